"""JSON Schema -> the part of it that llguidance handles right.

The result allows the same texts or fewer, never more; a keyword that cannot be expressed that way
is refused by name.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable
from typing import Any

from penstock_shard.structured_output.json_schema.combine import (
    Schema,
    all_of,
    any_of,
    type_of,
    unless,
    without,
)
from penstock_shard.structured_output.json_schema.formats import FORMATS, REFUSED_FORMATS
from penstock_shard.structured_output.json_schema.infinite_values import without_endless
from penstock_shard.structured_output.json_schema.keyword_types import check_shapes
from penstock_shard.structured_output.json_schema.negation import negative
from penstock_shard.structured_output.json_schema.one_of import one_of
from penstock_shard.structured_output.json_schema.patterns import rust_pattern
from penstock_shard.structured_output.json_schema.references import Document
from penstock_shard.structured_output.json_schema.unevaluated import UNEVALUATED, closed
from penstock_shard.structured_output.json_schema.unique import unique
from penstock_shard.structured_output.refusal import ConstraintRefused, shown

# Keywords that do not restrict values: annotations, and those that only hold or name schemas.
ANNOTATIONS = frozenset(
    [
        "$schema",
        "$id",
        "id",
        "$anchor",
        "$dynamicAnchor",
        "$recursiveAnchor",
        "$comment",
        "$defs",
        "definitions",
        "$vocabulary",
        "title",
        "description",
        "default",
        "examples",
        "example",
        "deprecated",
        "readOnly",
        "writeOnly",
        "contentMediaType",
        "contentEncoding",
        "contentSchema",
        "nullable",
        "discriminator",
        "xml",
        "externalDocs",
    ]
)
# Beyond this, integers are not exact in all JSON readers, nor in llguidance.
_LARGEST_EXACT = 2**53
_UNWRITABLE = re.compile(r"[\x00-\x07\x0b\x0e-\x1f\ud800-\udfff]")
_MOST_SCHEMAS = 20_000
_MOST_VALUES = 20_000
# Items that meet `contains` are among this many first ones.
_CONTAINED_WITHIN = 6
# The most cases of a keyword.
_MOST_CASES = 256

_COUNTS = ("minLength", "maxLength", "minItems", "maxItems")
_BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")


def prepared(root: Schema) -> dict[str, Any]:
    """The schema as given to llguidance, without its "x-guidance"."""
    translation = _Translation(root)
    found = translation.positive(root, "")
    if found is False:
        raise ConstraintRefused("json_schema: no value is valid, or none that can be enforced")
    found = without_endless(found, translation.definitions)
    if found is False:
        raise ConstraintRefused("json_schema: no value is valid: each would go on without end")
    if found is True:
        found = {}
    return {**found, "$defs": translation.definitions} if translation.definitions else found


class _Translation:
    """The translation of one schema."""

    def __init__(self, root: Schema) -> None:
        self._document = Document(root)
        self.definitions: dict[str, Schema] = {}
        self._names: dict[tuple[int, str], str] = {}
        self._schemas = 0
        self._negated: list[int] = []

    def positive(self, schema: Schema, base: str) -> Schema:
        """A schema of the same texts, or fewer, in keywords that llguidance knows."""
        self._count()
        if isinstance(schema, bool):
            return schema
        if not isinstance(schema, dict):
            raise ConstraintRefused(f"json_schema: {shown(schema)} is no schema")
        check_shapes(schema)
        if "$ref" in schema and self._document.references_stand_alone:
            return self._reference(schema["$ref"], base)
        base = self._document.base(schema, base)
        if not UNEVALUATED.isdisjoint(schema):
            return closed(self, schema, base)
        out: dict[str, Any] = {}
        more: list[Schema] = []
        for keyword in schema:
            self._keyword(keyword, schema, base, out, more)
        return all_of([out or True, *more]) if more else out or True

    def negative(self, schema: Schema, base: str) -> Schema:
        """A schema of texts that `schema` forbids: all of them, or fewer."""
        self._count()
        if isinstance(schema, bool):
            return not schema
        if not isinstance(schema, dict):
            raise ConstraintRefused(f"json_schema: {shown(schema)} is no schema")
        check_shapes(schema)
        if id(schema) in self._negated:
            # Recursive: leave out what it forbids at this place.
            return False
        self._negated.append(id(schema))
        try:
            alone = "$ref" in schema and self._document.references_stand_alone
            here = {"$ref": schema["$ref"]} if alone else schema
            return negative(self, here, base if alone else self._document.base(schema, base))
        finally:
            self._negated.pop()

    def resolve(self, keyword: str, reference: object, base: str) -> tuple[Schema, str]:
        if keyword == "$ref":
            return self._document.resolve(reference, base)
        return self._document.resolve_dynamic(reference, base)

    def base(self, schema: Schema, base: str) -> str:
        return self._document.base(schema, base)

    @property
    def lists_as_items(self) -> bool:
        """Up to 2019-09, `items` may be a list."""
        return self._document.draft != 2020

    def _count(self) -> None:
        self._schemas += 1
        if self._schemas > _MOST_SCHEMAS:
            raise ConstraintRefused(f"json_schema: comes to more than {_MOST_SCHEMAS} schemas")

    def _reference(self, reference: object, base: str, keyword: str = "$ref") -> Schema:
        target, target_base = self.resolve(keyword, reference, base)
        if isinstance(target, bool):
            return target
        key = (id(target), target_base)
        if key not in self._names:
            name = f"s{len(self._names)}"
            self._names[key] = name
            self.definitions[name] = True
            self.definitions[name] = self.positive(target, target_base)
        return {"$ref": f"#/$defs/{self._names[key]}"}

    def _keyword(
        self, keyword: str, schema: dict[str, Any], base: str, out: dict[str, Any], more: list[Any]
    ) -> None:
        value = schema[keyword]
        if keyword in _ADDED:
            more.append(_ADDED[keyword](self, schema, base))
        elif keyword in _KEPT:
            out.update(_KEPT[keyword](self, schema, base))
        elif keyword in ("$ref", "$dynamicRef"):
            more.append(self._reference(value, base, keyword))
        elif keyword == "nullable" and value is True:
            raise ConstraintRefused('nullable: say {"type": [..., "null"]} instead')
        elif keyword not in ANNOTATIONS and not keyword.startswith("x-"):
            raise ConstraintRefused(f"json_schema: the keyword {shown(keyword)} is not served")


def _kept_type(place: _Translation, schema: dict[str, Any], base: str) -> dict[str, Any]:
    return {"type": schema["type"]}


def _kept_count(keyword: str) -> _Keeper:
    def keep(place: _Translation, schema: dict[str, Any], base: str) -> dict[str, Any]:
        return {keyword: int(schema[keyword])}

    return keep


def _kept_bound(keyword: str) -> _Keeper:
    def keep(place: _Translation, schema: dict[str, Any], base: str) -> dict[str, Any]:
        value = schema[keyword]
        if isinstance(value, bool) and keyword.startswith("exclusive"):
            return _old_exclusive(keyword, schema)
        upper = keyword in ("maximum", "exclusiveMaximum")
        if (value if upper else -value) >= _LARGEST_EXACT:
            # Integers beyond are not exact, so a tighter bound loses nothing.
            return {keyword: _LARGEST_EXACT if upper else -_LARGEST_EXACT}
        if abs(value) >= _LARGEST_EXACT:
            raise ConstraintRefused(
                f"{keyword}: {shown(value)} is beyond 2^53, where numbers are not exact"
            )
        return {keyword: value}

    return keep


def _old_exclusive(keyword: str, schema: dict[str, Any]) -> dict[str, Any]:
    # Draft 4: whether the bound itself is excluded.
    bound = "minimum" if keyword == "exclusiveMinimum" else "maximum"
    if schema[keyword] and bound in schema:
        return {keyword: schema[bound]}
    return {}


def _kept_multiple(place: _Translation, schema: dict[str, Any], base: str) -> dict[str, Any]:
    if schema["multipleOf"] <= 0:
        raise ConstraintRefused(f"multipleOf: {shown(schema['multipleOf'])} is not above 0")
    return {"multipleOf": schema["multipleOf"]}


def _kept_values(keyword: str) -> _Keeper:
    def keep(place: _Translation, schema: dict[str, Any], base: str) -> dict[str, Any]:
        _check_value(keyword, schema[keyword], 0)
        if keyword == "enum" and len(schema["enum"]) > _MOST_VALUES:
            raise ConstraintRefused(f"enum: more than {_MOST_VALUES} values")
        return {keyword: schema[keyword]}

    return keep


def _check_value(keyword: str, value: Any, depth: int) -> None:
    if depth > 50:
        raise ConstraintRefused(f"{keyword}: a value nests deeper than 50")
    if isinstance(value, dict):
        for name, inner in value.items():
            _check_text(keyword, name)
            _check_value(keyword, inner, depth + 1)
    elif isinstance(value, str):
        _check_text(keyword, value)
    elif isinstance(value, list):
        for inner in value:
            _check_value(keyword, inner, depth + 1)
    elif type_of(value) == "number" and not abs(value) <= _LARGEST_EXACT:
        raise ConstraintRefused(
            f"{keyword}: {shown(value)} is beyond 2^53, where numbers are not exact"
        )


def _check_text(keyword: str, text: str) -> None:
    # JSON can write these as \\u only, and outputs may not contain \\u.
    if _UNWRITABLE.search(text):
        raise ConstraintRefused(
            f"{keyword}: {shown(text)} holds a control character or a surrogate"
        )


def _kept_pattern(place: _Translation, schema: dict[str, Any], base: str) -> dict[str, Any]:
    return {"pattern": rust_pattern(schema["pattern"])}


def _kept_properties(place: _Translation, schema: dict[str, Any], base: str) -> dict[str, Any]:
    inner = schema["properties"]
    for name in inner:
        _check_text("properties", name)
    return {"properties": {name: place.positive(of, base) for name, of in inner.items()}}


def _kept_patterns(place: _Translation, schema: dict[str, Any], base: str) -> dict[str, Any]:
    inner = schema["patternProperties"]
    patterns = {rust_pattern(name): place.positive(of, base) for name, of in inner.items()}
    return {"patternProperties": patterns}


def _kept_additional(place: _Translation, schema: dict[str, Any], base: str) -> dict[str, Any]:
    return {"additionalProperties": place.positive(schema["additionalProperties"], base)}


def _kept_required(place: _Translation, schema: dict[str, Any], base: str) -> dict[str, Any]:
    return {"required": _writable("required", schema["required"])}


def _writable(keyword: str, names: list[str]) -> list[str]:
    """The same names without duplicates; refuses one that cannot be written."""
    for name in names:
        _check_text(keyword, name)
    return list(dict.fromkeys(names))


def _kept_items(place: _Translation, schema: dict[str, Any], base: str) -> dict[str, Any]:
    items = schema["items"]
    if not isinstance(items, list):
        return {"items": place.positive(items, base)}
    if not place.lists_as_items or "prefixItems" in schema:
        raise ConstraintRefused("items: a list is called prefixItems in draft 2020-12")
    out: dict[str, Any] = {"prefixItems": [place.positive(item, base) for item in items]}
    if "additionalItems" in schema:
        out["items"] = place.positive(schema["additionalItems"], base)
    return out


def _kept_prefix(place: _Translation, schema: dict[str, Any], base: str) -> dict[str, Any]:
    return {"prefixItems": [place.positive(item, base) for item in schema["prefixItems"]]}


def _nothing(place: _Translation, schema: dict[str, Any], base: str) -> dict[str, Any]:
    return {}


def _format(place: _Translation, schema: dict[str, Any], base: str) -> Schema:
    name = schema["format"]
    if name in REFUSED_FORMATS:
        raise ConstraintRefused(f"format: {name} is not served")
    if name not in FORMATS:
        # By the standard an unknown format is an annotation.
        return True
    return unless("string", FORMATS[name])


def _all(place: _Translation, schema: dict[str, Any], base: str) -> Schema:
    return all_of(place.positive(part, base) for part in schema["allOf"])


def _any(place: _Translation, schema: dict[str, Any], base: str) -> Schema:
    return any_of(place.positive(part, base) for part in schema["anyOf"])


def _one(place: _Translation, schema: dict[str, Any], base: str) -> Schema:
    return one_of(place, schema["oneOf"], base)


def _not(place: _Translation, schema: dict[str, Any], base: str) -> Schema:
    return place.negative(schema["not"], base)


def _if(place: _Translation, schema: dict[str, Any], base: str) -> Schema:
    condition = schema["if"]
    met = all_of([place.positive(condition, base), place.positive(schema.get("then", True), base)])
    unmet = all_of(
        [place.negative(condition, base), place.positive(schema.get("else", True), base)]
    )
    if "then" not in schema and "else" not in schema:
        return True
    return any_of([met, unmet])


def _dependent_names(place: _Translation, schema: dict[str, Any], base: str) -> Schema:
    return all_of(
        _dependent(name, {"required": _writable("dependentRequired", needed)})
        for name, needed in schema["dependentRequired"].items()
    )


def _dependent_schemas(place: _Translation, schema: dict[str, Any], base: str) -> Schema:
    return all_of(
        _dependent(name, place.positive(needed, base))
        for name, needed in schema["dependentSchemas"].items()
    )


def _dependencies(place: _Translation, schema: dict[str, Any], base: str) -> Schema:
    def needed(value: Schema) -> Schema:
        if isinstance(value, list):
            return {"required": _writable("dependencies", value)} if value else True
        return place.positive(value, base)

    found = schema["dependencies"]
    return all_of(_dependent(name, needed(value)) for name, value in found.items())


def _dependent(name: str, needed: Schema) -> Schema:
    """Objects that have the member `name` must meet `needed`; others need not."""
    if needed is True or needed == {"required": []}:
        return True
    return unless("object", any_of([without([name]), all_of([{"required": [name]}, needed])]))


def _names(place: _Translation, schema: dict[str, Any], base: str) -> Schema:
    """propertyNames, if it is a pattern, lengths or a list of names."""
    names = schema["propertyNames"]
    if isinstance(names, dict) and "$ref" in names and len(names) == 1:
        names, base = place.resolve("$ref", names["$ref"], base)
    if isinstance(names, bool):
        return True if names else unless("object", {"maxProperties": 0})
    if not isinstance(names, dict):
        raise ConstraintRefused(f"propertyNames: {shown(names)} is no schema")
    check_shapes(names)
    said = {key: value for key, value in names.items() if key not in ANNOTATIONS}
    if said.pop("type", "string") != "string":
        raise ConstraintRefused("propertyNames: names are strings")
    if not said:
        return True
    if len(said) == 1 and ("enum" in said or "const" in said):
        listed = said.get("enum", [said.get("const")])
        allowed = dict.fromkeys((name for name in listed if isinstance(name, str)), True)
        return unless("object", {"properties": allowed, "additionalProperties": False})
    patterns = {_name_pattern(said): True}
    return unless("object", {"patternProperties": patterns, "additionalProperties": False})


def _name_pattern(said: dict[str, Any]) -> str:
    if set(said) == {"pattern"}:
        return rust_pattern(str(said["pattern"]))
    if set(said) == {"format"} and "pattern" in FORMATS.get(said["format"], {}):
        return str(FORMATS[said["format"]]["pattern"])
    if set(said) <= {"minLength", "maxLength"}:
        least = int(said.get("minLength", 0))
        most = int(said["maxLength"]) if "maxLength" in said else ""
        return f"^(?s:.){{{least},{most}}}$"
    raise ConstraintRefused("propertyNames: only a pattern, lengths or a list of names is served")


def _contains(place: _Translation, schema: dict[str, Any], base: str) -> Schema:
    least = int(schema.get("minContains", 1))
    most = int(schema["maxContains"]) if "maxContains" in schema else None
    if least == 0 and most is None:
        return True
    if most is None and schema["contains"] == schema.get("items") and "prefixItems" not in schema:
        # `items` is the same schema, so every item counts.
        return unless("array", {"minItems": least})
    met = place.positive(schema["contains"], base)
    unmet = True if most is None else place.negative(schema["contains"], base)
    greatest = least if most is None else min(most, least + _CONTAINED_WITHIN)
    if least > _CONTAINED_WITHIN:
        raise ConstraintRefused(f"minContains: {least} is over {_CONTAINED_WITHIN}")
    cases = [
        _placed(positions, met, unmet)
        for count in range(least, greatest + 1)
        for positions in itertools.combinations(range(_CONTAINED_WITHIN), count)
    ]
    return unless("array", any_of(cases))


def _placed(positions: tuple[int, ...], met: Schema, unmet: Schema) -> Schema:
    """Arrays whose items at these positions meet `met`, and all others `unmet`."""
    if positions and met is False:
        return False
    length = positions[-1] + 1 if positions else 0
    prefix = [met if index in positions else unmet for index in range(length)]
    if any(item is False for item in prefix):
        return False
    out: dict[str, Any] = {"type": "array", "minItems": length}
    if prefix:
        out["prefixItems"] = prefix
    if unmet is not True:
        out["items"] = unmet
    return out


def _least_properties(place: _Translation, schema: dict[str, Any], base: str) -> Schema:
    """minProperties, by requiring names: an output may write other names twice."""
    least = int(schema["minProperties"])
    needed = len(set(schema.get("required", ())))
    if least <= needed:
        return True
    named = [
        name for name in schema.get("properties", {}) if name not in schema.get("required", ())
    ]
    closed_ = schema.get("additionalProperties") is False and "patternProperties" not in schema
    if least == 1:
        rest = (
            []
            if closed_
            else [{**without(named), "minProperties": 1} if named else {"minProperties": 1}]
        )
        return unless("object", any_of([*({"required": [name]} for name in named), *rest]))
    if not named:
        raise ConstraintRefused(
            f"minProperties: {least} of unknown names cannot be held: one might be written twice"
        )
    chosen = list(itertools.islice(itertools.combinations(named, least - needed), _MOST_CASES + 1))
    if len(chosen) > _MOST_CASES:
        raise ConstraintRefused(f"minProperties: {least} of {len(named)} names are too many cases")
    return unless("object", any_of({"required": list(names)} for names in chosen))


def _most_properties(place: _Translation, schema: dict[str, Any], base: str) -> Schema:
    most = int(schema["maxProperties"])
    properties, needed = schema.get("properties", {}), schema.get("required", ())
    optional = [name for name in properties if name not in needed]
    closed_ = schema.get("additionalProperties") is False and "patternProperties" not in schema
    if closed_ and len(properties) <= most:
        return True
    if not optional or most == 0:
        return unless("object", {"maxProperties": most})
    left = most - len(set(needed))
    if left < 0:
        return unless("object", False)
    # One case for each set of optional names that may be present; unlisted names may fill it up.
    cases: list[Schema] = []
    for count in range(min(left, len(optional)) + 1):
        for kept in itertools.combinations(optional, count):
            away = [name for name in optional if name not in kept]
            if len(cases) > _MOST_CASES:
                raise ConstraintRefused(
                    f"maxProperties: {most} of {len(optional)} names are too many cases"
                )
            case = {**without(away), "required": list(kept)}
            if not closed_:
                case["maxProperties"] = most
            cases.append(case)
    return unless("object", any_of(cases))


_Keeper = Callable[[_Translation, dict[str, Any], str], dict[str, Any]]
_KEPT: dict[str, _Keeper] = {
    "type": _kept_type,
    "const": _kept_values("const"),
    "enum": _kept_values("enum"),
    "pattern": _kept_pattern,
    "multipleOf": _kept_multiple,
    "properties": _kept_properties,
    "patternProperties": _kept_patterns,
    "additionalProperties": _kept_additional,
    "required": _kept_required,
    "items": _kept_items,
    "prefixItems": _kept_prefix,
    # Handled with the keywords that they belong to.
    "additionalItems": _nothing,
    "then": _nothing,
    "else": _nothing,
    "minContains": _nothing,
    "maxContains": _nothing,
    **{name: _kept_count(name) for name in _COUNTS},
    **{name: _kept_bound(name) for name in _BOUNDS},
}
_ADDED: dict[str, Callable[[_Translation, dict[str, Any], str], Schema]] = {
    "format": _format,
    "allOf": _all,
    "anyOf": _any,
    "oneOf": _one,
    "not": _not,
    "if": _if,
    "dependentRequired": _dependent_names,
    "dependentSchemas": _dependent_schemas,
    "dependencies": _dependencies,
    "propertyNames": _names,
    "contains": _contains,
    "uniqueItems": unique,
    "minProperties": _least_properties,
    "maxProperties": _most_properties,
}
