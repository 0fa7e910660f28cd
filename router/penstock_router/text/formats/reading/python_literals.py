"""Shows a Python literal as JSON while it arrives.

Reads strings, numbers, None, True, False, lists, tuples and dictionaries, and JSON's null, true and
false. The reader is lenient: a string may have line breaks, and its own quotes if no part of a call
follows them; `\\/` in a string is `/`, as in JSON; an integer may begin with zeros. Bare words are
not values. Work is linear. Only one word or escape, or the text after a quote, is held.

Python's own parser is not lenient, needs the whole text, and takes 2 s and 500 MB for a list of 1
MB.
"""

from __future__ import annotations

import codecs
import contextlib
import functools
import json
import re
from collections.abc import Sequence

from penstock_router.request import Tool
from penstock_router.text.formats.reading.reader import (
    SPACE,
    CallParser,
    Misfit,
    Reading,
    TextOver,
)
from penstock_router.text.marks import NO_MARKS, TOKEN, Marks, plain

# ASCII only: Python's int and float take digits of any script.
_WORD = re.compile(r"[\w.+\-]*", re.ASCII)
_JSON_NUMBER = re.compile(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?")
_NUMBER_BEGUN = re.compile(r"[+-]?\.?([0-9]|$)")
_WORDS = {"None": "null", "True": "true", "False": "false"} | {
    word: word for word in ("null", "true", "false")
}
_CLOSERS = {"[": "]", "(": ")", "{": "}"}
_QUOTES = ('"""', "'''", '"', "'")
_ORDINARY = {
    '"': re.compile(rf'[^"\\{TOKEN}]+'),
    "'": re.compile(rf"[^'\\{TOKEN}]+"),
}
_BRACKETS = re.compile(r"[)}\];, \t\r\n]*")
# `_CODES` begin a numeric or named escape after a backslash. `_ESCAPE` also matches beginnings of
# these escapes.
_CODES = "01234567xuUN"
_HEX = "[0-9a-fA-F]"
_ESCAPE = re.compile(
    rf"\\([0-7]{{1,3}}|x{_HEX}{{,2}}|u{_HEX}{{,4}}|U{_HEX}{{,8}}|N(\{{([^{{}}]{{,100}}\}}?)?)?)"
)
_MEANINGFUL = frozenset("\n\\'\"abfnrtv" + _CODES)
# No reader accepts a longer number.
_MAX_WORD = 400
# Real values are less deep. Each level costs time with every piece of text.
_MAX_NESTING = 100
# Maximum characters examined after a quote.
_MAX_AHEAD = 32
# Beginnings of an element of a list or dictionary, of an argument, and of a call.
_ELEMENT = re.compile(r"[rRuU]?[\"']|[\[({+\-.0-9]|None|True|False|null|true|false")
ARGUMENT_BEGUN = re.compile(r"\w+\s*=[^=]")
CALL_BEGUN = re.compile(r"[A-Za-z_][\w.\-]*\(")

# `json.dumps` with settings would make an encoder for each call.
_ENCODE = json.JSONEncoder(ensure_ascii=False).encode
_NUMBER_READERS = (functools.partial(int, base=0), functools.partial(int, base=10), float)


class UnreadableWord(Misfit):
    """Raised after a word without a meaning was consumed."""


class LiteralParser(CallParser):
    # Marks that end a tool call, even an incomplete one.
    _ends: tuple[str, ...] = ()
    # The characters that may separate a key and its value.
    _separators = ":"

    def __init__(self, tools: Sequence[Tool], marks: Marks = NO_MARKS) -> None:
        super().__init__(tools, marks)
        # Missing closing brackets (the next is last), each with the pattern of its elements'
        # beginning.
        self._closers: list[str] = []
        self._elements_begin: list[re.Pattern[str]] = []
        # `_announced` is the name of a call that is not shown yet, `_before` the text to show once
        # the next value begins.
        self._announced = ""
        self._before = ""
        # The text that completes the innermost value; "" if it is complete.
        self._missing = ""

    def _mended(self, arguments: Reading[None], outside: int) -> Reading[None]:
        """Read a call's arguments; `outside` counts the brackets around them. Missing parts are
        completed if the model wrote the call's end, or ended its answer between two arguments.
        """
        try:
            yield from arguments
        except UnreadableWord:
            raise
        except Misfit:
            self._fits = False
            if self._announced or not (yield from self._is_end_behind_brackets()):
                raise
            self._fits = True
            self._complete(outside)
        except TextOver:
            if not self._announced and not self._was_cut and self._is_whole(outside):
                self._finish()
            raise
        self._finish()

    def _is_whole(self, num_brackets: int) -> bool:
        """Tell whether all values have ended, and no other value has begun."""
        rest = "".join(self._held) + self._text[self._at :]
        is_closed = not self._missing and len(self._closers) == num_brackets
        return is_closed and not rest.strip(f"{SPACE},")

    def _finish(self) -> None:
        if self._announced:
            self._call(self._announced, "{}")
            self._announced = ""
        else:
            self._arguments("}")
        self._end_call()

    def _is_end_behind_brackets(self) -> Reading[bool]:
        """Consume brackets and commas; return true if an end mark is next."""
        yield from self._run(_BRACKETS)
        return bool(self._ends) and (yield from self._ahead(*self._ends)) is not None

    def _end_marks(self) -> Reading[None]:
        """Drop end marks after calls, and excess brackets before them."""
        self._drop()
        brackets = yield from self._run(_BRACKETS)
        if self._ends and (yield from self._any_of(*self._ends)) is not None:
            yield from self._again(*self._ends)
        elif brackets.strip(SPACE):
            self._give_back()
        yield from self._after_call()

    def _literal(self) -> Reading[None]:
        yield from self._shown_if_cut(self._value_of(0))

    def _shown_if_cut(self, value: Reading[None]) -> Reading[None]:
        try:
            yield from value
        except TextOver:
            self._take(len(self._text))
            rest = "".join(self._held).strip(f"{SPACE},")
            if self._missing.startswith('"'):
                # Quotes alone are dropped: they may be text, or the string's end.
                self._drop()
                self._arguments(rest if rest.strip("\"'") else "")
            elif rest:
                self._fits = self._fits and self._was_cut
            raise

    def _start(self) -> None:
        """Begin a value or key: show the text before it."""
        if self._announced:
            self._call(self._announced)
            self._announced = ""
        self._drop()
        before, self._before = self._before, ""
        self._arguments(before)

    def _value_of(self, depth: int) -> Reading[None]:
        opener = yield from self._space()
        if opener not in _CLOSERS or depth == _MAX_NESTING:
            yield from self._scalar(is_key=False)
            return
        self._start()
        self._missing = ""
        closer = "}" if opener == "{" else "]"
        self._pass("{" if opener == "{" else "[")
        self._enter(_CLOSERS[opener], self._element_pattern(opener))
        yield from self._elements(opener, depth + 1)
        self._leave()
        self._before = ""
        self._pass(closer)

    def _enter(self, closer: str, pattern: re.Pattern[str]) -> None:
        self._closers.append(closer)
        self._elements_begin.append(pattern)

    def _leave(self) -> None:
        self._closers.pop()
        self._elements_begin.pop()

    def _element_pattern(self, opener: str) -> re.Pattern[str]:
        """Return the pattern of an element's beginning after this bracket."""
        return _ELEMENT

    def _elements(self, opener: str, depth: int) -> Reading[None]:
        """Read all up to the closing bracket; a trailing comma is allowed."""
        closer = _CLOSERS[opener]
        while (yield from self._space()) != closer:
            if opener == "{":
                yield from self._key()
                if (yield from self._space()) not in self._separators:
                    raise Misfit
                self._colon()
            yield from self._value_of(depth)
            self._missing = ""
            after = yield from self._space()
            self._before = ", "
            if after == ",":
                self._pass("")
            elif after != closer:
                raise Misfit

    def _colon(self) -> None:
        """Consume the character after a key, even if the key is not shown yet."""
        if self._before:
            self._before += ": "
            self._take(self._at + 1)
        else:
            self._pass(": ")
        self._missing = "null"

    def _key(self) -> Reading[None]:
        yield from self._scalar(is_key=True)

    def _pass(self, said: str) -> None:
        """Consume the next character, and show `said` as its JSON."""
        self._at += 1
        self._drop()
        self._arguments(said)

    def _complete(self, outside: int) -> None:
        """Complete a value because the model ended the call; `outside` brackets stay open."""
        if self._missing:
            self._start()
        self._arguments(self._missing)
        self._before = self._missing = ""
        while len(self._closers) > outside:
            self._arguments("}" if self._closers[-1] == "}" else "]")
            self._leave()

    def _scalar(self, *, is_key: bool) -> Reading[None]:
        held, self._held = self._held, []
        try:
            word = yield from self._run(_WORD)
        except TextOver:
            self._show_cut("".join(self._held), held)
            raise
        self._held = held + self._held
        if word in ("", "r", "R", "u", "U") and self._text[self._at] in _ORDINARY:
            yield from self._string(raw=word in ("r", "R"), is_key=is_key)
            return
        found = _number(word) if is_key else _WORDS.get(word) or _number(word)
        if found is None:
            raise UnreadableWord if word else Misfit
        self._start()
        self._arguments(f'"{found}"' if is_key else found)
        self._missing = ": null" if is_key else ""

    def _show_cut(self, word: str, held: list[str]) -> None:
        """Show the last word of a text that was cut off, if a value may begin so."""
        is_begun = bool(_NUMBER_BEGUN.match(word)) or any(
            known.startswith(word) for known in _WORDS
        )
        if word and (is_begun or not self._announced):
            self._start()
            # A number may have been cut.
            self._arguments(_WORDS.get(word, word))
            self._missing = "" if word in _WORDS else "null"
        else:
            self._held = held + self._held

    def _string(self, *, raw: bool, is_key: bool) -> Reading[None]:
        quote = yield from self._any_of(*_QUOTES)
        assert quote is not None
        self._start()
        self._arguments('"')
        self._missing = '": null' if is_key else '"'
        while True:
            match = _ORDINARY[quote[0]].match(self._text, self._at)
            if match is not None:
                self._at = match.end()
                self._say(plain(match.group()))
            elif self._at == len(self._text):
                yield from self._more()
            elif self._text[self._at] == "\\":
                yield from self._escape(raw=raw)
            elif self._text[self._at] == TOKEN:
                yield from self._token_in_string()
            elif (yield from self._ahead(quote)) and (
                yield from self._is_last(quote, is_key=is_key)
            ):
                self._at += len(quote)
                break
            else:
                # One quote of three, or a quote within the string.
                self._say(self._text[self._at])
                self._at += 1
        self._drop()
        self._arguments('"')
        self._missing = ": null" if is_key else ""

    def _token_in_string(self) -> Reading[None]:
        """Read a mark within a string. The mark is text, unless it ends the call and the answer."""
        if (yield from self._is_over_behind(*self._ends)):
            raise Misfit
        self._at += 1

    def _is_over_behind(self, *marks: str) -> Reading[bool]:
        """Tell whether one of these marks stands here, and the model's text ends after it."""
        mark = yield from self._ahead(*marks)
        if mark is None:
            return False
        while not self._text[self._at + len(self._marks.spelled(mark)) :].lstrip(SPACE):
            if self._over:
                return not self._was_cut
            yield from self._more()
        return False

    def _is_last(self, quote: str, *, is_key: bool) -> Reading[bool]:
        """Tell whether the quote here ends its string."""
        while True:
            behind = self._text[self._at + len(quote) : self._at + len(quote) + _MAX_AHEAD]
            is_last = self._judge(behind, quote, is_key=is_key)
            if is_last is not None:
                return is_last
            if len(behind) == _MAX_AHEAD:
                return True
            if self._over and self._was_cut:
                # The text was cut off, so the quote's meaning is unknown.
                self._at = len(self._text)
            elif self._over:
                return True
            yield from self._more()

    def _judge(self, behind: str, quote: str, *, is_key: bool) -> bool | None:
        """Tell whether a quote ends its string, by the text after it; None if more text is
        needed.
        """
        rest = behind.lstrip(SPACE)
        if not rest:
            return None
        if is_key:
            return rest[0] in self._separators
        rest, open_, is_damaged = self._behind_brackets(rest)
        if is_damaged:
            return self._at_end(rest) if rest else None
        if not open_:
            return self._may_follow(rest)
        if not rest:
            return None
        if rest[0] == ",":
            return self._begins_element(rest[1:].lstrip(SPACE), open_)
        return self._at_end(rest)

    def _behind_brackets(self, rest: str) -> tuple[str, int, bool]:
        """Return the text after closing brackets, the number of brackets still open, and whether
        brackets were missing or in excess. Excess brackets count only if other brackets are wrong,
        or if nothing else shows the call's end.
        """
        open_, is_damaged = len(self._closers), False
        counts_more = bool(self._ends) and not self._may_follow("")
        while rest and rest[0] in ")]}" and (open_ or (self._ends and is_damaged) or counts_more):
            if rest[0] in self._closers[:open_]:
                is_damaged = is_damaged or self._closers[open_ - 1] != rest[0]
                while self._closers[open_ - 1] != rest[0]:
                    open_ -= 1
                open_ -= 1
            else:
                is_damaged = True
            rest = rest[1:] if not open_ else rest[1:].lstrip(SPACE)
        return rest.lstrip(SPACE) if is_damaged else rest, open_, is_damaged

    def _begins_element(self, rest: str, open_: int) -> bool | None:
        """Tell whether another element of the bracket `open_`, or its end, begins here."""
        if not rest:
            return None
        if rest[0] in self._closers[:open_] or self._elements_begin[open_ - 1].match(rest):
            return True
        if len(rest) < _MAX_AHEAD and self._may_begin_element(rest, open_):
            return None
        return self._at_end(rest)

    def _may_begin_element(self, rest: str, open_: int) -> bool:
        """Tell whether more text could turn this into an element."""
        if self._elements_begin[open_ - 1] is _ELEMENT:
            return rest in ("r", "R", "u", "U") or any(word.startswith(rest) for word in _WORDS)
        return re.fullmatch(r"[\w.\-]+\s*=?", rest) is not None

    def _at_end(self, rest: str) -> bool | None:
        """Tell whether an end mark stands here; None if one may begin here."""
        marks = [self._marks.spelled(end) for end in self._ends]
        if any(rest.startswith(mark) for mark in marks):
            return True
        return None if any(mark.startswith(rest) for mark in marks) else False

    def _may_follow(self, rest: str) -> bool | None:
        """Tell whether this text may follow the last bracket."""
        return True

    def _say(self, text: str) -> None:
        # Any part of a string works, because JSON's escapes do not depend on neighbours. Half of a
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
    """Return a Python number as JSON; None if it is not one, or not finite."""
    if len(word) > _MAX_WORD:
        return None
    if _JSON_NUMBER.fullmatch(word):
        return word
    for read in _NUMBER_READERS:
        with contextlib.suppress(ValueError):
            return json.dumps(read(word), allow_nan=False)
    return None
