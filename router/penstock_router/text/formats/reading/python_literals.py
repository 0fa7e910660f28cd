"""Shows a Python literal as JSON while it comes.

Reads strings, numbers, None, True, False, lists, tuples and dictionaries, also JSON's null, true
and false. Lenient where models are: a string may contain line breaks, and `\\/` in one is `/`, as
in JSON. Work is linear, and what is held is one word or escape.

Python's own parser is no help: it takes neither of these two, wants the whole text, and needs two
seconds and half a GB for a list of 1 MB.
"""

from __future__ import annotations

import codecs
import contextlib
import functools
import json
import re

from penstock_router.text.formats.reading.reader import (
    SPACE,
    CallParser,
    Misfit,
    Reading,
    TextOver,
)
from penstock_router.text.marks import plain

# ASCII: Python's int and float would take the digits of any script.
_WORD = re.compile(r"[\w.+\-]*", re.ASCII)
_JSON_NUMBER = re.compile(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?")
_WORDS = {"None": "null", "True": "true", "False": "false"} | {
    word: word for word in ("null", "true", "false")
}
_CLOSERS = {"[": "]", "(": ")", "{": "}"}
_QUOTES = ('"""', "'''", '"', "'")
_ORDINARY = {'"': re.compile(r'[^"\\]+'), "'": re.compile(r"[^'\\]+")}
# What is behind the backslash of an escape that means a character by its number or name; such an
# escape, or its beginning.
_CODES = "01234567xuUN"
_HEX = "[0-9a-fA-F]"
_ESCAPE = re.compile(
    rf"\\([0-7]{{1,3}}|x{_HEX}{{,2}}|u{_HEX}{{,4}}|U{_HEX}{{,8}}|N(\{{([^{{}}]{{,100}}\}}?)?)?)"
)
_MEANINGFUL = frozenset("\n\\'\"abfnrtv" + _CODES)
# A longer word is not a number that any reader would accept.
_MAX_WORD = 400
# Deeper than anybody means: each level costs a little time with every piece of text.
_MAX_NESTING = 100

# Made once: `json.dumps` makes an encoder for each call that has settings.
_ENCODE = json.JSONEncoder(ensure_ascii=False).encode
_integer = functools.partial(int, base=0)


class LiteralParser(CallParser):
    """A reader whose calls have Python's literals as arguments."""

    def _literal(self) -> Reading[None]:
        try:
            yield from self._value(0)
        except TextOver:
            # The answer was cut off within a word: show what there is of it. Quotes have no meaning
            # before it is known how many there are.
            self._take(len(self._text))
            word = "".join(self._held).strip(SPACE)
            self._arguments(word if word.strip("\"'") else "")
            self._drop()
            raise

    def _value(self, depth: int) -> Reading[None]:
        opener = yield from self._space()
        if opener not in _CLOSERS or depth == _MAX_NESTING:
            yield from self._scalar(is_key=False)
            return
        self._pass("{" if opener == "{" else "[")
        yield from self._elements(opener, depth + 1)
        self._pass("}" if opener == "{" else "]")

    def _elements(self, opener: str, depth: int) -> Reading[None]:
        """All up to the closing bracket; a comma may follow the last one."""
        separator = ""
        while (yield from self._space()) != _CLOSERS[opener]:
            self._arguments(separator)
            separator = ", "
            if opener == "{":
                yield from self._scalar(is_key=True)
                if (yield from self._space()) != ":":
                    raise Misfit
                self._pass(": ")
            yield from self._value(depth)
            after = yield from self._space()
            if after == ",":
                self._pass("")
            elif after != _CLOSERS[opener]:
                raise Misfit

    def _pass(self, said: str) -> None:
        """The next character is read, and means this."""
        self._at += 1
        self._drop()
        self._arguments(said)

    def _scalar(self, *, is_key: bool) -> Reading[None]:
        self._drop()
        word = yield from self._run(_WORD)
        if word in ("", "r", "R", "u", "U") and self._text[self._at] in _ORDINARY:
            yield from self._string(raw=word in ("r", "R"))
            return
        found = _number(word) if is_key else _WORDS.get(word) or _number(word)
        if found is None:
            raise Misfit
        self._drop()
        self._arguments(f'"{found}"' if is_key else found)

    def _string(self, *, raw: bool) -> Reading[None]:
        quote = yield from self._any_of(*_QUOTES)
        assert quote is not None
        self._arguments('"')
        self._drop()
        while True:
            match = _ORDINARY[quote[0]].match(self._text, self._at)
            if match is not None:
                self._at = match.end()
                self._say(plain(match.group()))
            elif self._at == len(self._text):
                yield from self._more()
            elif self._text[self._at] == "\\":
                yield from self._escape(raw=raw)
            elif (yield from self._any_of(quote)) is not None:
                break
            else:
                # One quote of three.
                self._say(self._text[self._at])
                self._at += 1
        self._drop()
        self._arguments('"')

    def _say(self, text: str) -> None:
        # Works on any part of a string: JSON's escapes do not depend on their neighbours. Half of a
        # surrogate pair stays an escape.
        encode = json.dumps if "\ud800" <= text <= "\udfff" else _ENCODE
        self._arguments(encode(text)[1:-1])

    def _escape(self, *, raw: bool) -> Reading[None]:
        escape = (yield from self._character()) + (yield from self._character())
        codes = "" if raw else _CODES
        while escape[1] in codes and _ESCAPE.fullmatch(escape + (yield from self._peek())):
            escape += yield from self._character()
        meant = escape if raw else _meaning(escape)
        self._drop()
        self._say(meant)

    def _character(self) -> Reading[str]:
        character = yield from self._peek()
        self._take(self._at + 1)
        return character


def _meaning(escape: str) -> str:
    kind = escape[1]
    if kind in "01234567":
        return chr(int(escape[1:], 8))
    if kind not in _MEANINGFUL:
        return "/" if kind == "/" else escape
    try:
        return codecs.decode(escape, "unicode_escape")
    except UnicodeDecodeError:
        raise Misfit from None


def _number(word: str) -> str | None:
    """A Python number as JSON; None if it is not one, or not finite."""
    if len(word) > _MAX_WORD:
        return None
    if _JSON_NUMBER.fullmatch(word):
        return word
    for read in (_integer, float):
        with contextlib.suppress(ValueError):
            return json.dumps(read(word), allow_nan=False)
    return None
