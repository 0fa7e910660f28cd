"""Builds a response's items from pieces of text, and shows them whole and as events.

The JSON around a piece of text is the same in each event and is rendered once.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar, cast

import msgspec

from penstock_router.apis.base import event_frame
from penstock_router.apis.logprobs import ChatLogprob
from penstock_router.apis.responses.items.encrypted_reasoning import seal
from penstock_router.apis.responses.items.types import (
    Item,
    ItemStatus,
    MessageItem,
    Part,
    ReasoningItem,
)
from penstock_router.text.answer_pieces import PieceKind

# An event's type, and its fields except type and sequence number.
Event = tuple[str, dict[str, Any]]

_encode = msgspec.json.encode


class ItemBuilder(ABC):
    """An item that grows; its text is empty until the first piece."""

    # The kind of pieces that extend the item.
    grows_by: ClassVar[PieceKind]
    _prefix: ClassVar[str]
    _delta_type: ClassVar[str]
    # JSON after an event's text without log-probabilities.
    _beside_deltas: ClassVar[bytes] = b""

    def __init__(self, stem: str, index: int) -> None:
        """Make an item; `stem` is the response's id without prefix, `index` the item's place."""
        self.id = f"{self._prefix}_{stem}" if index == 0 else f"{self._prefix}_{stem}_{index}"
        self._index = index
        self._texts: list[str] = []
        self._delta_opens = b""

    def grow(self, text: str, logprobs: Sequence[msgspec.Raw]) -> str:
        """Append a piece; return the text that its event shows."""
        self._texts.append(text)
        return text

    @abstractmethod
    def as_item(self, status: ItemStatus) -> Item:
        """The item with its text so far."""

    @abstractmethod
    def opening(self) -> list[Event]:
        """The events before the item's first piece."""

    def delta(self, text: str, logprobs: Sequence[msgspec.Raw], number: int) -> bytes:
        return b'%b,"delta":%b%b,"sequence_number":%d}\n\n' % (
            self._delta_opens or self._begin_deltas(),
            _encode(text),
            self._beside_delta(logprobs) if logprobs else self._beside_deltas,
            number,
        )

    @abstractmethod
    def closing(self, shown: Item) -> list[Event]:
        """The events after the item's last piece; `shown` is the final item."""

    @abstractmethod
    def _place(self) -> dict[str, Any]:
        """The fields that identify the part of the output that an event extends."""

    def _beside_delta(self, logprobs: Sequence[msgspec.Raw]) -> bytes:
        return b""

    def _begin_deltas(self) -> bytes:
        fields = {"type": self._delta_type, **self._place()}
        self._delta_opens = event_frame(self._delta_type, fields).removesuffix(b"}\n\n")
        return self._delta_opens

    def _added(self) -> Event:
        item = self.as_item("in_progress")
        return "response.output_item.added", {"output_index": self._index, "item": item}

    def _done(self, shown: Item) -> Event:
        return "response.output_item.done", {"output_index": self._index, "item": shown}


class _WithPart(ItemBuilder):
    """An item whose text is one part of its content."""

    @abstractmethod
    def _part(self) -> Part:
        """The part with all of the text so far."""

    def _content(self) -> list[Part]:
        return [self._part()] if self._texts else []

    def _place(self) -> dict[str, Any]:
        return {"output_index": self._index, "content_index": 0, "item_id": self.id}

    def opening(self) -> list[Event]:
        begun = {**self._place(), "part": self._part()}
        return [self._added(), ("response.content_part.added", begun)]

    def closing(self, shown: Item) -> list[Event]:
        assert shown["type"] == "message" or shown["type"] == "reasoning"
        [part] = shown["content"]
        said = {key: value for key, value in part.items() if key in ("text", "logprobs")}
        return [
            (self._delta_type.replace(".delta", ".done"), {**self._place(), **said}),
            ("response.content_part.done", {**self._place(), "part": part}),
            self._done(shown),
        ]


class MessageBuilder(_WithPart):
    grows_by = PieceKind.CONTENT
    _prefix = "msg"
    _delta_type = "response.output_text.delta"
    _beside_deltas = b',"logprobs":[]'

    def __init__(self, stem: str, index: int) -> None:
        super().__init__(stem, index)
        # Encoded once: the events at a stream's end repeat them four times.
        self._logprobs: list[msgspec.Raw] = []

    def grow(self, text: str, logprobs: Sequence[msgspec.Raw]) -> str:
        self._texts.append(text)
        self._logprobs += logprobs
        return text

    def as_item(self, status: ItemStatus) -> MessageItem:
        return {
            "type": "message",
            "id": self.id,
            "role": "assistant",
            "status": status,
            "content": self._content(),
        }

    def _part(self) -> Part:
        return output_text("".join(self._texts), self._logprobs)

    def _beside_delta(self, logprobs: Sequence[msgspec.Raw]) -> bytes:
        return b',"logprobs":%b' % _encode(logprobs)


class ReasoningBuilder(_WithPart):
    grows_by = PieceKind.REASONING
    _prefix = "rs"
    _delta_type = "response.reasoning_text.delta"

    def __init__(self, stem: str, index: int, *, is_sealed: bool) -> None:
        """With `is_sealed`, show the text also as `encrypted_content`."""
        super().__init__(stem, index)
        self._is_sealed = is_sealed

    def as_item(self, status: ItemStatus) -> ReasoningItem:
        item: ReasoningItem = {
            "type": "reasoning",
            "id": self.id,
            "summary": [],
            "content": self._content(),
            "status": status,
        }
        if self._is_sealed and self._texts:
            item["encrypted_content"] = seal("".join(self._texts))
        return item

    def _part(self) -> Part:
        return {"type": "reasoning_text", "text": "".join(self._texts)}


def output_text(text: str, logprobs: Sequence[msgspec.Raw]) -> Part:
    shown = cast(list[ChatLogprob], list(logprobs))
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": shown}
