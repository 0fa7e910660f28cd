"""Drafts to tokens: what is sampled after each of them, for as long as they are what was sampled.

Each token is drawn exactly as it would be without drafts, by its request's parameters at its
position (so nothing is gained or lost by a draft but time, and no distribution is changed). Knows
the sampler; knows neither models nor who makes drafts.

Where logits and position alone decide, all positions are drawn at once. Where what was drawn before
decides too (penalties, constraints, budgets) they are drawn one after the other, over the requests
whose drafts have been right so far.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from penstock_shard.request import Request
from penstock_shard.runner.base import RowResult
from penstock_shard.runner.device import to_device
from penstock_shard.runner.sampler import Sampler, SampleRow
from penstock_shard.runner.token_state import needs_state


@dataclass(frozen=True, slots=True)
class Draft:
    """Drafted tokens of a request. `position` is that of the first token to be sampled, before any
    of the drafted ones, counted in its output; its logits are row `place`, those after each of
    these the rows behind that.
    """

    request: Request
    token_ids: Sequence[int]
    position: int
    place: int

    def rows(self, first: int, count: int) -> list[SampleRow]:
        """What so many of its rows of logits are for, from this one on."""
        start = self.position + first
        return [SampleRow(self.request, position) for position in range(start, start + count)]


@dataclass(slots=True)
class _Answer:
    """What a draft has come to so far."""

    draft: Draft
    results: list[RowResult] = field(default_factory=list)

    @property
    def goes_on(self) -> bool:
        """Whether the last token that was sampled is the one that was drafted, and not the end."""
        number = len(self.results) - 1
        if number == len(self.draft.token_ids):
            return False
        drafted = self.draft.token_ids[number]
        return self.results[-1].token_id == drafted and not self.draft.request.ends_with(drafted)

    def take(self, results: Sequence[RowResult]) -> None:
        """What was sampled at the positions that follow, as far as it counts."""
        for result in results:
            # An error that is not at once is one of the next step.
            if self.results and (result.error is not None or not self.goes_on):
                return
            self.results.append(result)

    def merged(self) -> RowResult:
        """One result, with all tokens and their log-probabilities."""
        first, *others = self.results
        first.more_token_ids = [result.token_id for result in others if result.token_id is not None]
        for result in others:
            if first.logprobs is not None and result.logprobs is not None:
                first.logprobs.extend(result.logprobs)
        return first


class Verification:
    """Drafts that are being verified. What needs nothing but their logits is enqueued at once, as a
    step's other rows are; the rest is drawn when it is finished.
    """

    def __init__(self, sampler: Sampler, logits: Tensor, drafts: Sequence[Draft]) -> None:
        """`logits` [N, V] of any float type."""
        self._sampler = sampler
        self._logits = logits
        self._answers = [_Answer(draft) for draft in drafts]
        self._is_stateful = [needs_state(draft.request) for draft in drafts]
        self._counts = [
            1 if is_stateful else 1 + len(draft.token_ids)
            for is_stateful, draft in zip(self._is_stateful, drafts, strict=True)
        ]
        rows, wanted = _next_rows(self._answers, self._counts)
        own = logits.index_select(0, to_device(wanted, logits.device))
        self._enqueued = sampler.enqueue(own, sampler.columns(rows))

    def finish(self) -> list[RowResult]:
        """One result for each draft. What was enqueued must have come to the host; once only."""
        _hand_out(self._answers, self._counts, self._enqueued.finish())
        alive = [
            answer
            for answer, is_stateful in zip(self._answers, self._is_stateful, strict=True)
            if is_stateful and answer.goes_on
        ]
        while alive:
            alive = self._draw_next(alive)
        return [answer.merged() for answer in self._answers]

    def _draw_next(self, alive: Sequence[_Answer]) -> list[_Answer]:
        """One more token of each; those whose next draft was right too."""
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
    answers: Sequence[_Answer], counts: Sequence[int]
) -> tuple[list[SampleRow], NDArray[np.int64]]:
    """So many more rows of each, and where their logits are."""
    rows: list[SampleRow] = []
    places: list[int] = []
    for answer, count in zip(answers, counts, strict=True):
        first = len(answer.results)
        rows += answer.draft.rows(first, count)
        places += range(answer.draft.place + first, answer.draft.place + first + count)
    return rows, np.array(places, dtype=np.int64)


def _hand_out(
    answers: Sequence[_Answer], counts: Sequence[int], results: Sequence[RowResult]
) -> None:
    """To each answer its own, of which there are so many."""
    start = 0
    for answer, count in zip(answers, counts, strict=True):
        answer.take(results[start : start + count])
        start += count
