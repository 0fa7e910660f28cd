"""Regular expressions of JSON Schema (ECMA 262) as the Rust dialect that llguidance reads."""

from __future__ import annotations

import re
from collections.abc import Iterable

from penstock_shard.structured_output.refusal import ConstraintRefused, shown

# The classes as ECMA 262 defines them; Rust's cover other characters.
_SPACE = (
    r"\t\n\x0B\x0C\r \xA0\x{1680}\x{2000}-\x{200A}\x{2028}\x{2029}\x{202F}\x{205F}\x{3000}\x{FEFF}"
)
_CLASSES = {
    "d": "0-9",
    "w": "A-Za-z0-9_",
    "s": _SPACE,
}
_CONTROLS = {"t": r"\t", "n": r"\n", "v": r"\x0B", "f": r"\x0C", "r": r"\r", "0": r"\x00"}
_ANY_BUT_LINE_ENDS = r"[^\n\r\x{2028}\x{2029}]"
_QUANTIFIER = re.compile(r"\{[0-9]{1,9}(,[0-9]{0,9})?\}")
_HEXADECIMAL = {
    "x": re.compile(r"[0-9a-fA-F]{2}"),
    "u": re.compile(r"\{[0-9a-fA-F]{1,6}\}|[0-9a-fA-F]{4}"),
}
_PROPERTY = re.compile(r"\{[A-Za-z_]+(=[A-Za-z_]+)?\}")
_GROUP = re.compile(r"\((\?:|\?<[A-Za-z_][A-Za-z0-9_]*>)?")
_SYNTAX = set("^$\\.*+?()[]{}|/-")
# Doubled inside a class, these are operators in Rust's dialect.
_OPERATORS = set("&-~")
_LARGEST_TRIE = 4000


def rust_pattern(pattern: str) -> str:
    """A pattern in Rust's dialect that matches the same texts."""
    return _Translation(pattern).text()


class _Translation:
    """One pass over a pattern."""

    def __init__(self, pattern: str) -> None:
        self._pattern = pattern
        self._at = 0
        self._out: list[str] = []

    def text(self) -> str:
        while self._at < len(self._pattern):
            self._out.append(self._next())
        return "".join(self._out)

    def _next(self) -> str:
        character = self._pattern[self._at]
        if character == "\\":
            return self._escape(in_class=False)
        if character == "[":
            return self._class()
        if character == "(":
            return self._group()
        if character == "{" and not _QUANTIFIER.match(self._pattern, self._at):
            self._at += 1
            return r"\{"
        if character == "{":
            return self._take(_QUANTIFIER)
        self._at += 1
        if character == ".":
            return _ANY_BUT_LINE_ENDS
        if character in "}]":
            return "\\" + character
        return character if character.isprintable() else f"\\x{{{ord(character):X}}}"

    def _group(self) -> str:
        text = self._take(_GROUP)
        if self._pattern.startswith("?", self._at):
            raise self._refused("look-around and flags are not served")
        # Names are dropped: they are not used, and in ECMA 262 need not be unique.
        return "(?:" if text != "(" else text

    def _take(self, expression: re.Pattern[str]) -> str:
        found = expression.match(self._pattern, self._at)
        if found is None:
            raise self._refused(f"unexpected text at position {self._at}")
        self._at = found.end()
        return found.group()

    def _escape(self, in_class: bool) -> str:
        self._at += 1
        if self._at == len(self._pattern):
            raise self._refused("it ends with a backslash")
        letter = self._pattern[self._at]
        self._at += 1
        if letter.lower() in _CLASSES:
            return self._escaped_class(letter, in_class)
        if letter in _CONTROLS:
            return _CONTROLS[letter]
        if letter in _HEXADECIMAL:
            return self._code(self._take(_HEXADECIMAL[letter]).strip("{}"))
        if letter == "c" and re.match(r"[A-Za-z]", self._pattern[self._at : self._at + 1]):
            self._at += 1
            return f"\\x{ord(self._pattern[self._at - 1]) % 32:02X}"
        if letter in "pP":
            return f"\\{letter}" + self._take(_PROPERTY)
        if letter in _SYNTAX or not letter.isalnum():
            return re.escape(letter) if letter.isprintable() else f"\\x{{{ord(letter):X}}}"
        raise self._refused(f"\\{letter} is not served")

    def _escaped_class(self, letter: str, in_class: bool) -> str:
        inside = _CLASSES[letter.lower()]
        if letter.islower():
            return inside if in_class else f"[{inside}]"
        return f"[^{inside}]"

    def _code(self, digits: str) -> str:
        code = int(digits, 16)
        if 0xD800 <= code <= 0xDFFF or code > 0x10FFFF:
            raise self._refused("surrogates are not served")
        return f"\\x{{{code:X}}}"

    def _class(self) -> str:
        self._at += 1
        out = ["["]
        if self._pattern.startswith("^", self._at):
            out.append("^")
            self._at += 1
        while not self._pattern.startswith("]", self._at):
            if self._at >= len(self._pattern):
                raise self._refused("a class is not closed")
            out.append(self._in_class())
        self._at += 1
        if len(out) == 1:
            raise self._refused("a class is empty")
        return r"[\x00-\x{10FFFF}]" if out == ["[", "^"] else "".join(out) + "]"

    def _in_class(self) -> str:
        character = self._pattern[self._at]
        if character == "\\" and self._pattern.startswith("b", self._at + 1):
            self._at += 2
            return r"\x08"
        if character == "\\":
            return self._escape(in_class=True)
        self._at += 1
        if character in _OPERATORS and self._pattern.startswith(character, self._at):
            return "\\" + character
        if character in "[^":
            return "\\" + character
        return character if character.isprintable() else f"\\x{{{ord(character):X}}}"

    def _refused(self, reason: str) -> ConstraintRefused:
        return ConstraintRefused(f"pattern {shown(self._pattern)}: {reason}")


def any_text_but(texts: Iterable[str]) -> str:
    """A pattern in Rust's dialect of all texts but these."""
    trie: dict[str, dict] = {}  # type: ignore[type-arg]
    size = 0
    for text in texts:
        node = trie
        size += len(text)
        for character in text:
            node = node.setdefault(character, {})
        node[""] = {}
    if size > _LARGEST_TRIE:
        raise ConstraintRefused(f"not: texts of more than {_LARGEST_TRIE} characters together")
    return f"^(?:{_but(trie, 0)})$"


def _but(node: dict[str, dict], depth: int) -> str:  # type: ignore[type-arg]
    if depth > 100:
        raise ConstraintRefused("not: a text of more than 100 characters")
    children = {character: child for character, child in node.items() if character}
    others = "".join(f"\\x{{{ord(character):X}}}" for character in children)
    alternatives = [f"[^{others}](?s:.)*" if others else "(?s:.)+"]
    for character, child in children.items():
        alternatives.append(f"\\x{{{ord(character):X}}}(?:{_but(child, depth + 1)})")
    if "" not in node:
        alternatives.append("")
    return "|".join(alternatives)
