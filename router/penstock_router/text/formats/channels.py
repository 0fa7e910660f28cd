"""The interface of formats that divide a whole answer into channels: reasoning, text, calls."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Protocol

from penstock_router.json_fields import JsonObject
from penstock_router.request import Tool
from penstock_router.text.answer_pieces import Piece
from penstock_router.text.formats.base import CallFormat
from penstock_router.text.marks import NO_MARKS, Marks
from penstock_router.text.reasoning import ReasoningStyle


class ChannelParser(Protocol):
    """Reads a whole answer: its reasoning, content and tool calls."""

    @property
    def is_open(self) -> bool:
        """True if a tool call is unfinished."""

    @property
    def has_reasoning(self) -> bool:
        """Tell whether any reasoning was read."""

    @property
    def is_over(self) -> bool:
        """Tell whether no more reasoning can come."""

    @property
    def in_reasoning(self) -> bool:
        """Tell whether the next text is, or may be, reasoning."""

    def feed(self, text: str) -> list[Piece]:
        """Read text, and return the pieces that can be shown now."""

    def flush(self, *, was_cut: bool = False) -> list[Piece]:
        """End the text, and return the remaining pieces."""


class ChannelFormat(CallFormat):
    """A family's channels. They are read whether or not a request has tools."""

    # The marks around reasoning at an answer's beginning; None if the family has none.
    style: ReasoningStyle | None

    @abstractmethod
    def channels(
        self, tools: Sequence[Tool], marks: Marks = NO_MARKS, *, begun: bool = False
    ) -> ChannelParser:
        """Make a parser for one answer; with `begun`, the prompt ends within reasoning."""

    @abstractmethod
    def said(self, text: JsonObject) -> JsonObject:
        """Match an answer without tool calls: `text`, in the channel that shows text."""

    @abstractmethod
    def reasoned(self, answer: JsonObject, *, begun: bool) -> JsonObject:
        """Match reasoning and then `answer`. Reasoning is optional, or already open if `begun`."""
