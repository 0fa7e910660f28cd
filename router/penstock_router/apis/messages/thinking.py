"""The field `thinking` of Anthropic's Messages -> options, and variables of templates."""

from __future__ import annotations

from typing import Any

from penstock_router.json_fields import POSITIVE, STRING, JsonObject, Kind, object_of, one_of

# GLM's and DeepSeek's servers of this API take "enabled" without a budget.
_TYPE = one_of("enabled", "disabled", "adaptive")
_ENTRIES = object_of(type=_TYPE, budget_tokens=POSITIVE, display=STRING)


def _read_thinking(name: str, value: Any) -> JsonObject:
    """Options of `ChatRequest`, and `thinks`, which becomes a variable of templates."""
    given: JsonObject = _ENTRIES.read(name, value)
    thinks = _TYPE.read(f"{name}.type", given.get("type")) != "disabled"
    asked: JsonObject = {"thinks": thinks}
    if thinks and "budget_tokens" in given:
        asked["thinking_tokens"] = given["budget_tokens"]
    if "display" in given:
        # All others show what was thought, whole or in parts.
        asked["include_reasoning"] = given["display"] != "omitted"
    return asked


THINKING = Kind(_read_thinking, {**_ENTRIES.schema, "required": ["type"]})


def thinking_options(values: JsonObject) -> JsonObject:
    """Options that the field asks for, as `ChatRequest` takes them."""
    asked = values.get("thinking", {})
    options = {name: value for name, value in asked.items() if name != "thinks"}
    return {**options, "requires_thinking_budget": False}


def thinking_variables(values: JsonObject) -> JsonObject:
    """Variables of templates that say whether to reason."""
    return {"enable_thinking": values["thinking"]["thinks"]} if "thinking" in values else {}
