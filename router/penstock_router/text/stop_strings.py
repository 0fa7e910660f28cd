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
import re
from collections import deque
from collections.abc import Sequence

from penstock_router.text.marks import TOKEN, plain

# The most characters of all stop strings of a request together.
MAX_CHARS = 4096


class _Automaton:
    """Stop strings, matched a character at a time (Aho and Corasick, 1975): however many there are,
    a character costs the same.

    A state stands for the longest suffix of the text so far that begins a stop string; `depths` has
    its length: at once what has to be held back and all that needs to be remembered.
    """

    __slots__ = ("_begins", "_fallbacks", "_steps", "_texts", "_whole", "depths")

    def __init__(self, texts: tuple[str, ...]) -> None:
        self._texts = texts
        # For each state the states after a character, and the one to go on from without such.
        self._steps: list[dict[str, int]] = [{}]
        self._fallbacks = [0]
        self.depths = [0]
        # The first of the stop strings that end in a state; -1: none does.
        self._whole = [-1]
        for number, text in enumerate(texts):
            self._add(number, text)
        self._set_fallbacks()
        # Nearly all text is skipped by it.
        firsts = "".join({re.escape(text[0]) for text in texts})
        self._begins = re.compile(f"[{firsts}]")

    def _add(self, number: int, text: str) -> None:
        state = 0
        for depth, character in enumerate(text, 1):
            known = self._steps[state].get(character)
            if known is None:
                known = self._steps[state][character] = len(self._steps)
                self._steps.append({})
                self._fallbacks.append(0)
                self.depths.append(depth)
                self._whole.append(-1)
            state = known
        if self._whole[state] < 0:
            self._whole[state] = number

    def _set_fallbacks(self) -> None:
        """Breadth first, so that those of shorter beginnings are known."""
        states = deque(self._steps[0].values())
        while states:
            state = states.popleft()
            for character, after in self._steps[state].items():
                fallback = self._fallbacks[after] = self._step(self._fallbacks[state], character)
                inner, own = self._whole[fallback], self._whole[after]
                if inner >= 0 and (own < 0 or inner < own):
                    self._whole[after] = inner
                states.append(after)

    def _step(self, state: int, character: str) -> int:
        while (after := self._steps[state].get(character)) is None:
            if state == 0:
                return 0
            state = self._fallbacks[state]
        return after

    def advance(self, state: int, piece: str, may_stop: bool) -> tuple[int, int, str | None]:
        """Match `piece`; returns the state behind it or, if a stop string completes, the position
        behind that, and the stop string.

        If it must not stop, matching goes on behind each place where a string completes.
        """
        position, end = 0, len(piece)
        while position < end:
            if state == 0:
                begun = self._begins.search(piece, position)
                if begun is None:
                    break
                position = begun.start()
            state = self._step(state, piece[position])
            position += 1
            if self._whole[state] >= 0:
                if may_stop:
                    return state, position, self._texts[self._whole[state]]
                while state and not self._steps[state]:
                    state = self._fallbacks[state]
        return state, end, None


# Choices of one request have the same stop strings.
@functools.lru_cache(256)
def compile_stops(stops: tuple[str, ...]) -> _Automaton:
    """The automaton of these stop strings, made in some 0.7 us a character."""
    return _Automaton(stops)


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

    __slots__ = ("_automaton", "_held", "_include", "_state", "active", "stopped_by")

    def __init__(self, stops: Sequence[str], *, include_stop: bool = False) -> None:
        # Whether there is anything to look for.
        self.active = bool(stops)
        self._automaton = compile_stops(tuple(stops)) if stops else None
        self._state = 0
        self._include = include_stop
        self._held = ""
        self.stopped_by: str | None = None

    def feed(self, piece: str, may_stop: bool = True) -> str:
        """The text that can be shown now. Once `stopped_by` is set, feed nothing more."""
        if self._automaton is None or not piece:
            return piece
        self._state, end, stop = self._automaton.advance(self._state, plain(piece), may_stop)
        if stop is not None:
            return self._cut(piece, end, stop)
        if self._include:
            return piece
        text = self._held + piece
        keep = _before_last(text, self._automaton.depths[self._state])
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
