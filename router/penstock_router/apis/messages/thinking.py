"""The field `thinking` of Anthropic's Messages -> options, and variables of templates."""

from __future__ import annotations

from typing import Any

from penstock_router.json_fields import (
    POSITIVE,
    STRING,
    JsonObject,
    Kind,
    one_of,
    or_null,
    read_object,
)

# GLM's and DeepSeek's servers of this API take "enabled" without a budget.
_TYPE = one_of("enabled", "disabled", "adaptive")
# Templates decide whether a model reasons, by a variable with one of these names.
_VARIABLES = ("enable_thinking", "thinking")


def _read_thinking(name: str, value: Any) -> JsonObject:
    """Options of `ChatRequest`, and `thinks`, which becomes template variables."""
    thinking = read_object(name, value)
    kind = _TYPE.read(f"{name}.type", thinking.get("type"))
    budget, display = thinking.get("budget_tokens"), thinking.get("display")
    result: JsonObject = {"thinks": kind != "disabled"}
    if budget is not None:
        budget = POSITIVE.read(f"{name}.budget_tokens", budget)
        if result["thinks"]:
            result["thinking_tokens"] = budget
    if display is not None:
        # All others show what was thought, whole or in parts.
        result["include_reasoning"] = STRING.read(f"{name}.display", display) != "omitted"
    return result


THINKING = Kind(
    _read_thinking,
    {
        "type": "object",
        "properties": {
            "type": _TYPE.schema,
            "budget_tokens": or_null(POSITIVE.schema),
            "display": or_null(STRING.schema),
        },
        "required": ["type"],
    },
)


def thinking_options(values: JsonObject) -> JsonObject:
    """What the field asks for, as `ChatRequest` takes it."""
    asked = values.get("thinking", {})
    options = {name: value for name, value in asked.items() if name != "thinks"}
    return {**options, "requires_thinking_budget": False}


def thinking_variables(values: JsonObject) -> JsonObject:
    """Whether to reason, under the variable names that templates use."""
    return dict.fromkeys(_VARIABLES, values["thinking"]["thinks"]) if "thinking" in values else {}
