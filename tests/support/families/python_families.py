"""Families whose calls are written as in Python, and those with bare keys."""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping, Sequence
from typing import Any

from support.families.family import Call, Family


def _json(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)


def _call(call: Call, written: Any = repr) -> str:
    name, arguments = call
    return f"{name}({', '.join(f'{key}={written(value)}' for key, value in arguments.items())})"


def _pythonic(calls: Sequence[Call]) -> str:
    return f"[{', '.join(map(_call, calls))}]"


def _lfm(calls: Sequence[Call]) -> str:
    return f"<|tool_call_start|>{_pythonic(calls)}<|tool_call_end|>"


def _olmo(calls: Sequence[Call]) -> str:
    lines = "\n".join(_call(call, _json) for call in calls)
    return f"<function_calls>{lines}</function_calls>"


def _bare(value: Any, quote: str) -> str:
    """A value with bare keys, its strings between marks."""
    if isinstance(value, str):
        return f"{quote}{value}{quote}"
    if isinstance(value, Mapping):
        members = ",".join(f"{key}:{_bare(each, quote)}" for key, each in value.items())
        return f"{{{members}}}"
    if isinstance(value, list):
        return f"[{','.join(_bare(each, quote) for each in value)}]"
    return _json(value)


def _gemma(begin: str, end: str, quote: str, calls: Sequence[Call]) -> str:
    return "".join(f"{begin}call:{name}{_bare(given, quote)}{end}" for name, given in calls)


_GEMMA4 = ("<|tool_call>", "<tool_call|>", '<|"|>')
_FUNCTION_GEMMA = ("<start_function_call>", "<end_function_call>", "<escape>")

FAMILIES = (
    Family("pythonic", _pythonic, says_before=None, has_marks=False),
    Family("lfm2", _lfm, begin="<|tool_call_start|>", end="<|tool_call_end|>"),
    Family("olmo3", _olmo, begin="<function_calls>", end="</function_calls>"),
    Family(
        "gemma4",
        functools.partial(_gemma, *_GEMMA4),
        reasons=lambda text: f"<|channel>thought\n{text}\n<channel|>",
        has_quotes=False,
        begin="<|tool_call>",
        end="<tool_call|>",
    ),
    Family(
        "functiongemma",
        functools.partial(_gemma, *_FUNCTION_GEMMA),
        has_quotes=False,
        begin="<start_function_call>",
        end="<end_function_call>",
    ),
)
