"""Splits wide unions into trees of narrow ones.

llguidance looks at each alternative of a union once for each position in the grammar that the union
may follow, and compares it with all positions found so far. If a thousand alternatives continue
with the same union of a thousand, a token takes seconds. A reference's target is looked at only
once.
"""

from __future__ import annotations

from penstock_common.json_schema.keywords import with_subschemas
from penstock_shard.structured_output.json_schema.combine import Schema, any_of

# Narrower unions cost little. Behind references, llguidance would not see impossible alternatives.
_WIDE = 64
_WIDEST = 8
_Definitions = dict[str, Schema]


def narrowed(root: Schema, definitions: _Definitions) -> tuple[Schema, _Definitions]:
    """The same schema and definitions, without unions wider than `_WIDE` outside `allOf`."""
    narrowing = _Narrowing()
    root = narrowing.narrow(root)
    narrow = {name: narrowing.narrow(of) for name, of in definitions.items()}
    return root, {**narrow, **narrowing.added}


class _Narrowing:
    """Collects the definitions that splitting adds."""

    def __init__(self) -> None:
        self.added: _Definitions = {}

    def narrow(self, schema: Schema) -> Schema:
        cases = _alternatives(schema)
        if len(cases) > _WIDE:
            return self._tree(list(map(self._within, cases)))
        return self._within(schema)

    def _within(self, schema: Schema) -> Schema:
        # Keep allOf: llguidance drops its impossible combinations, but not through references.
        if not isinstance(schema, dict) or "allOf" in schema:
            return schema
        return with_subschemas(schema, self.narrow)

    def _tree(self, cases: list[Schema]) -> Schema:
        while len(cases) > _WIDEST:
            starts = range(0, len(cases), _WIDEST)
            cases = [self._named(cases[start : start + _WIDEST]) for start in starts]
        return any_of(cases)

    def _named(self, cases: list[Schema]) -> Schema:
        name = f"w{len(self.added)}"
        self.added[name] = any_of(cases)
        return {"$ref": f"#/$defs/{name}"}


def _alternatives(schema: Schema) -> list[Schema]:
    if not isinstance(schema, dict):
        return [schema]
    if schema.keys() == {"anyOf"}:
        return [each for part in schema["anyOf"] for each in _alternatives(part)]
    if any(isinstance(value, dict | list) for value in schema.get("enum", ())):
        rest = {key: of for key, of in schema.items() if key != "enum"}
        return [{**rest, "const": value} for value in schema["enum"]]
    return [schema]
