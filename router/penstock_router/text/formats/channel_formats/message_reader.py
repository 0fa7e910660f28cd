"""The base class of readers of answers that consist of messages with headers.

A message's text is between a mark after its header and an end mark. If marks are plain text, a mark
within a text counts only if the rest of a header or the answer's end follows. Text without a header
is content.
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
    channel: str = ""
    recipient: str = ""
    # The type of the message's text, such as "json" or "code".
    kind: str = ""
    # True if a mark of a header was read.
    is_marked: bool = False
    num_words: int = 0


class MessageReader(ChannelReader):
    # `_openers` are marks that begin a message, `_closers` marks that end one.
    _openers: tuple[str, ...] = ()
    _closers: tuple[str, ...] = ()
    # Other marks of headers and tool calls, which have no meaning within a text.
    _others: tuple[str, ...] = ()
    # Beginnings of a message that lacks its first mark.
    _unmarked: tuple[str, ...] = ()

    def __init__(self, tools: Sequence[Tool], marks: Marks = NO_MARKS) -> None:
        super().__init__(tools, marks)
        # The next message's header, if it was already read.
        self._next: Header | None = None
        self._has_ended = False

    def _read(self) -> Reading[None]:
        header, self._next = self._next, None
        if header is None:
            header = yield from self._first_header()
        yield from self._message(header)

    @abstractmethod
    def _header(self, header: Header, *, is_strict: bool) -> Reading[None]:
        """Read a header; raise `Misfit` if there is none. If strict, no part may be missing, and
        the whole header is held until its end.
        """

    @abstractmethod
    def _message(self, header: Header) -> Reading[None]:
        """Read a message's text to its end. Without a header, it includes the text held so far."""

    def _first_header(self) -> Reading[Header]:
        # Whitespace after a message is not part of any text.
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
        self._open(is_reasoning=is_reasoning)
        self._give_back()
        yield from self._body(self._content)
        self._drop()

    def _body(self, show: Callable[[str], None], *also: str) -> Reading[str]:
        """Pass text to `show` until the message ends or a mark of `also` comes; return that mark,
        which stays held, or "".
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
        """Tell whether this mark, which was just read, ends a message."""
        if mark in self._closers:
            return self._is_token(mark) or (yield from self._is_closed())
        if mark not in self._openers:
            return False
        # Leave the mark to the next message.
        self._at -= len(self._held.pop())
        if self._is_token(mark):
            return True
        header, num_held = Header(), len(self._held)
        try:
            yield from self._header(header, is_strict=True)
        except Misfit:
            if len(self._held) == num_held:
                # No header begins here: the mark is text.
                yield from self._any_of(mark)
            return False
        self._next = header
        return True

    def _is_closed(self) -> Reading[bool]:
        """Tell whether a message or the answer's end follows a plain-text end mark."""
        was_reasoning, self.in_reasoning = self.in_reasoning, False
        self._fits = True
        yield from self._space()
        found = yield from self._ahead(*self._openers, *self._closers, *self._unmarked)
        self.in_reasoning = was_reasoning
        self._fits = found is not None
        return self._fits
