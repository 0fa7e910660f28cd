"""Splits the text of one answer into pieces: reasoning, content and tool calls.

Reasoning is told from the rest first; what a call looks like is looked for in the rest only.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from penstock_router.generation.job import Job
from penstock_router.request import ChatRequest
from penstock_router.text.answer_constraint import tools_of
from penstock_router.text.answer_pieces import Piece, PieceKind
from penstock_router.text.model_conventions import Conventions
from penstock_router.text.reasoning import ReasoningSplitter
from penstock_router.text.tool_calls.base import ToolParser


def choose_conventions(job: Job) -> Conventions:
    """The conventions by which this job's answers are parsed: its model's, without tool calls if
    the request has no tools.
    """
    asked, conventions = job.options, job.model.text.conventions
    if not isinstance(asked, ChatRequest):
        return Conventions()
    return conventions if tools_of(asked) else dataclasses.replace(conventions, tool_format=None)


def make_parser(job: Job) -> AnswerParser | None:
    """A parser for one of the job's answers; None where answers are plain text only."""
    conventions = choose_conventions(job)
    return None if conventions == Conventions() else AnswerParser(job, conventions)


class AnswerParser:
    """Tells the text of one answer into pieces, and counts the tokens of its reasoning.

    They are those up to the mark that ends reasoning: up to its own token or, where it has none, up
    to the token with which it was read.
    """

    def __init__(self, job: Job, conventions: Conventions) -> None:
        asked, tokenizer = job.options, job.model.tokenizer
        assert isinstance(asked, ChatRequest)
        style, tool_format = conventions.reasoning, conventions.tool_format
        self._splitter: ReasoningSplitter | None = None
        self._tool_parser: ToolParser | None = None
        marks: tuple[str, ...] = ()
        if style is not None:
            self._splitter = ReasoningSplitter(style, job.prepared.reasoning_begun)
            marks = style.marks
        if tool_format is not None:
            self._tool_parser = tool_format.parser([tool.name for tool in tools_of(asked)])
            marks += tool_format.markers
        # Special tokens that are parsed here, and so must not be skipped.
        self.shown_ids = tokenizer.special_ids_of(marks)
        self._end_id = None if style is None else tokenizer.token_id(style.end)
        self._shows_reasoning = asked.include_reasoning
        # With a named function as tool_choice, the finish reason stays "stop", as in OpenAI's API.
        self._tells_of_calls = asked.tool_choice.mode != "named"
        self._has_calls = False
        # Tokens counted as reasoning so far, if the answer has any; whether all are counted.
        self._num_reasoning, self._is_counted = 0, False
        # As reported so far; None where reasoning is not separated from content.
        self.reasoning_tokens = None if style is None else 0

    @property
    def counts(self) -> bool:
        """Whether text must come one token at a time, to count the tokens of reasoning."""
        return self._splitter is not None and not self._is_counted

    @property
    def ends_with_calls(self) -> bool:
        """Whether "stop" becomes "tool_calls": there were calls, and not just the named one."""
        return self._has_calls and self._tells_of_calls

    def read(self, texts: Sequence[str], token_ids: Sequence[int], *, is_last: bool) -> list[Piece]:
        """The pieces that are certain by now, given these texts and their tokens; with `is_last`
        also what was held back.
        """
        pieces: list[Piece] = []
        for place, text in enumerate(texts):
            if text:
                pieces += self._feed(text)
            if self.counts and place < len(token_ids):
                self._count(token_ids[place])
        if is_last:
            pieces += self._flush()
        if self._splitter is None:
            return pieces
        if self.counts:
            # A stop token at the answer's end has no text.
            self._num_reasoning += max(0, len(token_ids) - len(texts))
        # 0 until reasoning's mark was read, which the search for stop strings may delay.
        self.reasoning_tokens = self._num_reasoning if self._splitter.has_reasoning else 0
        if self._shows_reasoning:
            return pieces
        return [piece for piece in pieces if piece.kind is not PieceKind.REASONING]

    def _count(self, token_id: int) -> None:
        assert self._splitter is not None
        self._num_reasoning += 1
        self._is_counted = token_id == self._end_id or self._splitter.is_over

    def _feed(self, text: str) -> list[Piece]:
        if self._splitter is not None:
            return self._with_calls(self._splitter.feed(text))
        return self._calls_in(text)

    def _flush(self) -> list[Piece]:
        """The pieces that were held back."""
        pieces = [] if self._splitter is None else self._with_calls(self._splitter.flush())
        if self._tool_parser is not None:
            pieces += self._noted(self._tool_parser.flush())
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
        # There is a splitter or a tool parser, or both.
        assert self._tool_parser is not None
        return self._noted(self._tool_parser.feed(text))

    def _noted(self, pieces: list[Piece]) -> list[Piece]:
        for piece in pieces:
            self._has_calls = self._has_calls or piece.kind is PieceKind.CALL
        return pieces
