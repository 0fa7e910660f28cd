"""Rewrites keywords of older drafts, and shorthands, in fewer keywords of draft 2020-12."""

from __future__ import annotations

from typing import Any

from penstock_common.json_schema.keywords import restricting
from penstock_shard.structured_output.patterns.automaton import all_found
from penstock_shard.structured_output.refusal import ConstraintRefused

_EXCLUSIVE = {"minimum": "exclusiveMinimum", "maximum": "exclusiveMaximum"}


def modern(schema: dict[str, Any], draft: int | None) -> dict[str, Any]:
    """A schema of the same values without `additionalItems`, lists in `items` or bools as bounds.

    `nullable` becomes part of `type`. All conditions become tuples in `if`: the condition, and the
    schemas for values that meet it and for others.
    """
    out: dict[str, Any] = {}
    has_list = isinstance(schema.get("items"), list)
    if has_list and (draft == 2020 or "prefixItems" in schema):
        raise ConstraintRefused("items: a list is called prefixItems in draft 2020-12")
    for keyword, value in schema.items():
        if keyword == "items" and has_list:
            out |= {"prefixItems": value} if value else {}
        elif keyword == "additionalItems":
            out |= {"items": value} if has_list else {}
        elif keyword in _EXCLUSIVE and schema.get(_EXCLUSIVE[keyword]) is True:
            out[_EXCLUSIVE[keyword]] = value
        elif keyword == "type" and schema.get("nullable") is True:
            out["type"] = [*(value if isinstance(value, list) else [value]), "null"]
        elif keyword == "if":
            out.setdefault("if", []).append(_condition(schema))
        elif keyword == "allOf":
            parts = _patterns_together(_one_pattern(value))
            rest = [part for part in parts if not _is_condition(part)]
            out |= {"allOf": rest} if rest else {}
            asked = [_condition(part) for part in value if _is_condition(part)]
            out |= {"if": [*out.get("if", ()), *asked]} if asked else {}
        elif keyword in ("dependencies", "dependentRequired", "dependentSchemas"):
            out.setdefault("if", []).extend(_if_there(*each) for each in value.items())
        elif keyword not in ("then", "else") and not (
            keyword in _EXCLUSIVE.values() and isinstance(value, bool)
        ):
            out[keyword] = value
    return out


def _one_pattern(parts: list[Any]) -> list[Any]:
    plain = [part for part in parts if _is_pattern(part)]
    try:
        pattern = all_found([part["pattern"] for part in plain]) if len(plain) > 1 else None
    except ValueError:
        return parts
    if pattern is None:
        return parts
    return [{"pattern": pattern}, *(part for part in parts if not _is_pattern(part))]


def _patterns_together(parts: list[Any]) -> list[Any]:
    alike = [part for part in parts if _has_only_names(part)]
    if len(alike) < 2:
        return parts
    together: dict[str, Any] = {}
    for part in alike:
        for pattern, of in part["patternProperties"].items():
            both = [together[pattern], of] if pattern in together else None
            together[pattern] = of if both is None else {"allOf": both}
    others = [part for part in parts if not _has_only_names(part)]
    return [{"patternProperties": together}, *others]


def _has_only_names(schema: Any) -> bool:
    is_dict = isinstance(schema, dict) and isinstance(schema.get("patternProperties"), dict)
    return is_dict and restricting(schema).keys() == {"patternProperties"}


def _is_pattern(schema: Any) -> bool:
    is_dict = isinstance(schema, dict) and isinstance(schema.get("pattern"), str)
    return is_dict and restricting(schema).keys() == {"pattern"}


def _condition(schema: dict[str, Any]) -> tuple[Any, Any, Any]:
    return schema["if"], schema.get("then", True), schema.get("else", True)


def _is_condition(schema: Any) -> bool:
    if not isinstance(schema, dict) or "if" not in schema or "$id" in schema:
        return False
    said = restricting(schema)
    are_schemas = all(isinstance(value, dict | bool) for value in said.values())
    return are_schemas and said.keys() <= {"if", "then", "else"}


def without_nulls(schema: dict[str, Any]) -> dict[str, Any]:
    """Drop keywords that are null: some clients write null for unused keywords."""
    if None not in schema.values():
        return schema
    return {key: value for key, value in schema.items() if value is not None or key == "const"}


def _if_there(name: str, needed: Any) -> tuple[dict[str, Any], Any, bool]:
    """Return the condition that objects with a member `name` meet `needed` (a schema, or required
    names).
    """
    if isinstance(needed, list):
        needed = {"required": needed} if needed else True
    return {"type": "object", "required": [name]}, needed, True
