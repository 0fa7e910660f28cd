"""Turns of Anthropic's Messages, made of content blocks -> messages of a chat.

A turn may become several messages: each tool result is a message of its own in a chat, in the
turn's order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from penstock_router.apis.chat_messages import (
    FunctionCall,
    assistant_message,
    check_size,
    joined,
    tool_message,
)
from penstock_router.apis.images import IMAGE_BLOCK_SCHEMA, read_image_block
from penstock_router.errors import BadRequest
from penstock_router.json_fields import (
    BOOLEAN,
    OBJECT,
    STRING,
    JsonObject,
    Kind,
    or_null,
    read_array,
    read_object,
    refusal,
    shorten,
    string,
)
from penstock_router.request import Message
from penstock_router.text.contents import Content, Part, join_contents, text_part

_ROLES = ("user", "assistant")
# Names of tools and ids of calls.
_NAME = string(1, 256)
# Chat messages have no flag for a failed tool call: the text says it.
_ERROR_PREFIX = "Error: "


def read_turns(name: str, value: Any) -> list[Message]:
    """A chat; every block checked. Its last message may be an answer to continue."""
    turns = read_array(name, value)
    if not turns:
        raise BadRequest(f"{name}: at least one message is needed", param=name)
    check_size(name, turns)
    check_size(name, list(_blocks_of(turns)))
    # Templates expect a result to name its tool; here it has only the id of the call.
    tools_by_id: dict[str, str] = {}
    messages: list[Message] = []
    for index, turn in enumerate(turns):
        messages += _read_turn(f"{name}[{index}]", turn, tools_by_id)
    if messages[-1].get("tool_calls"):
        text = f"{name}: the last turn calls tools; a turn with their results must follow"
        raise BadRequest(text, param=name)
    return messages


def _blocks_of(turns: Sequence[Any]) -> Iterator[Any]:
    for turn in turns:
        content = turn.get("content") if isinstance(turn, dict) else None
        yield from content if isinstance(content, list) else ()


def _read_turn(name: str, value: Any, tools_by_id: dict[str, str]) -> list[Message]:
    turn = read_object(name, value)
    role, content = turn.get("role"), turn.get("content")
    if role not in _ROLES:
        raise refusal(f"{name}.role", "user or assistant", role)
    if isinstance(content, str):
        return [{"role": role, "content": content}]
    if not isinstance(content, list):
        raise refusal(f"{name}.content", "a string or an array of blocks", content)
    if role == "user":
        return _read_user(f"{name}.content", content, tools_by_id)
    return [_read_assistant(f"{name}.content", content, tools_by_id)]


def _read_user(name: str, blocks: list[Any], tools_by_id: dict[str, str]) -> list[Message]:
    """Results as messages of role tool; what stands before, between or after them as the user's."""
    messages: list[Message] = []
    parts: list[Part] = []

    def end_text() -> None:
        if parts:
            messages.append({"role": "user", "content": joined(parts.copy())})
            parts.clear()

    for index, value in enumerate(blocks):
        at, block = f"{name}[{index}]", read_object(f"{name}[{index}]", value)
        kind = block.get("type")
        if kind == "text":
            parts.append(text_part(STRING.read(f"{at}.text", block.get("text"))))
        elif kind == "image":
            parts.append(read_image_block(at, block))
        elif kind == "tool_result":
            end_text()
            messages.append(_read_result(at, block, tools_by_id))
        else:
            raise _not_served(at, kind, "text, image and tool_result")
    end_text()
    return messages or [{"role": "user", "content": ""}]


def _read_result(name: str, block: JsonObject, tools_by_id: dict[str, str]) -> Message:
    call_id = _NAME.read(f"{name}.tool_use_id", block.get("tool_use_id"))
    is_error = block.get("is_error")
    content = _read_content(f"{name}.content", block.get("content"))
    if is_error is not None and BOOLEAN.read(f"{name}.is_error", is_error):
        content = join_contents(_ERROR_PREFIX, content, "")
    return tool_message(call_id, content, tools_by_id.get(call_id, ""))


def _read_content(name: str, value: Any) -> Content:
    """Of a result: a text, or blocks of text and of images."""
    if not isinstance(value, list):
        return "" if value is None else STRING.read(name, value)
    check_size(name, value)
    parts: list[Part] = []
    for index, block in enumerate(value):
        at, kind = f"{name}[{index}]", read_object(f"{name}[{index}]", block).get("type")
        if kind == "text":
            parts.append(text_part(STRING.read(f"{at}.text", block.get("text"))))
        elif kind == "image":
            parts.append(read_image_block(at, block))
        else:
            raise _not_served(at, kind, "text and image")
    return joined(parts)


@dataclass(slots=True)
class _AssistantTurn:
    """The content of one assistant turn, collected from its blocks."""

    texts: list[str] = field(default_factory=list)
    reasoning: list[str] = field(default_factory=list)
    calls: list[FunctionCall] = field(default_factory=list)

    def message(self) -> Message:
        text = "\n".join(self.texts) if self.texts else None
        return assistant_message(text, "\n".join(self.reasoning), self.calls)


def _read_assistant(name: str, blocks: list[Any], tools_by_id: dict[str, str]) -> Message:
    said = _AssistantTurn()
    for index, value in enumerate(blocks):
        at = f"{name}[{index}]"
        block = read_object(at, value)
        reader = _OF_ASSISTANT.get(str(block.get("type")))
        if reader is None:
            raise _not_served(at, block.get("type"), ", ".join(_OF_ASSISTANT))
        reader(at, block, said)
    for call in said.calls:
        tools_by_id[call.call_id] = call.name
    return said.message()


def _read_text(name: str, block: JsonObject, said: _AssistantTurn) -> None:
    said.texts.append(STRING.read(f"{name}.text", block.get("text")))


def _read_thinking(name: str, block: JsonObject, said: _AssistantTurn) -> None:
    said.reasoning.append(STRING.read(f"{name}.thinking", block.get("thinking")))


def _read_redacted(name: str, block: JsonObject, said: _AssistantTurn) -> None:
    """Checked and dropped: only the service that encrypted it can read it."""
    STRING.read(f"{name}.data", block.get("data"))


def _read_call(name: str, block: JsonObject, said: _AssistantTurn) -> None:
    said.calls.append(
        FunctionCall(
            call_id=_NAME.read(f"{name}.id", block.get("id")),
            name=_NAME.read(f"{name}.name", block.get("name")),
            arguments=OBJECT.read(f"{name}.input", block.get("input")),
        )
    )


_OF_ASSISTANT: dict[str, Callable[[str, JsonObject, _AssistantTurn], None]] = {
    "text": _read_text,
    "thinking": _read_thinking,
    "redacted_thinking": _read_redacted,
    "tool_use": _read_call,
}


def _not_served(name: str, kind: object, served: str) -> BadRequest:
    text = f"{name}: blocks of type {shorten(kind)} are not served here, only {served}"
    return BadRequest(text, param=name)


# ---- What is documented ------------------------------------------------------------------------


def _block_schema(kind: str, *optional: str, **properties: JsonObject) -> JsonObject:
    return {
        "type": "object",
        "properties": {"type": {"enum": [kind]}, **properties},
        "required": ["type", *(name for name in properties if name not in optional)],
    }


def _turn_schema(role: str, *blocks: JsonObject) -> JsonObject:
    content = {"anyOf": [STRING.schema, {"type": "array", "items": {"anyOf": list(blocks)}}]}
    return {
        "type": "object",
        "properties": {"role": {"enum": [role]}, "content": content},
        "required": ["role", "content"],
    }


_TEXT_BLOCK = _block_schema("text", text=STRING.schema)
_CONTENT_SCHEMA: JsonObject = {
    "anyOf": [
        STRING.schema,
        {"type": "array", "items": {"anyOf": [_TEXT_BLOCK, IMAGE_BLOCK_SCHEMA]}},
    ]
}
_RESULT_BLOCK = _block_schema(
    "tool_result",
    "content",
    "is_error",
    tool_use_id=_NAME.schema,
    content=or_null(_CONTENT_SCHEMA),
    is_error=or_null(BOOLEAN.schema),
)
_ASSISTANT_BLOCKS = (
    _TEXT_BLOCK,
    _block_schema("thinking", thinking=STRING.schema),
    _block_schema("redacted_thinking", data=STRING.schema),
    _block_schema("tool_use", id=_NAME.schema, name=_NAME.schema, input=OBJECT.schema),
)
TURNS = Kind(
    read_turns,
    {
        "type": "array",
        "minItems": 1,
        "items": {
            "anyOf": [
                _turn_schema("user", _TEXT_BLOCK, IMAGE_BLOCK_SCHEMA, _RESULT_BLOCK),
                _turn_schema("assistant", *_ASSISTANT_BLOCKS),
            ]
        },
    },
)
