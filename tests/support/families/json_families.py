"""Families whose calls have JSON as arguments."""

from __future__ import annotations

import json
from collections.abc import Sequence

from support.families.family import Call, Family


def _json(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)


def _hermes(calls: Sequence[Call]) -> str:
    written = [_json({"name": name, "arguments": arguments}) for name, arguments in calls]
    return "\n".join(f"<tool_call>\n{each}\n</tool_call>" for each in written)


FAMILIES = (Family("hermes", _hermes, begin="<tool_call>", end="\n</tool_call>"),)
