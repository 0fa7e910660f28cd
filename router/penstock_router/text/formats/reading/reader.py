"""The base class of all readers of calls.

A reader takes an answer's text in pieces. It is a generator that consumes one character after the
other and yields when it needs more, so that cuts in the text cannot change the result. Text that it
has consumed is either shown or held. Held text is dropped once it proves to be syntax of a call,
and becomes content once it proves to be anything else: no text is lost, and nothing raises.

Readers name marks as the family writes them; whether a mark counts only as a token of the model's
tokenizer is the base class's business (`Marks`).
"""

from __future__ import annotations

import functools
import re
from abc import ABC, abstractmethod
from collections.abc import Generator, Sequence
from typing import TypeAlias, TypeVar

from penstock_router.request import Tool
from penstock_router.text.answer_pieces import Piece, PieceKind
from penstock_router.text.formats.reading.offered_tools import offered
from penstock_router.text.marks import NO_MARKS, Marks, plain
from penstock_router.text.stop_strings import beginning

T = TypeVar("T")
# A step of a reader: it yields while it waits for more text, and returns what it has read.
Reading: TypeAlias = Generator[None, None, T]

SPACE = " \t\r\n"
_SPACES = re.compile(r"[ \t\r\n]*")
# The characters of tools' names, and of whatever else models write in place of a name.
_NAME = re.compile(r"[\w.\-/:]*")


class Misfit(Exception):
    """The next text cannot continue a call."""


class TextOver(Exception):
    """The answer's text has ended."""


class CallParser(ABC):
    """Base of all readers. A family's reader has `_read`, which is started again when it ends."""

    def __init__(self, tools: Sequence[Tool], marks: Marks = NO_MARKS) -> None:
        self._offered = offered(tools)
        self._tools = self._offered.by_name
        self._marks = marks
        # Whether a mark of the format's own stands before what is read: then any name is a call's.
        self._is_marked = True
        # Whether the latest call has not come to its end, and whether the text was cut off.
        self.is_open = False
        self._was_cut = False
        # Text from `_at` on is not consumed yet: never more than what may begin a mark.
        self._text = ""
        self._at = 0
        self._over = False
        # Consumed, and neither shown nor dropped yet.
        self._held: list[str] = []
        # Whether the held text follows a call and may, so far, be syntax between or after calls.
        self._fits = False
        self._pieces: list[Piece] = []
        self._calls = 0
        self._reading = self._read_all()

    def feed(self, text: str) -> list[Piece]:
        """The pieces that can be shown now."""
        self._text = self._text[self._at :] + text
        self._at = 0
        return self._go_on()

    def flush(self, *, was_cut: bool = False) -> list[Piece]:
        """The text has ended, by the model or cut off: the remaining pieces."""
        self._over = True
        self._was_cut = was_cut
        return self._go_on()

    def _go_on(self) -> list[Piece]:
        next(self._reading, None)
        pieces, self._pieces = self._pieces, []
        return pieces

    def _read_all(self) -> Reading[None]:
        try:
            while True:
                try:
                    yield from self._read()
                except Misfit:
                    self._give_back()
        except TextOver:
            self._take(len(self._text))
            if self._fits:
                self._drop()
            self._give_back()

    @abstractmethod
    def _read(self) -> Reading[None]:
        """Read content up to the beginning of a call, and the call."""

    # Output.

    def _content(self, text: str) -> None:
        if text:
            self._pieces.append(Piece(PieceKind.CONTENT, plain(text)))

    def _call(self, name: str, arguments: str = "") -> None:
        """Show a call's beginning, and its arguments if known; the held text was its syntax."""
        self._drop()
        self._fits = True
        self.is_open = not arguments
        self._pieces.append(Piece(PieceKind.CALL, name, self._calls))
        if arguments:
            self._pieces.append(Piece(PieceKind.ARGUMENTS, arguments, self._calls))
        self._calls += 1

    def _arguments(self, text: str) -> None:
        """Show a piece of the latest call's arguments."""
        if text:
            self._pieces.append(Piece(PieceKind.ARGUMENTS, plain(text), self._calls - 1))

    def _end_call(self) -> None:
        """The latest call has come to its end; the held text was its syntax."""
        self._drop()
        self.is_open = False

    def _is_callable(self, name: object) -> bool:
        """Whether a call may have this name: any behind a mark, else one of the request's tools."""
        return name in self._tools or (self._is_marked and isinstance(name, str) and name != "")

    def _drop(self) -> None:
        """Drop the held text: it was syntax of a call."""
        self._held = []

    def _give_back(self) -> None:
        """Show the held text as content: it was not syntax of a call."""
        self._content("".join(self._held))
        self._held = []

    # Input.

    def _more(self) -> Reading[None]:
        """Wait for more text."""
        if self._over:
            raise TextOver
        yield

    def _take(self, end: int) -> None:
        """Consume the text up to `end` and hold it."""
        if end > self._at:
            self._held.append(self._text[self._at : end])
            self._at = end

    def _peek(self) -> Reading[str]:
        """The next character, not consumed."""
        while self._at == len(self._text):
            yield from self._more()
        return self._text[self._at]

    def _run(self, pattern: re.Pattern[str]) -> Reading[str]:
        """Consume what matches a pattern of the form [..]*, across pieces of text."""
        parts = []
        while True:
            match = pattern.match(self._text, self._at)
            if match is not None:
                parts.append(match.group())
                self._take(match.end())
            if self._at < len(self._text):
                return "".join(parts)
            yield from self._more()

    def _space(self) -> Reading[str]:
        """Consume white space, if any; returns the next character, not consumed."""
        yield from self._run(_SPACES)
        return self._text[self._at]

    def _name(self) -> Reading[str]:
        """Consume what is in the place of a function's name."""
        return (yield from self._run(_NAME))

    def _any_of(self, *literals: str) -> Reading[str | None]:
        """Consume the literal that comes next, the first of those that may come; None, and nothing
        is consumed, if none does.
        """
        found = yield from self._ahead(*literals)
        if found is not None:
            self._take(self._at + len(self._marks.spelled(found)))
        return found

    def _ahead(self, *literals: str) -> Reading[str | None]:
        """The literal that comes next, the first of those that may come; nothing is consumed."""
        while True:
            possible = False
            for literal in literals:
                spelled = self._marks.spelled(literal)
                there = self._text[self._at : self._at + len(spelled)]
                if there == spelled and not possible:
                    return literal
                possible = possible or spelled.startswith(there)
            if not possible:
                return None
            yield from self._more()

    def _expect(self, literal: str) -> Reading[None]:
        """Consume this literal; raises `Misfit` if something else comes."""
        if (yield from self._any_of(literal)) is None:
            raise Misfit

    def _until(self, *marks: str) -> Reading[str]:
        """Show content up to a mark, and hold the mark; returns which one it was.

        White space before a mark is held with it: it may only separate it from the text.
        """
        self._fits = False
        by_spelling = {self._marks.spelled(mark): mark for mark in marks}
        spelled = tuple(by_spelling)
        pattern = one_of(spelled)
        while True:
            found = pattern.search(self._text, self._at)
            if found is not None:
                self._show(found.start())
                self._take(found.end())
                return by_spelling[found.group()]
            self._show(beginning(self._text, spelled, self._at))
            yield from self._more()

    def _begin(self, *marks: str) -> Reading[str]:
        """Show content up to a mark that begins calls; the same mark again means nothing more.

        Consumes white space behind it; returns the next character, not consumed.
        """
        yield from self._until(*marks)
        return (yield from self._again(*marks))

    def _again(self, *marks: str) -> Reading[str]:
        """Consume white space and the marks once more; returns the next character, not consumed."""
        while True:
            first = yield from self._space()
            if (yield from self._any_of(*marks)) is None:
                return first

    def _show(self, end: int) -> None:
        """Show content up to `end`, but hold the white space at its end."""
        if end == self._at:
            return
        plain = self._text[self._at : end]
        self._at = end
        shown = plain.rstrip(SPACE)
        if shown:
            self._held.append(shown)
            self._give_back()
        if len(shown) < len(plain):
            self._held.append(plain[len(shown) :])

    def _after_call(self) -> Reading[None]:
        """Drop white space after a call: it is no content."""
        self._drop()
        yield from self._space()
        self._drop()


@functools.lru_cache(64)
def one_of(marks: tuple[str, ...]) -> re.Pattern[str]:
    """A pattern of any of these texts."""
    return re.compile("|".join([re.escape(mark) for mark in marks]))
