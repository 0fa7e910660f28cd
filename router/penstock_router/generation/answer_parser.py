"""Splits the text of one answer into pieces, and counts the tokens of its reasoning."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from penstock_router.generation.job import Job
from penstock_router.request import ChatRequest
from penstock_router.text.answer_constraint import tools_of
from penstock_router.text.answer_pieces import Piece, PieceKind
from penstock_router.text.answer_reader import make_reader
from penstock_router.text.formats.channels import ChannelFormat, ChannelParser
from penstock_router.text.marks import TOKEN, plain
from penstock_router.text.model_conventions import Conventions


def choose_conventions(job: Job) -> Conventions:
    """The conventions by which this job's answers are parsed: its model's, without tool calls if
    the request has no tools.
    """
    asked, conventions = job.options, job.model.text.conventions
    if not isinstance(asked, ChatRequest):
        return Conventions()
    if tools_of(asked) or isinstance(conventions.tool_format, ChannelFormat):
        return conventions
    return dataclasses.replace(conventions, tool_format=None)


def make_parser(job: Job) -> AnswerParser | None:
    """A parser for one of the job's answers; None where answers are plain text only."""
    conventions = choose_conventions(job)
    return None if conventions == Conventions() else AnswerParser(job, conventions)


class AnswerParser:
    """Tells the text of one answer into pieces, and counts the tokens of its reasoning.

    They are those up to the mark that ends reasoning: up to its own token or, where it has none, up
    to the token with which it was read. In channels, they are those of every channel of reasoning.
    """

    def __init__(self, job: Job, conventions: Conventions) -> None:
        asked, tokenizer = job.options, job.model.tokenizer
        assert isinstance(asked, ChatRequest)
        style, tool_format = conventions.reasoning, conventions.tool_format
        texts = () if style is None else style.texts
        texts += () if tool_format is None else tool_format.marks
        # Which marks are tokens; and special tokens that are read here, and so must not be skipped.
        self.marks = tokenizer.marks_among(texts)
        self.shown_ids = tokenizer.special_ids_of(texts)
        begun = job.prepared.reasoning_begun
        tools = tools_of(asked)
        # The reader where an answer is divided into channels: reasoning may come again.
        self._channels: ChannelParser | None = None
        if isinstance(tool_format, ChannelFormat):
            self._channels = tool_format.channels(tools, self.marks, begun=begun)
        self._reader = self._channels or make_reader(conventions, tools, self.marks, begun=begun)
        self._end_id = None if style is None else tokenizer.token_id(style.end)
        self._shows_reasoning = asked.include_reasoning
        # With a named function as tool_choice, the finish reason stays "stop", as in OpenAI's API.
        self._tells_of_calls = asked.tool_choice.mode != "named"
        self._has_calls = False
        self._in_reasoning = begun
        # Tokens counted as reasoning so far, if the answer has any; whether all are counted.
        self._num_reasoning, self._is_counted = 0, style is None
        # As reported so far; None where reasoning is not separated from content.
        self.reasoning_tokens = None if style is None else 0

    @property
    def counts(self) -> bool:
        """True if text must come one token at a time, to count the tokens of reasoning."""
        return not self._is_counted

    def ends_with_calls(self, *, was_cut: bool) -> bool:
        """True if "stop" becomes "tool_calls": there were calls, not just the named one, and the
        answer was not cut off within the last.
        """
        is_whole = not (was_cut and self._reader.is_open)
        return self._has_calls and self._tells_of_calls and is_whole

    def read(
        self,
        texts: Sequence[str],
        token_ids: Sequence[int],
        *,
        is_last: bool,
        was_cut: bool = False,
    ) -> list[Piece]:
        """The pieces that are certain by now, given these texts and their tokens; with `is_last`
        also what was held back.
        """
        pieces: list[Piece] = []
        for place, text in enumerate(texts):
            if text:
                pieces += self._reader.feed(text)
            if not self._is_counted and place < len(token_ids):
                self._count(token_ids[place])
        if is_last:
            pieces += self._reader.flush(was_cut=was_cut)
        for piece in pieces:
            if TOKEN in piece.text:
                piece.text = plain(piece.text)
            if piece.kind is PieceKind.CALL:
                self._has_calls = True
        if self.reasoning_tokens is None:
            return pieces
        if not self._is_counted and (self._channels is None or self._in_reasoning):
            # A stop token at the answer's end has no text.
            self._num_reasoning += max(0, len(token_ids) - len(texts))
        # 0 until reasoning's mark was read, which the search for stop strings may delay.
        self.reasoning_tokens = self._num_reasoning if self._reader.has_reasoning else 0
        if self._shows_reasoning:
            return pieces
        return [piece for piece in pieces if piece.kind is not PieceKind.REASONING]

    def _count(self, token_id: int) -> None:
        if self._channels is None:
            self._num_reasoning += 1
            self._is_counted = token_id == self._end_id or self._reader.is_over
            return
        # The token with which a channel opens is none of it, the one with which it ends is.
        self._num_reasoning += self._in_reasoning
        self._in_reasoning = self._channels.in_reasoning
