"""The exception for a constraint that cannot be honoured."""

from __future__ import annotations

import re

LONGEST_MESSAGE = 300


class ConstraintRefused(Exception):
    """The message is one short line, for the caller."""

    def __init__(self, message: str) -> None:
        line = " ".join(message.split())
        if len(line) > LONGEST_MESSAGE:
            line = line[: LONGEST_MESSAGE - 3] + "..."
        super().__init__(line)


def shown(value: object, longest: int = 60) -> str:
    """A caller's value for a message, cut to `longest` characters."""
    text = repr(value)
    return text if len(text) <= longest else text[: longest - 3] + "..."


_OF_PARSER = "parser error|Parser Error"
# The beginning of an error of llguidance -> the error for callers, without internal names.
_TOLD = (
    ("NoExtensionBias", "no text is allowed"),
    (_OF_PARSER, "too much of it fits what is written so far"),
    ("lexer error|initial lexer|LexerTooComplex", "its regular expressions take too much work"),
    ("panic|grammar too|too many", "it is too large to be compiled"),
    ("schema too large|Schema intersection", "its parts together come to too much"),
    ("circular references", "what stands beside a recursive reference cannot be combined with it"),
    ("Unable to determine", "its patterns of the same text are too complex together"),
    (
        "can't determine|patternProperty regexes",
        "patternProperties: several patterns match the same names",
    ),
    ("Unsatisfiable schema: Regex is empty", "no text meets its patterns and lengths together"),
    ("Unsatisfiable schema: prefixItems", "no array meets what is said of its items together"),
    ("min/maxProperties only", "minProperties and maxProperties are served beside properties only"),
    ("lookarounds not", "pattern: ^ and $ are served at the ends only"),
)
# llguidance's internal words, which mean nothing to callers.
_INTERNAL = re.compile(r"json-schema:///|assertion|backtrace|::|\bparser?\.|<non-verbose/>")
# A place in our grammar, which is not the caller's text.
_PLACE = re.compile(r"^(at )?\d+\(\d+\): (failed to compile JSON schema: )?")


def reason_of(error: str) -> str:
    """The reason in an error of llguidance, as one line for callers."""
    lines = _lines(error)
    first = next(filter(None, lines), "")
    for begin, told in _TOLD:
        if re.match(begin, first):
            return told
    line = next((line for line in lines if line.startswith("error:")), first)
    return "it cannot be compiled" if not line or _INTERNAL.search(line) else line


def is_of_parser(error: str) -> bool:
    """True if an error comes from llguidance's parser, which sequences do not share, and not from
    its lexer, which they share.
    """
    return re.match(_OF_PARSER, next(filter(None, _lines(error)), "")) is not None


def _lines(error: str) -> list[str]:
    return [_PLACE.sub("", line.strip()) for line in error.strip().splitlines()]
