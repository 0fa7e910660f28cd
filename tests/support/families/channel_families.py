"""Families whose whole answer is channels."""

from __future__ import annotations

import json
from collections.abc import Sequence

from support.families.family import Call, Family
from support.families.tagged_families import value_text


def _json(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)


def _harmony(calls: Sequence[Call]) -> str:
    return "<|start|>assistant".join(
        f"<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>{_json(arguments)}"
        "<|call|>"
        for name, arguments in calls
    )


def _attribute(value: str) -> str:
    return value.replace("&", "&amp;").replace('"', "&quot;")


def _kimi_k3(calls: Sequence[Call]) -> str:
    written = []
    for number, (name, arguments) in enumerate(calls, 1):
        inner = "".join(
            f'<|open|>argument key="{_attribute(key)}" type="{_type(value)}"<|sep|>'
            f"{value_text(value)}<|close|>argument<|sep|>"
            for key, value in arguments.items()
        )
        opens = f'<|open|>call tool="{_attribute(name)}" index="{number}"<|sep|>'
        written.append(f"{opens}{inner}<|close|>call<|sep|>")
    return f"<|open|>tools<|sep|>{''.join(written)}<|close|>tools<|sep|><|close|>message<|sep|>"


def _type(value: object) -> str:
    names = {bool: "boolean", str: "string", dict: "object", list: "array", type(None): "null"}
    return names.get(type(value), "number")


def _muse_glimmer(calls: Sequence[Call]) -> str:
    written = []
    for name, arguments in calls:
        inner = "".join(
            f'<atem:parameter name="{key}">{value_text(value)}</atem:parameter>\n'
            for key, value in arguments.items()
        )
        written.append(
            f' to={name}<|message|><atem:function_calls>\n<atem:invoke name="{name}">\n{inner}'
            "</atem:invoke>\n</atem:function_calls>"
        )
    return "<|eom|><|start|>assistant".join(written)


def _solar_open(calls: Sequence[Call]) -> str:
    written = "".join(
        f"<|tool_call:begin|>a1b2c3d{number:03}<|tool_call:name|>{name}<|tool_call:args|>"
        f"{_json(arguments)}<|tool_call:end|>"
        for number, (name, arguments) in enumerate(calls)
    )
    return f"<|tool_calls|>{written}<|calls|>"


FAMILIES = (
    Family(
        "harmony",
        _harmony,
        says_before=lambda text: f"<|channel|>commentary<|message|>{text}<|end|><|start|>assistant",
        says_alone=lambda text: f"<|channel|>final<|message|>{text}",
        reasons=lambda text: f"<|channel|>analysis<|message|>{text}<|end|><|start|>assistant",
        is_parallel=False,
        begin="<|channel|>commentary",
        end="<|call|>",
    ),
    Family(
        "kimi_k3",
        _kimi_k3,
        says_before=lambda text: f"<|open|>response<|sep|>{text}<|close|>response<|sep|>",
        says_alone=lambda text: (
            f"<|open|>response<|sep|>{text}<|close|>response<|sep|><|close|>message<|sep|>"
        ),
        reasons=lambda text: f"<|open|>think<|sep|>{text}<|close|>think<|sep|>",
        has_quotes=False,
        begin="<|open|>tools<|sep|>",
        end="<|close|>call<|sep|><|close|>tools<|sep|><|close|>message<|sep|>",
    ),
    Family(
        "muse_glimmer",
        _muse_glimmer,
        says_before=lambda text: f" to=user<|message|>{text}<|eom|><|start|>assistant",
        says_alone=lambda text: f" to=user<|message|>{text}",
        reasons=lambda text: f" to=self<|message|>{text}<|eom|><|start|>assistant",
        has_quotes=False,
        begin="<atem:function_calls>\n",
        end="\n</atem:function_calls>",
    ),
    Family(
        "solar_open",
        _solar_open,
        says_before=lambda text: f"<|content|>{text}<|end|><|begin|>assistant",
        says_alone=lambda text: f"<|content|>{text}<|end|>",
        reasons=lambda text: f"<|think|>{text}<|end|><|begin|>assistant",
        begin="<|tool_calls|>",
        end="<|tool_call:end|><|calls|>",
    ),
)
