"""Constraints as requests state them -> grammars of llguidance."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any, Never

from llguidance.gbnf_to_lark import GbnfToLarkError, any_to_lark

from penstock_shard.ipc.request import CONSTRAINT_KINDS, Constraint
from penstock_shard.structured_output.json_schema.schema import prepared
from penstock_shard.structured_output.json_schema.whitespace import json_writing
from penstock_shard.structured_output.refusal import ConstraintRefused, shown
from penstock_shard.structured_output.structural_lark import lark_regex, unforced, written
from penstock_shard.structured_output.structural_tag import read

# A surrogate without its other half, which JSON escapes can express but no text can hold.
_HALF = re.compile("[\ud800-\udfff]")
_EBNF = re.compile(r"^\s*[A-Za-z_][A-Za-z0-9_-]*\s*::=", re.MULTILINE)


def grammar_of(constraint: Constraint, special_tokens: Mapping[str, int]) -> str:
    """The grammar of the texts that the constraint allows.

    `special_tokens`: text and id of tokens that occur as themselves only, never as part of a text.
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
        return written(read(_whole_texts(parsed(constraint))), special_tokens, schema_of, lark_of)
    known = ", ".join(sorted(CONSTRAINT_KINDS))
    raise ConstraintRefused(f"constraint: {shown(constraint.kind)} is none of {known}")


def parsed(constraint: Constraint) -> Any:
    """The constraint's value, parsed as JSON."""
    kind = constraint.kind

    def not_json(name: str) -> Never:
        raise ConstraintRefused(f"{kind}: {name} is not JSON")

    try:
        return json.loads(constraint.value, parse_constant=not_json)
    except RecursionError as error:
        raise ConstraintRefused(f"{kind}: nests too deep") from error
    except ValueError as error:
        raise ConstraintRefused(f"{kind}: not JSON: {error}") from error


def _whole_texts(tag: Any) -> Any:
    """The same tag; refuses one with a lone surrogate, which no text can hold."""
    if _HALF.search(json.dumps(tag, ensure_ascii=False)):
        raise ConstraintRefused("structural_tag: it holds half a character")
    return tag


def schema_of(schema: Any) -> dict[str, Any]:
    """A schema as given to llguidance: keywords that it handles right, and whitespace rules."""
    if not isinstance(schema, dict | bool):
        raise ConstraintRefused(f"json_schema: {shown(schema)} is no schema")
    options = schema.get("x-guidance", {}) if isinstance(schema, dict) else {}
    return {"x-guidance": json_writing(options), **prepared(schema)}


def _json(schema: Any) -> str:
    return unforced(f"start: json\njson: %json {json.dumps(schema_of(schema))}")


def _regex(pattern: str) -> str:
    """A grammar of the texts that match as a whole; Rust's dialect, without look-around."""
    if not pattern:
        raise ConstraintRefused("regex: it is empty")
    return unforced(f"start: {lark_regex(pattern)}")


def _choice(options: tuple[str, ...]) -> str:
    if not options:
        raise ConstraintRefused("choice: no options")
    return unforced("start: " + " | ".join(map(json.dumps, options)))


def lark_of(text: str) -> str:
    """A grammar in llguidance's Lark; the EBNF of llama.cpp and vLLM is translated."""
    if not text.strip():
        raise ConstraintRefused("grammar: it is empty")
    if not _EBNF.search(text):
        return text
    try:
        return any_to_lark(text)
    except GbnfToLarkError as error:
        raise ConstraintRefused(f"grammar: {error}") from error
