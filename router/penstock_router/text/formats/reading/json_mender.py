"""Reads one JSON value in pieces, and writes it as valid JSON while it arrives.

Valid JSON (RFC 8259) is copied exactly, except escapes of half a character, which many readers
refuse: they become U+FFFD. Models' errors are mended: control characters in strings, trailing and
repeated commas, Python's words, numbers and quotes, escapes that JSON lacks, names without quotes.
The mender stops at the value's end or at the first character that it cannot mend, however the text
is cut. Work is linear. Only a word, a number, an escape or a comma is held back.
"""

from __future__ import annotations

import contextlib
import functools
import json
import re
from collections.abc import Callable

_SPACES = re.compile(r"[ \t\r\n]*")
# Characters that a string may have unescaped, by the string's quote.
_ORDINARY = {'"': re.compile(r'[^"\\\x00-\x1f]*'), "'": re.compile(r"[^'\"\\\x00-\x1f]*")}
_WORD = re.compile(r"[\w.+\-]*", re.ASCII)
_NAME = re.compile(r"[A-Za-z_$][\w$-]*")
_NAME_REST = re.compile(r"[\w$-]*")
_NUMBER = re.compile(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?")
_WORDS = {"None": "null", "True": "true", "False": "false"} | {
    word: word for word in ("null", "true", "false")
}
# The size of an escape, and the replacement of an escape of half a character.
_ESCAPE_SIZE, _LOST = len("\\u0000"), "\\ufffd"
_HIGH, _LOW = range(0xD800, 0xDC00), range(0xDC00, 0xE000)
_HEX = frozenset("0123456789abcdefABCDEF")
_ESCAPED = frozenset('"\\/bfnrt')
# No reader accepts a longer word or number.
_MAX_WORD = 400
# Escapes only quotes, backslashes and control characters, so the surrogate `TOKEN` stays.
_ENCODE = json.JSONEncoder(ensure_ascii=False).encode
_NUMBER_READERS = (functools.partial(int, base=0), functools.partial(int, base=10), float)


class JsonMender:
    """Reads one value; with `inside_object`, the rest of an object after one of its members."""

    __slots__ = ("_closers", "_in_key", "_quote", "_said", "_state", "complete", "failed", "unsaid")

    def __init__(self, *, inside_object: bool = False) -> None:
        # Missing closing brackets, the innermost last.
        self._closers: list[str] = ["}"] if inside_object else []
        self._state: Callable[[str, int], int] = self._after if inside_object else self._value
        self._in_key = False
        # The quote that ends the string; "" outside of one.
        self._quote = ""
        self._said: list[str] = []
        # Text that was read but not written yet: a word, a number, an escape, a comma.
        self.unsaid = ""
        # A bare word or number is complete only when another character follows it.
        self.complete = False
        self.failed = False

    def feed(self, text: str, start: int = 0) -> int:
        """Read from `start`. Return where reading stopped: at the text's end, unless the value is
        complete or invalid.
        """
        at, end = start, len(text)
        while at < end and not (self.complete or self.failed):
            at = self._state(text, at)
        return at

    def take(self) -> str:
        """Return the text written since the last `take`."""
        said = "".join(self._said)
        self._said.clear()
        return said

    @property
    def is_between(self) -> bool:
        """Tell whether only the last bracket is missing."""
        is_whole = self._state in (self._after, self._first_key, self._first_element)
        return is_whole and len(self._closers) == 1

    @property
    def is_in_string(self) -> bool:
        return self._quote != ""

    def close(self) -> None:
        """End the value here, and write the missing rest."""
        missing: dict[Callable[[str, int], int], str] = {
            self._bare_key: f'"{self.unsaid}": null',
            self._colon: ": null",
            self._word: _meaning(self.unsaid) or json.dumps(self.unsaid),
            self._member_value: "null",
        }
        if self._quote:
            self._say(self._begun_escape())
            self._say('": null' if self._in_key else '"')
        else:
            self._say(missing.get(self._state, ""))
        self._say("".join(reversed(self._closers)))
        self._closers, self.unsaid, self._quote, self.complete = [], "", "", True

    def _begun_escape(self) -> str:
        """Return the text of an unfinished escape: its backslash stays, as text."""
        half = _LOST if len(self.unsaid) >= _ESCAPE_SIZE else ""
        begun = self.unsaid[_ESCAPE_SIZE:] if half else self.unsaid
        return half + ("\\" + begun if begun else "")

    # The parser's states. Each consumes text from `at` on, and returns the index where it stopped.

    def _say(self, text: str) -> None:
        self._said.append(text)

    def _fail(self, at: int) -> int:
        self.failed = True
        return at

    def _ended(self) -> None:
        self._state = self._after
        self.complete = not self._closers

    def _skip_spaces(self, text: str, at: int) -> int:
        end = _end(_SPACES, text, at)
        if end > at:
            self._say(text[at:end])
        return end

    def _value(self, text: str, at: int) -> int:
        at = self._skip_spaces(text, at)
        if at == len(text):
            return at
        first = text[at]
        if first in "\"'":
            return self._open_string(first, at)
        if first in "{[":
            self._closers.append("}" if first == "{" else "]")
            self._state = self._first_key if first == "{" else self._first_element
            self._say(first)
            return at + 1
        if _end(_WORD, text, at) == at:
            return self._fail(at)
        self._state = self._word
        return at

    def _member_value(self, text: str, at: int) -> int:
        return self._value(text, at)

    def _open_string(self, quote: str, at: int) -> int:
        self._quote = quote
        self._say('"')
        self._state = self._string
        return at + 1

    def _first_element(self, text: str, at: int) -> int:
        return self._unless_closed(text, at, self._value)

    def _first_key(self, text: str, at: int) -> int:
        return self._unless_closed(text, at, self._key)

    def _unless_closed(self, text: str, at: int, state: Callable[[str, int], int]) -> int:
        """Read the closing bracket, or else what `state` reads. A comma before a bracket is
        dropped.
        """
        end = _end(_SPACES, text, at)
        if end == len(text):
            # The comma before this whitespace may be a trailing one.
            self._hold(text[at:end])
            return end
        pending, self.unsaid = self.unsaid + text[at:end], ""
        if text[end] == self._closers[-1]:
            self._say(pending.replace(",", ""))
            self._close(text[end])
            return end + 1
        if text[end] == "," and pending.startswith(","):
            self.unsaid = pending
            return end + 1
        self._say(pending)
        self._state = state
        return end

    def _hold(self, spaces: str) -> None:
        """Hold whitespace after a comma, or write it at the beginning."""
        if self.unsaid and len(self.unsaid) < _MAX_WORD:
            self.unsaid += spaces
        else:
            self._say(self.unsaid + spaces)
            self.unsaid = ""

    def _close(self, bracket: str) -> None:
        self._say(bracket)
        self._closers.pop()
        self._ended()

    def _key(self, text: str, at: int) -> int:
        if text[at] in "\"'":
            self._in_key = True
            return self._open_string(text[at], at)
        if _NAME.match(text, at) is None:
            return self._fail(at)
        self._state = self._bare_key
        return at

    def _bare_key(self, text: str, at: int) -> int:
        end = _end(_NAME_REST, text, at)
        self.unsaid += text[at:end]
        if len(self.unsaid) > _MAX_WORD:
            return self._fail(end)
        if end == len(text):
            return end
        if text[end] not in ": \t\r\n":
            return self._fail(end)
        self._say(f'"{self.unsaid}"')
        self.unsaid = ""
        self._state = self._colon
        return end

    def _colon(self, text: str, at: int) -> int:
        at = self._skip_spaces(text, at)
        if at == len(text):
            return at
        if text[at] != ":":
            return self._fail(at)
        self._say(":")
        self._state = self._member_value
        return at + 1

    def _after(self, text: str, at: int) -> int:
        at = self._skip_spaces(text, at)
        if at == len(text):
            return at
        if text[at] == ",":
            self.unsaid = ","
            in_object = self._closers[-1] == "}"
            self._state = self._first_key if in_object else self._first_element
            return at + 1
        if text[at] != self._closers[-1]:
            return self._fail(at)
        self._close(text[at])
        return at + 1

    def _string(self, text: str, at: int) -> int:
        end = _end(_ORDINARY[self._quote], text, at)
        self._say(text[at:end])
        if end == len(text):
            return end
        character = text[end]
        if character == "\\":
            self.unsaid = character
            self._state = self._escape
        elif character != self._quote:
            # A control character, or a double quote within single quotes.
            self._say(_ENCODE(character)[1:-1])
        else:
            self._say('"')
            self._quote = ""
            if self._in_key:
                self._in_key = False
                self._state = self._colon
            else:
                self._ended()
        return end + 1

    def _escape(self, text: str, at: int) -> int:
        if text[at] == "u":
            self.unsaid = "\\u"
            self._state = self._hex_digits
            return at + 1
        if text[at] in _ESCAPED:
            self._say("\\" + text[at])
        else:
            # JSON lacks this escape. A quote needs no escape; before another character the
            # backslash is text.
            self._say("'" if text[at] == "'" else "\\\\" + _ENCODE(text[at])[1:-1])
        self.unsaid = ""
        self._state = self._string
        return at + 1

    def _hex_digits(self, text: str, at: int) -> int:
        """Read an escape's digits; `unsaid` may have an escape of half a character before it."""
        if text[at] in _HEX:
            self.unsaid += text[at]
            if len(self.unsaid) % _ESCAPE_SIZE == 0:
                self._end_escape()
            return at + 1
        begun = self.unsaid[-(len(self.unsaid) % _ESCAPE_SIZE) :]
        self._say((_LOST if begun != self.unsaid else "") + "\\" + begun)
        self.unsaid = ""
        self._state = self._string
        return at

    def _end_escape(self) -> None:
        """Write a complete escape, unless it is half a character and the other half may follow."""
        *halves, last = re.findall(r"\\u(....)", self.unsaid)
        code = int(last, 16)
        if halves and code in _LOW:
            self._say(self.unsaid)
        elif code not in _HIGH:
            self._say(_LOST * len(halves) + (_LOST if code in _LOW else f"\\u{last}"))
        else:
            self._say(_LOST * len(halves))
            self.unsaid = f"\\u{last}"
            self._state = self._second_half
            return
        self.unsaid = ""
        self._state = self._string

    def _second_half(self, text: str, at: int) -> int:
        if text[at] == "\\":
            self.unsaid += "\\"
            self._state = self._second_escape
            return at + 1
        self._say(_LOST)
        self.unsaid = ""
        self._state = self._string
        return at

    def _second_escape(self, text: str, at: int) -> int:
        if text[at] == "u":
            self.unsaid += "u"
            self._state = self._hex_digits
            return at + 1
        self._say(_LOST)
        self.unsaid = "\\"
        return self._escape(text, at)

    def _word(self, text: str, at: int) -> int:
        end = _end(_WORD, text, at)
        self.unsaid += text[at:end]
        if len(self.unsaid) > _MAX_WORD:
            return self._fail(end)
        if end == len(text):
            return end
        meant = _meaning(self.unsaid)
        if meant is None:
            return self._fail(end)
        self._say(meant)
        self.unsaid = ""
        # The character is not part of the word.
        self._ended()
        return end


def _meaning(word: str) -> str | None:
    """Return the JSON for a word or number; None if it has no meaning."""
    if word in _WORDS or _NUMBER.fullmatch(word):
        return _WORDS.get(word, word)
    for read in _NUMBER_READERS:
        with contextlib.suppress(ValueError):
            return json.dumps(read(word), allow_nan=False)
    return None


def _end(pattern: re.Pattern[str], text: str, at: int) -> int:
    """Return the end of the match at `at`; the match may be empty."""
    match = pattern.match(text, at)
    return at if match is None else match.end()


def mended_object(text: str) -> str | None:
    """Return the text as one valid JSON object; None if it is anything else."""
    text = text.strip(" \t\r\n")
    mender = JsonMender()
    is_one = text.startswith("{") and mender.feed(text) == len(text) and mender.complete
    return mender.take() if is_one else None
