"""Reads one answer's text into pieces, by its model's formats: reasoning, content and tool calls.

Reasoning is told from the rest first; what a call looks like is looked for in the rest and, where
reasoning is never ended, in that (`calls_in_reasoning`). A format of channels reads all by itself.
"""

from __future__ import annotations

from collections.abc import Sequence

from penstock_router.request import Tool
from penstock_router.text.answer_pieces import Piece, PieceKind
from penstock_router.text.formats.base import CallFormat
from penstock_router.text.formats.channels import ChannelFormat, ChannelParser
from penstock_router.text.formats.reading.calls_in_reasoning import CallsInReasoning
from penstock_router.text.marks import Marks
from penstock_router.text.model_conventions import Conventions
from penstock_router.text.reasoning import ReasoningSplitter, ReasoningStyle


def make_reader(
    conventions: Conventions, tools: Sequence[Tool], marks: Marks, *, begun: bool
) -> ChannelParser:
    """A reader of one answer; `begun`: the prompt ends within reasoning."""
    tool_format = conventions.tool_format
    if isinstance(tool_format, ChannelFormat):
        return tool_format.channels(tools, marks, begun=begun)
    return AnswerReader(conventions.reasoning, tool_format, tools, marks, begun=begun)


class AnswerReader:
    """Reads reasoning first, and then content and calls."""

    def __init__(
        self,
        style: ReasoningStyle | None,
        tool_format: CallFormat | None,
        tools: Sequence[Tool],
        marks: Marks,
        *,
        begun: bool,
    ) -> None:
        self._splitter = None if style is None else ReasoningSplitter(style.spelled(marks), begun)
        self._calls = None if tool_format is None else tool_format.parser(tools, marks)
        self._within: CallsInReasoning | None = None
        if style is not None and tool_format is not None and tool_format.begins():
            self._within = CallsInReasoning(tool_format, tools, marks)

    @property
    def is_open(self) -> bool:
        """Whether the latest call has not come to its end."""
        return self._calls is not None and self._calls.is_open

    @property
    def has_reasoning(self) -> bool:
        """Whether any reasoning came so far."""
        return self._splitter is not None and self._splitter.has_reasoning

    @property
    def in_reasoning(self) -> bool:
        """Whether it is reasoning that comes, or may be."""
        return self._splitter is not None and not self._splitter.is_over

    def feed(self, text: str) -> list[Piece]:
        """The pieces that can be shown now."""
        if self._splitter is None:
            return [] if self._calls is None else self._calls.feed(text)
        pieces = self._splitter.feed(text)
        if self._within is not None:
            pieces = self._look_within(pieces)
        return self._with_calls(pieces)

    def flush(self, *, was_cut: bool = False) -> list[Piece]:
        """The text has ended, by the model or cut off: the remaining pieces."""
        pieces = [] if self._splitter is None else self._splitter.flush()
        found: list[Piece] = []
        if self._within is not None and self._splitter is not None:
            pieces = self._look_within(pieces)
            if self._splitter.in_reasoning:
                rest, found = self._within.flush(was_cut=was_cut)
                pieces.append(Piece(PieceKind.REASONING, rest))
        pieces = self._with_calls(pieces)
        if self._calls is not None:
            pieces += self._calls.flush(was_cut=was_cut)
        return pieces + found

    def _look_within(self, pieces: list[Piece]) -> list[Piece]:
        assert self._within is not None
        assert self._splitter is not None
        read = [
            Piece(PieceKind.REASONING, self._within.feed(piece.text))
            for piece in pieces
            if piece.kind is PieceKind.REASONING
        ]
        if not self._splitter.in_reasoning and (held := self._within.end()):
            read.append(Piece(PieceKind.REASONING, held))
        return read + [piece for piece in pieces if piece.kind is not PieceKind.REASONING]

    def _with_calls(self, pieces: list[Piece]) -> list[Piece]:
        if self._calls is None:
            return pieces
        read: list[Piece] = []
        for piece in pieces:
            if piece.kind is PieceKind.CONTENT:
                read += self._calls.feed(piece.text)
            else:
                read.append(piece)
        return read
