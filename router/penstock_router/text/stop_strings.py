"""Finding stop strings, and beginnings of marks, in text that arrives in pieces.

Text is held back only while it could still become a stop string: exactly the longest suffix that
begins one. The stop that completes first in the text wins; of two that complete on the same
character, the one listed first. Text that must not stop anything yet (`may_stop` False) is shown
in the same way: a stop string that completes within it is ordinary text, and one that begins in it
and completes later counts. What tells tokens of marks apart (`TOKEN`) is no part of what is
searched, and stays in the text that is shown.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

from penstock_router.text.marks import TOKEN, plain


class _Pattern:
    """One stop string, matched a character at a time (Knuth, Morris and Pratt).

    `matched` is the length of the longest suffix of the text so far that begins the stop string:
    at once what has to be held back and all that needs to be remembered.
    """

    __slots__ = ("_fallback", "matched", "text")

    def __init__(self, text: str) -> None:
        self.text = text
        self.matched = 0
        self._fallback = _fallback_table(text)

    def advance(self, piece: str, may_stop: bool) -> int | None:
        """Match `piece`; returns its length up to where the stop string completes, or None.

        If it must not stop, matching goes on behind each place where the string completes.
        """
        text, fallback, matched = self.text, self._fallback, self.matched
        position, end = 0, len(piece)
        while position < end:
            if matched == 0:
                # Nearly all text is skipped here, at the speed of `find`.
                position = piece.find(text[0], position)
                if position < 0:
                    break
            while matched and piece[position] != text[matched]:
                matched = fallback[matched]
            if piece[position] == text[matched]:
                matched += 1
            position += 1
            if matched == len(text):
                if may_stop:
                    self.matched = 0
                    return position
                matched = fallback[matched]
        self.matched = matched
        return None


# Choices of one request have the same stop strings.
@functools.lru_cache(256)
def _fallback_table(text: str) -> list[int]:
    """For each length of a match: the next shorter beginning of `text` that also ends it."""
    table = [0] * (len(text) + 1)
    length = 0
    for position in range(1, len(text)):
        while length and text[position] != text[length]:
            length = table[length]
        if text[position] == text[length]:
            length += 1
        table[position + 1] = length
    return table


def beginning(text: str, marks: Sequence[str], start: int = 0) -> int:
    """The position of the longest suffix of `text` that begins one of the marks; its length if none
    does. No mark may be in `text` as a whole; the search begins at `start`.
    """
    found = len(text)
    for mark in marks:
        position = text.find(mark[0], max(start, len(text) - len(mark) + 1))
        while 0 <= position < found:
            if mark.startswith(text[position:]):
                found = position
            position = text.find(mark[0], position + 1)
    return found


class StopMatcher:
    """Cuts one choice's text at the first stop string."""

    __slots__ = ("_held", "_include", "_patterns", "active", "stopped_by")

    def __init__(self, stops: Sequence[str], *, include_stop: bool = False) -> None:
        self._patterns = [_Pattern(stop) for stop in stops]
        self._include = include_stop
        self._held = ""
        # Whether there is anything to look for.
        self.active = bool(stops)
        self.stopped_by: str | None = None

    def feed(self, piece: str, may_stop: bool = True) -> str:
        """The text that can be shown now. Once `stopped_by` is set, feed nothing more."""
        if not self._patterns or not piece:
            return piece
        found: tuple[int, str] | None = None
        searched = plain(piece)
        for pattern in self._patterns:
            end = pattern.advance(searched, may_stop)
            if end is not None and (found is None or end < found[0]):
                found = (end, pattern.text)
        if found is not None:
            return self._cut(piece, *found)
        if self._include:
            return piece
        text = self._held + piece
        keep = _before_last(text, max([pattern.matched for pattern in self._patterns]))
        self._held = text[keep:]
        return text[:keep]

    def _cut(self, piece: str, end: int, stop: str) -> str:
        self.stopped_by = stop
        text = self._held + piece[: _before_last(piece, len(plain(piece)) - end)]
        self._held = ""
        return text if self._include else text[: _before_last(text, len(stop))]

    def flush(self) -> str:
        """The text is over: what was held back is ordinary text after all."""
        held, self._held = self._held, ""
        return held


def _before_last(text: str, count: int) -> int:
    """The position before the last characters, and before what tells the first of them apart."""
    at = len(text) - count
    if TOKEN not in text:
        return at
    while missing := count - len(plain(text[at:])):
        at -= missing
    return at - text.endswith(TOKEN, 0, at)
