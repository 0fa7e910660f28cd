"""How clients of chats ask for reasoning, in the ways of several hosted models.

What they say becomes variables of the chat template, which are fitted to its own names where the
template is known, and options of the request.
"""

from __future__ import annotations

from collections.abc import Sequence
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
    one_of,
    or_null,
    read_object,
    refusal,
)

_TYPE = one_of("enabled", "disabled", "auto", "adaptive")
_TOKENS = integer(0, INT32_MAX)


def _read_thinking(name: str, value: Any) -> JsonObject:
    """DeepSeek's, GLM's and Kimi's field: true, false, or an object with a type."""
    if isinstance(value, bool):
        return {"enable_thinking": value}
    given = read_object(name, value)
    kind = _TYPE.read(f"{name}.type", given.get("type"))
    said = {} if kind in ("auto", "adaptive") else {"enable_thinking": kind == "enabled"}
    if (budget := given.get("budget_tokens")) is not None:
        said["thinking_token_budget"] = _TOKENS.read(f"{name}.budget_tokens", budget)
    if (clears := given.get("clear_thinking")) is not None:
        said["clear_thinking"] = BOOLEAN.read(f"{name}.clear_thinking", clears)
    return _with_rest(name, given, said, ("type", "budget_tokens", "clear_thinking"))


def _read_reasoning(name: str, value: Any) -> JsonObject:
    """OpenRouter's field, of which SGLang and OpenAI's Responses have parts."""
    given = read_object(name, value)
    kinds = {
        "effort": ("reasoning_effort", STRING),
        "max_tokens": ("thinking_token_budget", _TOKENS),
        "enabled": ("enable_thinking", BOOLEAN),
    }
    said = {
        ours: kind.read(f"{name}.{key}", given[key])
        for key, (ours, kind) in kinds.items()
        if given.get(key) is not None
    }
    if (hides := given.get("exclude")) is not None:
        said["include_reasoning"] = not BOOLEAN.read(f"{name}.exclude", hides)
    return _with_rest(name, given, said, (*kinds, "exclude", "summary", "generate_summary"))


def _with_rest(
    name: str, given: JsonObject, said: JsonObject, known: tuple[str, ...]
) -> JsonObject:
    rest = [key for key in given if key not in known and given[key] is not None]
    if rest:
        raise BadRequest(f"{name}: has no entry {rest[0][:60]!r}", param=name)
    return said


def _read_effort(name: str, value: Any) -> str:
    if not isinstance(value, str):
        raise refusal(name, "a word, such as low, medium or high", value)
    return value


def _object(**properties: JsonObject) -> JsonObject:
    entries = {key: or_null(schema) for key, schema in properties.items()}
    return {"type": "object", "properties": entries}


THINKING_FIELDS = (
    Field("enable_thinking", BOOLEAN, "Whether to reason, where the template lets one choose."),
    Field("reasoning_effort", Kind(_read_effort, STRING.schema), "Passed to the template."),
    Field(
        "thinking",
        Kind(
            _read_thinking,
            {
                "anyOf": [
                    BOOLEAN.schema,
                    {
                        **_object(
                            type=_TYPE.schema,
                            budget_tokens=_TOKENS.schema,
                            clear_thinking=BOOLEAN.schema,
                        ),
                        "required": ["type"],
                    },
                ]
            },
        ),
        "The same as enable_thinking and thinking_token_budget.",
    ),
    Field(
        "reasoning",
        Kind(
            _read_reasoning,
            _object(
                effort=STRING.schema,
                max_tokens=_TOKENS.schema,
                enabled=BOOLEAN.schema,
                exclude=BOOLEAN.schema,
            ),
        ),
        "The same as reasoning_effort, thinking_token_budget, enable_thinking, include_reasoning.",
    ),
)
# Variables of templates, by the names of fields.
_VARIABLES = ("reasoning_effort", "enable_thinking", "clear_thinking")


def spread_thinking(values: JsonObject, names: Sequence[str] = ("thinking", "reasoning")) -> None:
    """Put what fields of these names say under the fields that say the same. Raises `BadRequest`
    where two fields contradict each other.
    """
    for name in names:
        for ours, said in values.pop(name, {}).items():
            if values.setdefault(ours, said) != said:
                text = f"{name}: not together with {ours}, which says something else"
                raise BadRequest(text, param=name)


def thinking_kwargs(values: JsonObject) -> JsonObject:
    """The variables of a template by which a request asks for reasoning."""
    return {name: values[name] for name in _VARIABLES if name in values}
