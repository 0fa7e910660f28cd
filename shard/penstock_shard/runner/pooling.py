"""Final hidden states -> one vector a prompt. Knows nothing of models or of how rows are packed.

For a prompt computed in chunks the sum is kept between them, in float64: the mean then does not
depend on where the chunks were cut, except for the last bit of a value now and then.
"""

from __future__ import annotations

from collections import abc

import torch
from torch import Tensor

from penstock_shard.request import Pooling
from penstock_shard.runner.base import RowResult
from penstock_shard.runner.batch import Piece
from penstock_shard.sequence import Sequence


class Pooler:
    """Keeps the sums of prompts that are computed in part."""

    def __init__(self) -> None:
        self._sums: dict[Sequence, Tensor] = {}

    def pool(self, hidden: Tensor, pieces: abc.Sequence[Piece], results: list[RowResult]) -> None:
        """Pool hidden [M, H] of the pieces' pooled tokens, piece by piece, and put the vectors of
        prompts that end here into the results of their rows. Called in the order of the steps.
        """
        parts = torch.split(hidden, [piece.num_pooled for piece in pieces])
        for piece, part in zip(pieces, parts, strict=True):
            if piece.num_pooled:
                self._add(part, piece, results[piece.row])

    def _add(self, hidden: Tensor, piece: Piece, result: RowResult) -> None:
        sequence = piece.scheduled.sequence
        total = hidden.sum(dim=0, dtype=torch.float64)
        is_mean = sequence.request.pooling is Pooling.MEAN
        # At start 0 a sum kept from before a preemption is dropped.
        if is_mean and piece.start:
            total += self._sums[sequence]
        if not piece.ends_prompt:
            self._sums[sequence] = total
            return
        vector = (total / sequence.num_prompt_tokens if is_mean else total).float().cpu()
        if bool(torch.isfinite(vector).all()):
            result.embedding = vector.numpy().astype("<f4").tobytes()
        else:
            result.error = "the model gave no finite hidden states for the prompt"

    def forget(self, sequence: Sequence) -> None:
        """Drop the sum of a sequence that ended."""
        self._sums.pop(sequence, None)
