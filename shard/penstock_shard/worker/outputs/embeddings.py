"""Final hidden states -> one vector for each prompt.

The sum over a prompt's chunks is kept in float64. So the division into chunks changes the mean
rarely, and only in the last bit of a value.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from penstock_shard.worker.base import RowResult
from penstock_shard.worker.input_batch import Inputs
from penstock_shard.worker.slot_state import MEAN, Slots


@dataclass(frozen=True, slots=True)
class _Pending:
    # Results by their row in the batch.
    results: dict[int, RowResult]

    def finish(self, results: list[RowResult]) -> None:
        for row, result in self.results.items():
            results[row] = result


class Embeddings:
    """A `RowOutput`. Keeps the sums of partly computed prompts."""

    def __init__(self, slots: Slots) -> None:
        self._slots = slots
        self._sums: dict[int, Tensor] = {}

    def begin(self, inputs: Inputs, logits: Tensor, hidden: Tensor) -> _Pending | None:
        """Pool hidden states [M, H], row by row."""
        if inputs.hidden_rows is None:
            return None
        batch, found, start = inputs.batch, dict[int, RowResult](), 0
        for row, slot in enumerate(batch.slots):
            is_mean = self._slots.pooling[slot] == MEAN
            count = batch.counts[row] if is_mean else int(batch.samples[row])
            if self._slots.pooling[slot] and count:
                own = hidden[start : start + count]
                start += count
                result = self._add(own, slot, is_mean and batch.starts[row] > 0, batch.samples[row])
                if result is not None:
                    found[row] = result
        return _Pending(found)

    def _add(self, hidden: Tensor, slot: int, adds: bool, is_last: bool) -> RowResult | None:
        """Take hidden states [n, H] of a prompt. Return its result after the last chunk. `adds` is
        true if the prompt has an earlier sum.
        """
        total = hidden.sum(dim=0, dtype=torch.float64)
        # Without `adds`, another sequence may have left its sum in this slot.
        if adds:
            total += self._sums[slot]
        if not is_last:
            self._sums[slot] = total
            return None
        if self._slots.pooling[slot] == MEAN:
            total = total / int(self._slots.num_prompt_tokens[slot])
        vector = total.float().cpu()
        if not bool(torch.isfinite(vector).all()):
            return RowResult(error="the model gave no finite hidden states for the prompt")
        return RowResult(embedding=vector.numpy().astype("<f4").tobytes())

    def release(self, slot: int) -> None:
        self._sums.pop(slot, None)
