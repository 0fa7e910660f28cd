"""Keywords of older drafts, and those that are short for others, as fewer of draft 2020-12."""

from __future__ import annotations

from typing import Any

from penstock_shard.structured_output.json_schema.combine import Schema
from penstock_shard.structured_output.refusal import ConstraintRefused

_EXCLUSIVE = {"minimum": "exclusiveMinimum", "maximum": "exclusiveMaximum"}
_DEPENDENT = frozenset(("dependencies", "dependentRequired", "dependentSchemas"))


def modern(schema: dict[str, Any], draft: int | None) -> dict[str, Any]:
    """A schema of the same values, without `additionalItems`, lists in `items`, bools as bounds,
    `dependencies` and `dependentRequired`.
    """
    out: dict[str, Any] = {}
    has_list = isinstance(schema.get("items"), list)
    if has_list and (draft == 2020 or "prefixItems" in schema):
        raise ConstraintRefused("items: a list is called prefixItems in draft 2020-12")
    for keyword, value in schema.items():
        if keyword == "items" and has_list:
            out["prefixItems"] = value
        elif keyword == "additionalItems":
            out |= {"items": value} if has_list else {}
        elif keyword in _EXCLUSIVE and schema.get(_EXCLUSIVE[keyword]) is True:
            out[_EXCLUSIVE[keyword]] = value
        elif keyword in _DEPENDENT:
            out["dependentSchemas"] = _dependent(schema)
        elif not (keyword in _EXCLUSIVE.values() and isinstance(value, bool)):
            out[keyword] = value
    return out


def _dependent(schema: dict[str, Any]) -> dict[str, Schema]:
    """By name, what objects with a member of that name must meet."""
    needed: dict[str, list[Schema]] = {}
    for keyword in filter(_DEPENDENT.__contains__, schema):
        for name, need in schema[keyword].items():
            if need not in ([], {}, True):
                meant = {"required": need} if isinstance(need, list) else need
                needed.setdefault(name, []).append(meant)
    return {name: {"allOf": some} for name, some in needed.items()}
