"""Converts a Python literal, in text that comes in pieces, to JSON.

Reads strings, numbers, None, True, False, lists, tuples and dictionaries, also JSON's null, true
and false; the JSON is produced as the text comes. Lenient where models are: a string may contain
line breaks, and `\\/` in one is `/`, as in JSON. Work is linear; memory grows by one bracket per
level of nesting.

Knows nothing of calls.
"""

from __future__ import annotations

import json
import re
import unicodedata
from collections.abc import Callable

_SPACES = re.compile(r"[ \t\r\n]*")
_ORDINARY = re.compile(r"""[^"'\\\x00-\x1f]*""")
_WORD = re.compile(r"[\w.+\-]*")
_JSON_NUMBER = re.compile(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?")
_WORDS = {"None": "null", "True": "true", "False": "false"} | {
    word: word for word in ("null", "true", "false")
}
_CLOSERS = {"[": "]", "(": ")", "{": "}"}
_ESCAPES = {
    **{"n": "\n", "t": "\t", "r": "\r", "a": "\a", "b": "\b", "f": "\f", "v": "\v"},
    **{character: character for character in "\"'\\/"},
    "\n": "",
}
_HEX_DIGITS = {"x": 2, "u": 4, "U": 8}
_HEX = frozenset("0123456789abcdefABCDEF")
# A longer word is not a number that any reader would accept.
_MAX_WORD = 400
_MAX_CHARACTER_NAME = 100


class PythonScanner:
    """Scans one value. `pending` is text that is consumed and cannot be converted yet."""

    __slots__ = (
        "_closers",
        "_commas",
        "_in_key",
        "_quote",
        "_raw",
        "_said",
        "_state",
        "complete",
        "failed",
        "pending",
    )

    def __init__(self) -> None:
        # The closing brackets still to come, the next one last.
        self._closers: list[str] = []
        # For each of them: whether a comma goes before the next element.
        self._commas: list[bool] = []
        self._state: Callable[[str, int], int] = self._value
        self._said: list[str] = []
        self._quote = ""
        self._raw = False
        self._in_key = False
        # Consumed, but not converted: the beginning of a word, of quotes or of an escape.
        self.pending = ""
        self.complete = False
        self.failed = False

    def feed(self, text: str, start: int = 0) -> int:
        """Scan from `start`; returns where it stopped: the end, unless complete or failed."""
        at, end = start, len(text)
        while at < end and not (self.complete or self.failed):
            at = self._state(text, at)
        return at

    def take_json(self) -> str:
        """The JSON produced since the last call."""
        said, self._said = self._said, []
        return "".join(said)

    # States: each consumes what it can from `at` on, and returns where it stopped.

    def _fail(self, at: int) -> int:
        self.failed = True
        return at

    def _ended(self) -> None:
        """A value or a key has ended."""
        self.pending = ""
        self._state = self._colon if self._in_key else self._after
        self._in_key = False
        self.complete = not self._closers

    def _spaces(self, text: str, at: int) -> int:
        match = _SPACES.match(text, at)
        return at if match is None else match.end()

    def _element(self, text: str, at: int) -> int:
        """An element or a key, or the closing bracket."""
        at = self._spaces(text, at)
        if at == len(text):
            return at
        if text[at] == self._closers[-1]:
            return self._closed(at)
        self._in_key = self._closers[-1] == "}"
        self._state = self._value
        if self._commas[-1]:
            self._said.append(", ")
        self._commas[-1] = True
        return at

    def _closed(self, at: int) -> int:
        self._said.append("}" if self._closers.pop() == "}" else "]")
        self._commas.pop()
        self._ended()
        return at + 1

    def _value(self, text: str, at: int) -> int:
        at = self._spaces(text, at)
        if at == len(text):
            return at
        first = text[at]
        if first in _CLOSERS and not self._in_key:
            self._closers.append(_CLOSERS[first])
            self._commas.append(False)
            self._said.append("{" if first == "{" else "[")
            self._state = self._element
            return at + 1
        self._state = self._quoted if first in "\"'" else self._word
        return at

    def _colon(self, text: str, at: int) -> int:
        at = self._spaces(text, at)
        if at == len(text):
            return at
        if text[at] != ":":
            return self._fail(at)
        self._said.append(": ")
        self._state = self._value
        return at + 1

    def _after(self, text: str, at: int) -> int:
        at = self._spaces(text, at)
        if at == len(text):
            return at
        if text[at] == self._closers[-1]:
            return self._closed(at)
        if text[at] != ",":
            return self._fail(at)
        self._state = self._element
        return at + 1

    def _word(self, text: str, at: int) -> int:
        """A number or a name, or the prefix of a string."""
        match = _WORD.match(text, at)
        end = at if match is None else match.end()
        end = min(end, at + _MAX_WORD - len(self.pending))
        self.pending += text[at:end]
        if len(self.pending) == _MAX_WORD:
            return self._fail(end)
        if end == len(text):
            return end
        if self.pending in ("r", "R", "u", "U") and text[end] in "\"'":
            self._raw = self.pending in "rR"
            self._state = self._quoted
            return end
        found = _WORDS.get(self.pending) or _number(self.pending)
        if found is None or (self._in_key and self.pending in _WORDS):
            return self._fail(end)
        self._said.append(f'"{found}"' if self._in_key else found)
        self._ended()
        return end

    def _quoted(self, text: str, at: int) -> int:
        """The quotes that begin a string: one or three; two are an empty string."""
        quote = text[at]
        if not self._quote or (quote == self._quote[0] and len(self._quote) < 3):
            self._quote += quote
            self.pending += quote
            if len(self._quote) < 3:
                return at + 1
            at += 1
        self._said.append('"')
        self.pending = ""
        if len(self._quote) == 2:
            self._end_string()
        else:
            self._state = self._string
        return at

    def _end_string(self) -> None:
        self._said.append('"')
        self._quote, self._raw = "", False
        self._ended()

    def _string(self, text: str, at: int) -> int:
        match = _ORDINARY.match(text, at)
        end = at if match is None else match.end()
        if end > at:
            self._flush_quotes()
            self._said.append(text[at:end])
            return end
        character = text[at]
        if character == self._quote[0]:
            self.pending += character
            if self.pending == self._quote:
                self._end_string()
            return at + 1
        self._flush_quotes()
        if character == "\\":
            self.pending = character
            self._state = self._escape
        else:
            self._say(character)
        return at + 1

    def _flush_quotes(self) -> None:
        """One or two quotes within a triple-quoted string are its text."""
        if self.pending:
            self._say(self.pending)
            self.pending = ""

    def _say(self, text: str) -> None:
        # Works on any part of a string: JSON's escapes do not depend on their neighbours.
        self._said.append(json.dumps(text, ensure_ascii=False)[1:-1])

    def _escape(self, text: str, at: int) -> int:
        character = text[at]
        self.pending += character
        if self._raw:
            self._say(self.pending)
        elif character in _HEX_DIGITS:
            self._state = self._hex
            return at + 1
        elif character == "N":
            self._state = self._named
            return at + 1
        elif character in "01234567":
            self._state = self._octal
            return at + 1
        else:
            self._say(_ESCAPES.get(character, self.pending))
        return self._escaped(at + 1)

    def _escaped(self, at: int) -> int:
        self.pending = ""
        self._state = self._string
        return at

    def _hex(self, text: str, at: int) -> int:
        if text[at] not in _HEX:
            return self._fail(at)
        self.pending += text[at]
        if len(self.pending) < 2 + _HEX_DIGITS[self.pending[1]]:
            return at + 1
        code = int(self.pending[2:], 16)
        if code > 0x10FFFF:
            return self._fail(at + 1)
        # Half of a surrogate pair stays an escape in the JSON.
        half = 0xD800 <= code <= 0xDFFF
        self._said.append(f"\\u{code:04x}") if half else self._say(chr(code))
        return self._escaped(at + 1)

    def _octal(self, text: str, at: int) -> int:
        if text[at] in "01234567" and len(self.pending) < 4:
            self.pending += text[at]
            return at + 1
        self._say(chr(int(self.pending[1:], 8)))
        return self._escaped(at)

    def _named(self, text: str, at: int) -> int:
        r"""`\N{..}`: a character by its name."""
        character = text[at]
        opens = len(self.pending) == 2
        if opens != (character == "{") or len(self.pending) > _MAX_CHARACTER_NAME:
            return self._fail(at)
        self.pending += character
        if character != "}":
            return at + 1
        try:
            self._say(unicodedata.lookup(self.pending[3:-1]))
        except KeyError:
            return self._fail(at + 1)
        return self._escaped(at + 1)


def _number(text: str) -> str | None:
    """A Python number as JSON; None if it is not one, or not finite."""
    if _JSON_NUMBER.fullmatch(text):
        return text
    if not text or text[0] not in "0123456789.+-":
        return None
    try:
        return json.dumps(int(text, 0))
    except ValueError:
        pass
    try:
        return json.dumps(float(text), allow_nan=False)
    except ValueError:
        return None
