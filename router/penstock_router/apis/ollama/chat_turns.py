"""Converts messages of Ollama's chats into the form that chat templates expect.

Calls and results may lack ids. Then `tool_name`, or else the order, tells which call a result
belongs to.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Sequence
from typing import Any

from penstock_router.apis.chat_messages import (
    FunctionCall,
    assistant_message,
    check_size,
    tool_message,
)
from penstock_router.apis.images import data_part
from penstock_router.errors import BadRequest
from penstock_router.json_fields import (
    STRING,
    JsonObject,
    Kind,
    one_of,
    or_null,
    read_array,
    read_object,
)
from penstock_router.request import Message
from penstock_router.text.contents import Content, Part, text_part

_ROLE = one_of("system", "user", "assistant", "tool", "developer")


def read_images(name: str, value: Any) -> list[Part]:
    return [
        data_part(f"{name}[{index}]", each) for index, each in enumerate(read_array(name, value))
    ]


IMAGES = Kind(read_images, {"type": "array", "items": STRING.schema})


def with_images(images: list[Part], text: str) -> Content:
    """Return a message's content, its images first."""
    return [*images, text_part(text)] if images else text


def _read_turns(name: str, value: Any) -> list[Message]:
    turns = read_array(name, value)
    check_size(name, turns)
    reader = _Reader()
    return [reader.message(f"{name}[{index}]", turn) for index, turn in enumerate(turns)]


# The key for all calls.
_ANY_CALL = ("", "")


class _OpenCalls:
    """Calls without a result yet, found by id, name or order in constant time."""

    def __init__(self, calls: Sequence[FunctionCall] = ()) -> None:
        self._left = dict(enumerate(calls))
        # Places of calls by id and by name; some of the calls may be taken.
        self._places: dict[tuple[str, str], deque[int]] = defaultdict(deque)
        for place, call in self._left.items():
            for key in (("id", call.call_id), ("name", call.name), _ANY_CALL):
                self._places[key].append(place)

    def take(self, call_id: str, name: str) -> FunctionCall | None:
        """Take the first call with this id, else the first with this name, else the first."""
        for key in (("id", call_id), ("name", name), _ANY_CALL):
            places = self._places[key]
            while places:
                if (call := self._left.pop(places.popleft(), None)) is not None:
                    return call
        return None


class _Reader:
    """Reads messages in order, and gives calls the ids that their results need."""

    def __init__(self) -> None:
        self._num_calls = 0
        self._open = _OpenCalls()

    def message(self, name: str, value: Any) -> Message:
        given = read_object(name, value)
        role = given.get("role")
        role = _ROLE.read(f"{name}.role", role.lower() if isinstance(role, str) else role)
        images = read_images(f"{name}.images", given.get("images") or [])
        content = STRING.read(f"{name}.content", given.get("content") or "")
        if role == "assistant":
            if images:
                raise BadRequest(f"{name}.images: an answer has none", param=f"{name}.images")
            return self._assistant(name, given, content)
        if role == "tool":
            return self._result(name, given, with_images(images, content))
        return {"role": role, "content": with_images(images, content)}

    def _assistant(self, name: str, given: JsonObject, content: str) -> Message:
        thinking = STRING.read(f"{name}.thinking", given.get("thinking") or "")
        calls = [
            self._call(f"{name}.tool_calls[{index}]", call)
            for index, call in enumerate(
                read_array(f"{name}.tool_calls", given.get("tool_calls") or [])
            )
        ]
        self._open = _OpenCalls(calls)
        return assistant_message(content or (None if calls else ""), thinking, calls)

    def _call(self, name: str, value: Any) -> FunctionCall:
        given = read_object(name, value)
        function = read_object(f"{name}.function", given.get("function"))
        called = STRING.read(f"{name}.function.name", function.get("name"))
        arguments = function.get("arguments")
        if not isinstance(arguments, str):
            arguments = read_object(f"{name}.function.arguments", arguments or {})
        self._num_calls += 1
        call_id = STRING.read(f"{name}.id", given.get("id") or f"call_{self._num_calls}")
        return FunctionCall(call_id, called, arguments)

    def _result(self, name: str, given: JsonObject, content: Content) -> Message:
        called = STRING.read(f"{name}.tool_name", given.get("tool_name") or given.get("name") or "")
        call_id = STRING.read(f"{name}.tool_call_id", given.get("tool_call_id") or "")
        call = self._open.take(call_id, called)
        if call is None:
            return tool_message(call_id, content, called)
        return tool_message(call.call_id, content, called or call.name)


_TEXT_OR_NULL: JsonObject = or_null(STRING.schema)
_CALL: JsonObject = {
    "type": "object",
    "properties": {
        "id": or_null(STRING.schema),
        "function": {
            "type": "object",
            "properties": {
                "name": STRING.schema,
                "arguments": {"anyOf": [{"type": "object"}, {"type": "string"}, {"type": "null"}]},
            },
            "required": ["name"],
        },
    },
    "required": ["function"],
}
TURNS = Kind(
    _read_turns,
    {
        "type": "array",
        "items": {
            "type": "object",
            "properties": {
                "role": _ROLE.schema,
                "content": _TEXT_OR_NULL,
                "thinking": _TEXT_OR_NULL,
                "images": or_null(IMAGES.schema),
                "tool_calls": or_null({"type": "array", "items": _CALL}),
                "tool_name": _TEXT_OR_NULL,
                "tool_call_id": _TEXT_OR_NULL,
                "name": _TEXT_OR_NULL,
            },
            "required": ["role"],
        },
    },
)
