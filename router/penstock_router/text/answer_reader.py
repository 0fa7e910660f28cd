"""Splits one answer's text into reasoning, content and tool calls, by its model's formats.

Reasoning is separated first. Tool calls are parsed from the rest or, if reasoning never ends, from
the reasoning (`calls_in_reasoning`). Channel formats read the whole answer themselves.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from penstock_router.request import Tool
from penstock_router.text.answer_pieces import Piece, PieceKind
from penstock_router.text.formats.base import CallFormat
from penstock_router.text.formats.reading.calls_in_reasoning import CallsInReasoning
from penstock_router.text.marks import Marks
from penstock_router.text.model_conventions import Conventions
from penstock_router.text.reasoning import ReasoningSplitter


class AnswerReader(Protocol):
    @property
    def is_open(self) -> bool:
        """True if a tool call is unfinished."""

    @property
    def has_reasoning(self) -> bool:
        """Tell whether any reasoning was read."""

    @property
    def is_over(self) -> bool:
        """Tell whether no more reasoning can come."""

    def feed(self, text: str) -> list[Piece]:
        """Read text, and return the pieces that can be shown now."""

    def flush(self, *, was_cut: bool = False) -> list[Piece]:
        """End the text, and return the remaining pieces."""


def make_reader(
    conventions: Conventions, tools: Sequence[Tool], marks: Marks, *, begun: bool
) -> AnswerReader:
    """Make a reader of one answer; with `begun`, the prompt ends within reasoning."""
    style, tool_format = conventions.reasoning, conventions.tool_format
    splitter = None if style is None else ReasoningSplitter(style.spelled(marks), begun)
    if tool_format is None:
        assert splitter is not None
        return splitter
    return _ReasoningAndCalls(splitter, tool_format, tools, marks)


class _ReasoningAndCalls:
    def __init__(
        self,
        splitter: ReasoningSplitter | None,
        tool_format: CallFormat,
        tools: Sequence[Tool],
        marks: Marks,
    ) -> None:
        self._splitter = splitter
        self._calls = tool_format.parser(tools, marks)
        self._within: CallsInReasoning | None = None
        if splitter is not None and tool_format.begins():
            self._within = CallsInReasoning(tool_format, tools, marks)

    @property
    def is_open(self) -> bool:
        return self._calls.is_open

    @property
    def has_reasoning(self) -> bool:
        return self._splitter is not None and self._splitter.has_reasoning

    @property
    def is_over(self) -> bool:
        return self._splitter is None or self._splitter.is_over

    def feed(self, text: str) -> list[Piece]:
        if self._splitter is None:
            return self._calls.feed(text)
        pieces = self._splitter.feed(text)
        if self._within is not None:
            pieces = self._look_within(pieces)
        return self._with_calls(pieces)

    def flush(self, *, was_cut: bool = False) -> list[Piece]:
        pieces = [] if self._splitter is None else self._splitter.flush()
        found: list[Piece] = []
        if self._within is not None and self._splitter is not None:
            pieces = self._look_within(pieces)
            if self._splitter.in_reasoning:
                rest, found = self._within.flush(was_cut=was_cut)
                pieces.append(Piece(PieceKind.REASONING, rest))
        return self._with_calls(pieces) + self._calls.flush(was_cut=was_cut) + found

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
        read: list[Piece] = []
        for piece in pieces:
            if piece.kind is PieceKind.CONTENT:
                read += self._calls.feed(piece.text)
            else:
                read.append(piece)
        return read
