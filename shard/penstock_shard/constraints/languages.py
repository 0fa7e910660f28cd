"""Constraints as requests state them to grammars of llguidance.

Knows the six languages and what each may hold, nothing of tokens but the ids of special ones.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any, Never

from llguidance import regex_to_lark
from llguidance.gbnf_to_lark import GbnfToLarkError, any_to_lark

from penstock_shard.constraints.json_schema import prepared
from penstock_shard.constraints.refusal import ConstraintRefused, shown
from penstock_shard.constraints.structural_lark import unforced, written
from penstock_shard.constraints.structural_tag import read
from penstock_shard.request import Constraint

__all__ = ["Constraint", "ConstraintRefused", "grammar_of"]

KINDS = ("json_schema", "json_object", "regex", "choice", "grammar", "structural_tag")
# A space or two, or a line's end and the indentation of the next: each place of the output may have
# one of these, so that whitespace cannot go on and on.
WHITESPACE = r"[ \t]{1,2}|\r?\n[ \t]{0,40}"
# Without \u: it could spell the name of a property in a way that is not known as that name.
_ESCAPES = 'nrbtf\\"'
_OPTIONS: dict[str, type] = {
    "whitespace_flexible": bool,
    "whitespace_pattern": str,
    "item_separator": str,
    "key_separator": str,
}
_MOST_OPTIONS = 10_000
_EBNF = re.compile(r"^\s*[A-Za-z_][A-Za-z0-9_-]*\s*::=", re.MULTILINE)


def grammar_of(constraint: Constraint, special_tokens: Mapping[str, int]) -> str:
    """The grammar whose texts are what the constraint allows.

    `special_tokens`: text and id of tokens that stand in no text but as themselves.
    """
    if constraint.kind == "json_schema":
        return _json(parsed(constraint))
    if constraint.kind == "json_object":
        return _json({"type": "object"})
    if constraint.kind == "regex":
        return _regex(constraint.value)
    if constraint.kind == "choice":
        return _choice(constraint.options)
    if constraint.kind == "grammar":
        return unforced(lark_of(constraint.value))
    if constraint.kind == "structural_tag":
        return written(read(parsed(constraint)), special_tokens, schema_of, lark_of)
    raise ConstraintRefused(f"constraint: {shown(constraint.kind)} is none of {', '.join(KINDS)}")


def parsed(constraint: Constraint) -> Any:
    """The value, which is JSON."""
    kind = constraint.kind

    def not_json(name: str) -> Never:
        raise ConstraintRefused(f"{kind}: {name} is not JSON")

    try:
        return json.loads(constraint.value, parse_constant=not_json)
    except RecursionError as error:
        raise ConstraintRefused(f"{kind}: nests too deep") from error
    except ValueError as error:
        raise ConstraintRefused(f"{kind}: not JSON: {error}") from error


def schema_of(schema: Any) -> dict[str, Any]:
    """A schema as llguidance is given it: what it gets right, and how whitespace may stand."""
    if not isinstance(schema, dict | bool):
        raise ConstraintRefused(f"json_schema: {shown(schema)} is no schema")
    options = schema.get("x-guidance", {}) if isinstance(schema, dict) else {}
    return {"x-guidance": _writing(options), **prepared(schema)}


def _writing(options: Any) -> dict[str, Any]:
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
    if options.get("whitespace_flexible", True):
        writing.setdefault("whitespace_pattern", WHITESPACE)
    return writing


def _json(schema: Any) -> str:
    return unforced(f"start: json\njson: %json {json.dumps(schema_of(schema))}")


def _regex(pattern: str) -> str:
    """The whole text matches; Rust's dialect, without look-around."""
    if not pattern:
        raise ConstraintRefused("regex: it is empty")
    return unforced(f"start: /{regex_to_lark(pattern, '')}/")


def _choice(options: tuple[str, ...]) -> str:
    if not options:
        raise ConstraintRefused("choice: no options")
    if len(options) > _MOST_OPTIONS:
        raise ConstraintRefused(f"choice: {len(options)} options are over {_MOST_OPTIONS}")
    return unforced("start: " + " | ".join(map(json.dumps, options)))


def lark_of(text: str) -> str:
    """Lark as llguidance has it; EBNF as llama.cpp and vLLM have it is translated."""
    if not text.strip():
        raise ConstraintRefused("grammar: it is empty")
    if not _EBNF.search(text):
        return text
    try:
        return any_to_lark(text)
    except GbnfToLarkError as error:
        raise ConstraintRefused(f"grammar: {error}") from error
