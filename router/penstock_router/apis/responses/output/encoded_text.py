"""Reads a tool's text from the JSON of its call while the JSON arrives.

A model writes `{"input": "the text"}`. Each readable piece of the string is shown immediately and
never taken back.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

import msgspec

from penstock_router.apis.responses.tools.functions import INPUT

_OPENS = re.compile(rf'\s*\{{\s*"{INPUT}"\s*:\s*"')
# A match of `_OPENS` is shorter, unless it has much whitespace.
_MAX_SOUGHT = 4096
_PLAIN = re.compile(r'[^"\\]+')
_ESCAPES: Mapping[str, str] = {
    **{'"': '"', "\\": "\\", "/": "/"},
    **{"b": "\b", "f": "\f", "n": "\n", "r": "\r", "t": "\t"},
}
_UNIT = re.compile(r"[0-9a-fA-F]{4}")
_REPLACEMENT = "\ufffd"


class EncodedText:
    def __init__(self) -> None:
        # The JSON before the string begins. After that, `_rest` is the unread part of the string.
        self._held: list[str] = []
        self._num_held = 0
        self._rest: str | None = None
        self._is_over = False
        self._texts: list[str] = []

    @property
    def text(self) -> str:
        return "".join(self._texts)

    def feed(self, piece: str) -> str:
        """Return the text that a piece of the JSON adds."""
        if self._is_over:
            return ""
        text = self._behind_opening(piece) if self._rest is None else self._rest + piece
        if text is None:
            return ""
        added = "".join(self._decoded(text))
        self._texts.append(added)
        return added

    def _behind_opening(self, piece: str) -> str | None:
        """Return the JSON after the string's opening quote; None before the quote has arrived."""
        self._held.append(piece)
        if self._num_held > _MAX_SOUGHT:
            return None
        self._num_held += len(piece)
        json = "".join(self._held)
        opened = _OPENS.match(json)
        return None if opened is None else json[opened.end() :]

    def end(self, *, was_cut: bool) -> str:
        """Return the text that only the complete JSON reveals."""
        if self._rest is not None:
            return ""
        self._rest, self._is_over = "", True
        added = _text_in("".join(self._held), was_cut=was_cut)
        self._texts.append(added)
        return added

    def _decoded(self, text: str) -> list[str]:
        """Decode the string up to the last complete escape."""
        found, at = [], 0
        while at < len(text):
            if plain := _PLAIN.match(text, at):
                found.append(plain.group())
                at = plain.end()
            elif text[at] == '"':
                self._is_over = True
                at = len(text)
            else:
                character, length = _escaped(text, at)
                if not length:
                    break
                found.append(character)
                at += length
        self._rest = text[at:]
        return found


def _escaped(text: str, at: int) -> tuple[str, int]:
    """Return an escape's character, and the escape's length: 0 if incomplete."""
    kind = text[at + 1 : at + 2]
    if kind != "u":
        # If JSON has no such escape, show the escaped character.
        return (_ESCAPES.get(kind, kind), 2) if kind else ("", 0)
    first = text[at + 2 : at + 6]
    if len(first) < 4 and _is_unit_begun(first):
        return "", 0
    if not _UNIT.fullmatch(first):
        return "u", 2
    unit = int(first, 16)
    if not 0xD800 <= unit < 0xDC00:
        return (_REPLACEMENT if 0xDC00 <= unit < 0xE000 else chr(unit)), 6
    rest = text[at + 6 : at + 12]
    if len(rest) < 6 and "\\u".startswith(rest[:2]) and _is_unit_begun(rest[2:]):
        return "", 0
    low = int(rest[2:], 16) if rest[:2] == "\\u" and _UNIT.fullmatch(rest[2:]) else 0
    if 0xDC00 <= low < 0xE000:
        return chr(0x10000 + ((unit - 0xD800) << 10) + low - 0xDC00), 12
    return _REPLACEMENT, 6


def _is_unit_begun(digits: str) -> bool:
    return all(each in "0123456789abcdefABCDEF" for each in digits)


def _text_in(arguments: str, *, was_cut: bool) -> str:
    """Find the text in JSON of another form: the argument `INPUT`, the only string, or the whole
    JSON.
    """
    try:
        given = msgspec.json.decode(arguments or "{}")
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        return "" if was_cut else arguments
    if isinstance(given, str):
        return given
    if not isinstance(given, dict) or not given:
        return arguments if given else ""
    strings = [value for value in given.values() if isinstance(value, str)]
    own = given.get(INPUT)
    if isinstance(own, str):
        return own
    return strings[0] if len(strings) == 1 else arguments
