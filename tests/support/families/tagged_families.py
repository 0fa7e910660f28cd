"""Families whose calls have each argument between tags of its own."""

from __future__ import annotations

import json
from collections.abc import Sequence

from support.families.family import Call, Family


def value_text(value: object) -> str:
    """A value as such families write it: strings as they are, all else as JSON."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _qwen_xml(calls: Sequence[Call]) -> str:
    written = []
    for name, arguments in calls:
        parameters = "".join(
            f"<parameter={key}>\n{value_text(value)}\n</parameter>\n"
            for key, value in arguments.items()
        )
        written.append(f"<tool_call>\n<function={name}>\n{parameters}</function>\n</tool_call>")
    return "\n".join(written)


FAMILIES = (
    Family("qwen_xml", _qwen_xml, has_quotes=False, begin="<tool_call>\n", end="\n</tool_call>"),
)
