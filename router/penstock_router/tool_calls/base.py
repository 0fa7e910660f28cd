"""What a family's way to write calls is, and what the readers of all families share.

A reader takes an answer's text in pieces. It is written as a generator that takes one character
after the other and yields where it needs more, so that cuts cannot change what it sees. What it
has taken is either shown or held. Held text is dropped once it has proved to be the form of a call,
and is content once it has proved to be something else: no text is lost, and nothing raises.

Knows no family, no JSON and no tokens.
"""

from __future__ import annotations

import functools
import re
from abc import ABC, abstractmethod
from collections.abc import Collection, Generator, Sequence
from typing import Protocol, TypeAlias, TypeVar

from penstock_router.fields import JsonObject
from penstock_router.pieces import Piece, PieceKind
from penstock_router.request import Tool
from penstock_router.stop import beginning

T = TypeVar("T")
# What is read, in the end; until then it waits for more text.
Reading: TypeAlias = Generator[None, None, T]

SPACE = " \t\r\n"
_SPACES = re.compile(r"[ \t\r\n]*")
# What a tool may be named, and whatever else models write where a name belongs.
_NAME = re.compile(r"[\w.\-]*")


class ToolParser(Protocol):
    """Reads the calls out of one answer's text."""

    def feed(self, text: str) -> list[Piece]:
        """What of the text so far can be shown now: content, calls, arguments."""

    def flush(self) -> list[Piece]:
        """The text is over: what is left."""


class ToolFormat(Protocol):
    """One family's way to write calls."""

    @property
    def name(self) -> str:
        """What flags call it."""

    @property
    def markers(self) -> tuple[str, ...]:
        """Texts that stay visible where they are special tokens."""

    def is_of(self, template: str) -> bool:
        """Whether a chat template has its model write calls so."""

    def parser(self, names: Collection[str]) -> ToolParser:
        """For an answer to a request whose tools have these names."""

    def calls(self, tools: Sequence[Tool], *, required: bool, parallel: bool) -> JsonObject:
        """The form of answers that keep to it, as the format of a structural tag.

        Required: calls and nothing else, exactly one where not parallel. Otherwise free text, and
        calls whose arguments obey the schema of a tool that is strict.
        """


class Misfit(Exception):
    """What comes next is not what a call goes on with."""


class _TextOver(Exception):
    """Nothing more will come."""


class CallReader(ABC):
    """What readers share: a family's has `_read`, which is begun anew after each time it ends."""

    def __init__(self, names: Collection[str]) -> None:
        self._names = frozenset(names)
        # Text that is not taken yet, from `_at` on: never more than what may begin a marker.
        self._text = ""
        self._at = 0
        self._over = False
        # Taken, and neither shown nor dropped yet.
        self._held: list[str] = []
        # Whether what is held follows a call and is, so far, what may follow one.
        self._fits = False
        self._pieces: list[Piece] = []
        self._calls = 0
        self._reading = self._read_all()

    def feed(self, text: str) -> list[Piece]:
        """What of the text so far can be shown now."""
        self._text = self._text[self._at :] + text
        self._at = 0
        return self._go_on()

    def flush(self) -> list[Piece]:
        """The text is over: what is left."""
        self._over = True
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
        except _TextOver:
            self._take(len(self._text))
            if self._fits:
                self._drop()
            self._give_back()

    @abstractmethod
    def _read(self) -> Reading[None]:
        """Content up to what begins a call, and what follows it."""

    # What is said.

    def _content(self, text: str) -> None:
        if text:
            self._pieces.append(Piece(PieceKind.CONTENT, text))

    def _call(self, name: str, arguments: str = "") -> None:
        """What is held was the beginning of a call, and its arguments if they are known."""
        self._drop()
        self._fits = True
        self._pieces.append(Piece(PieceKind.CALL, name, self._calls))
        if arguments:
            self._pieces.append(Piece(PieceKind.ARGUMENTS, arguments, self._calls))
        self._calls += 1

    def _arguments(self, text: str) -> None:
        """Of the latest call, as they come."""
        if text:
            self._pieces.append(Piece(PieceKind.ARGUMENTS, text, self._calls - 1))

    def _drop(self) -> None:
        """What is held was form and nothing else."""
        self._held = []

    def _give_back(self) -> None:
        """What is held was not the form of a call."""
        self._content("".join(self._held))
        self._held = []

    # What is taken.

    def _more(self) -> Reading[None]:
        """Wait for more text."""
        if self._over:
            raise _TextOver
        yield

    def _take(self, end: int) -> None:
        """Hold what is there up to `end`."""
        if end > self._at:
            self._held.append(self._text[self._at : end])
            self._at = end

    def _peek(self) -> Reading[str]:
        """The next character."""
        while self._at == len(self._text):
            yield from self._more()
        return self._text[self._at]

    def _run(self, pattern: re.Pattern[str]) -> Reading[str]:
        """All that a pattern of single characters, any number of them, goes on with."""
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
        """White space, if any; the character behind it."""
        yield from self._run(_SPACES)
        return self._text[self._at]

    def _name(self) -> Reading[str]:
        """What stands where a function's name belongs."""
        return (yield from self._run(_NAME))

    def _any_of(self, *literals: str) -> Reading[str | None]:
        """The one of them that comes next; None, and nothing is taken, where none does."""
        while True:
            possible = False
            for literal in literals:
                there = self._text[self._at : self._at + len(literal)]
                if there == literal:
                    self._take(self._at + len(literal))
                    return literal
                possible = possible or literal.startswith(there)
            if not possible:
                return None
            yield from self._more()

    def _expect(self, literal: str) -> Reading[None]:
        """Exactly this."""
        if (yield from self._any_of(literal)) is None:
            raise Misfit

    def _until(self, *markers: str) -> Reading[str]:
        """Show content up to a marker, and hold that; which one it was.

        White space before a marker is held with it: it may only set the marker off.
        """
        self._fits = False
        pattern = _one_of(markers)
        while True:
            found = pattern.search(self._text, self._at)
            if found is not None:
                self._show(found.start())
                self._take(found.end())
                return found.group()
            self._show(beginning(self._text, markers, self._at))
            yield from self._more()

    def _show(self, end: int) -> None:
        """Content up to `end`, but for the white space at its end."""
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
        """White space behind a call is of no one."""
        self._drop()
        yield from self._space()
        self._drop()


@functools.lru_cache(64)
def _one_of(markers: tuple[str, ...]) -> re.Pattern[str]:
    return re.compile("|".join([re.escape(marker) for marker in markers]))
