"""The base class of readers of answers that are several messages, each with a header.

A header says what its message is; behind a mark of its own the text begins, up to a mark of the
end. Where marks are plain text, one within a text counts only if the rest of a header, or nothing,
stands behind it. Where there is no header, what follows is content.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from penstock_router.request import Tool
from penstock_router.text.formats.channel_formats.channel_reader import ChannelReader
from penstock_router.text.formats.reading.reader import Misfit, Reading
from penstock_router.text.marks import NO_MARKS, Marks


@dataclass(slots=True)
class Header:
    """The facts known of a message."""

    channel: str = ""
    recipient: str = ""
    # What its text is, as it says: "json", "code".
    kind: str = ""
    # Whether a mark of a header was read.
    is_marked: bool = False
    num_words: int = 0


class MessageReader(ChannelReader):
    """Reads one message after the other."""

    # The marks that begin a message, and those that end one.
    _openers: tuple[str, ...] = ()
    _closers: tuple[str, ...] = ()
    # Other marks of headers and calls: within a text they mean nothing.
    _others: tuple[str, ...] = ()
    # How a message begins whose first mark is missing.
    _unmarked: tuple[str, ...] = ()

    def __init__(self, tools: Sequence[Tool], marks: Marks = NO_MARKS) -> None:
        super().__init__(tools, marks)
        # The header of the next message, if it was read already.
        self._next: Header | None = None
        # Whether a message has come to its end.
        self._has_ended = False

    def _read(self) -> Reading[None]:
        header, self._next = self._next, None
        if header is None:
            header = yield from self._first_header()
        yield from self._message(header)

    @abstractmethod
    def _header(self, header: Header, *, is_strict: bool) -> Reading[None]:
        """Read a header; raises `Misfit` if there is none. Strict: each part of it must be there,
        and what was read stays held until all of it was.
        """

    @abstractmethod
    def _message(self, header: Header) -> Reading[None]:
        """Read a message's text to its end. If there was no header, text is held."""

    def _first_header(self) -> Reading[Header]:
        """Read the header at the beginning of an answer or behind a message."""
        # White space behind a message is no text.
        self._fits = self._has_ended
        self.in_reasoning = False
        header = Header()
        try:
            yield from self._space()
            while self._has_ended and (yield from self._any_of(*self._closers)) is not None:
                self._drop()
                yield from self._space()
            yield from self._header(header, is_strict=False)
        except Misfit:
            return Header()
        return header

    def _text_message(self, *, is_reasoning: bool) -> Reading[None]:
        """A message that is nothing but text."""
        self._open(is_reasoning=is_reasoning)
        self._give_back()
        yield from self._body(self._content)
        self._drop()

    def _body(self, show: Callable[[str], None], *also: str) -> Reading[str]:
        """Pass text on up to the message's end, or up to one of the marks `also`, which is held and
        returned; "" at the end.
        """
        marks = (*also, *self._openers, *self._closers, *self._others)
        while True:
            mark = yield from self._text_until(*marks, show=show)
            if mark in also:
                return mark
            if (yield from self._is_over(mark)):
                self._has_ended = True
                return ""
            text, self._held = "".join(self._held), []
            show(text)

    def _is_over(self, mark: str) -> Reading[bool]:
        """Tell whether a message ends with this mark, which is held."""
        if mark in self._closers:
            return self._is_token(mark) or (yield from self._is_closed())
        if mark not in self._openers:
            return False
        # It is left to the next message.
        self._at -= len(self._held.pop())
        if self._is_token(mark):
            return True
        header, num_held = Header(), len(self._held)
        try:
            yield from self._header(header, is_strict=True)
        except Misfit:
            if len(self._held) == num_held:
                # No header begins so: the mark is text.
                yield from self._any_of(mark)
            return False
        self._next = header
        return True

    def _is_closed(self) -> Reading[bool]:
        """Tell whether a message, or nothing, follows a mark of the end that is plain text."""
        was_reasoning, self.in_reasoning = self.in_reasoning, False
        self._fits = True
        yield from self._space()
        found = yield from self._ahead(*self._openers, *self._closers, *self._unmarked)
        self.in_reasoning = was_reasoning
        self._fits = found is not None
        return self._fits
