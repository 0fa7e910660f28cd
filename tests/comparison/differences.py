"""The differences between two sets of answers: one line for each case that differs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any


class _Absent:
    """Unlike null."""

    def __repr__(self) -> str:
        return "absent"


_ABSENT = _Absent()


def differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Name each case that was answered before, and the first place in it that differs. What was not
    served before may be served now.
    """
    lines = (
        _first_difference(before[name], now.get(name), name)
        for name in before
        if not _is_refused(before[name]) or _is_refused(now.get(name))
    )
    return [line for line in lines if line]


def _is_refused(answer: Any) -> bool:
    return "not served by this server" in str(answer)


def _first_difference(before: Any, now: Any, case: str) -> str:
    place, was, is_now = next(_unequal(before, now), ("", None, None))
    return f"{case}: {place} was {_short(was)}, is {_short(is_now)}" if place else ""


def _unequal(before: Any, now: Any, place: str = "") -> Iterator[tuple[str, Any, Any]]:
    """Places, and the values there."""
    if isinstance(before, dict) and isinstance(now, dict):
        for key in {**before, **now}:
            inner = f"{place}.{key}" if place else str(key)
            yield from _unequal(before.get(key, _ABSENT), now.get(key, _ABSENT), inner)
    elif isinstance(before, list) and isinstance(now, list):
        for index, (was, is_now) in enumerate(zip(before, now, strict=False)):
            yield from _unequal(was, is_now, f"{place}[{index}]")
        if len(before) != len(now):
            yield f"the length of {place}", len(before), len(now)
    # NaN is not served, and 1 is not True.
    elif (type(before), before) != (type(now), now):
        yield place or "the answer", before, now


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
