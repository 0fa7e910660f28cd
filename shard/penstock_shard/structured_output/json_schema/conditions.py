"""Keywords that depend on a condition, as if, then and else."""

from __future__ import annotations

from typing import Any

from penstock_shard.structured_output.json_schema.combine import Schema

CONDITIONAL = frozenset(("if", "dependentSchemas"))


def conditions(keyword: str, schema: dict[str, Any]) -> list[tuple[Schema, Schema, Schema]]:
    """Conditions, each with what values must meet that meet it, and what all others must."""
    if keyword == "dependentSchemas":
        return [
            ({"type": "object", "required": [name]}, needed, True)
            for name, needed in schema[keyword].items()
        ]
    if "then" not in schema and "else" not in schema:
        return []
    return [(schema["if"], schema.get("then", True), schema.get("else", True))]
