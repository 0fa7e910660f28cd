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

from penstock_shard.constraints.compiler import Compiler, is_worn_out
from penstock_shard.constraints.state import failure_of
from penstock_shard.request import Request, RequestState

# A matcher has so much work for the tokens it takes, and has it anew with each mask. These many
# leave most of it even in a regex that can be read in many ways, and spare masks, the dearer part.
_TOKENS_A_MASK = 16
_NICE = 10


def _stand_back() -> None:
    """Leave the processor to steps, where threads have priorities of their own."""
    if sys.platform == "linux":
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICE)


class OutputRefused(Exception):
    """What was delivered of a request before is no beginning of what its constraint allows."""


class OutputExhausts(Exception):
    """What may follow what was delivered of a request takes too much to find out."""


class _Discarded(Exception):
    """Nobody waits for the matcher any more."""


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
        # Its output may be long: whoever waits behind it must not wait for that.
        request.state = RequestState.ENDED
        future.cancel()
        return True

    def take(self) -> list[tuple[Request, BaseException | None]]:
        """Those that have their matcher by now, or a reason why they never will: ConstraintRefused,
        OutputRefused, OutputExhausts, or what went wrong.
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
        constraint = request.constraint
        assert constraint is not None
        goes_on = bool(request.num_output_tokens)
        beginning = self._compiler.compile(constraint, goes_on=goes_on)
        try:
            return _follow(beginning.deep_copy(), request, _TOKENS_A_MASK)
        except (OutputRefused, OutputExhausts):
            if not is_worn_out(beginning):
                raise
        # What other outputs made of a constraint counts for all that share it. Alone, and with a
        # mask before each token, it does again what it did where these tokens were drawn.
        return _follow(self._compiler.compile_alone(constraint), request, 1)


def _follow(matcher: LLMatcher, request: Request, tokens_a_mask: int) -> LLMatcher:
    """The matcher behind what was delivered of the request, with a mask for what follows. Raises
    OutputRefused, OutputExhausts.
    """
    token_ids = request.token_ids[request.num_prompt_tokens :]
    for start in range(0, len(token_ids), tokens_a_mask):
        if request.state is RequestState.ENDED:
            raise _Discarded
        _compute_mask(matcher)
        if not matcher.consume_tokens(token_ids[start : start + tokens_a_mask]):
            raise OutputRefused(
                "output_token_ids: they are no beginning of what the constraint allows"
            )
    _compute_mask(matcher)
    return matcher


def _compute_mask(matcher: LLMatcher) -> None:
    matcher.compute_bitmask()
    if matcher.is_error():
        raise OutputExhausts(failure_of(matcher))
