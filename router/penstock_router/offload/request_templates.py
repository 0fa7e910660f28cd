"""Templates that requests bring: programs of strangers, each of which may never end.

They run in a text process of their own, so that nobody else's text waits for them, and each for a
few seconds. A client may have as many here as are still free, and clients have their turns: one
that sends many endless ones delays another's by a part of one at most.
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
# How many may run or wait.
MAX_PROGRAMS = 32


class Programs:
    """The processes in which they run. The caller owns, and closes, the pool."""

    def __init__(self, pool: TextPool, metrics: Metrics) -> None:
        self.pool = pool
        self._metrics = metrics
        # One for each program; no bytes.
        self._here = SharedBudget(MAX_PROGRAMS)

    @contextmanager
    def scope(self, client: str) -> Iterator[None]:
        """In which one program of this client's waits and runs.

        Raises `TooManyRequests` if it has its share here already, and `TimedOut` for a program that
        does not end.
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
