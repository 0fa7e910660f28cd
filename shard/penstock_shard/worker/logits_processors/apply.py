"""Applies logits processors to the rows of a step, and keeps their states by slot."""

from __future__ import annotations

from collections import abc
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from penstock_shard.device.async_copy import to_device
from penstock_shard.sequence import Sequence
from penstock_shard.worker.logits_processors.base import LogitsProcessor, LogitsState
from penstock_shard.worker.slot_state import Integers

_Index = NDArray[np.intp]


class _SlotState:
    """The processors' states of one sequence, at one output position."""

    __slots__ = ("parts", "position")

    def __init__(self, sequence: Sequence, processors: abc.Sequence[_Processor]) -> None:
        request = sequence.request
        self.position = sequence.num_output_tokens
        self.parts: list[tuple[int, LogitsState]] = [
            (number, processor.begin(sequence))
            for number, processor in enumerate(processors)
            if processor.wants(request)
        ]

    def advance(self, token_id: int | None) -> None:
        for _, state in self.parts:
            if token_id is None:
                state.skip()
            else:
                state.append(token_id)
        self.position += 1

    def repeat(self) -> None:
        for _, state in self.parts:
            state.repeat()
        self.position -= 1


_Processor = LogitsProcessor[Any]


@dataclass(frozen=True, slots=True)
class PreparedShaping:
    """Rows to sample next whose sequences have a state, and the changes to these rows' logits."""

    rows: _Index
    states: abc.Sequence[_SlotState]
    # For each processor, the rows that it changes.
    changes: abc.Sequence[abc.Sequence[tuple[int, LogitsState]]]

    def problem(self, row: int) -> str:
        """Return why no token can be drawn for a row, if a processor knows the reason."""
        states = (state for changed in self.changes for other, state in changed if other == row)
        return next((state.problem for state in states if state.problem), "")

    def advance(self, codes: abc.Sequence[int]) -> None:
        for row, state in zip(self.rows.tolist(), self.states, strict=True):
            state.advance(codes[row] if codes[row] >= 0 else None)


@dataclass(slots=True)
class ShapedLogits:
    """Rows with changed logits, and copies of these logits: float32 [n, V]."""

    rows: Integers
    logits: Tensor


class LogitsShaping:
    def __init__(self, processors: abc.Sequence[_Processor] = ()) -> None:
        self._processors = processors
        self._admitted: dict[int, Sequence] = {}
        self._states: dict[int, _SlotState] = {}

    def admit(self, sequence: Sequence) -> bool:
        """Register the sequence that now has this slot. True if processors have a state for it."""
        slot = sequence.slot
        self.release(slot)
        wants = any(processor.wants(sequence.request) for processor in self._processors)
        if wants:
            self._admitted[slot] = sequence
        return wants

    def release(self, slot: int) -> None:
        self._admitted.pop(slot, None)
        self._states.pop(slot, None)

    def repeat(self, slot: int) -> None:
        """Go back one position, because no token could be drawn."""
        if slot in self._states:
            self._states[slot].repeat()

    def prepare(self, rows: _Index, slots: Integers, positions: Integers) -> PreparedShaping:
        """Begin the work that needs no logits. Row `rows[i]` draws the token at output position
        `positions[i]` of the sequence in `slots[i]`, which has a state.
        """
        states = [
            self._state(*place) for place in zip(slots.tolist(), positions.tolist(), strict=True)
        ]
        changes: list[list[tuple[int, LogitsState]]] = [[] for _ in self._processors]
        for row, slot_state in zip(rows.tolist(), states, strict=True):
            for number, state in slot_state.parts:
                if state.choose():
                    changes[number].append((row, state))
        for processor, changed in zip(self._processors, changes, strict=True):
            if changed:
                processor.prepare([state for _, state in changed])
        return PreparedShaping(rows, states, changes)

    def apply(self, logits: Tensor, prepared: PreparedShaping) -> ShapedLogits | None:
        """Return changed copies of the rows of logits [N, V] that a processor changes."""
        changed = sorted({row for changes in prepared.changes for row, _ in changes})
        if not changed:
            return None
        rows = np.array(changed, dtype=np.int64)
        places = {row: place for place, row in enumerate(changed)}
        own = logits.index_select(0, to_device(rows, logits.device)).float()
        for processor, changes in zip(self._processors, prepared.changes, strict=True):
            if changes:
                processor.apply(own, [(places[row], state) for row, state in changes])
        return ShapedLogits(rows, own)

    def abandon(self) -> None:
        for processor in self._processors:
            processor.abandon()

    def _state(self, slot: int, position: int) -> _SlotState:
        state = self._states.get(slot)
        if state is None:
            state = self._states[slot] = _SlotState(self._admitted[slot], self._processors)
        assert state.position == position, (
            f"request {self._admitted[slot].request.request_id}: output position {position} is to "
            f"be drawn, but {state.position} output tokens are known"
        )
        return state
