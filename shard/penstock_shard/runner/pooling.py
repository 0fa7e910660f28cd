"""Final hidden states -> one vector a prompt. Knows nothing of models or of how rows are packed.

For a prompt computed in chunks the sum is kept between them, in float64: the mean then does not
depend on where the chunks were cut, except for the last bit of a value now and then.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from penstock_shard.runner.base import RowResult
from penstock_shard.runner.inputs import PooledRow


class Pooler:
    """Keeps the sums of prompts that are computed in part, by slot."""

    def __init__(self) -> None:
        self._sums: dict[int, Tensor] = {}

    def pool(self, hidden: Tensor, rows: Sequence[PooledRow]) -> dict[int, RowResult]:
        """Pool hidden [M, H] of the rows' pooled tokens, row by row; results of prompts that end
        here, by row of the batch. Called in the order of the steps.
        """
        parts = torch.split(hidden, [row.count for row in rows])
        found = {row.row: self._add(part, row) for row, part in zip(rows, parts, strict=True)}
        return {row: result for row, result in found.items() if result is not None}

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
