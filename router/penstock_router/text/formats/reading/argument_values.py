"""Values of arguments that a format writes without quotes -> JSON."""

from __future__ import annotations

import json

from penstock_router.argument_kinds import STRING, Kinds
from penstock_router.text.formats.reading.json_mender import JsonMender

# How values begin that are no strings.
_OTHER_BEGINS = tuple("\"'{[+-.0123456789")
_OTHER_WORDS = ("null", "None", "true", "True", "false", "False")


def json_of(text: str, kinds: Kinds) -> str:
    """The JSON value that a text is meant as."""
    mender = JsonMender()
    stripped = text.strip()
    # A word or number ends only where something else comes.
    is_value = mender.feed(f"{stripped} ") >= len(stripped) and mender.complete
    value = mender.take() if is_value else ""
    if not value or (kind := kind_of(value)) == "string":
        return value if value and not kinds & STRING else json.dumps(text, ensure_ascii=False)
    if kind == "number" and "number" not in kinds and "integer" in kinds:
        number = float(value)
        return str(int(number)) if number.is_integer() else value
    fits = kind in kinds or (kind == "integer" and "number" in kinds)
    return value if fits or not kinds & STRING else json.dumps(text, ensure_ascii=False)


def begun_json_of(text: str, kinds: Kinds) -> str:
    """What is certain of the JSON value, where its text was cut off."""
    if not kinds & STRING:
        return text
    begun = text.lstrip()
    is_open = begun[:1] in _OTHER_BEGINS or any(word.startswith(begun) for word in _OTHER_WORDS)
    return "" if is_open else json.dumps(text, ensure_ascii=False)[:-1]


def kind_of(value: str) -> str:
    """The type of a JSON value, of which the text is valid."""
    first = value.lstrip()[:1]
    named = {'"': "string", "{": "object", "[": "array", "n": "null", "t": "boolean"}
    if first in named or first == "f":
        return named.get(first, "boolean")
    return "number" if set(value) & set(".eE") else "integer"
