"""Items of OpenAI's Responses API as clients send them -> the form in which they are kept.

What a model cannot be shown is left out, and named. What a server ran itself, and what came of it,
is a function's call and its output.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from penstock_router.apis.chat_messages import check_size
from penstock_router.apis.images import INPUT_IMAGE_SCHEMA
from penstock_router.apis.responses.encrypted_reasoning import unseal
from penstock_router.apis.responses.item_parts import (
    TEXT_TYPES,
    read_content,
    read_output,
    read_plain_parts,
)
from penstock_router.apis.responses.item_types import (
    ApplyPatchCallItem,
    ApplyPatchOutputItem,
    CallItem,
    CallOutputItem,
    CustomCallItem,
    Item,
    LocalShellCallItem,
    LocalShellOutputItem,
    MessageItem,
    Part,
    ReasoningItem,
    ReferenceItem,
    ShellCallItem,
    ShellOutputItem,
    ToolSearchCallItem,
    ToolSearchOutputItem,
)
from penstock_router.errors import BadRequest
from penstock_router.json_fields import (
    STRING,
    JsonObject,
    Kind,
    one_of,
    or_null,
    read_array,
    read_object,
    refusal,
    shorten,
    string,
)

ROLES = ("user", "assistant", "system", "developer")
# Arrays of parts in items that chat messages do not have.
_MORE_PARTS = ("output", "summary", "tools")
_NOT_EMPTY = string(1)
# Items without anything that a model here could be shown.
_LEFT_OUT = (
    *("web_search_call", "image_generation_call", "computer_call", "computer_call_output"),
    *("mcp_list_tools", "mcp_approval_request", "mcp_approval_response"),
    *("compaction", "compaction_summary", "context_compaction", "compaction_trigger"),
    *("configuration_update", "ghost_snapshot", "program", "program_output"),
)


@dataclass(slots=True)
class ParsedInput:
    """The items of a body, and what else they bring."""

    items: list[Item] = field(default_factory=list)
    # That of each item in the body.
    places: list[int] = field(default_factory=list)
    # Tools that come as items: the field, and the tools.
    tools: list[tuple[str, list[Any]]] = field(default_factory=list)
    # Likewise those that a search found, which its output shows.
    found_tools: list[tuple[str, list[Any]]] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)

    @property
    def references(self) -> tuple[str, ...]:
        """The ids of stored items that it refers to."""
        return tuple(item["id"] for item in self.items if item["type"] == "item_reference")


def check_items(name: str, items: Sequence[Any]) -> None:
    """Refuse too many items, parts and calls; `items` is unchecked JSON."""
    check_size(name, items)
    parts = [
        part
        for item in items
        if isinstance(item, dict)
        for key in _MORE_PARTS
        if isinstance(item.get(key), list)
        for part in item[key]
    ]
    check_size(name, [*items, *parts])


def read_input(name: str, value: Any) -> ParsedInput:
    """Items, or a string, which becomes a message of the user."""
    # One random stem for all ids: drawing thousands takes time.
    stem = uuid.uuid4().hex
    parsed = ParsedInput()
    if isinstance(value, str):
        _add(parsed, 0, _message(f"{stem}_0", "user", read_content(name, "user", value)))
        return parsed
    if not isinstance(value, list):
        raise refusal(name, "a string or an array of items", value)
    check_items(name, value)
    for index, item in enumerate(value):
        where = f"{name}[{index}]"
        for read in _read(parsed, where, f"{stem}_{index}", read_object(where, item)):
            _add(parsed, index, read)
    if all(item["type"] == "reasoning" for item in parsed.items):
        raise BadRequest(f"{name}: at least one message is needed", param=name)
    return parsed


def _add(parsed: ParsedInput, place: int, item: Item) -> None:
    parsed.items.append(item)
    parsed.places.append(place)


def _read(parsed: ParsedInput, name: str, stem: str, item: JsonObject) -> Sequence[Item]:
    """An item as it is kept: one, none or two."""
    # Messages may leave out the type.
    kind = item.get("type") or "message"
    if kind == "reasoning":
        return [_reasoning(parsed, name, stem, item)]
    if kind == "additional_tools":
        parsed.tools.append((f"{name}.tools", read_array(f"{name}.tools", item.get("tools"))))
        return ()
    if kind == "tool_search_output":
        found = _tool_search_output(name, stem, item)
        parsed.found_tools.append((f"{name}.tools", list(found["tools"])))
        return [found]
    if kind == "agent_message":
        return _agent_message(parsed, name, stem, item)
    if isinstance(kind, str) and kind in _HOSTED:
        return _hosted(parsed, name, stem, kind, item)
    if isinstance(kind, str) and kind in _READERS:
        return [_READERS[kind](name, stem, item)]
    if kind in _LEFT_OUT:
        parsed.warnings.append(f"{name}: items of type {kind} are left out")
        return ()
    served = ", ".join(_READERS)
    text = f"{name}.type: items of type {shorten(kind)} are not served, only reasoning, {served}"
    raise BadRequest(text, param="input")


# ---- Messages and reasoning --------------------------------------------------------------------


def _read_message(name: str, stem: str, item: JsonObject) -> MessageItem:
    role = one_of(*ROLES).read(f"{name}.role", item.get("role"))
    return _message(stem, role, read_content(f"{name}.content", role, item.get("content")))


def _message(stem: str, role: str, content: list[Part]) -> MessageItem:
    return {
        "type": "message",
        "id": f"msg_{stem}",
        "role": role,
        "status": "completed",
        "content": content,
    }


def _reasoning(parsed: ParsedInput, name: str, stem: str, item: JsonObject) -> ReasoningItem:
    content = read_plain_parts(
        f"{name}.content", "reasoning_text", item.get("content"), also="text"
    )
    sealed = item.get("encrypted_content")
    if sealed is not None and not content:
        text = unseal(STRING.read(f"{name}.encrypted_content", sealed))
        if text is None:
            line = f"{name}.encrypted_content: it is not of this server and is left out"
            parsed.warnings.append(line)
        else:
            content = [{"type": "reasoning_text", "text": text}]
    return {
        "type": "reasoning",
        "id": f"rs_{stem}",
        "summary": read_plain_parts(f"{name}.summary", "summary_text", item.get("summary")),
        "content": content,
        "status": "completed",
    }


def _agent_message(parsed: ParsedInput, name: str, stem: str, item: JsonObject) -> Sequence[Item]:
    """Read another agent's words: as the user's, with the names of both agents."""
    texts: list[str] = []
    for index, entry in enumerate(read_array(f"{name}.content", item.get("content"))):
        at = f"{name}.content[{index}]"
        part = read_object(at, entry)
        if part.get("type") in TEXT_TYPES:
            texts.append(STRING.read(f"{at}.text", part.get("text")))
        else:
            parsed.warnings.append(f"{at}: parts of type {shorten(part.get('type'))} are left out")
    names = (STRING.read(f"{name}.{key}", item.get(key)) for key in ("author", "recipient"))
    if not texts:
        return ()
    said = "\n".join([f"{' to '.join(names)}:", *texts])
    return [_message(stem, "user", [{"type": "input_text", "text": said}])]


# ---- Calls and their outputs -------------------------------------------------------------------


def _call_id(name: str, item: JsonObject) -> str:
    given: str = _NOT_EMPTY.read(f"{name}.call_id", item.get("call_id"))
    return given


def _own_id(name: str, item: JsonObject) -> str:
    """The id of a call whose type may leave it out: then the item's is meant."""
    given = item.get("call_id")
    return _call_id(name, item if given is not None else {"call_id": item.get("id")})


def _in_namespace(name: str, item: JsonObject) -> dict[str, str]:
    namespace = item.get("namespace")
    if namespace is None or namespace == "":
        return {}
    return {"namespace": STRING.read(f"{name}.namespace", namespace)}


def _call(name: str, stem: str, item: JsonObject) -> CallItem:
    return {
        "type": "function_call",
        "id": f"fc_{stem}",
        "call_id": _call_id(name, item),
        "name": _NOT_EMPTY.read(f"{name}.name", item.get("name")),
        **_in_namespace(name, item),  # type: ignore[typeddict-item]
        "arguments": STRING.read(f"{name}.arguments", item.get("arguments")),
        "status": "completed",
    }


def _call_output(name: str, stem: str, item: JsonObject) -> CallOutputItem:
    return {
        "type": "function_call_output",
        "id": f"fco_{stem}",
        "call_id": _call_id(name, item),
        "output": read_output(f"{name}.output", item.get("output")),
        "status": "completed",
    }


def _custom_call(name: str, stem: str, item: JsonObject) -> CustomCallItem:
    return {
        "type": "custom_tool_call",
        "id": f"ctc_{stem}",
        "call_id": _call_id(name, item),
        "name": _NOT_EMPTY.read(f"{name}.name", item.get("name")),
        **_in_namespace(name, item),  # type: ignore[typeddict-item]
        "input": STRING.read(f"{name}.input", item.get("input")),
        "status": "completed",
    }


def _custom_output(name: str, stem: str, item: JsonObject) -> CallOutputItem:
    return {
        "type": "custom_tool_call_output",
        "id": f"ctco_{stem}",
        "call_id": _call_id(name, item),
        "output": read_output(f"{name}.output", item.get("output")),
        "status": "completed",
    }


def _local_shell_call(name: str, stem: str, item: JsonObject) -> LocalShellCallItem:
    action = read_object(f"{name}.action", item.get("action"))
    return {
        "type": "local_shell_call",
        "id": f"lsh_{stem}",
        "call_id": _own_id(name, item),
        "action": {**action, "type": "exec"},
        "status": "completed",
    }


def _local_shell_output(name: str, stem: str, item: JsonObject) -> LocalShellOutputItem:
    return {
        "type": "local_shell_call_output",
        "id": f"lsho_{stem}",
        "call_id": _own_id(name, item),
        "output": STRING.read(f"{name}.output", item.get("output")),
        "status": "completed",
    }


def _shell_call(name: str, stem: str, item: JsonObject) -> ShellCallItem:
    return {
        "type": "shell_call",
        "id": f"sh_{stem}",
        "call_id": _call_id(name, item),
        "action": read_object(f"{name}.action", item.get("action")),
        "status": "completed",
    }


def _shell_output(name: str, stem: str, item: JsonObject) -> ShellOutputItem:
    return {
        "type": "shell_call_output",
        "id": f"sho_{stem}",
        "call_id": _call_id(name, item),
        "output": read_array(f"{name}.output", item.get("output")),
        "status": "completed",
    }


def _apply_patch_call(name: str, stem: str, item: JsonObject) -> ApplyPatchCallItem:
    return {
        "type": "apply_patch_call",
        "id": f"apc_{stem}",
        "call_id": _call_id(name, item),
        "operation": read_object(f"{name}.operation", item.get("operation")),
        "status": "completed",
    }


def _apply_patch_output(name: str, stem: str, item: JsonObject) -> ApplyPatchOutputItem:
    status = item.get("status")
    if status is not None:
        one_of("completed", "failed").read(f"{name}.status", status)
    output = item.get("output")
    return {
        "type": "apply_patch_call_output",
        "id": f"apco_{stem}",
        "call_id": _call_id(name, item),
        "output": STRING.read(f"{name}.output", output) if output else status or "completed",
        "status": status or "completed",
    }


def _tool_search_call(name: str, stem: str, item: JsonObject) -> ToolSearchCallItem:
    return {
        "type": "tool_search_call",
        "id": f"tsc_{stem}",
        "call_id": _own_id(name, item),
        "execution": "client",
        "arguments": item.get("arguments") or {},
        "status": "completed",
    }


def _tool_search_output(name: str, stem: str, item: JsonObject) -> ToolSearchOutputItem:
    return {
        "type": "tool_search_output",
        "id": f"tso_{stem}",
        "call_id": _own_id(name, item),
        "execution": "client",
        "tools": read_array(f"{name}.tools", item.get("tools")),
        "status": "completed",
    }


def _reference(name: str, stem: str, item: JsonObject) -> ReferenceItem:
    return {"type": "item_reference", "id": _NOT_EMPTY.read(f"{name}.id", item.get("id"))}


_READERS: Mapping[str, Callable[[str, str, JsonObject], Item]] = {
    "message": _read_message,
    "function_call": _call,
    "function_call_output": _call_output,
    "custom_tool_call": _custom_call,
    "custom_tool_call_output": _custom_output,
    "local_shell_call": _local_shell_call,
    "local_shell_call_output": _local_shell_output,
    "shell_call": _shell_call,
    "shell_call_output": _shell_output,
    "apply_patch_call": _apply_patch_call,
    "apply_patch_call_output": _apply_patch_output,
    "tool_search_call": _tool_search_call,
    "item_reference": _reference,
}


# ---- What servers ran --------------------------------------------------------------------------


def _hosted(
    parsed: ParsedInput, name: str, stem: str, kind: str, item: JsonObject
) -> Sequence[Item]:
    """A call that a server ran, and its output; nothing if it has none."""
    function, arguments, output = _HOSTED[kind](item)
    if not output:
        parsed.warnings.append(f"{name}: an item of type {kind} without output is left out")
        return ()
    label = item.get("server_label")
    call: JsonObject = {
        "name": function or kind,
        "call_id": f"call_{stem}",
        "namespace": label if isinstance(label, str) else None,
        "arguments": arguments if isinstance(arguments, str) else _json(arguments),
    }
    shown = output if isinstance(output, str) else _json(output)
    return [
        _call(name, stem, call),
        _call_output(name, stem, {"call_id": call["call_id"], "output": shown}),
    ]


def _json(value: Any) -> str:
    return msgspec.json.encode(value).decode()


def _mcp(item: JsonObject) -> tuple[Any, Any, Any]:
    return item.get("name"), item.get("arguments") or {}, item.get("output") or item.get("error")


def _code_interpreter(item: JsonObject) -> tuple[Any, Any, Any]:
    return None, {"code": item.get("code") or ""}, item.get("outputs")


def _file_search(item: JsonObject) -> tuple[Any, Any, Any]:
    return None, {"queries": item.get("queries") or []}, item.get("results")


# The function's name, its arguments, and what came of it.
_HOSTED: Mapping[str, Callable[[JsonObject], tuple[Any, Any, Any]]] = {
    "mcp_call": _mcp,
    "code_interpreter_call": _code_interpreter,
    "file_search_call": _file_search,
}


# ---- As documented -----------------------------------------------------------------------------


def _object_schema(properties: JsonObject, *required: str) -> JsonObject:
    return {"type": "object", "properties": properties, "required": list(required)}


def _item_schema(kinds: Sequence[str], *required: str, **properties: JsonObject) -> JsonObject:
    return _object_schema({"type": {"enum": list(kinds)}, **properties}, "type", *required)


def _part_schema(kinds: Sequence[str], key: str) -> JsonObject:
    return _item_schema(kinds, key, **{key: {"type": "string"}})


_TEXT: JsonObject = {"type": "string"}
_OBJECT: JsonObject = {"type": "object"}
_ARRAY: JsonObject = {"type": "array"}
_TEXT_OR_NULL = or_null(_TEXT)


def _content_schema(*more: JsonObject) -> JsonObject:
    forms = [_part_schema(TEXT_TYPES, "text"), _part_schema(("refusal",), "refusal")]
    parts = {"type": "array", "items": {"anyOf": [*forms, INPUT_IMAGE_SCHEMA, *more]}}
    return {"anyOf": [_TEXT, parts]}


def _plain_parts_schema(*kinds: str) -> JsonObject:
    return or_null({"type": "array", "items": _part_schema(kinds, "text")})


_MESSAGE_SCHEMA = _object_schema(
    {
        "type": {"enum": ["message", None]},
        "role": {"enum": list(ROLES)},
        "content": _content_schema(),
    },
    "role",
    "content",
)
_REASONING_SCHEMA = _item_schema(
    ["reasoning"],
    summary=_plain_parts_schema("summary_text"),
    content=_plain_parts_schema("reasoning_text", "text"),
    encrypted_content=_TEXT_OR_NULL,
)
_OUTPUT_SCHEMA = _content_schema(
    _item_schema(["input_file", "input_audio", "audio", "encrypted_content"])
)
_ID = _NOT_EMPTY.schema
_FIRST_SCHEMAS = [
    _MESSAGE_SCHEMA,
    _item_schema(
        ["function_call"],
        *("call_id", "name", "arguments"),
        call_id=_ID,
        name=_ID,
        namespace=_TEXT_OR_NULL,
        arguments=_TEXT,
    ),
    _item_schema(
        ["custom_tool_call"],
        *("call_id", "name", "input"),
        call_id=_ID,
        name=_ID,
        namespace=_TEXT_OR_NULL,
        input=_TEXT,
    ),
    _item_schema(
        ["function_call_output", "custom_tool_call_output"],
        *("call_id", "output"),
        call_id=_ID,
        output=_OUTPUT_SCHEMA,
    ),
    _item_schema(["local_shell_call"], "action", action=_OBJECT),
    _item_schema(["local_shell_call_output"], "output", output=_TEXT),
    _item_schema(["shell_call"], "call_id", "action", call_id=_ID, action=_OBJECT),
    _item_schema(["shell_call_output"], "call_id", "output", call_id=_ID, output=_ARRAY),
    _item_schema(["apply_patch_call"], "call_id", "operation", call_id=_ID, operation=_OBJECT),
    _item_schema(["apply_patch_call_output"], "call_id", call_id=_ID, output=_TEXT_OR_NULL),
    _item_schema(["tool_search_call"]),
    _item_schema(["tool_search_output"], "tools", tools=_ARRAY),
    _item_schema(list(_HOSTED)),
    _item_schema(["agent_message"], "content", content=_ARRAY),
    _item_schema(["item_reference"], "id", id=_ID),
]
_OTHER_SCHEMAS = [
    _REASONING_SCHEMA,
    _item_schema(["additional_tools"], "tools", tools=_ARRAY),
    _item_schema(_LEFT_OUT),
]
INPUT = Kind(
    read_input,
    {
        "anyOf": [
            {"type": "string"},
            {
                "type": "array",
                "minItems": 1,
                "items": {"anyOf": [*_FIRST_SCHEMAS, *_OTHER_SCHEMAS]},
                # Of reasoning alone, and of what is left out, no prompt can be made.
                "contains": {"anyOf": _FIRST_SCHEMAS},
            },
        ]
    },
)
