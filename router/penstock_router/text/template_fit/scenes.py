"""Short conversations that show what a template does: every text in them is one to look for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from penstock_router.request import Message
from penstock_router.text.contents import text_part

# The name of the function in all conversations, and of an argument of it.
NAME, KEY = "zqlook", "zqplace"
TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": NAME,
        "description": "Looks.",
        "parameters": {
            "type": "object",
            "properties": {KEY: {"type": "string", "description": "Where."}},
            "required": [KEY],
        },
    },
}


@dataclass(frozen=True, slots=True)
class Scene:
    """A conversation, and texts that stand in its rendering: in the order of each chain."""

    messages: Sequence[Message]
    chains: tuple[tuple[str, ...], ...]

    def is_shown_in(self, text: str) -> bool:
        """Tell whether nothing is lost and nothing moved."""
        return all(_in_order(chain, text) for chain in self.chains)


def _in_order(chain: Sequence[str], text: str) -> bool:
    place = 0
    for wanted in chain:
        place = text.find(wanted, place)
        if place < 0:
            return False
        place += len(wanted)
    return True


def user(text: str) -> Message:
    """A message of the user."""
    return {"role": "user", "content": text}


def system(text: str) -> Message:
    """A message of the operator."""
    return {"role": "system", "content": text}


def developer(text: str) -> Message:
    """A message of the developer."""
    return {"role": "developer", "content": text}


def answer(text: str, **more: Any) -> Message:
    """A message of the assistant."""
    return {"role": "assistant", "content": text, **more}


def call(value: str, call_id: str = "callzq001") -> dict[str, Any]:
    """A call of `NAME`. Some templates want ids of just nine characters."""
    function = {"name": NAME, "arguments": {KEY: value}}
    return {"id": call_id, "type": "function", "function": function}


def calling(*calls: dict[str, Any], **more: Any) -> Message:
    """A message of the assistant with calls."""
    return {"role": "assistant", **more, "tool_calls": list(calls)}


def result(text: str, call_id: str = "callzq001") -> Message:
    """A message with what a call returned."""
    return {"role": "tool", "tool_call_id": call_id, "content": text}


def in_two_parts(message: Message, first: str, second: str) -> Message:
    """The message with a content of two parts."""
    return {**message, "content": [text_part(first), text_part(second)]}


def with_image(*, is_result: bool) -> list[Message]:
    """A conversation with an image, the user's or in a result."""
    content = [{"type": "image"}, text_part("zqtext")]
    if is_result:
        return [user("zquser"), calling(call("zqvalue")), {**result(""), "content": content}]
    return [{"role": "user", "content": content}]


def scene(*messages: Message) -> Scene:
    """A conversation all of whose texts stand in its rendering in this order."""
    return Scene(messages, (tuple(shown(*messages)),))


def shown(*messages: Message) -> list[str]:
    """The texts of messages: contents, and values of arguments."""
    texts: list[str] = []
    for message in messages:
        if content := message.get("content"):
            parts = [content] if isinstance(content, str) else [each["text"] for each in content]
            texts += parts
        texts += [each["function"]["arguments"][KEY] for each in message.get("tool_calls", ())]
    return texts
