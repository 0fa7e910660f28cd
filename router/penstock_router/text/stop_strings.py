"""Finds stop strings, and beginnings of marks, in text that arrives in pieces.

Only the longest suffix that begins a stop string is held back. The stop string that completes first
counts; if two complete on the same character, the one listed first. While `may_stop` is False, a
stop string that completes is text; one that begins then and completes later counts. The `TOKEN`
before a mark is not searched, and stays in the shown text.
"""

from __future__ import annotations

import functools
import re
from collections import deque
from collections.abc import Sequence

from penstock_router.text.marks import TOKEN, plain

# Maximum characters of all stop strings of a request together.
MAX_CHARS = 4096


class _Automaton:
    """Matches stop strings character by character, at a cost that does not depend on their number
    (Aho and Corasick, 1975).

    A state is the longest suffix of the text so far that begins a stop string. `depths` has the
    suffix's length: the characters to hold back.
    """

    __slots__ = ("_begins", "_fallbacks", "_steps", "_texts", "_whole", "depths")

    def __init__(self, texts: tuple[str, ...]) -> None:
        self._texts = texts
        # For each state: the next states by character, and the fallback state.
        self._steps: list[dict[str, int]] = [{}]
        self._fallbacks = [0]
        self.depths = [0]
        # For each state: the first listed stop string that ends in it, or -1.
        self._whole = [-1]
        for number, text in enumerate(texts):
            self._add(number, text)
        self._set_fallbacks()
        # This pattern skips nearly all text.
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
        """Set fallbacks breadth first, so that the fallbacks of shorter beginnings are known."""
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
        """Match `piece`, up to the end of a stop string if `may_stop`. Return the state, the
        position, and the stop string or None.
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


# All choices of a request have the same stop strings.
@functools.lru_cache(256)
def compile_stops(stops: tuple[str, ...]) -> _Automaton:
    """Build the automaton, in about 0.7 us per character."""
    return _Automaton(stops)


def beginning(text: str, marks: Sequence[str], start: int = 0) -> int:
    """Find the longest suffix of `text` that begins a mark; return its index, or else the text's
    length. The search begins at `start`; no whole mark may be in `text`.
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
        self.active = bool(stops)
        self._automaton = compile_stops(tuple(stops)) if stops else None
        self._state = 0
        self._include = include_stop
        self._held = ""
        self.stopped_by: str | None = None

    def feed(self, piece: str, may_stop: bool = True) -> str:
        """Return the text that can be shown now. Once `stopped_by` is set, feed nothing more."""
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
        """End the text; held text is ordinary text."""
        held, self._held = self._held, ""
        return held


def _before_last(text: str, count: int) -> int:
    """Return the position before the last `count` characters and a `TOKEN` in front of them."""
    at = len(text) - count
    if TOKEN not in text:
        return at
    while missing := count - len(plain(text[at:])):
        at -= missing
    return at - text.endswith(TOKEN, 0, at)
