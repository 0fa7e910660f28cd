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


def _kimi_k2(calls: Sequence[Call]) -> str:
    written = [
        f"<|tool_call_begin|>functions.{name}:{number}<|tool_call_argument_begin|>"
        f"{_json(arguments)}<|tool_call_end|>"
        for number, (name, arguments) in enumerate(calls)
    ]
    return f"<|tool_calls_section_begin|>{''.join(written)}<|tool_calls_section_end|>"


FAMILIES = (
    Family("hermes", _hermes, begin="<tool_call>", end="\n</tool_call>"),
    Family(
        "kimi_k2",
        _kimi_k2,
        begin="<|tool_calls_section_begin|>",
        end="<|tool_calls_section_end|>",
    ),
)
