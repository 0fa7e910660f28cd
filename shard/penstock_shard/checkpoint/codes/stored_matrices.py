"""Layouts of quantized matrices in checkpoints: read as codes, or dequantized to float32 [N, K].

The sources of compressed-tensors 0.20 (`pack_quantized`, `naive_quantized`), transformers'
`finegrained_fp8`, AutoGPTQ and AutoAWQ's GEMM version define the layouts.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import torch
from torch import Tensor

from penstock_shard.checkpoint.codes.codes import Codes, with_zeros

_WORD = 32
# AWQ's order of eight columns in a word: column j is nibble _AWQ_PLACES[j].
_AWQ_PLACES = (0, 4, 1, 5, 2, 6, 3, 7)


class StoredMatrix(Protocol):
    @property
    def shape(self) -> tuple[int, int]:
        """N and K of the dequantized matrix."""

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the matrix's tensors, in the order of `parts`."""

    def dense(self, parts: Sequence[Tensor]) -> Tensor:
        """Return the dequantized matrix, float32 [N, K]. Raises ValueError for tensors that do not
        fit together. Callers put the matrix's name before the message.
        """

    def codes(self, parts: Sequence[Tensor]) -> Codes | None:
        """Return the matrix as codes; None if it has no integers with scales for groups of columns.
        Raises ValueError like `dense`.
        """


@dataclass(frozen=True, slots=True)
class ScaledMatrix:
    """8-bit numbers [N, K] with a scale for each `block` of rows and columns."""

    names: tuple[str, ...]
    shape: tuple[int, int]
    block: tuple[int, int]

    def dense(self, parts: Sequence[Tensor]) -> Tensor:
        """Dequantize `parts`: the numbers, one scale for each block in any shape, and, if there are
        any, zero points in the same shape.
        """
        weight = parts[0].float()
        if len(parts) > 2:
            weight -= self._spread(parts[2])
        return weight.mul_(self._spread(parts[1]))

    def codes(self, parts: Sequence[Tensor]) -> Codes | None:
        if parts[0].dtype is not torch.int8:
            return None
        values = parts[0].view(torch.uint8) ^ 128
        scales, *zeros = (self._by_rows(part) for part in parts[1:])
        return with_zeros(values, scales, zeros[0] + 128 if zeros else 128, 8, self.block[1])

    def _by_rows(self, values: Tensor) -> Tensor:
        """Repeat one value per block into one per row and group of columns, float32 [N, groups]."""
        rows, columns = self.shape
        counts = (-(-rows // self.block[0]), -(-columns // self.block[1]))
        return values.float().reshape(counts).repeat_interleave(self.block[0], dim=0)[:rows]

    def _spread(self, values: Tensor) -> Tensor:
        """Repeat one value per block so that the result broadcasts to [N, K]."""
        counts = tuple(-(-size // each) for size, each in zip(self.shape, self.block, strict=True))
        spread = values.float().reshape(counts)
        for dim, size in enumerate(self.shape):
            if counts[dim] > 1:
                spread = spread.repeat_interleave(self.block[dim], dim=dim).narrow(dim, 0, size)
        return spread


@dataclass(frozen=True, slots=True)
class PackedMatrix:
    """A matrix of compressed-tensors: scales [N, G], and integers [N, K], offset to be positive and
    packed along the rows into words, lowest bits first.
    """

    names: tuple[str, ...]
    shape: tuple[int, int]
    bits: int
    group: int
    has_zeros: bool
    # True if another tensor [K] holds the group of each column.
    has_order: bool

    def dense(self, parts: Sequence[Tensor]) -> Tensor:
        return self.codes(parts).dense()

    def codes(self, parts: Sequence[Tensor]) -> Codes:
        packed, scales, *others = parts
        rows, columns = self.shape
        values = unpack(packed, self.bits, 1)[:, :columns].to(torch.uint8)
        order = others.pop() if self.has_order else None
        zeros: Tensor | int = 1 << (self.bits - 1)
        if self.has_zeros:
            zeros = unpack(others[0], self.bits, 0)[:rows].float()
        made = with_zeros(values, scales.float(), zeros, _bits(self.bits), self.group)
        return _in_groups(made, order)


@dataclass(frozen=True, slots=True)
class GptqMatrix:
    """GPTQ's matrix, transposed to [K, N] and packed along its columns. Zero points [G, N] are
    packed along their rows. Scales are [G, N]. Another tensor has the group of each of the K
    inputs.
    """

    names: tuple[str, ...]
    shape: tuple[int, int]
    bits: int
    group: int
    # Added to stored zero points, because the first version of the format stores them minus 1.
    zero_offset: int
    has_order: bool

    def dense(self, parts: Sequence[Tensor]) -> Tensor:
        return self.codes(parts).dense()

    def codes(self, parts: Sequence[Tensor]) -> Codes:
        packed, packed_zeros, scales, *order = parts
        highest = (1 << self.bits) - 1
        # A stored -1 is all ones and wraps around to 0.
        zeros = unpack(packed_zeros, self.bits, 1).add_(self.zero_offset).bitwise_and_(highest)
        values = unpack(packed, self.bits, 0).to(torch.uint8)
        made = with_zeros(
            values.t(), scales.float().t(), zeros.float().t(), _bits(self.bits), self.group
        )
        return _in_groups(made, order[0] if order else None)


@dataclass(frozen=True, slots=True)
class AwqMatrix:
    """AWQ's matrix, transposed to [K, N]. It and its zero points [G, N] have 4 bits, with eight
    columns to a word in AWQ's order. Scales are [G, N].
    """

    names: tuple[str, ...]
    shape: tuple[int, int]
    group: int

    def dense(self, parts: Sequence[Tensor]) -> Tensor:
        return self.codes(parts).dense()

    def codes(self, parts: Sequence[Tensor]) -> Codes:
        packed, packed_zeros, scales = parts
        values, zeros = (_in_order(unpack(part, 4, 1)) for part in (packed, packed_zeros))
        return with_zeros(
            values.to(torch.uint8).t(), scales.float().t(), zeros.float().t(), 4, self.group
        )


def unpack(words: Tensor, bits: int, dim: int) -> Tensor:
    """Unpack int32 words to int32 numbers from 0 to 2^bits - 1. `dim` grows by the factor 32 /
    bits.
    """
    if words.dtype is not torch.int32:
        raise ValueError(f"is packed in {words.dtype}, not in int32")
    shifts = torch.arange(0, _WORD, bits, dtype=torch.int32, device=words.device)
    each = shifts.view(-1, 1) if dim == 0 else shifts
    return (
        words.unsqueeze(dim + 1)
        .bitwise_right_shift(each)
        .bitwise_and_((1 << bits) - 1)
        .flatten(dim, dim + 1)
    )


def _in_order(numbers: Tensor) -> Tensor:
    words = numbers.view(len(numbers), -1, len(_AWQ_PLACES))
    return words[:, :, list(_AWQ_PLACES)].flatten(1)


def _bits(bits: int) -> Literal[4, 8]:
    return 4 if bits <= 4 else 8


def _in_groups(codes: Codes, groups: Tensor | None) -> Codes:
    """Sort the columns of codes by `groups`, int [K], so that a group's columns are adjacent."""
    # Negative entries mean that columns keep their order.
    if groups is None or bool((groups < 0).any()):
        return codes
    count, columns = codes.scales.shape[1], codes.values.shape[1]
    highest = int(groups.max())
    if highest >= count:
        raise ValueError(f"has the group {highest} for an input; there are {count} groups")
    plain = torch.arange(columns, device=groups.device) // codes.group
    order = groups.long().argsort(stable=True)
    if not torch.equal(groups.long()[order], plain):
        raise ValueError(f"has groups of other sizes than {codes.group}")
    if torch.equal(groups.long(), plain):
        return codes
    return dataclasses.replace(codes, values=codes.values[:, order], order=order)
