"""Reads the tools of Anthropic's Messages as `Tool`s, and decides which ones a prompt shows.

Tools that Anthropic's servers run are left out, with a warning. Tools that clients run, and whose
arguments Anthropic has published, become ordinary functions. A tool with deferred loading is shown
where a block refers to it, so that no earlier text of the prompt changes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

from penstock_router.apis.tools import (
    CHAT_TOOL,
    NAMED,
    SHOWN,
    ParsedToolChoice,
    add_type,
    array_form,
    check_number,
    describe,
    read_name,
    read_tool,
)
from penstock_router.json_fields import (
    BOOLEAN,
    STRING,
    JsonObject,
    Kind,
    or_null,
    read_array,
    read_object,
    refusal,
    shorten,
)
from penstock_router.request import Tool, ToolChoice


@dataclass(frozen=True, slots=True)
class OfferedTools:
    """The tools of a body that its answer may call."""

    tools: tuple[Tool, ...] = ()
    # Definitions of tools shown only where a turn refers to them.
    deferred: Mapping[str, JsonObject] = field(default_factory=lambda: MappingProxyType({}))
    warnings: tuple[str, ...] = ()

    def showing(self, name: str) -> OfferedTools:
        """Return a copy in which this tool is not deferred."""
        if name not in self.deferred:
            return self
        rest = {other: shown for other, shown in self.deferred.items() if other != name}
        shown = self.deferred[name]
        tools = tuple(
            replace(tool, shown=shown) if tool.name == name else tool for tool in self.tools
        )
        return replace(self, tools=tools, deferred=rest)


NO_TOOLS = OfferedTools()


# ---- Tools with a schema of Anthropic's own ----------------------------------------------------

_TEXT: JsonObject = {"type": "string"}
_RANGE: JsonObject = {
    "type": "array",
    "items": {"type": "integer"},
    "description": "The first and the last line to show; -1: the last one.",
}
_EDITS: JsonObject = {
    "path": _TEXT,
    "view_range": _RANGE,
    "file_text": {**_TEXT, "description": "For create: the content."},
    "old_str": {**_TEXT, "description": "For str_replace: the text to replace."},
    "new_str": {**_TEXT, "description": "For str_replace: what takes its place."},
    "insert_line": {"type": "integer", "description": "For insert: the line to insert after."},
}
_INSERTED: JsonObject = {"insert_text": {**_TEXT, "description": "For insert: the text."}}
_INSERTED_BEFORE: JsonObject = {
    "new_str": {**_TEXT, "description": "For str_replace: what takes its place; for insert: the"
                " text."},
}  # fmt: skip
_EDITING = ("view", "create", "str_replace", "insert")


def _commands(*commands: str, **properties: JsonObject) -> JsonObject:
    properties = {"command": {"type": "string", "enum": list(commands)}, **properties}
    return {"type": "object", "properties": properties, "required": ["command"]}


def _published(name: str, description: str, schema: JsonObject) -> JsonObject:
    return {"name": name, "description": description, "input_schema": schema}


_OLD_EDITOR = _published(
    "str_replace_editor",
    "View, create and edit files.",
    _commands(*_EDITING, "undo_edit", **{**_EDITS, **_INSERTED_BEFORE}),
)
# Schemas by the beginning of a tool's type; the first match counts.
_PUBLISHED: Mapping[str, JsonObject] = {
    "bash_": _published(
        "bash",
        "Run a command in a shell that keeps its state between calls, or restart that shell.",
        {"type": "object", "properties": {"command": _TEXT, "restart": {"type": "boolean"}}},
    ),
    "text_editor_20241022": _OLD_EDITOR,
    "text_editor_20250124": _OLD_EDITOR,
    "text_editor_": _published(
        "str_replace_based_edit_tool",
        "View, create and edit files.",
        _commands(*_EDITING, **_EDITS, **_INSERTED),
    ),
    "memory_": _published(
        "memory",
        "Keep notes in files below /memories that last from one conversation to the next.",
        _commands(*_EDITING, "delete", "rename", **_EDITS, **_INSERTED, old_path=_TEXT,
                  new_path=_TEXT),
    ),
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class _Entry:
    """An entry of a body's tools; `tool` is None if it is left out."""

    kind: str
    tool: Tool | None
    is_deferred: bool = False

    @property
    def finds_others(self) -> bool:
        """True for the tool of Anthropic's servers that searches for deferred tools."""
        return self.kind.startswith("tool_search_tool")


def read_entry(where: str, value: Any) -> Tool | str:
    """Return a tool, or why it is left out. Raises `BadRequest`."""
    entry = _read_entry(where, value)
    return entry.tool or _left_out(where, entry.kind)


def _left_out(where: str, kind: str) -> str:
    if kind == "custom":
        return f"{where}: left out, as only code on Anthropic's servers may call it"
    return f"{where}: tools of type {shorten(kind)} are left out"


_OF_FUNCTIONS = ("name", "description", "parameters", "input_schema", "strict")


def _in_own_form(where: str, given: JsonObject) -> JsonObject:
    """Rewrite a tool of chats or Responses in the form of Messages."""
    if given.get("type") not in (None, "function"):
        return given
    if given.get("function") is not None:
        function = read_object(f"{where}.function", given["function"])
        # Keep the keys beside `function` that tell how to use it. `function` itself describes it.
        given = {key: given[key] for key in given if key not in _OF_FUNCTIONS} | function
        if given.get("parameters") is not None:
            given["input_schema"] = given["parameters"]
    if given.get("input_schema") is None:
        given = {**given, "input_schema": given.get("parameters")}
    return {**given, "type": "custom"}


def _read_entry(where: str, value: Any) -> _Entry:
    given = _in_own_form(where, read_object(where, value))
    kind = given.get("type")
    kind = "custom" if kind is None else STRING.read(f"{where}.type", kind)
    defers = given.get("defer_loading")
    is_deferred = defers is not None and BOOLEAN.read(f"{where}.defer_loading", defers)
    own = next((tool for begin, tool in _PUBLISHED.items() if kind.startswith(begin)), None)
    if own is not None:
        given = {**own, **{key: item for key, item in given.items() if item is not None}}
    elif kind != "custom" and given.get("input_schema") is None:
        return _Entry(kind, None)
    if not _may_be_called(f"{where}.allowed_callers", given.get("allowed_callers")):
        return _Entry(kind, None)
    return _Entry(kind, read_tool(where, given, SHOWN, "input_schema"), is_deferred)


def _may_be_called(name: str, callers: Any) -> bool:
    """True if the model itself may call the tool."""
    return callers is None or "direct" in read_array(name, callers)


def _read_tools(name: str, value: Any) -> OfferedTools:
    given = read_array(name, value)
    check_number(name, len(given))
    entries = [_read_entry(f"{name}[{index}]", item) for index, item in enumerate(given)]
    warnings = [
        _left_out(f"{name}[{index}]", entry.kind)
        for index, entry in enumerate(entries)
        if entry.tool is None
    ]
    served = [(entry.tool, entry.is_deferred) for entry in entries if entry.tool is not None]
    shown = {tool.name for tool, is_deferred in served if not is_deferred}
    deferred: JsonObject = {}
    # Defer none if no other tool is shown, or if Anthropic's servers would search: the model could
    # not find them.
    if shown and not any(entry.finds_others for entry in entries):
        deferred = {tool.name: tool.shown for tool, _ in served if tool.name not in shown}
    tools = [replace(tool, shown={}) if tool.name in deferred else tool for tool, _ in served]
    return OfferedTools(tuple(tools), deferred, tuple(warnings))


def _read_choice(name: str, value: Any) -> ParsedToolChoice:
    given = read_object(name, value)
    alone = given.get("disable_parallel_tool_use")
    if alone is not None:
        BOOLEAN.read(f"{name}.disable_parallel_tool_use", alone)
    parallel = None if alone is None else not alone
    match given.get("type"):
        case "none":
            return ParsedToolChoice(ToolChoice("none"), parallel=parallel)
        case "auto":
            return ParsedToolChoice(ToolChoice("auto"), parallel=parallel)
        case "any":
            return ParsedToolChoice(ToolChoice("required"), parallel=parallel)
        case "tool":
            tool = read_name(f"{name}.name", given.get("name"))
            return ParsedToolChoice(ToolChoice("named", tool), parallel=parallel)
        case other:
            raise refusal(f"{name}.type", "auto, any, tool or none", other)


_INPUT: JsonObject = {"type": "object", "properties": {"type": {"enum": ["object"]}}}
_CUSTOM = describe(type={"enum": ["custom", None]}, input_schema=or_null(_INPUT))
_OF_ANTHROPIC: JsonObject = {
    "type": "object",
    "properties": {"type": {"type": "string"}},
    "required": ["type"],
}
TOOLS = Kind(_read_tools, array_form({"anyOf": [_CUSTOM, _OF_ANTHROPIC, CHAT_TOOL]}))
CHOICE = Kind(
    _read_choice,
    {
        "anyOf": [
            {
                "type": "object",
                "properties": {
                    "type": {"enum": ["auto", "any", "none"]},
                    "disable_parallel_tool_use": or_null({"type": "boolean"}),
                },
                "required": ["type"],
            },
            add_type("tool", NAMED),
        ]
    },
)
