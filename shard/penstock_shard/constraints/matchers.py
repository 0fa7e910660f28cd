"""Constraints of requests compiled where no step waits for them.

Knows threads and which request waits for what; compiling is `compiler`'s.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from queue import Empty, SimpleQueue

from llguidance import LLMatcher

from penstock_shard.constraints.compiler import Compiler
from penstock_shard.request import Request

# The matcher holds the interpreter while it takes tokens, 1 to 2 microseconds each; between calls a
# step that waits for it goes on.
_TOKENS_AT_ONCE = 256
_NICE = 10


def _stand_back() -> None:
    """Leave the processor to steps, where threads have priorities of their own."""
    if sys.platform == "linux":
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICE)


class OutputRefused(Exception):
    """What was delivered of a request before is no beginning of what its constraint allows."""


class PendingMatchers:
    """Matchers that requests wait for, each made behind what was delivered of its output."""

    def __init__(
        self, compiler: Compiler, on_done: Callable[[], None], num_threads: int = 1
    ) -> None:
        """`on_done` is called, in a thread, whenever `take` has something new."""
        self._compiler = compiler
        self._on_done = on_done
        self._threads = ThreadPoolExecutor(
            num_threads, thread_name_prefix="constraints", initializer=_stand_back
        )
        self._waiting: dict[Request, Future[LLMatcher]] = {}
        # However many wait, a step looks only at what is new.
        self._done: SimpleQueue[Request] = SimpleQueue()

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, request: Request) -> None:
        """Begin with a request that has a constraint."""
        future = self._threads.submit(self._matcher, request)
        self._waiting[request] = future
        future.add_done_callback(lambda _: self._tell_done(request))

    def discard(self, request: Request) -> bool:
        """Nobody waits for it any more; whether anybody did."""
        future = self._waiting.pop(request, None)
        if future is None:
            return False
        future.cancel()
        return True

    def take(self) -> list[tuple[Request, BaseException | None]]:
        """Those that have their matcher by now, or a reason why they never will: ConstraintRefused,
        OutputRefused, or what went wrong.
        """
        taken: list[tuple[Request, BaseException | None]] = []
        while (request := self._next_done()) is not None:
            future = self._waiting.pop(request, None)
            if future is None:
                continue
            # Of whatever kind, as the library's panics: it ends this request and no other.
            error = future.exception()
            if error is None:
                request.matcher = future.result()
            taken.append((request, error))
        return taken

    def _next_done(self) -> Request | None:
        try:
            return self._done.get_nowait()
        except Empty:
            return None

    def _tell_done(self, request: Request) -> None:
        self._done.put(request)
        self._on_done()

    def _matcher(self, request: Request) -> LLMatcher:
        assert request.constraint is not None
        matcher = self._compiler.compile(request.constraint)
        delivered = request.token_ids[request.num_prompt_tokens :]
        for start in range(0, len(delivered), _TOKENS_AT_ONCE):
            if not matcher.consume_tokens(delivered[start : start + _TOKENS_AT_ONCE]):
                raise OutputRefused(
                    "output_token_ids: they are no beginning of what the constraint allows"
                )
        return matcher
