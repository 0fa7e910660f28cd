"""The common form of quantized weights: small integers with scales."""

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

    # uint8 [N, K]; below 16 if codes have 4 bits.
    values: Tensor
    # float32 [N, ceil(K / group)].
    scales: Tensor
    # float32 [N, ceil(K / group)], or None.
    minimums: Tensor | None
    bits: Literal[4, 8]
    # The number of columns that share a scale.
    group: int
    zero: int
    # int64 [K]: the index of the input that multiplies each column; None if column i takes input i.
    order: Tensor | None = None

    def dense(self) -> Tensor:
        weight = self.values.float().sub_(self.zero).mul_(self._spread(self.scales))
        if self.minimums is not None:
            weight -= self._spread(self.minimums)
        if self.order is None:
            return weight
        return torch.empty_like(weight).index_copy_(1, self.order, weight)

    def change_rows(self, change: Callable[[Tensor], Tensor]) -> Codes:
        """Return a copy with `change` applied to the rows of each tensor."""
        return dataclasses.replace(
            self,
            values=change(self.values),
            scales=change(self.scales),
            minimums=None if self.minimums is None else change(self.minimums),
        )

    def _spread(self, values: Tensor) -> Tensor:
        if values.shape[1] == 1:
            return values
        return values.repeat_interleave(self.group, dim=1)[:, : self.values.shape[1]]


def with_zeros(
    values: Tensor, scales: Tensor, zeros: Tensor | int, bits: Literal[4, 8], group: int
) -> Codes:
    """Make codes [N, K] for scale * (code - zero). `zeros` is [N, groups], or one number for all
    codes.
    """
    if isinstance(zeros, Tensor):
        first = int(zeros.flatten()[0])
        if bool((zeros == first).all()):
            zeros = first
    if isinstance(zeros, int):
        return Codes(values, scales, None, bits, group, zeros)
    return Codes(values, scales, scales * zeros, bits, group, 0)
