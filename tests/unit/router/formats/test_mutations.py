"""Answers that are nearly right: nothing raises, no text is lost, and work stays linear.

No text is lost means: where no call was given, the content is the answer, to the character. Where
one was, every character is either shown, in its place, perhaps mended, or of the form of a call: a
marker, a name, white space, punctuation, a key, a member that calls may have besides.
"""

from __future__ import annotations

import json
import random
import re
import sys
from types import FrameType
from typing import Any

import pytest
from support.budget import budget, seeded
from support.recorded_tool_calls import OFFERED, RECORDED

from penstock_router.text.answer_pieces import Piece, PieceKind, content_of, join_pieces
from penstock_router.text.formats.reading.json_mender import JsonMender, mended_object
from penstock_router.text.formats.reading.reader import SPACE, CallParser
from penstock_router.text.formats.registry import FORMATS

FAMILIES = sorted({one.family for one in RECORDED})
_SCRAPS = ['"', "\\", "{", "}", "[", "]", "(", ")", ",", ":", ";", "=", "'", "`", "\n", " ", "é"]
_SCRAPS += ['"name"', '"arguments"', "null", "-", "1e", "```json\n", '"now"', "\\u00", "\x00", "🌧"]
_STRING = r"""(?:"(?:[^"\\]|\\.)*"|'(?:[^'\\]|\\.)*')"""
_BEGUN_STRING = r"""(?:"(?:[^"\\]|\\.)*|'(?:[^'\\]|\\.)*)\\?"""
# All that may be dropped of an answer.
_FORM = re.compile(
    rf"(?:\s|[{{}}\[\](),:;=`\w.\-+/]|{_STRING}\s*:\s*{_STRING}?|</?tool_call>"
    r"|<\|python_\w+\|>|<｜tool[▁_ ]\w+(?:[▁ ]\w+)?｜>)*"
    # Where the answer was cut off: in a marker, in a member.
    rf"(?:</?[\w|｜▁]*|{_BEGUN_STRING}|{_STRING}\s*:?\s*(?:{_BEGUN_STRING})?)?",
    re.DOTALL,
)
# What mending may change: syntax of JSON, words and numbers of Python.
_HALF = re.compile(r"\\u[dD][89a-fA-F][0-9a-fA-F]{2}")
_ESCAPES = re.compile(
    r"(\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}|\\u[0-9a-fA-F]{4}|\\.)"
)
_MENDED = re.compile(
    r"[\s{}\[\],:\"'\\]|0[xX][0-9a-fA-F_]+|0[oObB]|[-+0-9._]|(?<=[0-9.])[eE](?=[-+0-9])"
    r"|None|True|False"
)


def mutated(rng: random.Random, family: str) -> str:
    """A recorded answer after a few accidents."""
    records = [one.text for one in RECORDED if one.family == family]
    scraps = [*_SCRAPS, *FORMATS[family].marks]
    text = rng.choice(records)
    for _ in range(rng.randint(1, 4)):
        start, end = sorted(rng.choices(range(len(text) + 1), k=2))
        end = min(end, start + rng.choice([1, 3, 30]))
        before, part, behind = text[:start], text[start:end], text[end:]
        to = rng.randint(0, len(text))
        text = rng.choice(
            [
                before + behind,
                before + part + part + behind,
                before + part[::-1] + behind,
                text[:to] + rng.choice(scraps) + text[to:],
                text[:to] + part + text[to:],
                text[:to] + rng.choice(records) + text[to:],
                text[:to] or text,
            ]
        )
    return text


class Ledger:
    """Follows what a reader does with each character of a text."""

    def __init__(self, family: str, text: str) -> None:
        self._text = text
        self._reader: Any = FORMATS[family].parser(OFFERED)
        assert isinstance(self._reader, CallParser)
        reader: Any = self._reader
        self._drop, self._content = reader._drop, reader._content
        self._arguments = reader._arguments
        self.at = 0
        self.dropped: list[str] = []
        # Of arguments that were shown as they came: what was read, and what was shown.
        self.read_of_arguments: list[str] = []
        self.shown_of_arguments: list[str] = []
        reader._drop = self.on_drop
        reader._content = self.on_content
        reader._arguments = self.on_arguments

    def on_drop(self) -> None:
        self.dropped.append("".join(self._reader._held))
        self._follow(self.dropped[-1])
        self._drop()

    def on_content(self, text: str) -> None:
        if not self._text.startswith(text, self.at):
            # What had to be mended and could not be: it was read as arguments, and is shown now.
            read = "".join(self.read_of_arguments)
            back = next(n for n in range(len(read) + 1) if self._begins(text, self.at - n))
            self.at -= back
            self.read_of_arguments = [read[: len(read) - back]]
        self._follow(text)
        self._content(text)

    def _begins(self, text: str, at: int) -> bool:
        return self._text.startswith(text, at)

    def on_arguments(self, text: str) -> None:
        end = len(self._text) - len(self._reader._text) + self._reader._at
        assert end >= self.at
        self.read_of_arguments.append(self._text[self.at : end])
        self.shown_of_arguments.append(text)
        self.at = end
        self._arguments(text)

    def _follow(self, text: str) -> None:
        assert self._begins(text, self.at), (self.at, text)
        self.at += len(text)

    def read(self) -> list[Piece]:
        return join_pieces([*self._reader.feed(self._text), *self._reader.flush()])


def is_python(family: str, text: str) -> bool:
    """Tell whether calls may be Python, of which arguments are no part."""
    return family == "pythonic" or (family == "llama_json" and ".call(" in text)


def check(pieces: list[Piece], text: str) -> None:
    """Check what holds for the pieces of any text."""
    calls = [piece for piece in pieces if piece.kind is PieceKind.CALL]
    if not calls:
        assert content_of(pieces) == text
    assert [piece.call for piece in calls] == list(range(len(calls)))
    arguments = [""] * len(calls)
    for piece in pieces:
        if piece.kind is PieceKind.ARGUMENTS:
            arguments[piece.call] += piece.text
    for given in arguments:
        # A string of arguments may begin and end with white space.
        given = given.lstrip(SPACE)
        assert given.startswith("{")
        assert not given[JsonMender().feed(given) :].strip(SPACE), given


def in_parts(family: str, parts: list[str]) -> list[Piece]:
    parser = FORMATS[family].parser(OFFERED)
    pieces = []
    for part in parts:
        pieces += parser.feed(part)
    return join_pieces([*pieces, *parser.flush()])


@pytest.mark.parametrize("family", FAMILIES)
def test_a_mutated_answer_raises_nothing_and_no_cut_changes_it(family: str) -> None:
    rng = seeded(family)
    for _ in range(budget(100, 10_000)):
        text = mutated(rng, family)
        whole = in_parts(family, [text])
        if not is_python(family, text) or all(piece.kind is not PieceKind.CALL for piece in whole):
            check(whole, text)
        assert in_parts(family, list(text)) == whole, text
        cut = rng.randint(0, len(text))
        assert in_parts(family, [text[:cut], text[cut:]]) == whole, (text, cut)


@pytest.mark.parametrize("family", [one for one in FAMILIES if one != "pythonic"])
def test_whatever_is_not_shown_of_a_mutated_answer_is_form(family: str) -> None:
    rng = seeded(family)
    for _ in range(budget(100, 10_000)):
        text = mutated(rng, family)
        if is_python(family, text):
            continue
        ledger = Ledger(family, text)
        pieces = ledger.read()
        assert ledger.at == len(text), text
        read, shown = "".join(ledger.read_of_arguments), "".join(ledger.shown_of_arguments)
        assert is_shown(read, shown), (text, read, shown)
        whole = [piece.text for piece in pieces if piece.kind is PieceKind.ARGUMENTS]
        for dropped in ledger.dropped:
            # Arguments that came before the name were held: they are shown nevertheless.
            for arguments in whole:
                dropped = without(dropped, arguments)
            assert _FORM.fullmatch(dropped), (text, dropped)


def is_shown(read: str, shown: str) -> bool:
    """Tell whether each character of what was read is shown, in this order, or mended."""
    if read in shown:
        return True
    at = 0
    # Half a character becomes another one.
    read = "".join(each for each in _ESCAPES.split(read) if not _HALF.fullmatch(each))
    for kept in _MENDED.sub("", read):
        written = json.dumps(kept, ensure_ascii=False)[1:-1]
        found = shown.find(written, at)
        if found < 0:
            return False
        at = found + len(written)
    return True


def without(dropped: str, arguments: str) -> str:
    """Return what was dropped, without the value that was shown as these arguments."""
    for at, character in enumerate(dropped):
        if character in "{\"'":
            mender = JsonMender()
            end = mender.feed(dropped, at)
            value = mender.take()
            if value.startswith('"') and mender.complete:
                value = mended_object(json.loads(value)) or ""
            if mender.complete and json.dumps(value) == json.dumps(arguments):
                return f"{dropped[:at]} {dropped[end:]}"
    return dropped


@pytest.mark.parametrize("family", FAMILIES)
def test_a_mark_that_is_of_no_form_is_seen_wherever_it_is(family: str) -> None:
    records = [
        one.text
        for one in RECORDED
        # What stands beside a call's name and arguments is form, whatever it is.
        if one.family == family and not re.search(r'"(id|type|index|notes|age)"', one.text)
    ]
    for text in records:
        for at in range(len(text) + 1):
            marked = f"{text[:at]}§{text[at:]}"
            pieces = in_parts(family, [marked])
            assert any("§" in piece.text for piece in pieces), marked


_NAMED = '{"name": "search", "arguments": '
_LONG = {
    "hermes": ["<tool_call", "<tool_call>", '<tool_call>{"a": ', f"<tool_call>{_NAMED}{{}}}} "],
    "llama_json": ["{", '{"name":', "<|python_tag|>", f"{_NAMED}{{}}}};"],
    "mistral": ["[TOOL_CALLS]", "[TOOL_CALLS][{", "[TOOL_CALLS]x", "[TOOL_CALLS]now{}"],
    "deepseek_v3": ["<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>now", "<｜tool▁"],
    "plain_json": ["[", "{", "[{", "```"],
    "pythonic": ["[", "[now(", "[now(), ", "<|python_tag|>["],
}
_BEGUN = {
    "hermes": [f"<tool_call>{_NAMED}", '<tool_call>{"arguments": '],
    "llama_json": [_NAMED, '{"parameters": '],
    "mistral": [f"[TOOL_CALLS][{_NAMED}", "[TOOL_CALLS]now[ARGS]"],
    "deepseek_v3": ["<｜tool▁call▁begin｜>function<｜tool▁sep｜>now\n```json\n"],
    "plain_json": [_NAMED, f"```json\n[{_NAMED}"],
    "pythonic": ["[now(a="],
}
_GOING_ON = ["[", '{"a":', '"x', '"\\\\', " ", "1", "\\", "[[[],", '{"a": "', '"""', "}"]


def work(family: str, text: str) -> int:
    """Count how many functions are called while a text comes, four characters at a time."""
    parser: Any = FORMATS[family].parser(OFFERED)
    calls = 0
    longest = 0

    def count(frame: FrameType, event: str, argument: object) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    sys.setprofile(count)
    try:
        for at in range(0, len(text), 4):
            parser.feed(text[at : at + 4])
            longest = max(longest, len(parser._text) - parser._at)
        parser.flush()
    finally:
        sys.setprofile(None)
    # What is gone over again at each piece.
    assert longest < 40
    return calls


@pytest.mark.parametrize("family", _LONG)
def test_work_grows_as_text_does(family: str) -> None:
    size = budget(250, 4_000)
    begun = [(begin, more) for begin in _BEGUN[family] for more in _GOING_ON]
    begun += [(begin + '{"a": "', more) for begin in _BEGUN[family] for more in _GOING_ON]
    for begin, more in [("", more) for more in _LONG[family]] + begun:
        some, much = ((begin + more * size)[: len(begin) + size * by] for by in (1, 4))
        if len(much) > len(some):
            assert work(family, much) < 4.5 * work(family, some) + 1_000, (begin, more)


@pytest.mark.parametrize("family", _LONG)
def test_two_hundred_thousand_characters_are_read_at_once_and_in_pieces(family: str) -> None:
    for text in [more * (200_000 // len(more)) for more in _LONG[family][:2]]:
        pieces = [text[at : at + 2_000] for at in range(0, len(text), 2_000)]
        whole = in_parts(family, [text])
        assert whole == in_parts(family, pieces)
        check(whole, text)


@pytest.mark.parametrize("family", _BEGUN)
def test_nesting_without_end_is_read(family: str) -> None:
    for begin in _BEGUN[family]:
        depth = budget(20_000, 200_000)
        text = begin + '{"a": ' + "[" * depth
        pieces = in_parts(family, [text])
        assert sum(len(piece.text) for piece in pieces) >= depth
