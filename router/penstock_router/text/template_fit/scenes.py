"""Makes short conversations to test templates; a rendering shows where each text is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from penstock_router.request import Message
from penstock_router.text.contents import text_part

# The function's name and its argument's name in all conversations.
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
    """A conversation, and chains of texts that its rendering has in this order."""

    messages: Sequence[Message]
    chains: tuple[tuple[str, ...], ...]

    def is_shown_in(self, text: str) -> bool:
        """Tell whether no text is lost or moved."""
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
    return {"role": "user", "content": text}


def system(text: str) -> Message:
    return {"role": "system", "content": text}


def developer(text: str) -> Message:
    return {"role": "developer", "content": text}


def answer(text: str, **more: Any) -> Message:
    return {"role": "assistant", "content": text, **more}


def call(value: str, call_id: str = "callzq001") -> dict[str, Any]:
    """Make a tool call of `NAME`. Some templates want ids of exactly nine characters."""
    function = {"name": NAME, "arguments": {KEY: value}}
    return {"id": call_id, "type": "function", "function": function}


def calling(*calls: dict[str, Any], **more: Any) -> Message:
    return {"role": "assistant", **more, "tool_calls": list(calls)}


def result(text: str, call_id: str = "callzq001") -> Message:
    return {"role": "tool", "tool_call_id": call_id, "content": text}


def in_two_parts(message: Message, first: str, second: str) -> Message:
    return {**message, "content": [text_part(first), text_part(second)]}


def with_image(*, is_result: bool) -> list[Message]:
    content = [{"type": "image"}, text_part("zqtext")]
    if is_result:
        return [user("zquser"), calling(call("zqvalue")), {**result(""), "content": content}]
    return [{"role": "user", "content": content}]


def scene(*messages: Message) -> Scene:
    """Make a scene: all texts of the messages must be rendered in this order."""
    return Scene(messages, (tuple(shown(*messages)),))


def shown(*messages: Message) -> list[str]:
    texts: list[str] = []
    for message in messages:
        if content := message.get("content"):
            parts = [content] if isinstance(content, str) else [each["text"] for each in content]
            texts += parts
        texts += [each["function"]["arguments"][KEY] for each in message.get("tool_calls", ())]
    return texts
