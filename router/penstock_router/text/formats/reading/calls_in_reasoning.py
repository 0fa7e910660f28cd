"""Finds tool calls in reasoning that never ends.

A call counts if it begins with the format's own unquoted mark, is closed, names a function of the
request and has the required arguments. So text from a mark on is held until the reasoning ends, or
until the text proves not to be a call.
"""

from __future__ import annotations

import json
from collections.abc import Sequence

from penstock_router.request import Tool
from penstock_router.text.answer_pieces import Piece, PieceKind
from penstock_router.text.formats.base import CallFormat, ToolParser
from penstock_router.text.formats.reading.offered_tools import OfferedTools
from penstock_router.text.formats.reading.reader import one_of
from penstock_router.text.marks import Marks
from penstock_router.text.stop_strings import beginning

_QUOTES = "`'\"“‘«"
_FENCE = "```"
_MAX_LINE, _PART = 400, 100


class CallsInReasoning:
    def __init__(self, tool_format: CallFormat, tools: Sequence[Tool], marks: Marks) -> None:
        self._format, self._tools, self._marks = tool_format, OfferedTools(tools), marks
        self._begins = tuple(map(marks.spelled, tool_format.begins()))
        self._required = {tool.name: _required(tool) for tool in tools}
        # Text not searched yet: whitespace, and the possible beginning of a mark.
        self._rest = ""
        # The shown part of the current line.
        self._line = ""
        self._is_fenced = False
        # Text held since a mark, and its reader and pieces. `_is_within_line` is true if text
        # precedes the mark in its line.
        self._held: list[str] = []
        self._trial: ToolParser | None = None
        self._pieces: list[Piece] = []
        self._is_within_line = False

    def feed(self, text: str) -> str:
        """Read text, and return the text that is surely reasoning."""
        if self._trial is None and not self._rest and not self._may_begin(text):
            self._note(text)
            return text
        shown: list[str] = []
        text, self._rest = self._rest + text, ""
        while text:
            text = self._look(text, shown) if self._trial is None else self._try(text, shown)
        return "".join(shown)

    def end(self) -> str:
        """End the reasoning, and return its held text."""
        held = "".join(self._held) + self._rest
        self._drop()
        self._rest = ""
        return held

    def flush(self, *, was_cut: bool) -> tuple[str, list[Piece]]:
        """End an answer within reasoning; return the rest of the reasoning, and the calls
        after it.
        """
        if self._trial is not None:
            self._pieces += self._trial.flush(was_cut=was_cut)
            if not self._trial.is_open and self._are_calls():
                return "", self._pieces
        return self.end(), []

    def _may_begin(self, text: str) -> bool:
        return any(begin[0] in text for begin in self._begins) or text != text.rstrip()

    def _look(self, text: str, shown: list[str]) -> str:
        """Show the text before a mark; return the text after it, or "" if there is no mark."""
        found = one_of(self._begins).search(text)
        end = beginning(text, self._begins) if found is None else found.start()
        sure = len(text[:end].rstrip())
        self._note(text[:sure])
        shown.append(text[:sure])
        if found is None:
            self._rest = text[sure:]
            return ""
        space, mark = text[sure:end], found.group()
        self._note(space)
        if self._is_quoted():
            shown.append(space + mark)
            self._note(mark)
            return text[found.end() :]
        self._is_within_line = bool(self._line.strip())
        self._trial = self._format.parser(self._tools, self._marks)
        self._held = [space, mark]
        self._pieces = self._trial.feed(mark)
        return text[found.end() :]

    def _try(self, text: str, shown: list[str]) -> str:
        """Read more of a possible tool call. If it proves to be none, show its text, and return the
        rest.
        """
        assert self._trial is not None
        pieces = self._trial.feed(text)
        if not self._are_no_call(pieces, self._pieces):
            self._held.append(text)
            self._pieces += pieces
            return ""
        end = self._end_of_trial(text)
        held = "".join(self._held) + text[:end]
        self._drop()
        self._note(held)
        shown.append(held)
        return text[end:]

    def _end_of_trial(self, text: str) -> int:
        """Count the characters of `text` up to the proof that the held text is not a tool call. The
        result must not depend on how the text is cut.
        """
        trial = self._format.parser(self._tools, self._marks)
        pieces = trial.feed("".join(self._held).lstrip())
        for at, character in enumerate(text, 1):
            gained = trial.feed(character)
            if self._are_no_call(gained, pieces):
                return at
            pieces += gained
        return len(text)

    def _are_no_call(self, pieces: Sequence[Piece], before: Sequence[Piece]) -> bool:
        """Tell whether `pieces`, which follow `before`, prove that the held text is not a tool
        call.
        """
        has_call = any(piece.kind is PieceKind.CALL for piece in before)
        for piece in pieces:
            if piece.kind is PieceKind.CALL:
                has_call = True
                if piece.text not in self._required:
                    return True
            # If the call began a line, text may follow it.
            is_text = piece.kind is PieceKind.CONTENT and piece.text.strip()
            if is_text and (not has_call or self._is_within_line):
                return True
        return False

    def _are_calls(self) -> bool:
        """Tell whether all held tool calls have their required arguments."""
        names = [piece.text for piece in self._pieces if piece.kind is PieceKind.CALL]
        arguments: list[list[str]] = [[] for _ in names]
        for piece in self._pieces:
            if piece.kind is PieceKind.ARGUMENTS:
                arguments[piece.call].append(piece.text)
        return bool(names) and all(map(self._is_whole, names, map("".join, arguments)))

    def _is_whole(self, name: str, arguments: str) -> bool:
        try:
            given = json.loads(arguments)
        except ValueError:
            return False
        required = self._required.get(name)
        return isinstance(given, dict) and required is not None and required <= given.keys()

    def _is_quoted(self) -> bool:
        return self._is_fenced or self._line.rstrip()[-1:] in set(_QUOTES)

    def _note(self, text: str) -> None:
        """Keep track of lines and code fences in the shown text."""
        before, newline, line = text.rpartition("\n")
        if not newline:
            line = self._line + text
            # Only a line's beginning and end matter.
            self._line = line if len(line) < _MAX_LINE else line[:_PART] + line[-_PART:]
            return
        for each in (self._line + before).split("\n"):
            self._is_fenced ^= each.lstrip().startswith(_FENCE)
        self._line = line

    def _drop(self) -> None:
        self._held, self._trial, self._pieces = [], None, []


def _required(tool: Tool) -> set[str]:
    required = (tool.parameters or {}).get("required")
    return (
        {name for name in required if isinstance(name, str)}
        if isinstance(required, list)
        else set()
    )
