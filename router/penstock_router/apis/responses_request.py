"""A request of OpenAI's Responses API: a chat whose turns are items, and what its answer repeats.

Items are kept in one form, that in which they are listed, stored and gone on from: messages with
an id and an array of parts of text. Knows no other field and no store.
"""

from __future__ import annotations

import dataclasses
import uuid
from dataclasses import dataclass
from typing import Any, Literal, NotRequired, Self, TypedDict

from penstock_router.apis.chat_messages import check_size
from penstock_router.errors import BadRequest
from penstock_router.fields import (
    STRING,
    JsonObject,
    Kind,
    one_of,
    read_array,
    read_object,
    refusal,
    short,
)
from penstock_router.request import ChatRequest, Message

ROLES = ("user", "assistant", "system", "developer")
_TEXT_TYPES = ("text", "input_text", "output_text")


ItemStatus = Literal["completed", "incomplete", "in_progress"]


class Part(TypedDict):
    """A piece of a message; which of the texts it has depends on its type."""

    type: Literal["input_text", "output_text", "refusal"]
    text: NotRequired[str]
    refusal: NotRequired[str]
    annotations: NotRequired[list[Any]]
    logprobs: NotRequired[list[Any]]


class Item(TypedDict):
    """A message, given or answered."""

    type: Literal["message"]
    id: str
    role: str
    status: ItemStatus
    content: list[Part]


class TextFormat(TypedDict):
    """How the answer's text is written."""

    type: Literal["text"]


class TextConfig(TypedDict):
    """What the answer's text is to be like."""

    format: TextFormat
    verbosity: Literal["medium"]


class Reasoning(TypedDict):
    """What was asked of reasoning models."""

    effort: str | None
    summary: str | None


class Repeated(TypedDict):
    """What an answer repeats of its request, defaults filled in."""

    background: bool
    instructions: str | None
    max_output_tokens: int | None
    max_tool_calls: int | None
    metadata: dict[str, str]
    parallel_tool_calls: bool
    previous_response_id: str | None
    prompt_cache_key: str | None
    reasoning: Reasoning
    safety_identifier: str | None
    service_tier: Literal["default"]
    store: bool
    text: TextConfig
    tool_choice: str
    tools: list[JsonObject]
    top_logprobs: int
    truncation: Literal["auto", "disabled"]
    user: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ResponsesRequest(ChatRequest):
    """A chat as this API asks for it: `messages` are made of the instructions and `items`."""

    # The conversation, without instructions: they hold for one answer only.
    items: list[Item]
    repeated: Repeated

    def without_text(self) -> Self:
        """The same without whatever may be long, but for the instructions, which are shown."""
        # Not `super()`: a dataclass with slots is made anew, and that finds the one before.
        return dataclasses.replace(ChatRequest.without_text(self), items=[])

    def after(self, earlier: list[Item]) -> ResponsesRequest:
        """The same request behind what was said before. Raises `BadRequest` for too much."""
        items = [*earlier, *self.items]
        check_size("previous_response_id", items)
        messages = messages_of(self.repeated["instructions"], items)
        return dataclasses.replace(self, items=items, messages=messages)


def messages_of(instructions: str | None, items: list[Item]) -> list[Message]:
    """What the chat template is given."""
    first = [] if instructions is None else [{"role": "system", "content": instructions}]
    return first + [{"role": item["role"], "content": _text_of(item)} for item in items]


def _text_of(item: Item) -> str:
    # Joined as a chat's parts are.
    return "\n".join(part.get("text", part.get("refusal", "")) for part in item["content"])


# ---- Reading -----------------------------------------------------------------------------------


def read_input(name: str, value: Any) -> list[Item]:
    """A text, or items. Reasoning is left out: templates leave it out of earlier turns too."""
    # One id for all, as drawing thousands takes time.
    stem = f"msg_{uuid.uuid4().hex}"
    if isinstance(value, str):
        return [_message(f"{stem}_0", "user", _parts(name, "user", value))]
    if not isinstance(value, list):
        raise refusal(name, "a string or an array of items", value)
    check_size(name, value)
    items = [
        _item(f"{name}[{index}]", f"{stem}_{index}", item)
        for index, item in enumerate(value)
        if not (isinstance(item, dict) and item.get("type") == "reasoning")
    ]
    if not items:
        raise BadRequest(f"{name}: at least one message is needed", param=name)
    return items


def _item(name: str, item_id: str, value: Any) -> Item:
    item = read_object(name, value)
    # What has a role needs no type.
    kind = item.get("type") or "message"
    if kind != "message":
        text = f"{name}: items of type {short(kind)} are not served, only messages"
        raise BadRequest(text, param="input")
    role = one_of(*ROLES).read(f"{name}.role", item.get("role"))
    return _message(item_id, role, _parts(f"{name}.content", role, item.get("content")))


def _message(item_id: str, role: str, content: list[Part]) -> Item:
    return {
        "type": "message",
        "id": item_id,
        "role": role,
        "status": "completed",
        "content": content,
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
    if kind not in _TEXT_TYPES:
        text = f"{name}: parts of type {short(kind)} are not served, only text"
        raise BadRequest(text, param="input")
    text = STRING.read(f"{name}.text", part.get("text"))
    if role == "assistant":
        return {"type": "output_text", "text": text, "annotations": []}
    return {"type": "input_text", "text": text}


def _part_schema(kinds: tuple[str, ...], key: str) -> JsonObject:
    return {
        "type": "object",
        "properties": {"type": {"enum": list(kinds)}, key: {"type": "string"}},
        "required": ["type", key],
    }


_PART_SCHEMAS = [_part_schema(_TEXT_TYPES, "text"), _part_schema(("refusal",), "refusal")]
_MESSAGE_SCHEMA: JsonObject = {
    "type": "object",
    "properties": {
        "type": {"enum": ["message", None]},
        "role": {"enum": list(ROLES)},
        "content": {
            "anyOf": [
                {"type": "string"},
                {"type": "array", "items": {"anyOf": _PART_SCHEMAS}},
            ]
        },
    },
    "required": ["role", "content"],
}
_REASONING_SCHEMA: JsonObject = {
    "type": "object",
    "properties": {"type": {"enum": ["reasoning"]}},
    "required": ["type"],
}
INPUT = Kind(
    read_input,
    {
        "anyOf": [
            {"type": "string"},
            {
                "type": "array",
                "minItems": 1,
                "items": {"anyOf": [_MESSAGE_SCHEMA, _REASONING_SCHEMA]},
                "contains": _MESSAGE_SCHEMA,
            },
        ]
    },
)
