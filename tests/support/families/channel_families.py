"""Families whose whole answer is channels."""

from __future__ import annotations

import json
from collections.abc import Sequence

from support.families.family import Call, Family


def _json(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)


def _harmony(calls: Sequence[Call]) -> str:
    return "<|start|>assistant".join(
        f"<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>{_json(arguments)}"
        "<|call|>"
        for name, arguments in calls
    )


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
)
