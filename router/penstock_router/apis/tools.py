"""Reads functions that a chat's answer may call, in OpenAI's form, as `Tool` and `ToolChoice`.

Other APIs follow the same rules.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from penstock_router.apis.structured_output import check_nesting
from penstock_router.errors import BadRequest
from penstock_router.json_fields import (
    BOOLEAN,
    STRING,
    JsonObject,
    Kind,
    add_warning,
    or_null,
    read_array,
    read_object,
    refusal,
    shorten,
)
from penstock_router.request import ChatRequest, Tool, ToolChoice

# Reading more tools would take too long. A body's maximum of bytes bounds tools too.
MAX_TOOLS = 16_384
# The Model Context Protocol's rule for tool names, which includes OpenAI's.
MAX_NAME_CHARS = 128
_NAME_PATTERN = f"^[a-zA-Z0-9_.-]{{1,{MAX_NAME_CHARS}}}$"
NAME_SCHEMA: JsonObject = {"type": "string", "pattern": _NAME_PATTERN}
_NAME = re.compile(_NAME_PATTERN.removesuffix("$") + r"\Z")
# Templates expect this of a function without parameters.
_NO_PARAMETERS: JsonObject = {"type": "object", "properties": {}}


# ---- Tools -------------------------------------------------------------------------------------


def read_name(name: str, value: Any) -> str:
    if not isinstance(value, str) or not _NAME.match(value):
        wanted = f"1 to {MAX_NAME_CHARS} of a-z, A-Z, 0-9, _, - and ."
        raise refusal(name, wanted, value)
    return value


def _read_parameters(name: str, value: Any) -> JsonObject | None:
    """Read the arguments' schema, an object; None if missing or empty."""
    if value is None or value == {}:
        return None
    parameters = read_object(name, value)
    kind = parameters.get("type")
    if kind is not None and kind != "object":
        raise refusal(f"{name}.type", "object, as arguments have names", kind)
    check_nesting(name, parameters)
    return {**parameters, "type": "object"}


def read_tool(
    where: str, function: JsonObject, shown_keys: Iterable[str], parameters_key: str = "parameters"
) -> Tool:
    """Read a tool. Templates see its entries under `shown_keys`, and its parameters."""
    name = read_name(f"{where}.name", function.get("name"))
    for key, kind in (("strict", BOOLEAN), ("description", STRING)):
        if function.get(key) is not None:
            kind.read(f"{where}.{key}", function[key])
    given = function.get(parameters_key)
    parameters = _read_parameters(f"{where}.{parameters_key}", given)
    shown = {key: function[key] for key in shown_keys if function.get(key) is not None}
    check_nesting(where, shown)
    shown["parameters"] = given or _NO_PARAMETERS
    strict = bool(function.get("strict"))
    return Tool(name, parameters, strict, {"type": "function", "function": shown})


def as_definition(shown: JsonObject) -> str:
    """Render `Tool.shown` as most chat templates write it."""
    return json.dumps(shown, ensure_ascii=False)


# Templates see these entries; other entries are for the vendors' servers.
SHOWN = ("name", "description")


def _chat_tool(where: str, value: Any) -> Tool:
    tool = read_object(where, value)
    _check_type(where, tool)
    if "function" not in tool and "name" in tool:
        # Cursor sends tools in the form of Responses or of Messages.
        key = "input_schema" if tool.get("parameters") is None else "parameters"
        return read_tool(where, tool, SHOWN, key)
    function = read_object(f"{where}.function", tool.get("function"))
    # Some templates read more entries, such as a function's result. They need not know whether the
    # schema is enforced.
    shown = [key for key in function if key not in ("strict", "parameters")]
    return read_tool(f"{where}.function", function, shown)


def _check_type(where: str, entry: JsonObject) -> None:
    """Refuse all types but function, which may be omitted."""
    kind = entry.get("type")
    if kind is not None and kind != "function":
        text = f"{where}.type: tools of type {shorten(kind)} are not served, only function"
        raise BadRequest(text, param=f"{where}.type")


def check_number(name: str, count: int) -> None:
    if count > MAX_TOOLS:
        raise BadRequest(f"{name}: at most {MAX_TOOLS} tools; given: {count}", param=name)


def _read_tools(name: str, value: Any) -> tuple[Tool, ...]:
    given = read_array(name, value)
    check_number(name, len(given))
    return tuple([_chat_tool(f"{name}[{index}]", item) for index, item in enumerate(given)])


# ---- tool_choice -------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ParsedToolChoice:
    choice: ToolChoice
    # The only tools that may be called; None: all.
    allowed: tuple[str, ...] | None = None
    # True if several calls are allowed; None: not said.
    parallel: bool | None = None


# The last word, "any", is Mistral's.
_MODES: Mapping[str, ToolChoice] = {
    "none": ToolChoice("none"),
    "auto": ToolChoice("auto"),
    "required": ToolChoice("required"),
    "any": ToolChoice("required"),
}


def _chat_choice(name: str, value: Any) -> ParsedToolChoice:
    if isinstance(value, dict) and "function" in value and "type" not in value:
        # Hugging Face's clients send no type.
        value = {"type": "function", **value}
    match value:
        # Cursor sends the word as a type, as in Messages.
        case str(word) | {"type": str(word)} if word in _MODES:
            return ParsedToolChoice(_MODES[word])
        case {"type": "function" | "tool"}:
            return ParsedToolChoice(ToolChoice("named", _function_name(name, value)))
        case {"type": "allowed_tools"}:
            return _read_allowed(name, value)
        case {"type": other}:
            raise refusal(f"{name}.type", "function or allowed_tools", other)
    raise refusal(name, "none, auto, required or an object that names a function", value)


def _function_name(where: str, entry: JsonObject) -> str:
    """Read a function's name: nested as in chats, or flat."""
    if "function" not in entry and "name" in entry:
        return read_name(f"{where}.name", entry["name"])
    function = read_object(f"{where}.function", entry.get("function"))
    return read_name(f"{where}.function.name", function.get("name"))


def _read_allowed(name: str, value: JsonObject) -> ParsedToolChoice:
    mode, entries = read_allowed(name, value)
    for where, entry in entries.items():
        _check_type(where, entry)
    names = tuple(_function_name(where, entry) for where, entry in entries.items())
    return ParsedToolChoice(ToolChoice(mode), allowed=names)


def read_allowed(
    name: str, value: JsonObject
) -> tuple[Literal["auto", "required"], dict[str, JsonObject]]:
    """Read a choice among allowed tools: its mode and, by their place in the body, the entries that
    name tools. They are nested under "allowed_tools" as in chats, or flat as in Responses.
    """
    key = "allowed_tools"
    held = value
    if value.get(key) is not None:
        name, held = f"{name}.{key}", read_object(f"{name}.{key}", value[key])
    mode = held.get("mode")
    if mode not in ("auto", "required"):
        raise refusal(f"{name}.mode", "auto or required", mode)
    entries = read_array(f"{name}.tools", held.get("tools"))
    if not 1 <= len(entries) <= MAX_TOOLS:
        text = f"{name}.tools: 1 to {MAX_TOOLS} tools; given: {len(entries)}"
        raise BadRequest(text, param=f"{name}.tools")
    places = (f"{name}.tools[{index}]" for index in range(len(entries)))
    return mode, {at: read_object(at, each) for at, each in zip(places, entries, strict=True)}


# ---- A body's tools ----------------------------------------------------------------------------


def tool_options(values: JsonObject) -> JsonObject:
    """Turn `tools`, `tool_choice` and `parallel_tool_calls` into fields of `ChatRequest`. May add
    warnings to `values`. Raises `BadRequest`.
    """
    tools = _last_of_each_name(values)
    asked: ParsedToolChoice = values.get("tool_choice") or ParsedToolChoice(ToolChoice("auto"))
    if not tools:
        if asked.choice.forces:
            raise BadRequest("tool_choice: needs tools", param="tool_choice")
        return {}
    names = {tool.name for tool in tools}
    wanted = [asked.choice.name] if asked.choice.mode == "named" else asked.allowed or ()
    for name in wanted:
        if name not in names:
            text = f"tool_choice: none of the tools is named {name}"
            raise BadRequest(text, param="tool_choice")
    if asked.allowed is not None:
        allowed = set(asked.allowed)
        tools = tuple(tool for tool in tools if tool.name in allowed)
    parallel = values.get("parallel_tool_calls", True) if asked.parallel is None else asked.parallel
    return {"tools": tools, "tool_choice": asked.choice, "parallel_tool_calls": parallel}


def _last_of_each_name(values: JsonObject) -> tuple[Tool, ...]:
    """Keep the last of several tools with the same name, and add a warning."""
    given: tuple[Tool, ...] = values.get("tools", ())
    by_name = {tool.name: tool for tool in given}
    if len(by_name) == len(given):
        return given
    counts = Counter(tool.name for tool in given)
    repeated = [name for name, count in counts.items() if count > 1]
    add_warning(values, last_counts(repeated))
    return tuple(by_name.values())


def last_counts(names: Sequence[str]) -> str:
    return f"tools: several are named {', '.join(names[:16])}; the last counts"


def check_one_form(request: ChatRequest) -> None:
    """Refuse a constraint beside a tool_choice that forces a call: no answer satisfies both."""
    if request.constraint is not None and request.tool_choice.forces:
        field = request.constraint_field
        text = f"{field}: not together with a tool_choice that asks for a call"
        raise BadRequest(text, param=field)


# ---- Kinds -------------------------------------------------------------------------------------


def describe(**forms: JsonObject) -> JsonObject:
    properties = {
        "name": NAME_SCHEMA,
        "description": or_null({"type": "string"}),
        "strict": or_null({"type": "boolean"}),
        **forms,
    }
    return {"type": "object", "properties": properties, "required": ["name"]}


def array_form(tool: JsonObject, at_least: int = 0) -> JsonObject:
    return {"type": "array", "items": tool, "minItems": at_least, "maxItems": MAX_TOOLS}


_PARAMETERS: JsonObject = {
    "type": "object",
    "properties": {"type": {"enum": ["object"]}},
}
_MAYBE: JsonObject = or_null(_PARAMETERS)
_FUNCTION: JsonObject = {"enum": ["function", None]}
CHAT_TOOL: JsonObject = {
    "type": "object",
    "properties": {"type": _FUNCTION, "function": describe(parameters=_MAYBE)},
    "required": ["function"],
}
_FLAT_TOOLS = [
    describe(type=_FUNCTION, parameters=_MAYBE),
    describe(type=_FUNCTION, parameters={"type": "null"}, input_schema=_MAYBE),
]
NAMED: JsonObject = {
    "type": "object",
    "properties": {"name": NAME_SCHEMA},
    "required": ["name"],
}


def choice_schema(
    *forms: JsonObject, words: Iterable[str] = ("none", "auto", "required")
) -> JsonObject:
    """Describe a tool_choice: a word, or one of these forms."""
    return {"anyOf": [{"type": "string", "enum": list(words)}, *forms]}


def _allowed_form(tool: JsonObject) -> JsonObject:
    properties = {"mode": {"enum": ["auto", "required"]}, "tools": array_form(tool, 1)}
    return {"type": "object", "properties": properties, "required": ["mode", "tools"]}


def add_type(kind: str, form: JsonObject) -> JsonObject:
    properties = {**form["properties"], "type": {"enum": [kind]}}
    return {**form, "properties": properties, "required": ["type", *form["required"]]}


def _nest(key: str, form: JsonObject) -> JsonObject:
    return {"type": "object", "properties": {key: form}, "required": [key]}


_WORD_AS_TYPE: JsonObject = {
    "type": "object",
    "properties": {"type": {"enum": list(_MODES)}},
    "required": ["type"],
}
_ONE: JsonObject = {"anyOf": [_nest("function", NAMED), NAMED]}
_NAMED_ONE: JsonObject = {
    "anyOf": [
        _nest("function", NAMED),
        *(add_type(kind, form) for kind in ("function", "tool") for form in _ONE["anyOf"]),
    ]
}


def allowed_schemas(tool: JsonObject) -> list[JsonObject]:
    """Describe the two forms that `read_allowed` reads."""
    allowing = _allowed_form(tool)
    return [
        add_type("allowed_tools", allowing),
        add_type("allowed_tools", _nest("allowed_tools", allowing)),
    ]


# The form in chats: {"type": "function", "function": {"name": ...}}.
TOOLS = Kind(_read_tools, array_form({"anyOf": [CHAT_TOOL, *_FLAT_TOOLS]}))
CHOICE = Kind(
    _chat_choice,
    choice_schema(_WORD_AS_TYPE, _NAMED_ONE, *allowed_schemas(_ONE), words=_MODES),
)
