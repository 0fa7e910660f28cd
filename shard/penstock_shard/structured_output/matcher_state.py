"""The state of a sequence's constraint: its matcher, and the mask of tokens that may follow."""

from __future__ import annotations

import time
from collections import abc
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np
from llguidance import LLExecutor, LLMatcher
from llguidance.numpy import (
    allocate_token_bitmask,
    fill_next_token_bitmask,
    fill_next_token_bitmask_par,
)
from numpy.typing import NDArray

from penstock_proto.engine_request import EngineRequest
from penstock_shard.structured_output.distinct.distinct import Distinct
from penstock_shard.structured_output.pace import SLOW_S, Pace
from penstock_shard.structured_output.refusal import is_of_parser, reason_of

# The longest time of an ordinary mask.
_ORDINARY_S = 0.0001
# int32 [words of the vocabulary], one bit per token, the lowest bit first.
Mask = NDArray[np.int32]


class ConstraintState:
    def __init__(
        self,
        request: EngineRequest,
        matcher: LLMatcher,
        distinct: Distinct | None = None,
        pace: Pace | None = None,
    ) -> None:
        """`matcher` and `distinct` have consumed the output delivered before. `distinct` enforces
        what the matcher cannot. All sequences of this constraint share `pace`.
        """
        self.matcher = matcher
        self.pace = Pace() if pace is None else pace
        self._distinct = distinct
        self.mask: Mask | None = None
        self._request = request
        self._position = len(request.output) // 4
        # The last output tokens, if the matcher has not consumed them yet.
        self._waiting: list[int] = []
        # No token is allowed, though the text is not complete.
        self._is_at_end = False
        self._stop_ids = _ids(request.stop_token_ids)
        self._reluctant_ids = _ids(request.reluctant_stop_ids)

    @property
    def error(self) -> str:
        """The reason why the matcher cannot go on; "" if it can."""
        if self.matcher.is_error():
            why = failure_of(self.matcher)
        elif self._is_at_end:
            why = "cannot be followed any further: no other item or name differs"
        else:
            return ""
        kind = self._request.constraint.kind if self._request.constraint else "constraint"
        return f"{kind}: {why}"

    @property
    def may_be_others_failure(self) -> bool:
        """True if another sequence of this constraint, which shares the lexer, may have caused the
        error.
        """
        return self.matcher.is_error() and not is_of_parser(self.matcher.get_error())

    def is_ready_after(self, num_tokens: int) -> bool:
        """True if no step needs to wait for the mask after `num_tokens` output tokens: it is ready,
        or there is an error.
        """
        return bool(self.error) or (self._position == num_tokens and self.mask is not None)

    def move_to(self, output: abc.Sequence[int]) -> None:
        position = len(output)
        if position == self._position:
            return
        if position < self._position:
            self._go_back()
        self._waiting += output[self._position :]
        self.catch_up()
        self._position = position
        self.mask = None

    def append(self, token_id: int) -> None:
        """Add the sampled token. The matcher consumes it now; if the pace is slow, with the next
        mask.
        """
        self._waiting.append(token_id)
        if not self.pace.is_slow:
            self.catch_up()
        self._position += 1
        self.mask = None

    def catch_up(self) -> None:
        """Have the matcher consume the waiting tokens."""
        waiting, self._waiting = self._waiting, []
        if not waiting:
            return
        if self._distinct is None:
            self.matcher.consume_tokens(waiting)
        else:
            self._distinct.consume(waiting, self.matcher)

    def _go_back(self) -> None:
        if self._distinct is None:
            self.matcher.reset()
        else:
            self.matcher = self._distinct.reset()
        self._position = 0
        self._waiting.clear()

    def skip(self) -> None:
        """Advance by one position without a token. A mask for that position has no meaning."""
        self._position += 1
        self.mask = None

    def repeat(self) -> None:
        """Undo a `skip`."""
        self._position -= 1

    def restrict(self, mask: Mask) -> None:
        """Clear tokens that the matcher allows but `distinct` does not."""
        if self._distinct is not None and not self.matcher.is_error():
            self._distinct.restrict(mask, self.matcher)

    def set_mask(self, mask: Mask) -> None:
        """Store the mask. Allow stop ids where the constraint may end; but reluctant stop ids, and
        before min_tokens all stop ids, only if no other token is allowed.
        """
        if self.matcher.is_error():
            # After an error the matcher's mask would allow an end.
            return
        self._is_at_end = not mask.any()
        if self._is_at_end:
            return
        may_end, too_early = self.matcher.is_accepting(), self._position < self._request.min_tokens
        if may_end and self._stop_ids.size:
            _set(mask, self._stop_ids)
        reluctant = self._reluctant_ids
        if too_early:
            reluctant = np.concatenate([reluctant, self._stop_ids])
        # The matcher allows ignored eos ids only where the constraint may end.
        if reluctant.size and (may_end or too_early):
            others = mask.copy()
            _clear(others, reluctant)
            if others.any():
                mask = others
        self.mask = mask


def fill_mask(state: ConstraintState, vocab_size: int) -> None:
    """Fill one state's mask in this thread, and measure its pace."""
    bitmasks = allocate_token_bitmask(1, vocab_size)
    _fill_measured(state, bitmasks, 0)
    state.set_mask(bitmasks[0])


def _fill_measured(state: ConstraintState, bitmasks: NDArray[np.int32], row: int) -> None:
    state.catch_up()
    before_s = time.thread_time()
    fill_next_token_bitmask(state.matcher, bitmasks, row)
    state.restrict(bitmasks[row])
    state.pace.learn(time.thread_time() - before_s)


class MaskFiller:
    """Fills missing masks in threads, while the caller does other work."""

    def __init__(self, vocab_size: int, num_threads: int = 1) -> None:
        self._vocab_size = vocab_size
        self._executor = LLExecutor(num_threads)
        self._threads = ThreadPoolExecutor(max_workers=1, thread_name_prefix="masks")
        # The last masks took long: fill the next ones singly, to find the slow one.
        self._measures = False

    def fill(self, states: abc.Sequence[ConstraintState]) -> None:
        states = _without_masks(states)
        self._set(states, self._filled(states))

    def start(self, states: abc.Sequence[ConstraintState]) -> Callable[[], None]:
        """Begin to fill the masks. Return a function that waits for them. Leave `states` alone
        until you have called it.
        """
        states = _without_masks(states)
        filling = self._threads.submit(self._filled, states)
        return lambda: self._set(states, filling.result())

    def _filled(self, states: abc.Sequence[ConstraintState]) -> NDArray[np.int32]:
        bitmasks = allocate_token_bitmask(len(states), self._vocab_size)
        before_s = time.monotonic()
        if self._measures or len(states) == 1:
            for row, state in enumerate(states):
                _fill_measured(state, bitmasks, row)
        elif states:
            # One call fills all masks, without the interpreter lock, which a step needs between its
            # kernels.
            for state in states:
                state.catch_up()
            places = [(state.matcher, row) for row, state in enumerate(states)]
            fill_next_token_bitmask_par(self._executor, places, bitmasks)
            for state, row in zip(states, bitmasks, strict=True):
                state.restrict(row)
        took_s = time.monotonic() - before_s
        self._measures = not self._measures and took_s > SLOW_S + len(states) * _ORDINARY_S
        return bitmasks

    def _set(self, states: abc.Sequence[ConstraintState], bitmasks: NDArray[np.int32]) -> None:
        for state, mask in zip(states, bitmasks, strict=True):
            state.set_mask(mask)


def _without_masks(states: abc.Sequence[ConstraintState]) -> list[ConstraintState]:
    return [state for state in states if state.mask is None]


def allowed_ids(mask: Mask) -> NDArray[np.intp]:
    return np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))


def _ids(token_ids: frozenset[int]) -> NDArray[np.int64]:
    return np.array(sorted(token_ids), dtype=np.int64)


def _set(mask: Mask, ids: NDArray[np.int64]) -> None:
    np.bitwise_or.at(mask.view(np.uint32), ids >> 5, _bits(ids))


def _clear(mask: Mask, ids: NDArray[np.int64]) -> None:
    np.bitwise_and.at(mask.view(np.uint32), ids >> 5, ~_bits(ids))


def _bits(ids: NDArray[np.int64]) -> NDArray[np.uint32]:
    return np.left_shift(np.uint32(1), (ids & 31).astype(np.uint32))


def failure_of(matcher: LLMatcher) -> str:
    """The reason why the matcher cannot go on, in one line."""
    return f"cannot be followed any further: {reason_of(matcher.get_error())}"


def is_mismatch(matcher: LLMatcher) -> bool:
    """True if the matcher failed at a token that is not allowed, and not at a work limit."""
    return "doesn't satisfy the grammar" in matcher.get_error()
