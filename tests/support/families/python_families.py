"""Families whose calls are written as in Python."""

from __future__ import annotations

from collections.abc import Sequence

from support.families.family import Call, Family


def _pythonic(calls: Sequence[Call]) -> str:
    written = [
        f"{name}({', '.join(f'{key}={value!r}' for key, value in arguments.items())})"
        for name, arguments in calls
    ]
    return f"[{', '.join(written)}]"


FAMILIES = (Family("pythonic", _pythonic, says_before=None, has_marks=False),)
