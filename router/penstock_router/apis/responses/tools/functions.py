"""Turns tools of the Responses API into functions for a model, and tells the form of their calls.

A model sees only functions. The name of a function in a namespace contains both names. A tool that
takes text becomes a function with one string. A tool that the client runs (a shell, a patch, a
search for tools) becomes a function with the fields of its call. Tools that only OpenAI's servers
run are left out.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any

from penstock_proto.types import Constraint, ConstraintKind
from penstock_router.apis.tools import (
    MAX_NAME_CHARS,
    MAX_TOOLS,
    NAME_SCHEMA,
    SHOWN,
    as_definition,
    check_number,
    last_counts,
    read_name,
    read_tool,
)
from penstock_router.json_fields import (
    STRING,
    JsonObject,
    Kind,
    one_of,
    or_null,
    read_array,
    read_object,
    string,
)
from penstock_router.request import Tool
from penstock_router.text.answer_constraint import format_of
from penstock_router.text.formats.base import CallFormat

FUNCTION, CUSTOM, NAMESPACE = "function", "custom", "namespace"
LOCAL_SHELL, SHELL, APPLY_PATCH = "local_shell", "shell", "apply_patch"
TOOL_SEARCH = "tool_search"
# The argument that holds the text of a tool that takes text.
INPUT = "input"
# Type, namespace and name of a tool in requests.
ToolKey = tuple[str, str, str]

_SYNTAX = one_of("lark", "regex")
_DEFINITION = string(1)


@dataclass(frozen=True, slots=True)
class ServedTool:
    """A tool that is not a plain function. It determines how calls of its function are shown."""

    type: str
    name: str
    namespace: str = ""
    # `lark` or `regex`, if the tool's text has a grammar.
    syntax: str = ""
    definition: str = ""

    @property
    def key(self) -> ToolKey:
        return self.type, self.namespace, self.name


class Source(Enum):
    """The part of a body that contains a tool."""

    # The field `tools`, which answers repeat.
    FIELD = auto()
    ITEM = auto()
    # A tool search's output, which shows the tool. Shown before the chat, the tool would change the
    # prompt's beginning, and the prefix cache would not find the prompt.
    SEARCH = auto()


@dataclass(frozen=True, slots=True)
class _Entry:
    """A tool after reading; its function still has the tool's own name."""

    served: ServedTool
    function: Tool
    # The tool's form in answers. The first tool of a namespace has the namespace's form.
    shown: JsonObject | None
    source: Source = Source.FIELD


@dataclass(slots=True)
class ParsedTools:
    """The tools of a body, and warnings of those left out."""

    entries: list[_Entry] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)

    def add(self, name: str, value: Any, *, source: Source = Source.FIELD) -> None:
        """Add an array of tools. Raises `BadRequest`."""
        given = read_array(name, value)
        check_number(name, len(given))
        for index, tool in enumerate(given):
            self._add(f"{name}[{index}]", read_object(f"{name}[{index}]", tool), source)
        check_number(name, len(self.entries))

    def _add(self, where: str, tool: JsonObject, source: Source) -> None:
        kind = STRING.read(f"{where}.type", tool.get("type"))
        if kind == NAMESPACE:
            self._add_namespace(where, tool, source)
            return
        entry = _read(where, kind, tool, "")
        if entry is None:
            self.warnings.append(f"{where}: tools of type {kind[:60]} are left out")
            return
        self.entries.append(dataclasses.replace(entry, source=source))

    def _add_namespace(self, where: str, tool: JsonObject, source: Source) -> None:
        name = read_name(f"{where}.name", tool.get("name"))
        about = tool.get("description")
        if about is not None:
            STRING.read(f"{where}.description", about)
        shown: JsonObject | None = tool
        for index, member in enumerate(read_array(f"{where}.tools", tool.get("tools"))):
            at = f"{where}.tools[{index}]"
            kind = STRING.read(f"{at}.type", read_object(at, member).get("type"))
            entry = _read(at, kind, member, name) if kind in (FUNCTION, CUSTOM) else None
            if entry is None:
                self.warnings.append(f"{at}: tools of type {kind[:60]} are left out")
                continue
            if about and index == 0:
                entry = dataclasses.replace(entry, function=_with_text(entry.function, about))
            self.entries.append(dataclasses.replace(entry, shown=shown, source=source))
            shown = None

    def named(self) -> tuple[tuple[Tool, ...], dict[str, ServedTool]]:
        """Return functions with distinct names, and the tools that are not plain functions, by
        function name. Of several tools with the same key, the last one counts.
        """
        by_key = {entry.served.key: entry for entry in self.entries}
        at_front = {entry.served.key for entry in self.entries if entry.source is not Source.SEARCH}
        # Plain functions choose names first, because models and clients rely on them.
        plain = {key for key in by_key if key[0] == FUNCTION and not key[1]}
        taken = {key[2] for key in plain}
        tools: list[Tool] = []
        served: dict[str, ServedTool] = {}
        for key, entry in by_key.items():
            function = entry.function
            if key not in plain:
                name = _free_name(key, taken)
                taken.add(name)
                function = _renamed(function, name)
                served[name] = entry.served
            if key not in at_front:
                function = dataclasses.replace(function, shown={})
            tools.append(function)
        return tuple(tools), served

    def definitions(self, names: Mapping[ToolKey, str]) -> list[str]:
        """Write the functions as most chat templates do; `names` has the names that differ from
        `flat_name`.
        """
        keyed = [(entry.served.key, entry.function) for entry in self.entries]
        return [
            as_definition(_renamed(tool, names.get(key) or flat_name(key)).shown)
            for key, tool in keyed
        ]

    def shown(self) -> list[JsonObject]:
        own = (entry.shown for entry in self._of_field())
        return [shown for shown in own if shown is not None]

    def warn_of_namesakes(self) -> None:
        counts = Counter(entry.served.key for entry in self._of_field())
        if again := dict.fromkeys(key[2] for key, count in counts.items() if count > 1):
            self.warnings.append(last_counts([*again]))

    def _of_field(self) -> Iterator[_Entry]:
        return (entry for entry in self.entries if entry.source is Source.FIELD)


def flat_name(key: ToolKey) -> str:
    """Return the name of a tool's function, unless another function has it."""
    _, namespace, name = key
    whole = f"{namespace}__{name}" if namespace else name
    return whole if len(whole) <= MAX_NAME_CHARS else _marked(key, whole)


def _free_name(key: ToolKey, taken: set[str]) -> str:
    name = flat_name(key)
    return _marked(key, name) if name in taken else name


def _marked(key: ToolKey, name: str) -> str:
    """Make the name unique by a hash of the key, the same in every request."""
    mark = hashlib.blake2b(repr(key).encode(), digest_size=5).hexdigest()
    return f"{name[: MAX_NAME_CHARS - len(mark) - 1]}_{mark}"


def _renamed(tool: Tool, name: str) -> Tool:
    shown = {**tool.shown, "function": {**tool.shown["function"], "name": name}}
    return dataclasses.replace(tool, name=name, shown=shown)


def _with_text(tool: Tool, before: str) -> Tool:
    function = tool.shown["function"]
    text = "\n\n".join(filter(None, (before, function.get("description"))))
    return dataclasses.replace(
        tool, shown={**tool.shown, "function": {**function, "description": text}}
    )


def _read(where: str, kind: str, tool: JsonObject, namespace: str) -> _Entry | None:
    """Read a tool; None if its kind is left out."""
    if kind == FUNCTION:
        function = read_tool(where, tool, SHOWN)
        shown = {key: tool.get(key) for key in ("name", "description", "parameters")}
        shown = {"type": kind, **shown, "strict": function.strict}
        return _Entry(ServedTool(kind, function.name, namespace), function, shown)
    if kind == CUSTOM:
        return _read_custom(where, tool, namespace)
    if kind == TOOL_SEARCH and tool.get("execution") == "client":
        given = {"name": kind, **_ABOUT_SEARCH, **_not_null(tool, "description", "parameters")}
        function = read_tool(where, given, SHOWN)
        return _Entry(ServedTool(kind, kind), function, tool)
    if kind in _OF_CLIENTS and not _is_remote(tool):
        given = {"name": kind, **_OF_CLIENTS[kind]}
        return _Entry(ServedTool(kind, kind), read_tool(where, given, SHOWN), tool)
    return None


def _not_null(given: JsonObject, *keys: str) -> JsonObject:
    return {key: given[key] for key in keys if given.get(key) is not None}


def _is_remote(tool: JsonObject) -> bool:
    """True if OpenAI's servers run the shell."""
    environment = tool.get("environment")
    return isinstance(environment, dict) and environment.get("type") != "local"


def _read_custom(where: str, tool: JsonObject, namespace: str) -> _Entry:
    name = read_name(f"{where}.name", tool.get("name"))
    syntax, definition = _read_format(f"{where}.format", tool.get("format"))
    about = tool.get("description")
    texts = ["" if about is None else STRING.read(f"{where}.description", about)]
    if syntax:
        texts.append(f"The {INPUT} must match this grammar ({syntax}):\n{definition}")
    given = {
        "name": name,
        "description": "\n\n".join(filter(None, texts)),
        "parameters": _TEXT_PARAMETERS,
    }
    served = ServedTool(CUSTOM, name, namespace, syntax, definition)
    return _Entry(served, read_tool(where, given, SHOWN), tool)


def _read_format(name: str, value: Any) -> tuple[str, str]:
    """Read a grammar's syntax and definition; both are empty if any text is allowed."""
    if value is None:
        return "", ""
    given = read_object(name, value)
    if one_of("text", "grammar").read(f"{name}.type", given.get("type")) == "text":
        return "", ""
    syntax = _SYNTAX.read(f"{name}.syntax", given.get("syntax"))
    return syntax, _DEFINITION.read(f"{name}.definition", given.get("definition"))


def _parameters(required: Sequence[str], **properties: JsonObject) -> JsonObject:
    return {
        "type": "object",
        "properties": properties,
        "required": list(required),
        "additionalProperties": False,
    }


def _of(kind: str, about: str, **more: Any) -> JsonObject:
    return {"type": kind, "description": about, **more}


_TEXT_PARAMETERS = _parameters(
    [INPUT], **{INPUT: _of("string", "The text for the tool, as it is.")}
)
_STRINGS: JsonObject = {"type": "string"}
_OF_CLIENTS: Mapping[str, JsonObject] = {
    LOCAL_SHELL: {
        "description": "Runs a command on the user's machine and returns its output.",
        "parameters": _parameters(
            ["command"],
            command=_of("array", "The program and its arguments.", items=_STRINGS),
            working_directory=_of("string", "Where the command runs."),
            timeout_ms=_of("integer", "After how many milliseconds it is ended."),
            env=_of("object", "Environment variables.", additionalProperties=_STRINGS),
            user=_of("string", "The user that runs it."),
        ),
    },
    SHELL: {
        "description": "Runs shell commands on the user's machine and returns their outputs.",
        "parameters": _parameters(
            ["commands"],
            commands=_of("array", "The commands, in order.", items=_STRINGS),
            timeout_ms=_of("integer", "After how many milliseconds they are ended."),
            max_output_length=_of("integer", "How many characters of output are returned."),
        ),
    },
    APPLY_PATCH: {
        "description": "Creates, updates or deletes a file of the user's.",
        "parameters": _parameters(
            ["type", "path"],
            type=_of("string", "What to do.", enum=["create_file", "update_file", "delete_file"]),
            path=_of("string", "The file, from the root of the workspace."),
            diff=_of("string", "The change as a unified diff; not where a file is deleted."),
        ),
    },
}
# Tools without a name of their own.
NAMED_BY_TYPE = (*_OF_CLIENTS, TOOL_SEARCH)
_ABOUT_SEARCH: JsonObject = {
    "description": "Searches for more tools; those that it finds can be called afterwards.",
    "parameters": _parameters(["query"], query=_of("string", "What the tool should do.")),
}


def hold_to_grammars(
    tools: tuple[Tool, ...], served: Mapping[str, ServedTool], tool_format: CallFormat | None
) -> tuple[tuple[Tool, ...], tuple[str, ...]]:
    """Return the tools, and the names of tools whose grammar is shown to the model but not
    enforced. A grammar is enforced if the model writes the text in its calls literally.
    """
    bound = {name: tool for name, tool in served.items() if tool.syntax}
    if not bound:
        return tools, ()
    if tool_format is None or not tool_format.writes_plain_strings:
        return tools, tuple(tool.name for tool in bound.values())
    held = (
        dataclasses.replace(tool, strict=True, text_format=_format(bound[tool.name]))
        if tool.name in bound
        else tool
        for tool in tools
    )
    return tuple(held), ()


def _format(tool: ServedTool) -> JsonObject:
    kind = ConstraintKind.REGEX if tool.syntax == "regex" else ConstraintKind.GRAMMAR
    made: JsonObject = format_of(Constraint(kind, tool.definition))
    return made


def _read_tools(name: str, value: Any) -> ParsedTools:
    parsed = ParsedTools()
    parsed.add(name, value)
    return parsed


def object_schema(kind: JsonObject, required: Sequence[str] = (), **more: JsonObject) -> JsonObject:
    return {
        "type": "object",
        "properties": {"type": kind, **more},
        "required": ["type", *required],
    }


_TEXT: JsonObject = or_null({"type": "string"})
_FUNCTION_SCHEMA = object_schema(
    {"enum": [FUNCTION]},
    ["name"],
    name=NAME_SCHEMA,
    description=_TEXT,
    strict=or_null({"type": "boolean"}),
    parameters=or_null({"type": "object", "properties": {"type": {"enum": ["object"]}}}),
)
_CUSTOM_SCHEMA = object_schema(
    {"enum": [CUSTOM]},
    ["name"],
    name=NAME_SCHEMA,
    description=_TEXT,
    format=or_null(
        {
            "anyOf": [
                object_schema({"enum": ["text"]}),
                object_schema(
                    {"enum": ["grammar"]},
                    ["syntax", "definition"],
                    syntax=_SYNTAX.schema,
                    definition=_DEFINITION.schema,
                ),
            ]
        }
    ),
)
_OTHER: JsonObject = {"type": "string", "not": {"enum": [FUNCTION, CUSTOM, NAMESPACE]}}
_MEMBERS: list[JsonObject] = [
    _FUNCTION_SCHEMA,
    _CUSTOM_SCHEMA,
    object_schema({"type": "string", "not": {"enum": [FUNCTION, CUSTOM]}}),
]
_NAMESPACE_SCHEMA = object_schema(
    {"enum": [NAMESPACE]},
    ["name", "tools"],
    name=NAME_SCHEMA,
    description=_TEXT,
    tools={"type": "array", "items": {"anyOf": _MEMBERS}},
)
_TOOL_SCHEMA: JsonObject = {
    "anyOf": [_FUNCTION_SCHEMA, _CUSTOM_SCHEMA, _NAMESPACE_SCHEMA, object_schema(_OTHER)]
}
TOOLS = Kind(_read_tools, {"type": "array", "items": _TOOL_SCHEMA, "maxItems": MAX_TOOLS})
