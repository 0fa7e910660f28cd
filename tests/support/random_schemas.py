"""Random JSON schemas of the kinds that requests have: each one can be met, by short texts too."""

from __future__ import annotations

import random
from typing import Any

_NAMES = (
    "id",
    "name",
    "kind",
    "tags",
    "price",
    "née",
    "a b",
    'quo"te',
    "line\nbreak",
    "$ref",
    "type",
)
_WORDS = ("red", "green", "blue", "", "it's", 'say "yes"', "back\\slash", "雪", "a/b", "new\nline")
# "uri" has no greatest length: a walk through one is long.
_FORMATS = ("date", "date-time", "time", "email", "ipv4", "ipv6", "uuid", "hostname") * 4 + ("uri",)
_PATTERNS = (
    r"^[a-z]{2,5}$",
    r"^\d{3}-\d{4}$",
    r"^(GET|PUT|POST) /[a-z]+$",
    r"^#[0-9A-Fa-f]{6}$",
    r"^\S{1,6}$",
    r"^v\d+\.\d+$",
)


def random_schema(rng: random.Random) -> dict[str, Any]:
    """An object at the top, as tools and response formats have it; some with definitions."""
    schemas = _Schemas(rng)
    schema = schemas.object(0)
    if schemas.definitions:
        schema["$defs"] = schemas.definitions
    return schema


class _Schemas:
    """A maker of one schema and its definitions."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self.definitions: dict[str, Any] = {}

    def any(self, depth: int) -> dict[str, Any]:
        kinds = [self._text, self._number, self._integer, self._fixed, self._fixed]
        if depth < 3:
            kinds += [self.object, self._array, self._tuple, self._any_of, self._one_of]
            kinds += [self._all_of, self._tree, self._nullable, self._map]
        return self._rng.choice(kinds)(depth)

    def object(self, depth: int) -> dict[str, Any]:
        names = self._rng.sample(_NAMES, self._rng.randint(1, 4))
        schema: dict[str, Any] = {
            "type": "object",
            "properties": {name: self.any(depth + 1) for name in names},
            "required": [name for name in names if self._rng.random() < 0.7],
            "additionalProperties": False,
        }
        if self._rng.random() < 0.1:
            schema["additionalProperties"] = self._fixed(depth)
        if self._rng.random() < 0.1:
            schema["dependentRequired"] = {names[0]: names[1:]}
        if self._rng.random() < 0.1:
            schema["minProperties"] = 1
        if self._rng.random() < 0.3:
            schema["description"] = "any text"
        return schema

    def _map(self, depth: int) -> dict[str, Any]:
        name = self._rng.choice([r"^[a-z]{1,4}$", r"^x-[0-9]$"])
        values = {name: self.any(depth + 1)}
        return {"type": "object", "patternProperties": values, "additionalProperties": False}

    def _text(self, depth: int) -> dict[str, Any]:
        schema: dict[str, Any] = {"type": "string"}
        chance = self._rng.random()
        if chance < 0.3:
            schema["format"] = self._rng.choice(_FORMATS)
        elif chance < 0.6:
            schema["pattern"] = self._rng.choice(_PATTERNS)
        elif chance < 0.98:
            schema["minLength"] = self._rng.randint(0, 3)
            schema["maxLength"] = schema["minLength"] + self._rng.randint(0, 8)
        return schema

    def _number(self, depth: int) -> dict[str, Any]:
        schema: dict[str, Any] = {"type": "number"}
        if self._rng.random() < 0.5:
            schema["minimum"] = self._rng.choice([-10, 0, 0.5, 3.25])
        if self._rng.random() < 0.5:
            schema["exclusiveMaximum"] = self._rng.choice([4, 10.5, 1000])
        if len(schema) == 1 and self._rng.random() < 0.4:
            schema["multipleOf"] = self._rng.choice([0.25, 0.5, 5])
        return schema

    def _integer(self, depth: int) -> dict[str, Any]:
        schema: dict[str, Any] = {"type": "integer"}
        if self._rng.random() < 0.6:
            schema["minimum"] = self._rng.randint(-50, 50)
            schema["maximum"] = schema["minimum"] + self._rng.randint(1, 500)
        if self._rng.random() < 0.2:
            schema["multipleOf"] = self._rng.choice([2, 5, 7, 10])
            schema.pop("maximum", None)
        return schema

    def _fixed(self, depth: int) -> dict[str, Any]:
        values: list[Any] = [*_WORDS, 0, 1, -7, 2.5, True, False, None, [], {}, [1, "a"], {"k": 1}]
        return self._rng.choice(
            [
                {"enum": self._rng.sample(values, self._rng.randint(1, 5))},
                {"const": self._rng.choice(values)},
                {"type": "boolean"},
                {"type": "null"},
            ]
        )

    def _array(self, depth: int) -> dict[str, Any]:
        items, least = self.any(depth + 1), self._rng.randint(0, 2)
        schema: dict[str, Any] = {"type": "array", "items": items, "minItems": least}
        schema["maxItems"] = least + self._rng.randint(1, 3)
        if self._rng.random() < 0.2:
            schema["contains"] = items
        return schema

    def _tuple(self, depth: int) -> dict[str, Any]:
        prefix = [self.any(depth + 1) for _ in range(self._rng.randint(1, 3))]
        return {"type": "array", "prefixItems": prefix, "items": False, "minItems": 1}

    def _any_of(self, depth: int) -> dict[str, Any]:
        return {"anyOf": [self.any(depth + 1) for _ in range(self._rng.randint(1, 3))]}

    def _nullable(self, depth: int) -> dict[str, Any]:
        return {"anyOf": [self.any(depth + 1), {"type": "null"}]}

    def _one_of(self, depth: int) -> dict[str, Any]:
        """Told apart by what `kind` says."""
        parts = []
        for kind in self._rng.sample(("circle", "square", "line"), 2):
            part = self.object(depth + 1)
            part["properties"] = {"kind": {"const": kind}, **part["properties"]}
            part["properties"]["kind"] = {"const": kind}
            part["required"] = ["kind", *(name for name in part["required"] if name != "kind")]
            parts.append(part)
        return {"oneOf": parts}

    def _all_of(self, depth: int) -> dict[str, Any]:
        low, high = self._rng.randint(0, 9), self._rng.randint(10, 99)
        return {"allOf": [{"type": "integer"}, {"minimum": low}, {"maximum": high}]}

    def _tree(self, depth: int) -> dict[str, Any]:
        name = f"tree{len(self.definitions)}"
        self.definitions[name] = {}
        self.definitions[name] = {
            "type": "object",
            "properties": {
                "value": self._fixed(depth),
                "next": {"anyOf": [{"type": "null"}, {"$ref": f"#/$defs/{name}"}]},
            },
            "required": ["value", "next"],
            "additionalProperties": False,
        }
        return {"$ref": f"#/$defs/{name}"}
