"""Translates constraints, or the parts of a structural tag, into llguidance's languages."""

from __future__ import annotations

import re
import sys
from typing import Any

from llguidance import regex_to_lark
from llguidance.gbnf_to_lark import GbnfToLarkError, any_to_lark

from penstock_shard.structured_output.json_schema.schema import prepared
from penstock_shard.structured_output.json_schema.whitespace import json_writing
from penstock_shard.structured_output.refusal import ConstraintRefused, shown

_CODE_POINT = re.compile(r"(?<!\\)((?:\\\\)*)\\U([0-9A-Fa-f]{8})")
_EBNF = re.compile(r"^\s*([A-Za-z_][A-Za-z0-9_-]*)\s*::=", re.MULTILINE)
_RULE = re.compile(r"[A-Za-z_][A-Za-z0-9_-]*")
# Text without rules' names: strings, character classes, tokens and comments.
_NO_RULE = re.compile(r'"(?:\\.|[^"\\])*"|\[(?:\\.|[^\]\\])*\]|<[^<>\n]*>|#.*')


def schema_of(schema: Any, *, is_watched: bool = False) -> dict[str, Any]:
    """A schema for llguidance: keywords that it handles correctly, and whitespace rules.

    `is_watched`: items and names can be watched, because it is known where the JSON begins.
    """
    if not isinstance(schema, dict | bool):
        raise ConstraintRefused(f"json_schema: {shown(schema)} is no schema")
    options = schema.get("x-guidance") if isinstance(schema, dict) else None
    writing = json_writing({} if options is None else options)
    return {"x-guidance": writing, **prepared(schema, is_watched=is_watched)}


def lark_regex(pattern: str) -> str:
    """Translate a regular expression of Rust's dialect, without look-around, into Lark's syntax."""
    if not pattern:
        raise ConstraintRefused("regex: it is empty")
    if (len(pattern) - len(pattern.rstrip("\\"))) % 2:
        # The library would ignore the backslash.
        raise ConstraintRefused(f"regex: {shown(pattern)} ends with a backslash")
    return f"/{regex_to_lark(pattern, '')}/"


def lark_of(text: str) -> str:
    """A grammar in llguidance's Lark. Translates the EBNF of llama.cpp and vLLM."""
    if not text.strip():
        raise ConstraintRefused("grammar: it is empty")
    if not _EBNF.search(text):
        return text
    _check_rules(text)
    try:
        return any_to_lark(_CODE_POINT.sub(_character, text))
    except GbnfToLarkError as error:
        raise ConstraintRefused(f"grammar: {error}") from error


def _check_rules(text: str) -> None:
    """Refuse an undefined rule; the library has no error for it."""
    named = _RULE.findall(_NO_RULE.sub(" ", text))
    defined = _EBNF.findall(text)
    for name in named:
        if name not in defined:
            raise ConstraintRefused(f"grammar: Rule {shown(name)} not found")


def _character(escaped: re.Match[str]) -> str:
    """Replace an escape of more than four digits by its character: Lark lacks such escapes."""
    number = int(escaped[2], 16)
    if 0xFFFF < number <= sys.maxunicode:
        return escaped[1] + chr(number)
    return escaped[0]


def unforced(lark: str) -> str:
    """Switch off llguidance's search for forced text.

    At each mask llguidance would follow forced text to its end, whose length nothing bounds.
    """
    return lark + '\n%llguidance {"no_forcing": true}\n'
