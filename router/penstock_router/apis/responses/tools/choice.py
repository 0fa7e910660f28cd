"""Reads tool_choice of the Responses API, and finds the tools that the request may call."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from penstock_router.apis.responses.tools.functions import (
    CUSTOM,
    FUNCTION,
    NAMED_BY_TYPE,
    NAMESPACE,
    ParsedTools,
    ServedTool,
    ToolKey,
    object_schema,
)
from penstock_router.apis.tools import (
    NAME_SCHEMA,
    allowed_schemas,
    choice_schema,
    read_allowed,
    read_name,
)
from penstock_router.errors import BadRequest
from penstock_router.json_fields import (
    STRING,
    JsonObject,
    Kind,
    or_null,
    refusal,
    shorten,
)
from penstock_router.request import Tool, ToolChoice


@dataclass(frozen=True, slots=True)
class AskedChoice:
    """A body's tool_choice. Answers show it in the form `shown`."""

    mode: Literal["none", "auto", "required", "named"]
    shown: Any
    # With mode "named", the tool. Otherwise the allowed tools; empty: all tools.
    tools: tuple[ToolKey, ...] = ()


AUTO = AskedChoice("auto", "auto")
_NAMED = (FUNCTION, CUSTOM)


def _read_choice(name: str, value: Any) -> AskedChoice:
    match value:
        case "none" | "auto" | "required":
            return AskedChoice(value, value)
        case {"type": "allowed_tools"}:
            return _read_allowed(name, value)
        case {"type": str(kind)} if kind in _NAMED or kind in NAMED_BY_TYPE:
            key = _read_key(name, value)
            return AskedChoice("named", _shown_key(key), (key,))
        case {"type": str(kind)}:
            text = f"{name}.type: tools of type {shorten(kind)} are not served by this server"
            raise BadRequest(text, param=f"{name}.type")
        case dict():
            raise refusal(f"{name}.type", "a type of tool or allowed_tools", value.get("type"))
    raise refusal(name, "none, auto, required or an object that names a tool", value)


def _read_key(where: str, entry: JsonObject) -> ToolKey:
    kind = entry["type"]
    if kind in NAMED_BY_TYPE:
        return kind, "", kind
    namespace = entry.get("namespace")
    if namespace is not None:
        read_name(f"{where}.namespace", namespace)
    return kind, namespace or "", read_name(f"{where}.name", entry.get("name"))


def _shown_key(key: ToolKey) -> JsonObject:
    kind, namespace, name = key
    if kind in NAMED_BY_TYPE:
        return {"type": kind}
    shown = {"type": kind, "name": name}
    return {**shown, "namespace": namespace} if namespace else shown


def _read_allowed(name: str, value: JsonObject) -> AskedChoice:
    mode, entries = read_allowed(name, value)
    keys: list[ToolKey] = []
    for where, entry in entries.items():
        kind = STRING.read(f"{where}.type", entry.get("type"))
        if kind == NAMESPACE:
            keys.append((kind, read_name(f"{where}.name", entry.get("name")), ""))
        elif kind in _NAMED or kind in NAMED_BY_TYPE:
            keys.append(_read_key(where, entry))
    tools = [
        {"type": NAMESPACE, "name": key[1]} if key[0] == NAMESPACE else _shown_key(key)
        for key in keys
    ]
    if not keys and mode == "required":
        text = f"{name}.tools: none of these is served by this server"
        raise BadRequest(text, param=f"{name}.tools")
    shown = {"type": "allowed_tools", "mode": mode, "tools": tools}
    # An empty list of allowed tools allows no call.
    return AskedChoice(mode if keys else "none", shown, tuple(keys))


def tool_options(parsed: ParsedTools, asked: AskedChoice, parallel: bool) -> JsonObject:
    """Return the tools, and those that may be called, as fields of `ResponsesRequest`. Raises
    `BadRequest`.
    """
    tools, served = parsed.named()
    if not tools:
        if asked.mode in ("required", "named"):
            raise BadRequest("tool_choice: needs tools", param="tool_choice")
        return {}
    index = _Index(tools, served)
    # Take each key once: a namespace's key stands for all its members.
    keys = dict.fromkeys(asked.tools)
    wanted = [name for key in keys for name in index.names_of(key)]
    choice = ToolChoice(asked.mode, wanted[0] if asked.mode == "named" else "")
    if asked.mode != "named" and wanted:
        allowed = set(wanted)
        tools = tuple(tool for tool in tools if tool.name in allowed)
    return {
        "tools": tools,
        "served": {tool.name: served[tool.name] for tool in tools if tool.name in served},
        "tool_choice": choice,
        "parallel_tool_calls": parallel,
    }


class _Index:
    def __init__(self, tools: Iterable[Tool], served: Mapping[str, ServedTool]) -> None:
        # A client may also use the name that the model sees.
        self._names = {(FUNCTION, "", tool.name): tool.name for tool in tools}
        self._names |= {tool.key: name for name, tool in served.items()}
        self._members: dict[str, list[str]] = defaultdict(list)
        for name, tool in served.items():
            self._members[tool.namespace].append(name)

    def names_of(self, key: ToolKey) -> list[str]:
        """Return the function's name, or all names in the namespace. Raises `BadRequest` if there
        is none.
        """
        kind, namespace, _ = key
        if kind == NAMESPACE:
            found = self._members.get(namespace, [])
        else:
            found = [self._names[key]] if key in self._names else []
        if not found:
            named = " ".join(filter(None, key))
            raise BadRequest(f"tool_choice: none of the tools is the {named}", param="tool_choice")
        return found


CHOICE = Kind(
    _read_choice,
    choice_schema(
        object_schema(
            {"enum": list(_NAMED)}, ["name"], name=NAME_SCHEMA, namespace=or_null(STRING.schema)
        ),
        object_schema({"enum": list(NAMED_BY_TYPE)}),
        *allowed_schemas({"type": "object"}),
    ),
)
