"""Rules for writing constrained JSON: whitespace, separators, escapes."""

from __future__ import annotations

import re
from typing import Any

from penstock_shard.structured_output.refusal import ConstraintRefused, shown

# Between JSON tokens: one or two blanks, or a line break and indentation. The bound keeps an output
# from consisting of whitespace forever.
WHITESPACE = r"[ \t]{1,2}|\r?\n[ \t]{0,40}"
# Without \u, which could spell a property's name so that the grammar does not recognize it.
_ESCAPES = 'nrbtf\\"'
_OPTIONS: dict[str, type] = {
    "whitespace_flexible": bool,
    "whitespace_pattern": str,
    "item_separator": str,
    "key_separator": str,
}
# A rule may match only JSON's whitespace, so that the output stays JSON.
_BLANK = r"[ \t\n\r]|\\[ntrs]"
_HOW_OFTEN = r"[*+?]|\{[0-9]{1,5}(?:,[0-9]{0,5})?\}"
_BLANKS = rf"(?:(?:{_BLANK}|\[(?:{_BLANK})+\])(?:{_HOW_OFTEN})?)*"
_WRITING: dict[str, tuple[re.Pattern[str], str]] = {
    "whitespace_pattern": (
        re.compile(rf"(?:{_BLANK}|\[(?:{_BLANK})+\]|\((?:\?:)?|[|)]|{_HOW_OFTEN})*"),
        "white space, groups and alternatives of it",
    ),
    "item_separator": (re.compile(f"{_BLANKS},{_BLANKS}"), "one comma with white space around it"),
    "key_separator": (re.compile(f"{_BLANKS}:{_BLANKS}"), "one colon with white space around it"),
}
_IN_CLASS = re.compile(r"\[[^]]*\]")


def json_writing(options: Any) -> dict[str, Any]:
    """The rules for llguidance: our defaults, or a schema's `x-guidance`."""
    if not isinstance(options, dict):
        raise ConstraintRefused(f"x-guidance: {shown(options)} is no object")
    for name, value in options.items():
        if name not in _OPTIONS:
            raise ConstraintRefused(f"x-guidance: {shown(name)} is none of {', '.join(_OPTIONS)}")
        if not isinstance(value, _OPTIONS[name]):
            raise ConstraintRefused(
                f"x-guidance: {name}: {shown(value)} is no {_OPTIONS[name].__name__}"
            )
    writing = {"json_allowed_escapes": _ESCAPES, **options}
    for name, (pattern, what) in _WRITING.items():
        if name in options:
            writing[name] = _blank(name, options[name], pattern, what)
    if options.get("whitespace_flexible", True):
        writing.setdefault("whitespace_pattern", WHITESPACE)
    return writing


def _blank(name: str, text: str, pattern: re.Pattern[str], what: str) -> str:
    """Narrow \\s: in regexes it matches more than JSON's whitespace."""
    if not pattern.fullmatch(text):
        raise ConstraintRefused(f"x-guidance: {name}: {shown(text)} is not {what}")
    text = _IN_CLASS.sub(lambda found: found.group().replace(r"\s", r" \t\n\r"), text)
    return text.replace(r"\s", r"[ \t\n\r]")
