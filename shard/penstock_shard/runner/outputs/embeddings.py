"""Final hidden states -> one vector a prompt. Knows nothing of models or of how rows are packed.

For a prompt computed in chunks the sum is kept between them, in float64: the mean then does not
depend on where the chunks were cut, except for the last bit of a value now and then.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from penstock_shard.runner.base import RowResult
from penstock_shard.runner.inputs import Inputs, PooledRow


@dataclass(frozen=True, slots=True)
class _Pending:
    # By row of the batch.
    results: dict[int, RowResult]

    def finish(self, results: list[RowResult]) -> None:
        for row, result in self.results.items():
            results[row] = result


class Embeddings:
    """A `RowOutput`. Keeps the sums of prompts that are computed in part, by slot."""

    def __init__(self) -> None:
        self._sums: dict[int, Tensor] = {}

    def begin(self, inputs: Inputs, logits: Tensor, hidden: Tensor) -> _Pending | None:
        """Pool hidden states [M, H] of the rows' pooled tokens, row by row."""
        if not inputs.pooled:
            return None
        parts = torch.split(hidden, [row.count for row in inputs.pooled])
        found = {
            row.row: self._add(part, row) for row, part in zip(inputs.pooled, parts, strict=True)
        }
        return _Pending({row: result for row, result in found.items() if result is not None})

    def _add(self, hidden: Tensor, row: PooledRow) -> RowResult | None:
        total = hidden.sum(dim=0, dtype=torch.float64)
        # At start 0 a sum that is left of another sequence is dropped.
        if row.is_mean and row.start:
            total += self._sums[row.slot]
        if not row.ends_prompt:
            self._sums[row.slot] = total
            return None
        vector = (total / row.num_prompt_tokens if row.is_mean else total).float().cpu()
        if not bool(torch.isfinite(vector).all()):
            return RowResult(error="the model gave no finite hidden states for the prompt")
        return RowResult(embedding=vector.numpy().astype("<f4").tobytes())

    def release(self, slot: int) -> None:
        """No sequence has this slot any more."""
        self._sums.pop(slot, None)
