"""Turns arguments that a format writes without quotes into JSON."""

from __future__ import annotations

import json

from penstock_router.argument_kinds import STRING, Kinds
from penstock_router.text.formats.reading.json_mender import JsonMender

_NUMBERS: Kinds = frozenset({"integer", "number"})
# Most JSON readers use doubles, which are not exact beyond this number.
_MAX_WHOLE = 2**53
# The JSON of words, used for arguments that cannot be strings.
_WORDS = {"true": "true", "false": "false", "null": "null", "none": "null", "": "null"}
# Beginnings of values other than strings.
_OTHER_BEGINS = tuple("\"'{[+-.0123456789")
_OTHER_WORDS = ("null", "None", "true", "True", "false", "False")


def json_of(text: str, kinds: Kinds) -> str:
    """Return the JSON value that a text means; a string if no other type fits."""
    value = _value_of(text.strip())
    kind = "string" if value is None else kind_of(value)
    if kinds & STRING:
        fits = kind in kinds - STRING or (kind == "integer" and "number" in kinds)
        return value if value and fits else json.dumps(text, ensure_ascii=False)
    word = _WORDS.get(text.strip().lower())
    if word is not None and kind_of(word) in kinds:
        return word
    if value is None:
        return json.dumps(text, ensure_ascii=False)
    return _whole(value) if kind == "number" and kinds & _NUMBERS == {"integer"} else value


def _value_of(text: str) -> str | None:
    """Return the text as one mended JSON value; None if it is not one value."""
    mender = JsonMender()
    # A word or number is complete only when another character follows, so add a space.
    is_value = mender.feed(f"{text} ") >= len(text) and mender.complete
    return (mender.take() or None) if is_value else None


def _whole(value: str) -> str:
    number = float(value)
    return str(int(number)) if abs(number) <= _MAX_WHOLE and number.is_integer() else value


def begun_json_of(text: str, kinds: Kinds) -> str:
    """Return the certain part of the JSON value of a text that was cut off."""
    if not kinds & STRING:
        return text
    begun = text.lstrip()
    is_open = begun[:1] in _OTHER_BEGINS or any(word.startswith(begun) for word in _OTHER_WORDS)
    return "" if is_open else json.dumps(text, ensure_ascii=False)[:-1]


def kind_of(value: str) -> str:
    """Return the type of a valid JSON value."""
    first = value.lstrip()[:1]
    named = {'"': "string", "{": "object", "[": "array", "n": "null", "t": "boolean"}
    if first in named or first == "f":
        return named.get(first, "boolean")
    return "number" if set(value) & set(".eE") else "integer"
