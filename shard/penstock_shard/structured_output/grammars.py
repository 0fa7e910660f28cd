"""Turns requests' constraints into llguidance grammars."""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping, Sequence
from typing import Any, Never

from penstock_proto.types import Constraint
from penstock_shard.structured_output.distinct.watched import Watched, watched_in
from penstock_shard.structured_output.languages import lark_of, lark_regex, schema_of, unforced
from penstock_shard.structured_output.refusal import ConstraintRefused
from penstock_shard.structured_output.structural_lark import written
from penstock_shard.structured_output.structural_tag import read


def grammar_of(constraint: Constraint, special_tokens: Mapping[str, int]) -> str:
    """The grammar of a constraint, without the rules of `watched_of`.

    `special_tokens`: text and id of tokens that stand for themselves and never for text.
    """
    return _written(constraint, tuple(special_tokens.items()))[0]


def watched_of(constraint: Constraint, special_tokens: Mapping[str, int]) -> dict[str, Watched]:
    """Return the JSON in which items or names must differ, by the name of the grammar's capture
    before the JSON; "" is the start of the text.
    """
    schemas = _written(constraint, tuple(special_tokens.items()))[1]
    found = {name: watched_in(schema) for name, schema in schemas.items()}
    return {name: watched for name, watched in found.items() if watched is not None}


def holds_grammar(constraint: Constraint, special_tokens: Mapping[str, int]) -> bool:
    """True if the caller wrote rules of the grammar: they may be recursive and ambiguous."""
    if constraint.kind != "structural_tag":
        return constraint.kind == "grammar"
    written_as = _written(constraint, tuple(special_tokens.items()))[0]
    return len(json.loads(written_as)["grammars"]) > 1


# The functions above call this in turn for one constraint.
@functools.lru_cache(4)
def _written(
    constraint: Constraint, special_tokens: tuple[tuple[str, int], ...]
) -> tuple[str, dict[str, dict[str, Any]]]:
    """Return the grammar, and the prepared schemas of its JSON by the name of the capture before
    it.
    """
    match constraint.kind:
        case "json_schema" | "json_object":
            is_any = constraint.kind == "json_object"
            given = {"type": "object"} if is_any else _parsed(constraint)
            schema = schema_of(given, is_watched=True)
            return unforced(f"start: json\njson: %json {json.dumps(schema)}"), {"": schema}
        case "regex":
            return unforced(f"start: {lark_regex(constraint.value)}"), {}
        case "choice":
            return _choice(constraint.options), {}
        case "grammar":
            return unforced(lark_of(constraint.value)), {}
    return written(read(_parsed(constraint)), dict(special_tokens))


def _parsed(constraint: Constraint) -> Any:
    def not_json(name: str) -> Never:
        raise ConstraintRefused(f"{name} is not JSON")

    try:
        return json.loads(constraint.value, parse_constant=not_json)
    except ValueError as error:
        raise ConstraintRefused(f"not JSON: {error}") from error


def _choice(options: Sequence[str]) -> str:
    if not options:
        raise ConstraintRefused("choice: no options")
    # Write one terminal: in a rule, each option would take a position.
    return unforced("start: CHOICE\nCHOICE: " + " | ".join(map(json.dumps, options)))
