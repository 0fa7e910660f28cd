"""Scans one JSON value in text that comes in pieces: where it ends, and whether it is valid.

Strict by RFC 8259, and never raises. It consumes exactly the characters of the value: up to its
end, or up to the first that is invalid there, so that where it stops does not depend on how the
text was cut. Work is linear; memory grows by one character per level of nesting.
"""

from __future__ import annotations

import re
from collections.abc import Callable

_SPACES = re.compile(r"[ \t\r\n]*")
_ORDINARY = re.compile(r'[^"\\\x00-\x1f]*')
_DIGITS = frozenset("0123456789")
_HEX = frozenset("0123456789abcdefABCDEF")
_ESCAPED = frozenset('"\\/bfnrt')
_WORDS = {"t": "rue", "f": "alse", "n": "ull"}

# The parts of a number: for each, the characters that may come and the part that they begin.
_SIGN, _ZERO, _WHOLE, _POINT, _FRACTION, _E, _E_SIGN, _EXPONENT = range(8)
_NUMBER: dict[int, dict[str, int]] = {
    _SIGN: {"0": _ZERO} | dict.fromkeys("123456789", _WHOLE),
    _ZERO: {".": _POINT, "e": _E, "E": _E},
    _WHOLE: {".": _POINT, "e": _E, "E": _E} | dict.fromkeys(_DIGITS, _WHOLE),
    _POINT: dict.fromkeys(_DIGITS, _FRACTION),
    _FRACTION: {"e": _E, "E": _E} | dict.fromkeys(_DIGITS, _FRACTION),
    _E: {"+": _E_SIGN, "-": _E_SIGN} | dict.fromkeys(_DIGITS, _EXPONENT),
    _E_SIGN: dict.fromkeys(_DIGITS, _EXPONENT),
    _EXPONENT: dict.fromkeys(_DIGITS, _EXPONENT),
}
_NUMBER_MAY_END = frozenset({_ZERO, _WHOLE, _FRACTION, _EXPONENT})


class JsonScanner:
    """Scans one value; `inside_object`: the rest of an object, after one of its members."""

    __slots__ = ("_closers", "_in_key", "_part", "_rest", "_state", "complete", "failed")

    def __init__(self, *, inside_object: bool = False) -> None:
        # The closing brackets still to come, the next one last.
        self._closers: list[str] = ["}"] if inside_object else []
        self._state: Callable[[str, int], int] = self._after if inside_object else self._value
        self._in_key = False
        # The missing rest of a word; the part of a number, or how many digits an escape lacks.
        self._rest = ""
        self._part = 0
        # A bare number is complete only once another character follows it.
        self.complete = False
        self.failed = False

    def feed(self, text: str, start: int = 0) -> int:
        """Scan from `start`; returns where it stopped: the end, unless complete or failed."""
        at, end = start, len(text)
        while at < end and not (self.complete or self.failed):
            at = self._state(text, at)
        return at

    # States: each consumes what it can from `at` on, and returns where it stopped.

    def _fail(self, at: int) -> int:
        self.failed = True
        return at

    def _ended(self) -> None:
        """A value has ended."""
        self._state = self._after
        self.complete = not self._closers

    def _value(self, text: str, at: int) -> int:
        at = _end(_SPACES, text, at)
        if at == len(text):
            return at
        first = text[at]
        if first == '"':
            self._state = self._string
        elif first == "{":
            self._closers.append("}")
            self._state = self._first_key
        elif first == "[":
            self._closers.append("]")
            self._state = self._first_element
        elif first in _WORDS:
            self._rest = _WORDS[first]
            self._state = self._word
        elif first == "-" or first in _DIGITS:
            self._part = _SIGN if first == "-" else _NUMBER[_SIGN][first]
            self._state = self._number
        else:
            return self._fail(at)
        return at + 1

    def _first_element(self, text: str, at: int) -> int:
        return self._unless_closed(text, at, self._value)

    def _first_key(self, text: str, at: int) -> int:
        return self._unless_closed(text, at, self._key)

    def _unless_closed(self, text: str, at: int, state: Callable[[str, int], int]) -> int:
        at = _end(_SPACES, text, at)
        if at < len(text):
            if text[at] == self._closers[-1]:
                self._closers.pop()
                self._ended()
                return at + 1
            self._state = state
        return at

    def _key(self, text: str, at: int) -> int:
        at = _end(_SPACES, text, at)
        if at == len(text):
            return at
        if text[at] != '"':
            return self._fail(at)
        self._in_key = True
        self._state = self._string
        return at + 1

    def _colon(self, text: str, at: int) -> int:
        at = _end(_SPACES, text, at)
        if at == len(text):
            return at
        if text[at] != ":":
            return self._fail(at)
        self._state = self._value
        return at + 1

    def _after(self, text: str, at: int) -> int:
        at = _end(_SPACES, text, at)
        if at == len(text):
            return at
        if text[at] == ",":
            self._state = self._key if self._closers[-1] == "}" else self._value
        elif text[at] == self._closers[-1]:
            self._closers.pop()
            self._ended()
        else:
            return self._fail(at)
        return at + 1

    def _string(self, text: str, at: int) -> int:
        at = _end(_ORDINARY, text, at)
        if at == len(text):
            return at
        if text[at] == "\\":
            self._state = self._escape
        elif text[at] != '"':
            return self._fail(at)
        elif self._in_key:
            self._in_key = False
            self._state = self._colon
        else:
            self._ended()
        return at + 1

    def _escape(self, text: str, at: int) -> int:
        if text[at] == "u":
            self._part = 4
            self._state = self._hex_digit
        elif text[at] in _ESCAPED:
            self._state = self._string
        else:
            return self._fail(at)
        return at + 1

    def _hex_digit(self, text: str, at: int) -> int:
        if text[at] not in _HEX:
            return self._fail(at)
        self._part -= 1
        if self._part == 0:
            self._state = self._string
        return at + 1

    def _word(self, text: str, at: int) -> int:
        if text[at] != self._rest[0]:
            return self._fail(at)
        self._rest = self._rest[1:]
        if not self._rest:
            self._ended()
        return at + 1

    def _number(self, text: str, at: int) -> int:
        part = _NUMBER[self._part].get(text[at])
        if part is not None:
            self._part = part
            return at + 1
        if self._part not in _NUMBER_MAY_END:
            return self._fail(at)
        # The character belongs to what follows the number.
        self._ended()
        return at


def _end(pattern: re.Pattern[str], text: str, at: int) -> int:
    """The end of the match at `at`, which may be empty."""
    match = pattern.match(text, at)
    return at if match is None else match.end()


def is_object(text: str) -> bool:
    """Whether the text is one JSON object and nothing else but white space."""
    text = text.strip(" \t\r\n")
    scanner = JsonScanner()
    return text.startswith("{") and scanner.feed(text) == len(text) and scanner.complete
