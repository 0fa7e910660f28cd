"""Constraints as requests state them -> grammars of llguidance."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Never

from penstock_shard.ipc.request import CONSTRAINT_KINDS, Constraint
from penstock_shard.structured_output.distinct.watched import Watched, watched_in
from penstock_shard.structured_output.languages import lark_of, lark_regex, schema_of, unforced
from penstock_shard.structured_output.refusal import ConstraintRefused, shown
from penstock_shard.structured_output.structural_lark import written
from penstock_shard.structured_output.structural_tag import read


def grammar_of(constraint: Constraint, special_tokens: Mapping[str, int]) -> str:
    """The grammar of the texts that the constraint allows, apart from what `watched_of` tells.

    `special_tokens`: text and id of tokens that occur as themselves only, never as part of a text.
    """
    if constraint.kind in _WHOLE_JSON:
        return unforced(f"start: json\njson: %json {json.dumps(_schema(constraint))}")
    match constraint.kind:
        case "regex":
            return unforced(f"start: {lark_regex(constraint.value)}")
        case "choice":
            return _choice(constraint.options)
        case "grammar":
            return unforced(lark_of(constraint.value))
        case "structural_tag":
            return written(read(_parsed(constraint)), special_tokens)[0]
    known = ", ".join(sorted(CONSTRAINT_KINDS))
    raise ConstraintRefused(f"constraint: {shown(constraint.kind)} is none of {known}")


def watched_of(constraint: Constraint, special_tokens: Mapping[str, int]) -> dict[str, Watched]:
    """In which JSON of the constraint's texts items or names must differ: by the name of the
    grammar's capture behind which it begins; "" for where the text begins.
    """
    schemas = {}
    if constraint.kind in _WHOLE_JSON:
        schemas = {"": _schema(constraint)}
    elif constraint.kind == "structural_tag":
        schemas = written(read(_parsed(constraint)), special_tokens)[1]
    found = {name: watched_in(schema) for name, schema in schemas.items()}
    return {name: watched for name, watched in found.items() if watched is not None}


_WHOLE_JSON = ("json_schema", "json_object")


def _schema(constraint: Constraint) -> dict[str, Any]:
    is_any = constraint.kind == "json_object"
    return schema_of({"type": "object"} if is_any else _parsed(constraint), is_watched=True)


def _parsed(constraint: Constraint) -> Any:
    """The constraint's value, parsed as JSON."""

    def not_json(name: str) -> Never:
        raise ConstraintRefused(f"{name} is not JSON")

    try:
        return json.loads(constraint.value, parse_constant=not_json)
    except ValueError as error:
        raise ConstraintRefused(f"not JSON: {error}") from error


def _choice(options: tuple[str, ...]) -> str:
    if not options:
        raise ConstraintRefused("choice: no options")
    return unforced("start: " + " | ".join(map(json.dumps, options)))
