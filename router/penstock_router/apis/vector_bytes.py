"""Encodes vectors as bytes: numbers of 32, 16 or 8 bits, in either byte order."""

from __future__ import annotations

import math
import sys
from array import array
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise

from penstock_router.errors import BadRequest


@dataclass(frozen=True, slots=True)
class _Format:
    """A float format of 16 or 8 bits: IEEE 754, except for the meaning of the largest codes."""

    exponent_bits: int
    fraction_bits: int
    # Code of the largest finite number; greater codes are infinite or not numbers.
    largest: int

    def value(self, code: int) -> float:
        """Return a code's number, without sign."""
        exponent, fraction = divmod(code, 1 << self.fraction_bits)
        if exponent:
            fraction += 1 << self.fraction_bits
        lowest = 2 - (1 << self.exponent_bits - 1) - self.fraction_bits
        return math.ldexp(fraction, lowest + max(0, exponent - 1))


_FORMATS = {
    "float16": _Format(5, 10, 0x7BFF),
    "bfloat16": _Format(8, 7, 0x7F7F),
    "fp8_e4m3": _Format(4, 3, 0x7E),
    "fp8_e5m2": _Format(5, 2, 0x7B),
}
DTYPES = ("float32", *_FORMATS)
ENDIANNESS = ("little", "big", "native")


def encode(vector: Sequence[float], dtype: str, endianness: str) -> bytes:
    """Encode a vector as one of `DTYPES`. Raises `BadRequest` if a number is too large."""
    values = array("f", vector) if dtype == "float32" else _codes(vector, dtype)
    if endianness not in (sys.byteorder, "native"):
        values.byteswap()
    return values.tobytes()


def _codes(vector: Sequence[float], dtype: str) -> array[int]:
    """Round each number to the nearest number of the dtype. If two are equally near, take the one
    whose last bit is 0.
    """
    coded, sizes = _FORMATS[dtype], list(map(abs, vector))
    bound = coded.value(coded.largest)
    if max(sizes) > bound:
        raise BadRequest(
            f"embed_dtype: {dtype} has numbers up to {bound:g}, and a vector has {max(sizes):g}; "
            "ask for vectors of length 1, or for another embed_dtype",
            param="embed_dtype",
        )
    middles = _middles(dtype)
    sign_bit = 1 << coded.exponent_bits + coded.fraction_bits
    codes = array("H" if sign_bit > 0x80 else "B")
    for value, size in zip(vector, sizes, strict=True):
        code = bisect_left(middles, size)
        if code & 1 and code < len(middles) and middles[code] == size:
            code += 1
        codes.append(code | sign_bit if math.copysign(1.0, value) < 0 else code)
    return codes


@cache
def _middles(dtype: str) -> list[float]:
    """The midpoints between neighboring numbers, from 0 up."""
    coded = _FORMATS[dtype]
    values = map(coded.value, range(coded.largest + 1))
    return [(low + high) / 2 for low, high in pairwise(values)]
