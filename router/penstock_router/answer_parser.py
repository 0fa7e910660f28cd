"""The text of one answer to pieces: its reasoning, its content, the calls that it makes.

Reasoning is told from the rest first; what a call looks like is looked for in the rest only. Knows
text; neither tokens nor how an API shows pieces.
"""

from __future__ import annotations

from penstock_router.pieces import Piece, PieceKind
from penstock_router.reasoning import ReasoningSplitter, ReasoningStyle
from penstock_router.tool_calls.base import ToolParser


class AnswerParser:
    """Reads one answer."""

    def __init__(
        self, style: ReasoningStyle | None, begun: bool, tool_parser: ToolParser | None
    ) -> None:
        """`begun`: the prompt ends within reasoning. Without a style all is content, without a
        parser of calls no content is a call.
        """
        self._splitter = None if style is None else ReasoningSplitter(style, begun)
        self._tool_parser = tool_parser
        self.num_calls = 0

    @property
    def in_reasoning(self) -> bool:
        """What was read last is reasoning."""
        return self._splitter is not None and self._splitter.in_reasoning

    @property
    def has_reasoning(self) -> bool:
        """There was some, be it no more than its mark."""
        return self._splitter is not None and self._splitter.has_reasoning

    @property
    def is_past_reasoning(self) -> bool:
        """None follows."""
        return self._splitter is None or self._splitter.is_over

    def feed(self, text: str) -> list[Piece]:
        """What is certain by now."""
        if self._splitter is not None:
            return self._with_calls(self._splitter.feed(text))
        return self._calls_in(text)

    def flush(self) -> list[Piece]:
        """The text is over: what was held back."""
        pieces = [] if self._splitter is None else self._with_calls(self._splitter.flush())
        if self._tool_parser is not None:
            pieces += self._counted(self._tool_parser.flush())
        return pieces

    def _with_calls(self, pieces: list[Piece]) -> list[Piece]:
        if self._tool_parser is None:
            return pieces
        read: list[Piece] = []
        for piece in pieces:
            if piece.kind is PieceKind.CONTENT:
                read += self._calls_in(piece.text)
            else:
                read.append(piece)
        return read

    def _calls_in(self, text: str) -> list[Piece]:
        if self._tool_parser is not None:
            return self._counted(self._tool_parser.feed(text))
        return [Piece(PieceKind.CONTENT, text)] if text else []

    def _counted(self, pieces: list[Piece]) -> list[Piece]:
        for piece in pieces:
            if piece.kind is PieceKind.CALL:
                self.num_calls += 1
        return pieces
