"""Items of OpenAI's Responses API, which make up a conversation: read, and turned into messages.

Items are kept in one form, in which they are also listed, stored and continued: each with an id and
a type, text in arrays of parts.
"""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NotRequired, TypedDict

from penstock_router.apis.chat_messages import (
    FunctionCall,
    assistant_message,
    check_size,
    joined,
    tool_message,
)
from penstock_router.apis.images import INPUT_IMAGE_SCHEMA, image_part, read_input_image
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
from penstock_router.request import ImageSource, Message
from penstock_router.text.contents import Content, text_part

ROLES = ("user", "assistant", "system", "developer")
_TEXT_TYPES = ("text", "input_text", "output_text")
# Arrays of parts in items that chat messages do not have.
_MORE_PARTS = ("output", "summary")
_NOT_EMPTY = string(1)


# ---- What items look like ----------------------------------------------------------------------

ItemStatus = Literal["completed", "incomplete", "in_progress"]


class Part(TypedDict):
    """A part of an item; which fields it has depends on its type."""

    type: Literal[
        "input_text", "input_image", "output_text", "refusal", "reasoning_text", "summary_text"
    ]
    text: NotRequired[str]
    image_url: NotRequired[str]
    refusal: NotRequired[str]
    annotations: NotRequired[list[Any]]
    logprobs: NotRequired[list[Any]]


class MessageItem(TypedDict):
    """A message of the input or of an answer."""

    type: Literal["message"]
    id: str
    role: str
    status: ItemStatus
    content: list[Part]


class ReasoningItem(TypedDict):
    """The model's reasoning before the next item."""

    type: Literal["reasoning"]
    id: str
    summary: list[Part]
    content: list[Part]
    status: ItemStatus


class CallItem(TypedDict):
    """A function call."""

    type: Literal["function_call"]
    id: str
    call_id: str
    name: str
    # JSON; incomplete if the call was cut off.
    arguments: str
    status: ItemStatus


class CallOutputItem(TypedDict):
    """The result of a function call."""

    type: Literal["function_call_output"]
    id: str
    call_id: str
    output: str | list[Part]
    status: ItemStatus


Item = MessageItem | ReasoningItem | CallItem | CallOutputItem


# ---- Items as a chat ---------------------------------------------------------------------------


@dataclass(slots=True)
class _AssistantTurn:
    """A message of the assistant, collected from a run of reasoning, message and call items."""

    reasoning: list[str] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    calls: list[FunctionCall] = field(default_factory=list)

    def takes(self, item: Item) -> bool:
        """Whether the item belongs to this message; else it begins another.

        Outputs must follow the message with their calls, so a message with calls takes all items
        up to the outputs.
        """
        return item["type"] == "function_call" or bool(self.calls) or not self.texts

    def add(self, item: Item) -> None:
        if item["type"] == "function_call":
            self.calls.append(FunctionCall(item["call_id"], item["name"], item["arguments"]))
        elif item["type"] == "reasoning":
            if item["content"]:
                self.reasoning.append(_text_of(item["content"]))
        elif item["type"] == "message":
            self.texts.append(_text_of(item["content"]))

    def message(self) -> list[Message]:
        """The chat message; none if there was only reasoning without readable text."""
        if not (self.reasoning or self.texts or self.calls):
            return []
        text = "\n".join(self.texts) if self.texts else None
        return [assistant_message(text, "\n".join(self.reasoning), self.calls)]


def messages_of(instructions: str | None, items: Sequence[Item]) -> list[Message]:
    """The messages for the chat template; items of one assistant message are joined."""
    messages: list[Message] = []
    if instructions is not None:
        messages.append({"role": "system", "content": instructions})
    names: dict[str, str] = {}
    said = _AssistantTurn()
    for index, item in enumerate(items):
        if _is_given(item):
            messages += said.message()
            said = _AssistantTurn()
            messages.append(_read_given(f"input[{index}]", item, names))
            continue
        if not said.takes(item):
            messages += said.message()
            said = _AssistantTurn()
        said.add(item)
        if item["type"] == "function_call":
            names[item["call_id"]] = item["name"]
    return messages + said.message()


def _is_given(item: Item) -> bool:
    """Whether the item comes from the client, not from the assistant."""
    if item["type"] == "message":
        return item["role"] != "assistant"
    return item["type"] == "function_call_output"


def _read_given(name: str, item: Item, names: dict[str, str]) -> Message:
    if item["type"] != "function_call_output":
        assert item["type"] == "message"
        return {"role": item["role"], "content": _content_of(f"{name}.content", item["content"])}
    output, call_id = item["output"], item["call_id"]
    content = output if isinstance(output, str) else _content_of(f"{name}.output", output)
    return tool_message(call_id, content, names.get(call_id, ""))


def _content_of(name: str, parts: list[Part]) -> Content:
    """As of a chat's message: one text, or parts where it has images."""
    return joined(
        [
            image_part(part["image_url"], f"{name}[{index}]")
            if part["type"] == "input_image"
            else text_part(part.get("text", part.get("refusal", "")))
            for index, part in enumerate(parts)
        ]
    )


def _text_of(parts: list[Part]) -> str:
    # Joined like the parts of a chat message.
    return "\n".join(part.get("text", part.get("refusal", "")) for part in parts)


def check_outputs(items: Sequence[Item], num_earlier: int = 0) -> None:
    """Refuse an output without a call before it; `input` is the items after `num_earlier`."""
    called: set[str] = set()
    for index, item in enumerate(items):
        if item["type"] == "function_call":
            called.add(item["call_id"])
        elif item["type"] == "function_call_output" and item["call_id"] not in called:
            name = f"input[{index - num_earlier}].call_id"
            text = (
                f"{name}: no function call with the id {shorten(item['call_id'])} comes before it"
            )
            raise BadRequest(text, param="input")


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


# ---- Reading -----------------------------------------------------------------------------------


def read_input(name: str, value: Any) -> list[Item]:
    """Items, or a string, which becomes a message of the user."""
    # One random stem for all ids: drawing thousands takes time.
    stem = uuid.uuid4().hex
    if isinstance(value, str):
        return [_message(f"msg_{stem}_0", "user", _parts(name, "user", value))]
    if not isinstance(value, list):
        raise refusal(name, "a string or an array of items", value)
    check_items(name, value)
    items = [_item(f"{name}[{index}]", f"{stem}_{index}", item) for index, item in enumerate(value)]
    if all(item["type"] == "reasoning" for item in items):
        raise BadRequest(f"{name}: at least one message is needed", param=name)
    return items


def _item(name: str, stem: str, value: Any) -> Item:
    item = read_object(name, value)
    # Messages may leave out the type.
    kind = item.get("type") or "message"
    if kind == "message":
        role = one_of(*ROLES).read(f"{name}.role", item.get("role"))
        parts = _parts(f"{name}.content", role, item.get("content"))
        return _message(f"msg_{stem}", role, parts)
    if kind == "reasoning":
        return _reasoning(name, f"rs_{stem}", item)
    if kind == "function_call":
        return _call(name, f"fc_{stem}", item)
    if kind == "function_call_output":
        return _call_output(name, f"fco_{stem}", item)
    text = f"{name}: items of type {shorten(kind)} are not served, only messages, reasoning, "
    raise BadRequest(f"{text}function calls and their outputs", param="input")


def _message(item_id: str, role: str, content: list[Part]) -> MessageItem:
    return {
        "type": "message",
        "id": item_id,
        "role": role,
        "status": "completed",
        "content": content,
    }


def _reasoning(name: str, item_id: str, item: JsonObject) -> ReasoningItem:
    return {
        "type": "reasoning",
        "id": item_id,
        "summary": _plain_parts(f"{name}.summary", "summary_text", item.get("summary")),
        "content": _plain_parts(f"{name}.content", "reasoning_text", item.get("content")),
        "status": "completed",
    }


def _call(name: str, item_id: str, item: JsonObject) -> CallItem:
    return {
        "type": "function_call",
        "id": item_id,
        "call_id": _NOT_EMPTY.read(f"{name}.call_id", item.get("call_id")),
        "name": _NOT_EMPTY.read(f"{name}.name", item.get("name")),
        "arguments": STRING.read(f"{name}.arguments", item.get("arguments")),
        "status": "completed",
    }


def _call_output(name: str, item_id: str, item: JsonObject) -> CallOutputItem:
    output = item.get("output")
    return {
        "type": "function_call_output",
        "id": item_id,
        "call_id": _NOT_EMPTY.read(f"{name}.call_id", item.get("call_id")),
        "output": output if isinstance(output, str) else _parts(f"{name}.output", "tool", output),
        "status": "completed",
    }


def _parts(name: str, role: str, value: Any) -> list[Part]:
    if isinstance(value, str):
        return [_part(name, role, {"type": "text", "text": value})]
    return [
        _part(f"{name}[{index}]", role, read_object(f"{name}[{index}]", part))
        for index, part in enumerate(read_array(name, value))
    ]


def _part(name: str, role: str, part: JsonObject) -> Part:
    kind = part.get("type")
    if kind == "refusal":
        return {"type": kind, "refusal": STRING.read(f"{name}.refusal", part.get("refusal"))}
    if kind == "input_image" and role != "assistant":
        source: ImageSource = read_input_image(name, part)["source"]
        return {"type": kind, "image_url": source.url}
    if kind not in _TEXT_TYPES:
        served = "text" if role == "assistant" else "text and input_image"
        text = f"{name}: parts of type {shorten(kind)} are not served, only {served}"
        raise BadRequest(text, param="input")
    text = STRING.read(f"{name}.text", part.get("text"))
    if role == "assistant":
        return {"type": "output_text", "text": text, "annotations": []}
    return {"type": "input_text", "text": text}


def _plain_parts(
    name: str, kind: Literal["reasoning_text", "summary_text"], value: Any
) -> list[Part]:
    """Parts of one type, possibly none."""
    parts: list[Part] = []
    for index, entry in enumerate([] if value is None else read_array(name, value)):
        part = read_object(f"{name}[{index}]", entry)
        one_of(kind).read(f"{name}[{index}].type", part.get("type"))
        text = STRING.read(f"{name}[{index}].text", part.get("text"))
        parts.append({"type": kind, "text": text})
    return parts


# ---- As documented -----------------------------------------------------------------------------


def _object_schema(properties: JsonObject, *required: str) -> JsonObject:
    return {"type": "object", "properties": properties, "required": list(required)}


def _part_schema(kinds: tuple[str, ...], key: str) -> JsonObject:
    return _object_schema({"type": {"enum": list(kinds)}, key: {"type": "string"}}, "type", key)


def _plain_parts_schema(kind: str) -> JsonObject:
    parts = {"type": "array", "items": _part_schema((kind,), "text")}
    return or_null(parts)


_TEXT_SCHEMA: JsonObject = {
    "anyOf": [
        {"type": "string"},
        {
            "type": "array",
            "items": {
                "anyOf": [
                    _part_schema(_TEXT_TYPES, "text"),
                    _part_schema(("refusal",), "refusal"),
                    INPUT_IMAGE_SCHEMA,
                ]
            },
        },
    ]
}
_MESSAGE_SCHEMA = _object_schema(
    {
        "type": {"enum": ["message", None]},
        "role": {"enum": list(ROLES)},
        "content": _TEXT_SCHEMA,
    },
    "role",
    "content",
)
_REASONING_SCHEMA = _object_schema(
    {
        "type": {"enum": ["reasoning"]},
        "summary": _plain_parts_schema("summary_text"),
        "content": _plain_parts_schema("reasoning_text"),
    },
    "type",
)
_CALL_SCHEMA = _object_schema(
    {
        "type": {"enum": ["function_call"]},
        "call_id": _NOT_EMPTY.schema,
        "name": _NOT_EMPTY.schema,
        "arguments": {"type": "string"},
    },
    *("type", "call_id", "name", "arguments"),
)
_CALL_OUTPUT_SCHEMA = _object_schema(
    {
        "type": {"enum": ["function_call_output"]},
        "call_id": _NOT_EMPTY.schema,
        "output": _TEXT_SCHEMA,
    },
    *("type", "call_id", "output"),
)
# The input must have an item of one of these types: reasoning alone is refused.
_FIRST_SCHEMAS = [_MESSAGE_SCHEMA, _CALL_SCHEMA, _CALL_OUTPUT_SCHEMA]
INPUT = Kind(
    read_input,
    {
        "anyOf": [
            {"type": "string"},
            {
                "type": "array",
                "minItems": 1,
                "items": {"anyOf": [*_FIRST_SCHEMAS, _REASONING_SCHEMA]},
                "contains": {"anyOf": _FIRST_SCHEMAS},
            },
        ]
    },
)
