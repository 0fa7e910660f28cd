"""Which values sampling parameters may have, in a request or in a model's files."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

MAX_TOP_K = 2**31 - 1
# The largest float32, the type on the wire and in the sampler.
_LARGEST_FLOAT = float(np.finfo(np.float32).max)


@dataclass(frozen=True, slots=True)
class Range:
    """The values a field may have; `low` itself only where `above_low` is false."""

    low: float
    high: float = _LARGEST_FLOAT
    above_low: bool = False

    def holds(self, value: float) -> bool:
        """False for NaN and for infinities."""
        above = self.low < value if self.above_low else self.low <= value
        return above and value <= self.high

    def __str__(self) -> str:
        if not self.above_low:
            return f"{self.low:g}..{self.high:g}"
        bound = "finite" if self.high == _LARGEST_FLOAT else f"at most {self.high:g}"
        return f"above {self.low:g}, {bound}"


# The parameters that are floats.
SAMPLING_RANGES: Mapping[str, Range] = {
    "temperature": Range(0, 100),
    "top_p": Range(0, 1, above_low=True),
    "min_p": Range(0, 1),
    "typical_p": Range(0, 1, above_low=True),
    "repetition_penalty": Range(0, above_low=True),
    "presence_penalty": Range(-2, 2),
    "frequency_penalty": Range(-2, 2),
}


def usable_defaults(stated: Mapping[str, object]) -> tuple[dict[str, float], list[str]]:
    """The defaults in a model's own configuration that are in bounds, and a line about each that is
    not.
    """
    usable: dict[str, float] = {}
    unusable = []
    for name, value in stated.items():
        allowed = Range(-1, MAX_TOP_K) if name == "top_k" else SAMPLING_RANGES[name]
        is_flag = isinstance(value, bool)
        if isinstance(value, int | float) and not is_flag and allowed.holds(value):
            usable[name] = value
        else:
            unusable.append(out_of_bounds(name, value, allowed))
    return usable, unusable


def out_of_bounds(name: str, value: object, bound: object) -> str:
    """The error text for a field with such a value."""
    return f"{name}: {short(value)} is out of bounds; allowed: {bound}"


def short(value: object) -> str:
    """A value as text, cut to 80 characters."""
    text = str(value)
    return text if len(text) <= 80 else text[:77] + "..."
