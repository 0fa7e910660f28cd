"""Reads the field `thinking` of Anthropic's Messages into options and template variables."""

from __future__ import annotations

from typing import Any

from penstock_router.json_fields import POSITIVE, STRING, JsonObject, Kind, object_of, one_of

# GLM's and DeepSeek's own servers also accept "enabled" without a budget in this API.
_TYPE = one_of("enabled", "disabled", "adaptive")
_ENTRIES = object_of(type=_TYPE, budget_tokens=POSITIVE, display=STRING)


def _read_thinking(name: str, value: Any) -> JsonObject:
    """Read options of `ChatRequest`, and `thinks`, which becomes a template variable."""
    given: JsonObject = _ENTRIES.read(name, value)
    thinks = _TYPE.read(f"{name}.type", given.get("type")) != "disabled"
    asked: JsonObject = {"thinks": thinks}
    if thinks and "budget_tokens" in given:
        asked["thinking_tokens"] = given["budget_tokens"]
    if "display" in given:
        # All values except "omitted" show reasoning, whole or in part.
        asked["include_reasoning"] = given["display"] != "omitted"
    return asked


THINKING = Kind(_read_thinking, {**_ENTRIES.schema, "required": ["type"]})


def thinking_options(values: JsonObject) -> JsonObject:
    asked = values.get("thinking", {})
    options = {name: value for name, value in asked.items() if name != "thinks"}
    return {**options, "requires_thinking_budget": False}


def thinking_variables(values: JsonObject) -> JsonObject:
    return {"enable_thinking": values["thinking"]["thinks"]} if "thinking" in values else {}
