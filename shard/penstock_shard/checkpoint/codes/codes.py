"""A weight as the small integers that a quantized checkpoint stores; formats are read as it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, eq=False)
class Codes:
    """A weight [N, K]: scale * (code - zero) - minimum."""

    # uint8 [N, K]; below 16 where they have 4 bits.
    values: Tensor
    # float32 [N, ceil(K / group)].
    scales: Tensor
    # float32 like the scales, if there are any.
    minimums: Tensor | None
    bits: Literal[4, 8]
    # Columns that share a scale.
    group: int
    zero: int
    # The input that each column is multiplied by, int64 [K]; None: its own.
    order: Tensor | None = None

    def dense(self) -> Tensor:
        """The weight in float32 [N, K]."""
        weight = self.values.float().sub_(self.zero).mul_(self._spread(self.scales))
        if self.minimums is not None:
            weight -= self._spread(self.minimums)
        if self.order is None:
            return weight
        return torch.empty_like(weight).index_copy_(1, self.order, weight)

    def change_rows(self, change: Callable[[Tensor], Tensor]) -> Codes:
        """The same with its rows changed, as all columns of a matrix are."""
        return dataclasses.replace(
            self,
            values=change(self.values),
            scales=change(self.scales),
            minimums=None if self.minimums is None else change(self.minimums),
        )

    def _spread(self, values: Tensor) -> Tensor:
        """A number for each group -> one for each column."""
        if values.shape[1] == 1:
            return values
        return values.repeat_interleave(self.group, dim=1)[:, : self.values.shape[1]]


def with_zeros(
    values: Tensor, scales: Tensor, zeros: Tensor | int, bits: Literal[4, 8], group: int
) -> Codes:
    """Codes [N, K] that stand for scale * (code - zero), with zeros [N, groups] or one for all."""
    if isinstance(zeros, Tensor):
        first = int(zeros.flatten()[0])
        if bool((zeros == first).all()):
            zeros = first
    if isinstance(zeros, int):
        return Codes(values, scales, None, bits, group, zeros)
    return Codes(values, scales, scales * zeros, bits, group, 0)
