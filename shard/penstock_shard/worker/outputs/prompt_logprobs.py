"""Log-probabilities of prompt tokens."""

from __future__ import annotations

from collections import abc
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from penstock_shard.device.async_copy import to_device, to_host
from penstock_shard.worker.base import RowResult
from penstock_shard.worker.input_batch import Inputs
from penstock_shard.worker.sampling.token_scores import TokenScores, score_tokens
from penstock_shard.worker.slot_state import Slots


@dataclass(frozen=True, slots=True)
class _RowScores:
    """Scores of one row that are being copied to the host."""

    row: int
    is_finite: Tensor
    scores: TokenScores

    def finish(self, result: RowResult) -> None:
        if not bool(self.is_finite):
            result.error = "the model gave no finite logits for the prompt"
            return
        first, *others = self.scores.finish()
        for scores in others:
            first.extend(scores)
        result.prompt_logprobs = first


@dataclass(frozen=True, slots=True)
class _Pending:
    rows: abc.Sequence[_RowScores]

    def finish(self, results: list[RowResult]) -> None:
        for row in self.rows:
            row.finish(results[row.row])


class PromptLogprobs:
    """A `RowOutput`."""

    def __init__(self, slots: Slots) -> None:
        self._slots = slots

    def begin(self, inputs: Inputs, logits: Tensor, hidden: Tensor) -> _Pending | None:
        rows = [row for row, count in enumerate(inputs.batch.scored) if count]
        return _Pending([self._score(inputs, logits, row) for row in rows]) if rows else None

    def release(self, slot: int) -> None:
        pass

    def _score(self, inputs: Inputs, logits: Tensor, row: int) -> _RowScores:
        batch = inputs.batch
        slot, count, place = batch.slots[row], batch.scored[row], int(inputs.places[row])
        own = logits[place : place + count]
        first = batch.starts[row] + 1
        known = self._slots.token_ids[slot][first : first + count]
        is_finite = torch.isfinite(own.amax(dim=-1)).all()
        top_n = int(self._slots.prompt_logprobs[slot])
        tokens = to_device(known.astype(np.int64), own.device)
        return _RowScores(row, to_host(is_finite), score_tokens(own, tokens, [top_n] * count))
