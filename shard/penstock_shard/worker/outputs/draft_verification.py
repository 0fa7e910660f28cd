"""Verifies drafts: samples a token at each position, up to the first that differs from its draft.

Each token is drawn exactly as it would be without drafts. If tokens depend only on logits and
position, all positions are drawn at once. If they also depend on earlier tokens (penalties,
constraints, budgets), positions are drawn one after the other, while drafts are accepted.
"""

from __future__ import annotations

from collections import abc
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from penstock_shard.device.async_copy import to_device
from penstock_shard.worker.base import RowResult
from penstock_shard.worker.input_batch import Inputs
from penstock_shard.worker.sampling.sampler import Sampler, SampleRows
from penstock_shard.worker.slot_state import Slots


@dataclass(frozen=True, slots=True)
class DraftRow:
    """Row `row` of the batch, which has drafts. Its first token to sample has output position
    `position` and logits row `place`, and verifies the first draft. The next logits rows are those
    after each draft.
    """

    row: int
    slot: int
    token_ids: abc.Sequence[int]
    position: int
    place: int


@dataclass(slots=True)
class _Answer:
    """The tokens sampled so far for a row with drafts."""

    sampler: Sampler
    draft: DraftRow
    results: list[RowResult] = field(default_factory=list)

    @property
    def goes_on(self) -> bool:
        """True if the last sampled token equals its draft and does not end the sequence."""
        number = len(self.results) - 1
        if number == len(self.draft.token_ids):
            return False
        drafted = self.draft.token_ids[number]
        ends = self.sampler.ends_with(self.draft.slot, drafted)
        return self.results[-1].token_id == drafted and not ends

    def take(self, results: abc.Sequence[RowResult]) -> None:
        """Add the results at the next positions, up to the first that is not accepted."""
        for result in results:
            if self.results and result.error is not None:
                # Ignore this error, because the next step will raise it again.
                self.sampler.repeat(self.draft.slot)
                return
            if self.results and not self.goes_on:
                return
            self.results.append(result)

    def merged(self) -> RowResult:
        first, *others = self.results
        first.more_token_ids = [result.token_id for result in others if result.token_id is not None]
        for result in others:
            if first.logprobs is not None and result.logprobs is not None:
                first.logprobs.extend(result.logprobs)
        return first


class Drafts:
    """A `RowOutput`: the tokens of rows with drafts."""

    def __init__(self, slots: Slots, sampler: Sampler) -> None:
        self._slots = slots
        self._sampler = sampler

    def begin(self, inputs: Inputs, logits: Tensor, hidden: Tensor) -> _Pending | None:
        """Start the verification. All tokens before the drafts are known (see `Batch`)."""
        rows = [self._row(inputs, row) for row, drafts in enumerate(inputs.batch.drafts) if drafts]
        if not rows:
            return None
        if inputs.is_static and any(self._sampler.is_stateful(row.slot) for row in rows):
            # Some tokens are drawn later, when a graph may have overwritten its output logits.
            logits = logits.clone()
        return _Pending(self._slots, rows, Verification(self._sampler, logits, rows))

    def _row(self, inputs: Inputs, row: int) -> DraftRow:
        batch, slot = inputs.batch, inputs.batch.slots[row]
        # The last known token is at `starts`.
        position = batch.starts[row] + 1 - int(self._slots.num_prompt_tokens[slot])
        return DraftRow(row, slot, batch.drafts[row], position, int(inputs.places[row]))

    def release(self, slot: int) -> None:
        pass


@dataclass(frozen=True, slots=True)
class _Pending:
    slots: Slots
    drafts: abc.Sequence[DraftRow]
    verification: Verification

    def finish(self, results: list[RowResult]) -> None:
        """Set the results. This may still draw tokens on the device."""
        for draft, result in zip(self.drafts, self.verification.finish(), strict=True):
            results[draft.row] = result
            if result.token_id is not None:
                self.slots.extend(draft.slot, [result.token_id, *result.more_token_ids])


class Verification:
    """Verifies drafts. Rows whose tokens depend only on logits are enqueued at once, others drawn
    in `finish`.
    """

    def __init__(self, sampler: Sampler, logits: Tensor, drafts: abc.Sequence[DraftRow]) -> None:
        """`logits` [N, V] have any float type."""
        self._sampler = sampler
        self._logits = logits
        self._answers = [_Answer(sampler, draft) for draft in drafts]
        self._is_stateful = [sampler.is_stateful(draft.slot) for draft in drafts]
        self._counts = [
            1 if is_stateful else 1 + len(draft.token_ids)
            for is_stateful, draft in zip(self._is_stateful, drafts, strict=True)
        ]
        rows, wanted = _next_rows(self._answers, self._counts)
        own = logits.index_select(0, to_device(wanted, logits.device))
        self._enqueued = sampler.enqueue(own, rows)

    def finish(self) -> list[RowResult]:
        """Return one result for each draft. Call once, after the device has finished the enqueued
        work.
        """
        _hand_out(self._answers, self._counts, self._enqueued.finish())
        alive = [
            answer
            for answer, is_stateful in zip(self._answers, self._is_stateful, strict=True)
            if is_stateful and answer.goes_on
        ]
        while alive:
            alive = self._draw_next(alive)
        return [answer.merged() for answer in self._answers]

    def _draw_next(self, alive: abc.Sequence[_Answer]) -> list[_Answer]:
        """Draw one more token for each answer. Return the answers that go on."""
        counts = [1] * len(alive)
        before = [len(answer.results) for answer in alive]
        rows, wanted = _next_rows(alive, counts)
        logits = self._logits.index_select(0, to_device(wanted, self._logits.device))
        _hand_out(alive, counts, self._sampler.sample(logits, rows))
        return [
            answer
            for answer, count in zip(alive, before, strict=True)
            if len(answer.results) > count and answer.goes_on
        ]


def _next_rows(
    answers: abc.Sequence[_Answer], counts: abc.Sequence[int]
) -> tuple[SampleRows, NDArray[np.int64]]:
    """Return the next `counts[i]` rows of each answer i, and the indices of their logits."""
    slots: list[int] = []
    positions: list[int] = []
    places: list[int] = []
    for answer, count in zip(answers, counts, strict=True):
        draft, first = answer.draft, len(answer.results)
        slots += [draft.slot] * count
        positions += range(draft.position + first, draft.position + first + count)
        places += range(draft.place + first, draft.place + first + count)
    return SampleRows(np.array(slots), np.array(positions)), np.array(places)


def _hand_out(
    answers: abc.Sequence[_Answer], counts: abc.Sequence[int], results: abc.Sequence[RowResult]
) -> None:
    start = 0
    for answer, count in zip(answers, counts, strict=True):
        answer.take(results[start : start + count])
        start += count
