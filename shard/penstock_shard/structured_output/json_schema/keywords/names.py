"""patternProperties and propertyNames: as few patterns as there can be, no two for one name.

A pattern of few names is listed as properties: a grammar then has each name once, and the object
ends where none is left. A pattern of all names is what holds of every member. Patterns that match
the same names are divided into ones that do not.
"""

from __future__ import annotations

import functools
import itertools
import re
from typing import Any

from penstock_common.json_schema.keywords import ANNOTATIONS
from penstock_shard.structured_output.json_schema.combine import Place, Schema, unless
from penstock_shard.structured_output.json_schema.keywords.formats import FORMATS
from penstock_shard.structured_output.json_schema.references import REFERENCES
from penstock_shard.structured_output.patterns.automaton import automaton, expression
from penstock_shard.structured_output.patterns.characters import ALL, LINE_ENDS
from penstock_shard.structured_output.patterns.languages import NOTHING, Languages
from penstock_shard.structured_output.patterns.reader import language_of
from penstock_shard.structured_output.refusal import ConstraintRefused

# Names of a pattern that are listed, and patterns that are divided.
_MOST_LISTED = 64
_MOST_DIVIDED = 5
_COUNT = re.compile(r"\{(?:[0-9]*,)?([0-9]+)\}")


_Patterns = dict[str, Schema]


def simpler_patterns(schema: dict[str, Any]) -> dict[str, Any]:
    """A schema of the same values with other `patternProperties`, or none."""
    if not schema.get("patternProperties"):
        return schema
    out = dict(schema)
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
    for pattern in [pattern for pattern in left if _matches_all(pattern)]:
        of = left.pop(pattern)
        for keyword, some in (("properties", out.get("properties", {})), ("", left)):
            changed = {name: _all(one, of) for name, one in some.items()}
            out, left = ({**out, keyword: changed}, left) if keyword else (out, changed)
        out["additionalProperties"] = of
    if not left:
        return out
    listed, left = _apart(out.get("properties", {}), _divided(left), out.get("required", []))
    out |= {"properties": listed} if "properties" in out else {}
    return {**out, "patternProperties": left}


def _apart(
    listed: _Patterns, patterns: _Patterns, required: list[str]
) -> tuple[_Patterns, _Patterns]:
    """Listed properties and patterns that match none of them.

    llguidance would intersect both, which is without end where they are recursive.
    """
    kept: _Patterns = {}
    for pattern, of in patterns.items():
        languages = Languages()
        try:
            found = language_of(languages, pattern)
            both = [name for name in listed if languages.has(found, name)]
            same = {name for name in both if _bare(listed[name]) == _bare(of)} - set(required)
            others = [languages.text(name) for name in both if name not in same]
            if others:
                apart = languages.all_but(languages.either(others))
                pattern = expression(automaton(languages, languages.both([found, apart])))
        except ValueError:
            kept[pattern] = of
            continue
        listed = {
            name: _all(own, of) if name in both else own
            for name, own in listed.items()
            if name not in same
        }
        kept[pattern] = of
    return listed, kept


def _all(*schemas: Schema) -> Schema:
    parts = [schema for schema in schemas if schema is not True]
    return parts[0] if len(parts) == 1 else {"allOf": parts} if parts else True


@functools.lru_cache(1024)
def listed_names(pattern: str) -> list[str] | None:
    """The names that a pattern matches if they are few; None if they are not, or not known."""
    languages = Languages()
    if any(int(count) > _MOST_LISTED for count in _COUNT.findall(pattern)):
        return None
    try:
        return automaton(languages, language_of(languages, pattern)).texts(_MOST_LISTED)
    except ValueError:
        return None


@functools.lru_cache(1024)
def _matches_all(pattern: str) -> bool:
    """Tell whether a pattern is known to match every name, but those with line breaks."""
    languages = Languages()
    try:
        found = language_of(languages, pattern)
        others = languages.joined([languages.anything, languages.of(LINE_ENDS), languages.anything])
        missed = languages.all_but(languages.either([found, others]))
        return languages.is_nothing(missed)
    except ValueError:
        return False


def _divided(patterns: _Patterns) -> _Patterns:
    """Patterns of which no two match the same name; as they are if none do, or they are many."""
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
    """Patterns of the names that each set of these match, and no others do, with the set; None if
    no two match the same name, or it is not known.
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
    """The schema without its own annotations."""
    if not isinstance(schema, dict):
        return schema
    return {key: value for key, value in schema.items() if key not in ANNOTATIONS}


# ---- propertyNames -----------------------------------------------------------------------------


def property_names(place: Place, schema: dict[str, Any], base: str) -> Schema:
    """Objects of which all names meet the schema of `propertyNames`."""
    names, inner = place.read(schema["propertyNames"], base)
    if isinstance(names, bool):
        return True if names else unless("object", {"maxProperties": 0})
    said = {key: value for key, value in names.items() if key not in ANNOTATIONS}
    if not said or said == {"type": "string"}:
        return True
    pattern = _plain_pattern(said)
    if pattern is not None:
        return _named_by(place, pattern, base)
    languages = Languages()
    try:
        found = automaton(languages, _language(place, languages, names, inner))
        listed = found.texts(_MOST_LISTED)
        if listed is None:
            return _named_by(place, expression(found), base)
    except ValueError as error:
        raise ConstraintRefused(f"propertyNames: {error}") from error
    return unless(
        "object", {"properties": dict.fromkeys(listed, True), "additionalProperties": False}
    )


def _plain_pattern(said: dict[str, Any]) -> str | None:
    """The pattern of names if that, a format or lengths are all that is said of them."""
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


def _language(place: Place, languages: Languages, schema: Schema, base: str) -> int:
    """The texts that meet a schema. Raises ValueError."""
    if isinstance(schema, bool):
        return languages.anything if schema else NOTHING
    schema, base = place.read(schema, base)
    return languages.both(
        _of_keyword(place, languages, keyword, schema, base)
        for keyword in schema
        if keyword not in ANNOTATIONS
    )


def _of_keyword(
    place: Place, languages: Languages, keyword: str, schema: dict[str, Any], base: str
) -> int:
    value = schema[keyword]
    if keyword == "type":
        return languages.anything if "string" in value else NOTHING
    if keyword == "pattern":
        return language_of(languages, value)
    if keyword == "minLength":
        return languages.between(languages.of(ALL), int(value), None)
    if keyword == "maxLength":
        return languages.between(languages.of(ALL), 0, int(value))
    if keyword in ("enum", "const"):
        texts = value if keyword == "enum" else [value]
        return languages.either(languages.text(each) for each in texts if isinstance(each, str))
    if keyword == "format":
        if value in FORMATS and "pattern" not in FORMATS[value]:
            raise ValueError(f"format {value} is not served")
        return language_of(languages, FORMATS.get(value, {}).get("pattern", ""))
    if keyword in ("allOf", "anyOf"):
        parts = [_language(place, languages, part, base) for part in value]
        return languages.both(parts) if keyword == "allOf" else languages.either(parts)
    if keyword == "not" and "format" not in str(value):
        return languages.all_but(_language(place, languages, value, base))
    if keyword in REFERENCES:
        target, target_base = place.resolve(keyword, value, base)
        return _language(place, languages, target, target_base)
    raise ValueError(f"{keyword} is not served")
