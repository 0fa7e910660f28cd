"""A value of each sampling parameter that is a number, for tests that try them all."""

from __future__ import annotations

from typing import Any

from penstock_proto.limits import SAMPLING_RANGES
from penstock_proto.types import SAMPLING_NUMBERS, EngineSampling


def _value(name: str, number: int) -> float:
    if name not in SAMPLING_RANGES:
        return 3 + number
    # A float32 holds it exactly.
    value = 0.25 + number / 64
    assert SAMPLING_RANGES[name].holds(value)
    return value


# Each value is allowed, changes what is drawn, and is no other parameter's.
SAMPLING_VALUES: dict[str, Any] = {
    name: _value(name, number) for number, name in enumerate(SAMPLING_NUMBERS)
}
assert all(value != getattr(EngineSampling(), name) for name, value in SAMPLING_VALUES.items())
