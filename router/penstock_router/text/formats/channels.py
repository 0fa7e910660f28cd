"""The interface of formats that divide the whole answer into channels: reasoning, text, calls."""

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
    """Reads one answer whole: its reasoning, content and calls."""

    @property
    def is_open(self) -> bool:
        """Tell whether the latest call has not come to its end."""

    @property
    def has_reasoning(self) -> bool:
        """Tell whether any reasoning came so far."""

    @property
    def is_over(self) -> bool:
        """Tell whether no reasoning follows, whatever comes."""

    @property
    def in_reasoning(self) -> bool:
        """Tell whether it is reasoning that comes, or may be."""

    def feed(self, text: str) -> list[Piece]:
        """The pieces that can be shown now."""

    def flush(self, *, was_cut: bool = False) -> list[Piece]:
        """The text has ended, by the model or cut off: the remaining pieces."""


class ChannelFormat(CallFormat):
    """A family's channels. They are read whether or not a request has tools."""

    # The texts that open and close its channel of reasoning, where it comes first; None: it has no
    # such channel.
    style: ReasoningStyle | None

    @abstractmethod
    def channels(
        self, tools: Sequence[Tool], marks: Marks = NO_MARKS, *, begun: bool = False
    ) -> ChannelParser:
        """A parser for one answer; `begun`: the prompt ends within the channel of reasoning."""

    @abstractmethod
    def said(self, text: JsonObject) -> JsonObject:
        """The format of an answer that is nothing but text: its channel, with `text` as that."""

    @abstractmethod
    def reasoned(self, answer: JsonObject, *, begun: bool) -> JsonObject:
        """The format of an answer behind the channel of reasoning, which may come before it or, if
        `begun`, is open already.
        """
