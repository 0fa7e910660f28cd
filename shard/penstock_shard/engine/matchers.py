"""Compiles constraints of sequences in threads, so that no step waits for them."""

from __future__ import annotations

import logging
import os
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from dataclasses import dataclass
from queue import Empty, SimpleQueue

from llguidance import LLMatcher

from penstock_shard.ipc.codes import Code
from penstock_shard.ipc.messages import Error
from penstock_shard.sequence import Sequence
from penstock_shard.structured_output.compiler import Compiler, is_worn_out
from penstock_shard.structured_output.distinct.distinct import Distinct
from penstock_shard.structured_output.matcher_state import (
    ConstraintState,
    failure_of,
    fill_mask,
    is_mismatch,
)
from penstock_shard.structured_output.refusal import ConstraintRefused

logger = logging.getLogger(__name__)

# A matcher's limit of work for consuming tokens is renewed at each mask. A mask after this many
# delivered tokens uses little of that limit even with a highly ambiguous regex, and computes few
# masks, which cost more than consuming tokens.
_TOKENS_A_MASK = 16
_NICE = 10


def _stand_back() -> None:
    """Lower this thread's priority below that of steps, where the system has one per thread."""
    if sys.platform == "linux":
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICE)


def compiling_threads(count: int) -> ThreadPoolExecutor:
    """Threads that stand back behind the one that steps."""
    return ThreadPoolExecutor(count, thread_name_prefix="constraints", initializer=_stand_back)


class OutputRefused(Exception):
    """A sequence's delivered output does not match its constraint."""


class OutputExhausts(Exception):
    """Following a sequence's delivered output exceeds the matcher's limits."""


class Discarded(Exception):
    """The sequence ended while its matcher was made."""


@dataclass(frozen=True, slots=True)
class _Making:
    """A constraint's state that is being made, and what stops that."""

    state: Future[ConstraintState]
    is_discarded: threading.Event


class PendingMatchers:
    """Matchers that sequences wait for, each advanced past the sequence's delivered output."""

    def __init__(self, compiler: Compiler, on_done: Callable[[], None], threads: Executor) -> None:
        """`on_done` is called, in a thread, whenever `take` has something new."""
        self._compiler = compiler
        self.on_done = on_done
        self._threads = threads
        self._waiting: dict[Sequence, _Making] = {}
        # A queue, so that a step looks only at sequences that are done, however many wait.
        self._done: SimpleQueue[Sequence] = SimpleQueue()

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, sequence: Sequence) -> None:
        """Begin to make the matcher of a sequence that has a constraint."""
        is_discarded = threading.Event()
        state = self._threads.submit(self._state, sequence, is_discarded)
        self._waiting[sequence] = _Making(state, is_discarded)
        state.add_done_callback(lambda _: self._tell_done(sequence))

    def discard(self, sequence: Sequence) -> bool:
        """Forget a sequence that ended; whether it was waiting for its matcher."""
        making = self._waiting.pop(sequence, None)
        if making is None:
            return False
        # Stops `_follow`, as other sequences wait behind it and its output may be long.
        making.is_discarded.set()
        making.state.cancel()
        return True

    def take(self) -> list[tuple[Sequence, Error | None]]:
        """Sequences that are done: with their constraint's state and None, or with the error that
        ends them, as there is none.
        """
        taken: list[tuple[Sequence, Error | None]] = []
        while (sequence := self._next_done()) is not None:
            making = self._waiting.pop(sequence, None)
            if making is None:
                continue
            # Any exception, the library's panics included, ends this sequence only.
            reason = making.state.exception()
            if reason is None:
                sequence.constraint = making.state.result()
            taken.append((sequence, None if reason is None else _unmatched(sequence, reason)))
        return taken

    def _next_done(self) -> Sequence | None:
        try:
            return self._done.get_nowait()
        except Empty:
            return None

    def _tell_done(self, sequence: Sequence) -> None:
        self._done.put(sequence)
        self.on_done()

    def _state(self, sequence: Sequence, is_discarded: threading.Event) -> ConstraintState:
        constraint = sequence.request.constraint
        assert constraint is not None
        goes_on = bool(sequence.num_output_tokens)
        beginning = self._compiler.compile(constraint, goes_on=goes_on)
        matcher = beginning.deep_copy()
        distinct = self._compiler.distinct(constraint, matcher)
        try:
            _follow(matcher, distinct, sequence, is_discarded, _TOKENS_A_MASK)
        except (OutputRefused, OutputExhausts):
            if not is_worn_out(beginning):
                raise
            # Requests with the same constraint share a lexer and its limits, which others may have
            # used up. Compiled alone, with a mask before each token, it repeats how the tokens were
            # drawn.
            matcher = self._compiler.compile_alone(constraint)
            distinct = self._compiler.distinct(constraint, matcher)
            _follow(matcher, distinct, sequence, is_discarded, 1)
        state = ConstraintState(
            sequence.request, matcher, distinct, self._compiler.pace(constraint)
        )
        if state.pace.is_slow:
            fill_mask(state, self._compiler.tokenizer.vocab_size)
        return state


def _follow(
    matcher: LLMatcher,
    distinct: Distinct | None,
    sequence: Sequence,
    is_discarded: threading.Event,
    tokens_a_mask: int,
) -> None:
    """Advance the matcher past the sequence's delivered output, and check that it can fill a mask
    there. Raises OutputRefused, OutputExhausts.
    """
    token_ids = sequence.token_ids[sequence.num_prompt_tokens :].tolist()
    for start in range(0, len(token_ids), tokens_a_mask):
        if is_discarded.is_set():
            raise Discarded
        _compute_mask(matcher)
        some = token_ids[start : start + tokens_a_mask]
        if not _consume(matcher, distinct, some):
            raise _unfollowed(matcher)
    _compute_mask(matcher)


def _unfollowed(matcher: LLMatcher) -> OutputRefused | OutputExhausts:
    if is_mismatch(matcher):
        return OutputRefused(
            "output_token_ids: they are no beginning of what the constraint allows"
        )
    return OutputExhausts(failure_of(matcher))


def _consume(matcher: LLMatcher, distinct: Distinct | None, token_ids: list[int]) -> bool:
    # One by one: each holds the interpreter lock, which a step needs, for some milliseconds where a
    # grammar is ambiguous.
    if distinct is None:
        return all(matcher.consume_token(each) for each in token_ids)
    return all(distinct.consume([each], matcher) for each in token_ids)


def _compute_mask(matcher: LLMatcher) -> None:
    matcher.compute_bitmask()
    if matcher.is_error():
        raise OutputExhausts(failure_of(matcher))


def _unmatched(sequence: Sequence, reason: BaseException) -> Error:
    """The error of a sequence for which no matcher could be made."""
    assert sequence.request.constraint is not None
    kind = sequence.request.constraint.kind
    if isinstance(reason, OutputRefused):
        return Error(Code.INVALID_ARGUMENT, str(reason), "output_token_ids")
    if isinstance(reason, OutputExhausts):
        return Error(Code.OUT_OF_RANGE, f"{kind}: {reason}", kind)
    if isinstance(reason, ConstraintRefused):
        return Error(Code.INVALID_ARGUMENT, str(reason), kind)
    logger.error("request %s: its constraint failed", sequence.request.request_id, exc_info=reason)
    return Error(Code.INTERNAL, f"{kind}: it cannot be compiled: {type(reason).__name__}", kind)
