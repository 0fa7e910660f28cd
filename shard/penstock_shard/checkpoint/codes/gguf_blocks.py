"""Blocks of a GGUF file -> codes with scales. ggml's `ggml-common.h` defines the layouts.

For each type, a function turns blocks uint8 [B, bytes] into codes uint8 [B, columns], scales
float32 [B, groups], and minimums of the same shape or None. A row of a matrix is a row of blocks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray

from penstock_shard.checkpoint.codes.codes import Codes

_Bytes = NDArray[np.uint8]
_Floats = NDArray[np.float32]
_Parts = tuple[_Bytes, _Floats, _Floats | None]
_FIFTH, _SIGN = np.uint8(16), np.uint8(128)


@dataclass(frozen=True, slots=True)
class _Type:
    read: Callable[[_Bytes], _Parts]
    bits: Literal[4, 8]
    group: int
    zero: int


def read_codes(data: _Bytes, name: str) -> Codes | None:
    """Read the rows uint8 [N, bytes] of a matrix; None if its type is not supported."""
    kind = _TYPES.get(name)
    if kind is None:
        return None
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

    _, block_bytes = GGML_QUANT_SIZES[GGMLQuantizationType[name]]
    values, scales, minimums = kind.read(data.reshape(-1, block_bytes))
    rows = len(data)
    return Codes(
        torch.from_numpy(values.reshape(rows, -1)),
        torch.from_numpy(scales.reshape(rows, -1)),
        None if minimums is None else torch.from_numpy(minimums.reshape(rows, -1)),
        kind.bits,
        kind.group,
        kind.zero,
    )


def _half(blocks: _Bytes, at: int) -> _Floats:
    """Return the float16 at this byte of each block, [B, 1]."""
    return blocks[:, at : at + 2].copy().view(np.float16).astype(np.float32)


def _halves(packed: _Bytes) -> _Bytes:
    """Return [B, 2 n] for [B, n]: the lower four bits of all bytes, then the higher four."""
    return np.concatenate((packed & 15, packed >> 4), axis=1)


def _fifth_bits(packed: _Bytes) -> _Bytes:
    """Unpack [B, 4] to [B, 32]: each bit, in order, becomes bit 4 of a code."""
    return np.unpackbits(packed, axis=1, bitorder="little") * _FIFTH


def _q4_0(blocks: _Bytes) -> _Parts:
    return _halves(blocks[:, 2:]), _half(blocks, 0), None


def _q4_1(blocks: _Bytes) -> _Parts:
    return _halves(blocks[:, 4:]), _half(blocks, 0), -_half(blocks, 2)


def _q5_0(blocks: _Bytes) -> _Parts:
    return _halves(blocks[:, 6:]) | _fifth_bits(blocks[:, 2:6]), _half(blocks, 0), None


def _q5_1(blocks: _Bytes) -> _Parts:
    codes = _halves(blocks[:, 8:]) | _fifth_bits(blocks[:, 4:8])
    return codes, _half(blocks, 0), -_half(blocks, 2)


def _q8_0(blocks: _Bytes) -> _Parts:
    return blocks[:, 2:] ^ _SIGN, _half(blocks, 0), None


def _k_scales(blocks: _Bytes) -> tuple[_Floats, _Floats]:
    """Return scales and minimums of Q4_K and Q5_K. The 12 bytes after two float16 factors hold
    them, with 6 bits each.
    """
    packed = blocks[:, 4:16]
    first, second, third = packed[:, :4], packed[:, 4:8], packed[:, 8:]
    scales = np.concatenate((first & 63, third & 15 | (first >> 6 << 4)), axis=1)
    minimums = np.concatenate((second & 63, third >> 4 | (second >> 6 << 4)), axis=1)
    return _half(blocks, 0) * scales, _half(blocks, 2) * minimums


def _q4_k(blocks: _Bytes) -> _Parts:
    return _q4_k_codes(blocks[:, 16:]), *_k_scales(blocks)


def _q4_k_codes(packed: _Bytes) -> _Bytes:
    """Return codes: the lower halves of 32 bytes are 32 codes, the higher halves the next 32."""
    return _halves(packed.reshape(-1, 32)).reshape(len(packed), -1)


def _q5_k(blocks: _Bytes) -> _Parts:
    # Bit i of byte j belongs to code j of sub-block i.
    bits = np.unpackbits(blocks[:, 16:48, None], axis=2, bitorder="little")
    fifths = bits.transpose(0, 2, 1).reshape(len(blocks), -1) * _FIFTH
    return _q4_k_codes(blocks[:, 48:]) | fifths, *_k_scales(blocks)


def _q6_k(blocks: _Bytes) -> _Parts:
    low = blocks[:, :128].reshape(-1, 2, 64)
    high = blocks[:, 128:192].reshape(-1, 2, 1, 32)
    lower = np.concatenate((low & 15, low >> 4), axis=2).reshape(-1, 2, 4, 32)
    shifts = np.array([0, 2, 4, 6], np.uint8).reshape(4, 1)
    codes = lower | (high >> shifts & 3) << 4
    scales = blocks[:, 192:208].view(np.int8).astype(np.float32)
    return codes.reshape(len(blocks), -1), _half(blocks, 208) * scales, None


_TYPES: dict[str, _Type] = {
    "Q4_0": _Type(_q4_0, 4, 32, 8),
    "Q4_1": _Type(_q4_1, 4, 32, 0),
    "Q5_0": _Type(_q5_0, 8, 32, 16),
    "Q5_1": _Type(_q5_1, 8, 32, 0),
    "Q8_0": _Type(_q8_0, 8, 32, 128),
    "Q4_K": _Type(_q4_k, 4, 32, 0),
    "Q5_K": _Type(_q5_k, 8, 32, 0),
    "Q6_K": _Type(_q6_k, 8, 16, 32),
}
