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


def _llama_json(calls: Sequence[Call]) -> str:
    return "; ".join(_json({"name": name, "parameters": arguments}) for name, arguments in calls)


def _listed(calls: Sequence[Call]) -> str:
    return _json([{"name": name, "arguments": arguments} for name, arguments in calls])


def _mistral(calls: Sequence[Call]) -> str:
    return f"[TOOL_CALLS]{_listed(calls)}"


def _mistral_named(calls: Sequence[Call]) -> str:
    return "".join(f"[TOOL_CALLS]{name}[ARGS]{_json(arguments)}" for name, arguments in calls)


def _deepseek_v3(calls: Sequence[Call]) -> str:
    written = [
        f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n```json\n{_json(arguments)}\n```"
        "<｜tool▁call▁end｜>"
        for name, arguments in calls
    ]
    return f"<｜tool▁calls▁begin｜>{chr(10).join(written)}<｜tool▁calls▁end｜>"


def _deepseek_v31(calls: Sequence[Call]) -> str:
    written = [
        f"<｜tool▁call▁begin｜>{name}<｜tool▁sep｜>{_json(arguments)}<｜tool▁call▁end｜>"
        for name, arguments in calls
    ]
    return f"<｜tool▁calls▁begin｜>{''.join(written)}<｜tool▁calls▁end｜>"


def _plain_json(calls: Sequence[Call]) -> str:
    return _listed(calls).removeprefix("[").removesuffix("]") if len(calls) == 1 else _listed(calls)


FAMILIES = (
    Family("hermes", _hermes, begin="<tool_call>", end="\n</tool_call>"),
    Family("llama_json", _llama_json, says_before=None, has_marks=False),
    Family("mistral", _mistral, begin="[TOOL_CALLS]"),
    Family("mistral_named", _mistral_named, begin="[TOOL_CALLS]"),
    Family(
        "deepseek_v3",
        _deepseek_v3,
        begin="<｜tool▁calls▁begin｜>",
        end="\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    ),
    Family(
        "deepseek_v31",
        _deepseek_v31,
        begin="<｜tool▁calls▁begin｜>",
        end="<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    ),
    Family("plain_json", _plain_json, says_before=None, has_marks=False),
)
