"""Completes tools for templates that refuse tools without optional fields."""

from __future__ import annotations

from penstock_router.json_fields import JsonObject

_NULL = "null"


def completed_tool(tool: JsonObject) -> JsonObject:
    """Add missing descriptions and properties, and use one type in place of several.

    Some templates join descriptions to other text, or look types up, without checking.
    """
    function = tool.get("function")
    if not isinstance(function, dict):
        return tool
    completed = {**function, "description": function.get("description") or ""}
    parameters = function.get("parameters")
    if isinstance(parameters, dict):
        completed["parameters"] = {"properties": {}} | _completed(parameters)
    return {**tool, "function": completed}


def _completed(schema: JsonObject) -> JsonObject:
    completed = dict(schema)
    types = schema.get("type")
    if isinstance(types, list):
        completed["type"] = next((each for each in types if each != _NULL), _NULL)
    if isinstance(properties := schema.get("properties"), dict):
        completed["properties"] = {name: _property(each) for name, each in properties.items()}
    if isinstance(items := schema.get("items"), dict):
        completed["items"] = _completed(items)
    return completed


def _property(schema: object) -> JsonObject:
    return {"description": ""} | _completed(schema if isinstance(schema, dict) else {})
