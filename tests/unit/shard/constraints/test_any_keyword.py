"""Keywords put together as nobody would: what is allowed is valid, whatever is refused."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest
from jsonschema import Draft202012Validator
from support.budget import budget, seeded
from support.compilers import END, plain_compiler
from support.distinct_walks import Walker, of_schema

from penstock_shard.structured_output.refusal import ConstraintRefused

_LEAVES: tuple[Any, ...] = (
    True,
    False,
    *({"type": kind} for kind in ("integer", "null", "boolean", ["string", "integer"])),
    *({"const": value} for value in (1, "a", None, [1], {"a": 1}, True, 0.5)),
    {"enum": ["a", "b", 1]},
    {"type": "string", "maxLength": 2},
    {"pattern": "^a"},
    {"minLength": 2},
    {"minimum": 2},
    {"exclusiveMinimum": 2},
    {"type": "number", "maximum": 5},
    {"multipleOf": 3},
    {"type": "array", "maxItems": 2},
    {"type": "array", "minItems": 1},
    {"type": "object", "maxProperties": 2},
    {"required": ["a"]},
)
_NAMES = ("a", "b", "c")
# What a request ends with if its schema leaves it no token, or too much work to find one.
_ENDS = ("no other item or name differs", "too much of it fits what is written so far")


class _Odd:
    """Makes schemas of a few keywords each, and schemas in them."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng

    def schema(self, depth: int) -> Any:
        if depth == 0:
            return self._rng.choice(_LEAVES)
        schema: dict[str, Any] = {}
        for _ in range(self._rng.randint(1, 3)):
            schema.update(self._keyword(depth - 1))
        return schema

    def _keyword(self, depth: int) -> dict[str, Any]:
        rng = self._rng
        names = rng.sample(_NAMES, rng.randint(1, 2))
        some = [self.schema(depth) for _ in range(rng.randint(1, 3))]
        one = some[0]
        leaf = rng.choice(_LEAVES)
        made: tuple[dict[str, Any], ...] = (
            {rng.choice(("allOf", "anyOf", "oneOf")): some},
            {rng.choice(("allOf", "anyOf", "oneOf")): some},
            {"not": one},
            {"if": one, "then": some[-1], "else": leaf},
            {"if": one, rng.choice(("then", "else")): some[-1]},
            {"properties": {name: self.schema(depth) for name in names}},
            {"patternProperties": {rng.choice(("^a", "b$", "^c.$")): one}},
            {
                rng.choice(("additionalProperties", "unevaluatedProperties")): rng.choice(
                    (False, one)
                )
            },
            {rng.choice(("items", "unevaluatedItems")): rng.choice((False, one))},
            {"prefixItems": some},
            {"uniqueItems": True, "minItems": rng.randint(0, 2)},
            {"uniqueItems": True, "items": one},
            {"contains": one, "minContains": rng.randint(0, 2), "maxContains": 2},
            {"contains": one},
            {"required": names},
            {"dependentRequired": {"a": ["b"]}},
            {"dependentSchemas": {"a": one}},
            {
                "propertyNames": rng.choice(
                    ({"enum": ["a", "b"]}, {"pattern": "^[ab]"}, {"maxLength": 2})
                )
            },
            {"minProperties": rng.randint(0, 2)},
            {"maxProperties": rng.randint(0, 3)},
            {"type": rng.choice(("object", "array", ["object", "null"]))},
            leaf if isinstance(leaf, dict) else {},
        )
        return rng.choice(made)


def _short_walk(walker: Walker, rng) -> list[int] | None:
    """Prefers tokens of one letter that JSON or the schemas here are made of."""
    decode = plain_compiler().tokenizer.decode_str
    letters = set(' {}[],:"abcxu01235.-/nte\\')
    token_ids: list[int] = []
    for _ in range(100):
        choices = walker.allowed()
        if not choices:
            assert walker.state.error.endswith(_ENDS)
            return None
        if END in choices and rng.random() < 0.5:
            return token_ids
        plain = [token for token in choices if decode([token]) in letters]
        token = rng.choice(plain if plain and rng.random() < 0.95 else choices)
        if token == END:
            return token_ids
        walker.state.append(token)
        if walker.state.error:
            assert walker.state.error.endswith(_ENDS)
            return None
        token_ids.append(token)
    return None


@pytest.mark.timeout(3000)
def test_no_combination_of_keywords_allows_what_the_schema_forbids():
    rng = seeded("odd schemas")
    compiler, odd = plain_compiler(), _Odd(rng)
    ended = 0
    for _ in range(budget(50, 5000)):
        schema = odd.schema(rng.choice((1, 1, 2, 2, 3)))
        try:
            of_schema(compiler, schema)
        except ConstraintRefused:
            continue
        validator = Draft202012Validator(schema)
        for _ in range(5):
            found = _short_walk(of_schema(compiler, schema), rng)
            if found is not None:
                ended += 1
                text = compiler.tokenizer.decode_str(found)
                assert validator.is_valid(json.loads(text)), f"{json.dumps(schema)}\n{text}"
    assert ended > 15
