"""Reads the fields by which clients of several hosted models ask for reasoning in chats.

They become options of the request and variables of the chat template. Once the template is known,
the variables get the names that it uses.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from penstock_router.errors import BadRequest
from penstock_router.json_fields import (
    BOOLEAN,
    INT32_MAX,
    STRING,
    Field,
    JsonObject,
    Kind,
    integer,
    object_of,
    one_of,
    refusal,
)

_TYPE = one_of("enabled", "disabled", "auto", "adaptive")
_TOKENS = integer(0, INT32_MAX)
_THINKING = object_of(type=_TYPE, budget_tokens=_TOKENS, clear_thinking=BOOLEAN)


def _read_thinking(name: str, value: Any) -> JsonObject:
    """Read the field of DeepSeek, GLM and Kimi: true, false, or an object with a type."""
    if isinstance(value, bool):
        return {"enable_thinking": value}
    given: JsonObject = _THINKING.read(name, value)
    kind = _TYPE.read(f"{name}.type", given.get("type"))
    said = {} if kind in ("auto", "adaptive") else {"enable_thinking": kind == "enabled"}
    if "budget_tokens" in given:
        said["thinking_token_budget"] = given["budget_tokens"]
    if "clear_thinking" in given:
        said["clear_thinking"] = given["clear_thinking"]
    _refuse_others(name, value, ("type", "budget_tokens", "clear_thinking"))
    return said


# OpenRouter's field; SGLang and OpenAI's Responses have some of its entries.
_REASONING = object_of(effort=STRING, max_tokens=_TOKENS, enabled=BOOLEAN, exclude=BOOLEAN)
_OF_REASONING = {
    "effort": "reasoning_effort",
    "max_tokens": "thinking_token_budget",
    "enabled": "enable_thinking",
}


def _read_reasoning(name: str, value: Any) -> JsonObject:
    given: JsonObject = _REASONING.read(name, value)
    said = {ours: given[key] for key, ours in _OF_REASONING.items() if key in given}
    if "exclude" in given:
        said["include_reasoning"] = not given["exclude"]
    _refuse_others(name, value, (*_OF_REASONING, "exclude", "summary", "generate_summary"))
    return said


def _refuse_others(name: str, given: JsonObject, known: Collection[str]) -> None:
    rest = [key for key in given if key not in known and given[key] is not None]
    if rest:
        raise BadRequest(f"{name}: has no entry {rest[0][:60]!r}", param=name)


def _read_effort(name: str, value: Any) -> str:
    if not isinstance(value, str):
        raise refusal(name, "a word, such as low, medium or high", value)
    return value


THINKING_FIELDS = (
    Field("enable_thinking", BOOLEAN, "Whether to reason, where the template lets one choose."),
    Field("reasoning_effort", Kind(_read_effort, STRING.schema), "Passed to the template."),
    Field(
        "thinking",
        Kind(
            _read_thinking,
            {"anyOf": [BOOLEAN.schema, {**_THINKING.schema, "required": ["type"]}]},
        ),
        "The same as enable_thinking and thinking_token_budget.",
    ),
    Field(
        "reasoning",
        Kind(_read_reasoning, _REASONING.schema),
        "The same as reasoning_effort, thinking_token_budget, enable_thinking, include_reasoning.",
    ),
)
_VARIABLES = ("reasoning_effort", "enable_thinking", "clear_thinking")


def spread_thinking(values: JsonObject, names: Sequence[str] = ("thinking", "reasoning")) -> None:
    """Move these fields' entries to the fields with the same meaning. Raises `BadRequest` if two
    contradict each other.
    """
    for name in names:
        for ours, said in values.pop(name, {}).items():
            if values.setdefault(ours, said) != said:
                text = f"{name}: not together with {ours}, which says something else"
                raise BadRequest(text, param=name)


def thinking_kwargs(values: JsonObject) -> JsonObject:
    return {name: values[name] for name in _VARIABLES if name in values}
