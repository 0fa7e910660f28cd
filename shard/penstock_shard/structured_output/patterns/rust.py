"""Translates JSON Schema's regular expressions (ECMA 262) into llguidance's Rust dialect."""

from __future__ import annotations

import contextlib
import functools
import re
from collections.abc import Iterable

from penstock_shard.structured_output.patterns.automaton import without_looking
from penstock_shard.structured_output.refusal import ConstraintRefused, shown

# As in ECMA 262; Rust's classes have other characters.
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
_ESCAPE = (
    r"\\(?:x[0-9a-fA-F]{2}|u(?:\{[0-9a-fA-F]{1,6}\}|[0-9a-fA-F]{4})|c[A-Za-z]"
    r"|[pP]\{[A-Za-z_]+(?:=[A-Za-z_]+)?\}|.)"
)
_TOKEN = re.compile(
    rf"{_ESCAPE}|\[\^?(?:{_ESCAPE}|[^\]\\])*\]|\(\?(?::|<[A-Za-z_][A-Za-z0-9_]*>)|\(\?"
    r"|\{[0-9]{1,9}(?:,[0-9]{0,9})?\}|.",
    re.DOTALL,
)
# In Rust's dialect, some characters are operators if doubled inside a class.
_TOKEN_IN_CLASS = re.compile(rf"{_ESCAPE}|(?P<operator>[&~-])(?=(?P=operator))|.", re.DOTALL)
_SYNTAX = set("^$\\.*+?()[]{}|/-")
_LOOKING = re.compile(r"\(\?<?[=!]|(?<!\\)(?:\\\\)*\\[bB](?![^\[]*\])")
# Anchors that are not at an end of an alternative, and text that looks like one.
_ANCHOR = re.compile(r"(?<=[^|\\\[])\^|(?<!\\)\$(?=[^|])")
_LARGEST_TEXTS = 4000
_LONGEST_TEXT = 100


@functools.lru_cache(1024)
def rust_pattern(pattern: str) -> str:
    """A pattern of the same texts in Rust's dialect, which has no look-around."""
    try:
        if _LOOKING.search(pattern):
            pattern = without_looking(pattern)
        elif _ANCHOR.search(pattern):
            with contextlib.suppress(ValueError):
                pattern = without_looking(pattern)
        return _TOKEN.sub(lambda token: _translated(token.group()), pattern)
    except ValueError as error:
        raise ConstraintRefused(f"pattern {shown(pattern)}: {error}") from error


def _translated(token: str) -> str:
    if token[0] == "\\":
        return _escaped(token, in_class=False)
    if token == "(?":
        raise ValueError("flags and groups of other kinds are not served")
    if token[:2] == "(?":
        # Drop unused names: in ECMA 262 they need not be unique.
        return "(?:"
    if token == "[":
        raise ValueError("a class is not closed")
    if token[0] == "[":
        return _class(token)
    if token in ("{", "}", "]"):
        return "\\" + token
    return _ANY_BUT_LINE_ENDS if token == "." else _literal(token)


def _class(token: str) -> str:
    begin = "[^" if token.startswith("[^") else "["
    inside = token[len(begin) : -1]
    if not inside and begin == "[":
        raise ValueError("a class is empty")
    if not inside:
        return r"[\x00-\x{10FFFF}]"
    return begin + _TOKEN_IN_CLASS.sub(_in_class, inside) + "]"


def _in_class(found: re.Match[str]) -> str:
    token = found.group()
    if token == r"\b":
        return r"\x08"
    if token[0] == "\\":
        return _escaped(token, in_class=True)
    return "\\" + token if found["operator"] or token in "[^" else _literal(token)


def _escaped(token: str, in_class: bool) -> str:
    """Translate an escape of ECMA 262."""
    letter, more = token[1:2], token[2:]
    if not letter:
        raise ValueError("it ends with a backslash")
    if letter in "dws":
        return _CLASSES[letter] if in_class else f"[{_CLASSES[letter]}]"
    if letter in "DWS":
        return f"[^{_CLASSES[letter.lower()]}]"
    if letter in _CONTROLS:
        return _CONTROLS[letter]
    if letter in "xu" and more:
        return _code(int(more.strip("{}"), 16))
    if letter == "c" and more:
        return f"\\x{ord(more) % 32:02X}"
    if letter in "pP" and more:
        return token
    if letter in _SYNTAX or not letter.isalnum():
        return re.escape(letter) if letter.isprintable() else _literal(letter)
    raise ValueError(f"\\{letter} is not served")


def _code(code: int) -> str:
    if 0xD800 <= code <= 0xDFFF or code > 0x10FFFF:
        raise ValueError("surrogates are not served")
    return f"\\x{{{code:X}}}"


def _literal(text: str) -> str:
    return text if text.isprintable() else f"\\x{{{ord(text):X}}}"


def any_text_but(texts: Iterable[str]) -> str:
    """A Rust pattern of all texts except `texts`."""
    texts = list(texts)
    if sum(map(len, texts)) > _LARGEST_TEXTS:
        raise ConstraintRefused(f"not: texts of more than {_LARGEST_TEXTS} characters together")
    if max(map(len, texts)) > _LONGEST_TEXT:
        raise ConstraintRefused(f"not: a text of more than {_LONGEST_TEXT} characters")
    return f"^(?:{_but(texts)})$"


def _but(texts: list[str]) -> str:
    following: dict[str, list[str]] = {}
    for text in filter(None, texts):
        following.setdefault(f"\\x{{{ord(text[0]):X}}}", []).append(text[1:])
    others = "".join(following)
    alternatives = [f"[^{others}](?s:.)*" if others else "(?s:.)+"]
    alternatives += [f"{character}(?:{_but(more)})" for character, more in following.items()]
    if "" not in texts:
        alternatives.append("")
    return "|".join(alternatives)
