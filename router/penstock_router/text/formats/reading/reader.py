"""The base class of all readers of tool calls.

A reader is a generator that consumes text character by character and yields for more, so that cuts
in the text do not change the result. Consumed text is shown or held. Held text is dropped if it
proves to be syntax of a tool call; otherwise it becomes content. So no text is lost or raises an
error.

Readers name marks as the family writes them. The base class knows which marks count only as tokens
(`Marks`).
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
# A step of a reader: yields while it waits for text, and returns the result.
Reading: TypeAlias = Generator[None, None, T]

SPACE = " \t\r\n"
_SPACES = re.compile(r"[ \t\r\n]*")
# Characters of tools' names, and of texts that models write instead.
_NAME = re.compile(r"[\w.\-/:]*")


class Misfit(Exception):
    """Raised if the next text cannot continue a tool call."""


class TextOver(Exception):
    """Raised at the end of the answer's text."""


class CallParser(ABC):
    """Base of all readers. A family defines `_read`, which runs again when it ends."""

    def __init__(self, tools: Sequence[Tool], marks: Marks = NO_MARKS) -> None:
        self._offered = offered(tools)
        self._tools = self._offered.by_name
        self._marks = marks
        # True after a mark of the format's own: then any name may be a function's.
        self._is_marked = True
        # True if the latest tool call is unfinished.
        self.is_open = False
        self._was_cut = False
        # Text from `_at` on is not consumed yet: at most the possible beginning of a mark.
        self._text = ""
        self._at = 0
        self._over = False
        # Consumed text, neither shown nor dropped yet.
        self._held: list[str] = []
        # True if held text may be syntax between or after tool calls.
        self._fits = False
        self._pieces: list[Piece] = []
        self._calls = 0
        self._reading = self._read_all()

    def feed(self, text: str) -> list[Piece]:
        self._text = self._text[self._at :] + text
        self._at = 0
        return self._go_on()

    def flush(self, *, was_cut: bool = False) -> list[Piece]:
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
        """Read content up to the beginning of a tool call, and the call."""

    # Output.

    def _content(self, text: str) -> None:
        if text:
            self._pieces.append(Piece(PieceKind.CONTENT, plain(text)))

    def _call(self, name: str, arguments: str = "") -> None:
        """Show a tool call's beginning, with its arguments if known; drop its held syntax."""
        self._drop()
        self._fits = True
        self.is_open = not arguments
        self._pieces.append(Piece(PieceKind.CALL, name, self._calls))
        if arguments:
            self._pieces.append(Piece(PieceKind.ARGUMENTS, arguments, self._calls))
        self._calls += 1

    def _arguments(self, text: str) -> None:
        """Show a piece of the latest tool call's arguments."""
        if text:
            self._pieces.append(Piece(PieceKind.ARGUMENTS, plain(text), self._calls - 1))

    def _end_call(self) -> None:
        """End the latest tool call, and drop its held syntax."""
        self._drop()
        self.is_open = False

    def _is_callable(self, name: object) -> bool:
        """Tell whether a call may have this name: after a mark any name, otherwise only a
        tool's.
        """
        return name in self._tools or (self._is_marked and isinstance(name, str) and name != "")

    def _drop(self) -> None:
        """Drop held text, which was a tool call's syntax."""
        self._held = []

    def _give_back(self) -> None:
        """Show held text as content, because it was not a tool call's syntax."""
        self._content("".join(self._held))
        self._held = []

    # Input.

    def _more(self) -> Reading[None]:
        if self._over:
            raise TextOver
        yield

    def _take(self, end: int) -> None:
        """Consume the text up to `end` and hold it."""
        if end > self._at:
            self._held.append(self._text[self._at : end])
            self._at = end

    def _peek(self) -> Reading[str]:
        while self._at == len(self._text):
            yield from self._more()
        return self._text[self._at]

    def _run(self, pattern: re.Pattern[str]) -> Reading[str]:
        """Consume the match of a pattern of the form [..]*, across pieces of text."""
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
        """Consume whitespace; return the next character without consuming it."""
        yield from self._run(_SPACES)
        return self._text[self._at]

    def _name(self) -> Reading[str]:
        """Consume the text at the place of a function's name."""
        return (yield from self._run(_NAME))

    def _any_of(self, *literals: str) -> Reading[str | None]:
        """Consume the first literal that fits the next text; None if none fits."""
        found = yield from self._ahead(*literals)
        if found is not None:
            self._take(self._at + len(self._marks.spelled(found)))
        return found

    def _ahead(self, *literals: str) -> Reading[str | None]:
        """Return the first literal that fits the next text, without consuming it."""
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
        """Consume this literal; raise `Misfit` if other text is next."""
        if (yield from self._any_of(literal)) is None:
            raise Misfit

    def _until(self, *marks: str) -> Reading[str]:
        """Show content up to a mark, hold the mark, and return it.

        Whitespace before the mark is held too: it may only separate the mark from the text.
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
        """Show content up to a mark that begins tool calls; then continue as `_again`, and return
        its result.
        """
        yield from self._until(*marks)
        return (yield from self._again(*marks))

    def _again(self, *marks: str) -> Reading[str]:
        """Consume whitespace and repeated marks; return the next character without consuming it."""
        while True:
            first = yield from self._space()
            if (yield from self._any_of(*marks)) is None:
                return first

    def _show(self, end: int) -> None:
        """Show content up to `end`, but hold the whitespace at its end."""
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
        self._drop()
        yield from self._space()
        self._drop()


@functools.lru_cache(64)
def one_of(marks: tuple[str, ...]) -> re.Pattern[str]:
    return re.compile("|".join([re.escape(mark) for mark in marks]))
