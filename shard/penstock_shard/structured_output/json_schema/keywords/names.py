"""Rewrites patternProperties and propertyNames with few patterns, of which no two match one name.

A pattern of few names is listed as properties: the grammar then has each name once, and the object
ends when no name is left. A pattern of all names applies to every member. Patterns that share names
are divided into disjoint ones.
"""

from __future__ import annotations

import functools
import itertools
import re
from collections.abc import Callable
from typing import Any

from penstock_common.json_schema.keywords import restricting
from penstock_shard.structured_output.json_schema.combine import Place, Schema, unless
from penstock_shard.structured_output.json_schema.keywords.formats import FORMATS
from penstock_shard.structured_output.json_schema.values import same
from penstock_shard.structured_output.patterns.automaton import (
    all_found,
    automaton,
    expression,
    without_looking,
)
from penstock_shard.structured_output.patterns.characters import ALL, LINE_ENDS
from penstock_shard.structured_output.patterns.languages import NOTHING, Languages
from penstock_shard.structured_output.patterns.reader import language_of, may_match
from penstock_shard.structured_output.refusal import ConstraintRefused

# The most names of a pattern to be listed; below, the most patterns to be divided.
_MOST_LISTED = 64
_MOST_DIVIDED = 5
_COUNTED_TO = re.compile(r"\{(?:[0-9]*,)?([0-9]+)\}")


_Patterns = dict[str, Schema]


def simpler_patterns(schema: dict[str, Any]) -> dict[str, Any]:
    if not schema.get("patternProperties"):
        return schema
    out = _without_property_names(schema)
    patterns: _Patterns = out.pop("patternProperties")
    left: _Patterns = {}
    for pattern, of in patterns.items():
        names = listed_names(pattern)
        if names is not None:
            properties = out.get("properties", {})
            listed = {name: _all(properties.get(name, True), of) for name in names}
            out["properties"] = {**properties, **listed}
        else:
            left[pattern] = of
    # `.` matches no line breaks, so names with them count as other names.
    is_open = out.get("additionalProperties", True) is True
    for pattern in [pattern for pattern in left if _matches_all(pattern, but_breaks=is_open)]:
        of = left.pop(pattern)
        left = {name: _all(one, of) for name, one in left.items()}
        out["properties"] = {name: _all(one, of) for name, one in out.get("properties", {}).items()}
        out["additionalProperties"] = of
    if not left:
        return out
    listed, left = _disjoint(out.get("properties", {}), _divided(left), out.get("required", []))
    out |= {"properties": listed} if "properties" in out else {}
    return {**out, "patternProperties": left}


def _without_property_names(schema: dict[str, Any]) -> dict[str, Any]:
    """Rewrite `propertyNames` as `patternProperties`, if that keeps the allowed values."""
    names, others = schema.get("propertyNames"), schema.get("additionalProperties", True)
    pattern = _plain_pattern(restricting(names)) if isinstance(names, dict) else None
    if pattern is None or not isinstance(others, bool):
        return dict(schema)
    try:
        found = {all_found([pattern, one]): of for one, of in schema["patternProperties"].items()}
        whole = without_looking(pattern)
    except ValueError:
        return dict(schema)
    out = {key: of for key, of in schema.items() if key != "propertyNames"}
    out["patternProperties"] = {**({whole: True} if others else {}), **found}
    listed = schema.get("properties", {})
    named = {name: of if may_match(pattern, name) else False for name, of in listed.items()}
    return {**out, "properties": named, "additionalProperties": False}


def _disjoint(
    listed: _Patterns, patterns: _Patterns, required: list[str]
) -> tuple[_Patterns, _Patterns]:
    """Return listed properties, and patterns that match none of them.

    For a name in both, llguidance would intersect the schemas; without end, if they are recursive.
    """
    kept: _Patterns = {}
    for pattern, of in patterns.items():
        languages = Languages()
        try:
            found = language_of(languages, pattern)
            both = [name for name in listed if languages.has(found, name)]
            alike = {name for name in both if same(_bare(listed[name]), _bare(of))}
            repeated = alike - set(required)
            others = [languages.text(name) for name in both if name not in repeated]
            if others:
                apart = languages.all_but(languages.either(others))
                pattern = expression(automaton(languages, languages.both([found, apart])))
        except ValueError:
            kept[pattern] = of
            continue
        listed = {
            name: _all(own, of) if name in both else own
            for name, own in listed.items()
            if name not in repeated
        }
        kept[pattern] = of
    return listed, kept


def _all(*schemas: Schema) -> Schema:
    parts = [schema for schema in schemas if schema is not True]
    return parts[0] if len(parts) == 1 else {"allOf": parts} if parts else True


@functools.lru_cache(1024)
def listed_names(pattern: str) -> list[str] | None:
    """The names that a pattern matches; None if there are many or they are unknown."""
    if any(int(count) > _MOST_LISTED for count in _COUNTED_TO.findall(pattern)):
        return None
    languages = Languages()
    try:
        return automaton(languages, language_of(languages, pattern)).texts(_MOST_LISTED)
    except ValueError:
        return None


@functools.lru_cache(1024)
def _matches_all(pattern: str, *, but_breaks: bool) -> bool:
    """True if a pattern surely matches all names; with `but_breaks`, those without line breaks."""
    languages = Languages()
    try:
        found = language_of(languages, pattern)
        breaks = languages.of(LINE_ENDS if but_breaks else ())
        others = languages.joined([languages.anything, breaks, languages.anything])
        missed = languages.all_but(languages.either([found, others]))
        return languages.is_nothing(missed)
    except ValueError:
        return False


def _divided(patterns: _Patterns) -> _Patterns:
    """Return patterns of the same names, of which no two match one name. Return many patterns
    unchanged.
    """
    regions = _regions(tuple(patterns))
    if regions is None:
        return patterns
    schemas = list(patterns.values())
    return {
        pattern: _all(*(of for of, is_met in zip(schemas, met, strict=True) if is_met))
        for pattern, met in regions
    }


@functools.lru_cache(256)
def _regions(patterns: tuple[str, ...]) -> list[tuple[str, tuple[bool, ...]]] | None:
    """Divide names by the `patterns` that match them. Return a pattern for each part, and for each
    of `patterns` whether it matches. None if no two match the same name, or if this is unknown.
    """
    languages = Languages()
    out = []
    try:
        found = [language_of(languages, pattern) for pattern in patterns]
        pairs = itertools.combinations(found, 2)
        if len(found) > _MOST_DIVIDED or all(
            languages.is_nothing(languages.both(pair)) for pair in pairs
        ):
            return None
        for met in itertools.product((True, False), repeat=len(found)):
            chosen = zip(found, met, strict=True)
            region = languages.both(of if yes else languages.all_but(of) for of, yes in chosen)
            if any(met) and not languages.is_nothing(region):
                out.append((expression(automaton(languages, region)), met))
    except ValueError:
        return None
    return out


def _bare(schema: Schema) -> Schema:
    return restricting(schema) if isinstance(schema, dict) else schema


# ---- propertyNames -----------------------------------------------------------------------------


def property_names(place: Place, schema: dict[str, Any], base: str) -> Schema:
    """Objects whose names all meet `propertyNames`."""
    names, _ = place.read(schema["propertyNames"], base)
    if isinstance(names, bool):
        return True if names else unless("object", {"maxProperties": 0})
    said = restricting(names)
    if not said or said == {"type": "string"}:
        return True
    if said.keys() - {"type"} == {"enum"} and "string" in said.get("type", "string"):
        return _listed_only([name for name in said["enum"] if isinstance(name, str)])
    pattern = _plain_pattern(said)
    if pattern is not None:
        return _named_by(place, pattern, base)
    languages = Languages()
    try:
        texts = _Texts(place, languages, exactly=False)
        found = automaton(languages, texts.of(schema["propertyNames"], base))
        listed = found.texts(_MOST_LISTED)
        if listed is None:
            return _named_by(place, expression(found), base)
    except ValueError as error:
        raise ConstraintRefused(f"propertyNames: {error}") from error
    return _listed_only(listed)


def _listed_only(names: list[str]) -> Schema:
    listed = {"properties": dict.fromkeys(names, True), "additionalProperties": False}
    return unless("object", listed)


def _plain_pattern(said: dict[str, Any]) -> str | None:
    """The names' pattern, if only a pattern, a format or lengths restrict them."""
    if said.get("type", "string") != "string":
        return None
    keys = said.keys() - {"type"}
    if keys == {"pattern"}:
        return str(said["pattern"])
    if keys == {"format"}:
        pattern = FORMATS.get(said["format"], {}).get("pattern")
        return None if pattern is None else str(pattern)
    if keys and keys <= {"minLength", "maxLength"}:
        most = int(said["maxLength"]) if "maxLength" in said else ""
        return f"^[^]{{{int(said.get('minLength', 0))},{most}}}$"
    return None


def _named_by(place: Place, pattern: str, base: str) -> Schema:
    named = {"patternProperties": {pattern: True}, "additionalProperties": False}
    return unless("object", place.positive(named, base))


class _Texts:
    """Computes the language of the texts that meet a schema. Methods raise ValueError if they
    cannot.

    Unless `exactly`, some texts may be missing: patterns of formats are narrower.
    """

    def __init__(self, place: Place, languages: Languages, *, exactly: bool) -> None:
        self._place = place
        self._languages = languages
        self._exactly = exactly

    def of(self, schema: Schema, base: str) -> int:
        if isinstance(schema, bool):
            return self._languages.anything if schema else NOTHING
        schema, base = self._place.read(schema, base)
        said = restricting(schema)
        for keyword in said:
            if keyword not in _OF_TEXTS:
                raise ValueError(f"{keyword} is not served")
        return self._languages.both(
            _OF_TEXTS[key](self, value, base) for key, value in said.items()
        )

    def _type(self, value: Any, base: str) -> int:
        return self._languages.anything if "string" in value else NOTHING

    def _pattern(self, value: str, base: str) -> int:
        return language_of(self._languages, value)

    def _least(self, value: float, base: str) -> int:
        return self._languages.between(self._languages.of(ALL), int(value), None)

    def _most(self, value: float, base: str) -> int:
        return self._languages.between(self._languages.of(ALL), 0, int(value))

    def _enum(self, values: list[Any], base: str) -> int:
        texts = (value for value in values if isinstance(value, str))
        return self._languages.either(map(self._languages.text, texts))

    def _const(self, value: Any, base: str) -> int:
        return self._enum([value], base)

    def _format(self, name: str, base: str) -> int:
        if name not in FORMATS:
            return self._languages.anything
        if self._exactly or "pattern" not in FORMATS[name]:
            raise ValueError(f"format {name} is not served")
        return language_of(self._languages, FORMATS[name]["pattern"])

    def _all(self, parts: list[Schema], base: str) -> int:
        return self._languages.both([self.of(part, base) for part in parts])

    def _any(self, parts: list[Schema], base: str) -> int:
        return self._languages.either([self.of(part, base) for part in parts])

    def _one(self, parts: list[Schema], base: str) -> int:
        exact = [self._not(part, base) for part in parts]
        return self._languages.either(
            self._languages.both([self.of(part, base), *exact[:index], *exact[index + 1 :]])
            for index, part in enumerate(parts)
        )

    def _not(self, part: Schema, base: str) -> int:
        exact = _Texts(self._place, self._languages, exactly=True)
        return self._languages.all_but(exact.of(part, base))

    def _reference(self, reference: str, base: str) -> int:
        return self.of(*self._place.resolve("$ref", reference, base))

    def _nothing(self, value: object, base: str) -> int:
        return self._languages.anything


_OF_TEXTS: dict[str, Callable[[_Texts, Any, str], int]] = {
    "type": _Texts._type,
    "pattern": _Texts._pattern,
    "minLength": _Texts._least,
    "maxLength": _Texts._most,
    "enum": _Texts._enum,
    "const": _Texts._const,
    "format": _Texts._format,
    "allOf": _Texts._all,
    "anyOf": _Texts._any,
    "oneOf": _Texts._one,
    "not": _Texts._not,
    "$ref": _Texts._reference,
    # `type` includes `nullable` already. The others are for values that are not texts.
    **dict.fromkeys(("nullable", "minimum", "maximum", "multipleOf"), _Texts._nothing),
    **dict.fromkeys(("exclusiveMinimum", "exclusiveMaximum"), _Texts._nothing),
    **dict.fromkeys(("properties", "required", "additionalProperties"), _Texts._nothing),
    **dict.fromkeys(("items", "prefixItems", "minItems", "maxItems"), _Texts._nothing),
}
