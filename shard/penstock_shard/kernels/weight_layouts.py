"""Weights in the kernels' own layouts; see weights.h."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

WeightKind = Literal["float32", "float16", "bfloat16", "int8", "int4"]
WEIGHT_KINDS: tuple[WeightKind, ...] = ("float32", "float16", "bfloat16", "int8", "int4")

# Outputs are padded to a multiple of 64, and stored in panels of 16.
_OUTPUTS = 64
_PANEL = 16
# A panel's codes begin at a multiple of 64 bytes.
_LINE = 64
# `_LAYOUTS`: each layout's number. `_UNITS`: for each layout, how many values of k are adjacent,
# and their bytes.
_LAYOUTS = {"float32": 0, "float16": 1, "bfloat16": 2, 8: 3, 4: 4}
_UNITS = ((1, 4), (1, 2), (2, 4), (4, 4), (8, 4))
# The largest group of codes for which sums of products are exact in int32.
_MAX_GROUP = 1 << 17
# Group size of int4, as in GGUF's Q4_0.
_INT4_GROUP = 32


class _WeightStruct(ctypes.Structure):
    _fields_ = (
        ("n", ctypes.c_int64),
        ("k", ctypes.c_int64),
        ("layout", ctypes.c_int64),
        ("data", ctypes.c_void_p),
        ("group", ctypes.c_int64),
        ("zero", ctypes.c_int64),
        ("header", ctypes.c_int64),
    )


@dataclass(frozen=True, slots=True)
class CodeLayout:
    """The layout of a weight stored as scale * (code - zero) - minimum. A code has `bits` bits;
    `group` columns share a scale; `in_halves` is true if scales and minimums are float16.
    """

    bits: Literal[4, 8]
    group: int
    zero: int
    has_minimums: bool = False
    in_halves: bool = False

    @property
    def header(self) -> int:
        return self.has_minimums + 2 * self.in_halves


@dataclass(frozen=True, slots=True, eq=False)
class PackedWeight:
    """A weight [n, k] in the kernels' own layout."""

    n: int
    k: int
    data: Tensor
    _struct: _WeightStruct = field(repr=False)
    address: int = field(repr=False)

    @property
    def nbytes(self) -> int:
        return self.data.nbytes

    def __reduce__(self) -> tuple[object, ...]:
        """Pickle without addresses, which are valid only in this process."""
        struct = self._struct
        fields = (struct.layout, struct.group, struct.zero, struct.header)
        return packed_weight, (self.n, self.k, self.data, *fields)


def packed_weight(
    n: int, k: int, data: Tensor, layout: int, group: int, zero: int, header: int
) -> PackedWeight:
    """Return the weight [n, k] packed in `data` uint8. Raises ValueError for a wrong size."""
    if len(data) != _packed_bytes(n, k, layout, group, header):
        raise ValueError(f"a packed weight [{n}, {k}] of layout {layout} in {len(data)} bytes")
    struct = _WeightStruct(n, k, layout, data.data_ptr(), group, zero, header)
    return PackedWeight(n, k, data, struct, ctypes.addressof(struct))


def _packed_bytes(n: int, k: int, layout: int, group: int, header: int) -> int:
    unit, num_bytes = _UNITS[layout]
    panel = -(-k // unit) * num_bytes * _PANEL
    if group:
        headers = -(-k // group) * _PANEL * (2 if header & 2 else 4) * (1 + header % 2)
        panel += -(-headers // _LINE) * _LINE
    return -(-n // _OUTPUTS) * _OUTPUTS // _PANEL * panel


def rounding(kind: WeightKind, k: int) -> WeightKind | CodeLayout:
    if kind == "int8":
        return CodeLayout(8, -(-k // 4) * 4, 128)
    return CodeLayout(4, _INT4_GROUP, 8, in_halves=True) if kind == "int4" else kind


def empty_weight(n: int, k: int, layout: WeightKind | CodeLayout) -> PackedWeight:
    codes = layout if isinstance(layout, CodeLayout) else None
    number = _LAYOUTS[layout if codes is None else codes.bits]
    fields = (0, 0, 0) if codes is None else (codes.group, codes.zero, codes.header)
    if codes is not None and (codes.group > _MAX_GROUP or codes.group % _UNITS[number][0]):
        raise ValueError(
            f"a group of codes has {codes.group} columns; it must be a multiple of "
            f"{_UNITS[number][0]} and at most {_MAX_GROUP}"
        )
    data = torch.empty(_packed_bytes(n, k, number, fields[0], fields[2]), dtype=torch.uint8)
    return packed_weight(n, k, data, number, *fields)


def bad_weight(weight: Tensor, row: int, column: int, kind: WeightKind) -> str:
    if kind in ("int8", "int4"):
        return f"weight has a value that is not finite in row {row}; {kind} cannot hold it"
    value, most = float(weight[row, column]), torch.finfo(getattr(torch, kind)).max
    return f"weight[{row}, {column}] is {value:g}; {kind} holds at most {most:g}"
