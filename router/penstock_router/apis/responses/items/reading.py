"""Reads items of OpenAI's Responses API, as clients send them, into the form that is stored.

Items that cannot be shown to a model are left out, with a warning. A call that a server ran becomes
a function call and its output.
"""

from __future__ import annotations

import functools
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import msgspec

from penstock_router.apis.chat_messages import check_size
from penstock_router.apis.responses.items.encrypted_reasoning import unseal
from penstock_router.apis.responses.items.parts import (
    OUTPUT,
    TEXT_TYPES,
    content_schema,
    item_schema,
    plain_parts_schema,
    read_content,
    read_plain_parts,
)
from penstock_router.apis.responses.items.types import (
    ApplyPatchOutputItem,
    Item,
    MessageItem,
    Part,
    ReasoningItem,
    ReferenceItem,
    ToolSearchCallItem,
)
from penstock_router.errors import BadRequest
from penstock_router.json_fields import (
    ARRAY,
    OBJECT,
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
# Arrays of parts that chat messages do not have.
_MORE_PARTS = ("output", "summary", "tools")
_NOT_EMPTY = string(1)
# Items that contain nothing for a model here.
_LEFT_OUT = (
    *("web_search_call", "image_generation_call", "computer_call", "computer_call_output"),
    *("mcp_list_tools", "mcp_approval_request", "mcp_approval_response"),
    *("compaction", "compaction_summary", "context_compaction", "compaction_trigger"),
    *("configuration_update", "ghost_snapshot", "program", "program_output"),
)


@dataclass(slots=True)
class ParsedInput:
    """The items of a body, with the tools and warnings found in them."""

    items: list[Item] = field(default_factory=list)
    # Each item's index in the body.
    places: list[int] = field(default_factory=list)
    # Tools given as items: for each item, the field's name and the tools.
    tools: list[tuple[str, list[Any]]] = field(default_factory=list)
    # Tools that searches found, in the same form. The output of a search shows its tools.
    found_tools: list[tuple[str, list[Any]]] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)

    @property
    def references(self) -> tuple[str, ...]:
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
    """Read items, or a string, which becomes a user message."""
    # All ids share one random stem, because thousands of random numbers would take time.
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
    """Read an item to its stored form: one, none or two items."""
    # Messages may omit the type.
    kind = item.get("type") or "message"
    if kind == "reasoning":
        return [_reasoning(parsed, name, stem, item)]
    if kind == "additional_tools":
        parsed.tools.append((f"{name}.tools", read_array(f"{name}.tools", item.get("tools"))))
        return ()
    if kind == "tool_search_output":
        parsed.found_tools.append((f"{name}.tools", read_array(f"{name}.tools", item.get("tools"))))
        return [_READERS[kind](name, stem, item)]
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
    """Make a user message with both agents' names."""
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


@dataclass(frozen=True, slots=True)
class _Form:
    """A type of call or output: the prefix of its ids, and its entries."""

    prefix: str
    entries: Mapping[str, Kind]
    # Entries that are set here; the client's values are ignored.
    fixed: Mapping[str, str] = field(default_factory=dict)
    # True if the item's id replaces a missing call id.
    may_lack_call_id: bool = False

    def read(self, kind: str, name: str, stem: str, item: JsonObject) -> Item:
        call_id = _call_id(name, item, or_own=self.may_lack_call_id)
        entries = {
            key: entry.read(f"{name}.{key}", item.get(key))
            for key, entry in self.entries.items()
            if key != _NAMESPACE or item.get(key) not in (None, "")
        }
        kept = {
            "type": kind,
            "id": f"{self.prefix}_{stem}",
            "call_id": call_id,
            **entries,
            **self.fixed,
            "status": "completed",
        }
        return cast(Item, kept)

    def schema(self, kind: str) -> JsonObject:
        entries = {
            key: or_null(entry.schema) if key == _NAMESPACE else entry.schema
            for key, entry in self.entries.items()
        }
        required = [key for key in entries if key != _NAMESPACE]
        if self.may_lack_call_id:
            return item_schema([kind], *required, **entries)
        return item_schema([kind], "call_id", *required, call_id=_NOT_EMPTY.schema, **entries)


def _call_id(name: str, item: JsonObject, *, or_own: bool) -> str:
    key = "id" if or_own and item.get("call_id") is None else "call_id"
    given: str = _NOT_EMPTY.read(f"{name}.call_id", item.get(key))
    return given


def _read_execution(name: str, value: Any) -> JsonObject:
    return {**read_object(name, value), "type": "exec"}


# A function's namespace: left out if null or empty.
_NAMESPACE = "namespace"
_ACTION = Kind(_read_execution, OBJECT.schema)
_FOR_CLIENTS = {"execution": "client"}
_FORMS: Mapping[str, _Form] = {
    "function_call": _Form("fc", {"name": _NOT_EMPTY, _NAMESPACE: STRING, "arguments": STRING}),
    "function_call_output": _Form("fco", {"output": OUTPUT}),
    "custom_tool_call": _Form("ctc", {"name": _NOT_EMPTY, _NAMESPACE: STRING, "input": STRING}),
    "custom_tool_call_output": _Form("ctco", {"output": OUTPUT}),
    "local_shell_call": _Form("lsh", {"action": _ACTION}, may_lack_call_id=True),
    "local_shell_call_output": _Form("lsho", {"output": STRING}, may_lack_call_id=True),
    "shell_call": _Form("sh", {"action": OBJECT}),
    "shell_call_output": _Form("sho", {"output": ARRAY}),
    "apply_patch_call": _Form("apc", {"operation": OBJECT}),
    "tool_search_output": _Form("tso", {"tools": ARRAY}, _FOR_CLIENTS, may_lack_call_id=True),
}


def _apply_patch_output(name: str, stem: str, item: JsonObject) -> ApplyPatchOutputItem:
    status = item.get("status")
    if status is not None:
        one_of("completed", "failed").read(f"{name}.status", status)
    output = item.get("output")
    return {
        "type": "apply_patch_call_output",
        "id": f"apco_{stem}",
        "call_id": _call_id(name, item, or_own=False),
        "output": STRING.read(f"{name}.output", output) if output else status or "completed",
        "status": status or "completed",
    }


def _tool_search_call(name: str, stem: str, item: JsonObject) -> ToolSearchCallItem:
    return {
        "type": "tool_search_call",
        "id": f"tsc_{stem}",
        "call_id": _call_id(name, item, or_own=True),
        "execution": "client",
        "arguments": item.get("arguments") or {},
        "status": "completed",
    }


def _reference(name: str, stem: str, item: JsonObject) -> ReferenceItem:
    return {"type": "item_reference", "id": _NOT_EMPTY.read(f"{name}.id", item.get("id"))}


_READERS: Mapping[str, Callable[[str, str, JsonObject], Item]] = {
    "message": _read_message,
    **{kind: functools.partial(form.read, kind) for kind, form in _FORMS.items()},
    "apply_patch_call_output": _apply_patch_output,
    "tool_search_call": _tool_search_call,
    "item_reference": _reference,
}


def _hosted(
    parsed: ParsedInput, name: str, stem: str, kind: str, item: JsonObject
) -> Sequence[Item]:
    """Return a call that a server ran and its output; nothing without output."""
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
        _READERS["function_call"](name, stem, call),
        _READERS["function_call_output"](name, stem, {**call, "output": shown}),
    ]


def _json(value: Any) -> str:
    return msgspec.json.encode(value).decode()


def _mcp(item: JsonObject) -> tuple[Any, Any, Any]:
    return item.get("name"), item.get("arguments") or {}, item.get("output") or item.get("error")


def _code_interpreter(item: JsonObject) -> tuple[Any, Any, Any]:
    return None, {"code": item.get("code") or ""}, item.get("outputs")


def _file_search(item: JsonObject) -> tuple[Any, Any, Any]:
    return None, {"queries": item.get("queries") or []}, item.get("results")


# Readers of a function's name (None: the item's type), arguments and output.
_HOSTED: Mapping[str, Callable[[JsonObject], tuple[Any, Any, Any]]] = {
    "mcp_call": _mcp,
    "code_interpreter_call": _code_interpreter,
    "file_search_call": _file_search,
}


_MESSAGE_SCHEMA: JsonObject = {
    "type": "object",
    "properties": {
        "type": {"enum": ["message", None]},
        "role": {"enum": list(ROLES)},
        "content": content_schema(),
    },
    "required": ["role", "content"],
}
_REASONING_SCHEMA = item_schema(
    ["reasoning"],
    summary=plain_parts_schema("summary_text"),
    content=plain_parts_schema("reasoning_text", "text"),
    encrypted_content=or_null(STRING.schema),
)
_ID = _NOT_EMPTY.schema
_FIRST_SCHEMAS = [
    _MESSAGE_SCHEMA,
    *(form.schema(kind) for kind, form in _FORMS.items()),
    item_schema(["apply_patch_call_output"], "call_id", call_id=_ID, output=or_null(STRING.schema)),
    item_schema(["tool_search_call"]),
    item_schema(list(_HOSTED)),
    item_schema(["agent_message"], "content", content=ARRAY.schema),
    item_schema(["item_reference"], "id", id=_ID),
]
_OTHER_SCHEMAS = [
    _REASONING_SCHEMA,
    item_schema(["additional_tools"], "tools", tools=ARRAY.schema),
    item_schema(_LEFT_OUT),
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
                # A prompt needs an item that is neither reasoning nor left out.
                "contains": {"anyOf": _FIRST_SCHEMAS},
            },
        ]
    },
)
