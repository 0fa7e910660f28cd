"""Runs templates of requests: strangers' programs, which may never end.

Separate text processes run them, so that no other text waits for them, each for at most a few
seconds. A client may use as many places as are still free. Clients take turns: a client waits for
at most one endless template of another.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from penstock_router.admission.shared_budget import SharedBudget
from penstock_router.errors import TimedOut, TooManyRequests
from penstock_router.observe.metrics import Metrics
from penstock_router.offload.text_pool import TextPool

# Rendering takes milliseconds, and tokenizing the longest text a second or two.
MAX_PROGRAM_S = 5.0
# Maximum of templates that run or wait.
MAX_PROGRAMS = 32


class Programs:
    def __init__(self, pool: TextPool, metrics: Metrics) -> None:
        self.pool = pool
        self._metrics = metrics
        # Counts 1 for each template, not bytes.
        self._here = SharedBudget(MAX_PROGRAMS)

    @contextmanager
    def scope(self, client: str) -> Iterator[None]:
        """Let one template of this client wait and run within the scope.

        Raises `TooManyRequests` if the client already has its share here, and `TimedOut` for a
        template that does not end.
        """
        with self._here.hold(client) as held:
            held.grow(1, self._refusal)
            try:
                yield
            except TimeoutError:
                raise TimedOut(
                    f"chat_template: the request's template ran for {MAX_PROGRAM_S:g} s without an "
                    "end"
                ) from None

    def _refusal(self, held: int, most: int) -> TooManyRequests:
        self._metrics.refused.labels("templates").inc()
        return TooManyRequests(
            f"chat_template: {held} requests of this client with templates of their own are here "
            f"already (of {most} for all); try again shortly"
        )
