"""Constraints of requests compiled where no step waits for them.

Knows threads and which request waits for what; compiling is `compiler`'s.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

from llguidance import LLMatcher

from penstock_shard.constraints.compiler import Compiler
from penstock_shard.constraints.languages import ConstraintRefused
from penstock_shard.request import Request


class OutputRefused(Exception):
    """What was delivered of a request before is no beginning of what its constraint allows."""


class ConstraintPreparer:
    """Makes the matchers of requests, each behind what was delivered of its output."""

    def __init__(
        self, compiler: Compiler, on_done: Callable[[], None], num_threads: int = 1
    ) -> None:
        """`on_done` is called, in a thread, whenever `take` has something new."""
        self._compiler = compiler
        self._on_done = on_done
        self._threads = ThreadPoolExecutor(num_threads, thread_name_prefix="constraints")
        # In the order they came.
        self._waiting: dict[Request, Future[LLMatcher]] = {}

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, request: Request) -> None:
        """Begin with a request that has a constraint."""
        future = self._threads.submit(self._matcher, request)
        self._waiting[request] = future
        future.add_done_callback(lambda _: self._on_done())

    def discard(self, request: Request) -> bool:
        """Nobody waits for it any more; whether anybody did."""
        future = self._waiting.pop(request, None)
        if future is None:
            return False
        future.cancel()
        return True

    def take(self) -> list[tuple[Request, ConstraintRefused | OutputRefused | None]]:
        """Those that have their matcher by now, or a reason why they never will."""
        done = [request for request, future in self._waiting.items() if future.done()]
        taken: list[tuple[Request, ConstraintRefused | OutputRefused | None]] = []
        for request in done:
            future = self._waiting.pop(request)
            try:
                request.matcher = future.result()
            except (ConstraintRefused, OutputRefused) as error:
                taken.append((request, error))
            else:
                taken.append((request, None))
        return taken

    def _matcher(self, request: Request) -> LLMatcher:
        assert request.constraint is not None
        matcher = self._compiler.compile(request.constraint)
        delivered = request.token_ids[request.num_prompt_tokens :]
        if delivered and not matcher.consume_tokens(delivered):
            raise OutputRefused(
                "output_token_ids: they are no beginning of what the constraint allows"
            )
        return matcher
