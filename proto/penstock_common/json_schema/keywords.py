"""The keywords of JSON Schema: what each draft from 4 to 2020-12 defines, and OpenAPI 3.0.

A keyword that none of them defines is an annotation: it forbids nothing (JSON Schema core, 6.5).
"""

from __future__ import annotations

import difflib
import functools
from collections.abc import Callable, Iterator
from typing import Any

# What a keyword holds: a schema or a list of schemas; schemas by name.
HOLDING = frozenset(
    (
        *("allOf", "anyOf", "oneOf", "not", "if", "then", "else", "contentSchema"),
        *("items", "prefixItems", "additionalItems", "unevaluatedItems", "contains"),
        *("additionalProperties", "unevaluatedProperties", "propertyNames"),
    )
)
HOLDING_BY_NAME = frozenset(
    (
        *("properties", "patternProperties", "$defs", "definitions"),
        *("dependentSchemas", "dependencies"),
    )
)
_HOLDERS = HOLDING | HOLDING_BY_NAME
# Keywords that do not restrict values: annotations, and those that only hold or name schemas.
ANNOTATIONS = frozenset(
    (
        *("$schema", "$id", "id", "$anchor", "$dynamicAnchor", "$recursiveAnchor", "$vocabulary"),
        *("$comment", "$defs", "definitions", "title", "description", "default", "examples"),
        *("deprecated", "readOnly", "writeOnly"),
        *("contentMediaType", "contentEncoding", "contentSchema"),
        # OpenAPI's.
        *("example", "discriminator", "xml", "externalDocs"),
    )
)
# Keywords that restrict values; `nullable`, which is OpenAPI's, lets one more pass.
RESTRICTING = frozenset(
    (
        *("$ref", "$dynamicRef", "$recursiveRef", "type", "enum", "const", "nullable"),
        *("multipleOf", "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"),
        *("minLength", "maxLength", "pattern", "format"),
        *("items", "prefixItems", "additionalItems", "unevaluatedItems", "contains"),
        *("minContains", "maxContains", "minItems", "maxItems", "uniqueItems"),
        *("properties", "patternProperties", "additionalProperties", "unevaluatedProperties"),
        *("propertyNames", "minProperties", "maxProperties", "required"),
        *("dependencies", "dependentRequired", "dependentSchemas"),
        *("allOf", "anyOf", "oneOf", "not", "if", "then", "else"),
    )
)
# Keywords of drafts before 4 that restrict values.
OUTDATED = frozenset(("divisibleBy", "disallow", "extends", "requires"))
_DEFINED = ANNOTATIONS | RESTRICTING | OUTDATED
# How alike a name must be to a keyword to be a misspelt one, of 1: a short one, such as "note", is
# sooner a word of its own than a long one.
_ALIKE, _SHORT_ALIKE = 0.85, 0.88
_SHORT, _SHORTEST, _LONGEST = 6, 4, 40


def is_unknown(keyword: str) -> bool:
    """Tell whether no draft defines a keyword, and its name does not mark it as an extension."""
    return keyword not in _DEFINED and not keyword.startswith("x-")


def restricting(schema: dict[str, Any]) -> dict[str, Any]:
    """The keywords of a schema that restrict values, with these."""
    return {key: value for key, value in schema.items() if key in RESTRICTING or key in OUTDATED}


def with_subschemas(schema: dict[str, Any], change: Callable[[Any], Any]) -> dict[str, Any]:
    """The schema with `change` of each schema that its keywords hold."""
    out = dict(schema)
    for key, value in schema.items():
        if key in HOLDING and isinstance(value, list):
            out[key] = list(map(change, value))
        elif key in HOLDING:
            out[key] = change(value)
        elif key in HOLDING_BY_NAME and isinstance(value, dict):
            out[key] = {name: change(of) for name, of in value.items()}
    return out


def subschemas(schema: dict[str, Any]) -> Iterator[Any]:
    """The schemas that the keywords of a schema hold, and whatever else stands in their place."""
    for key, value in schema.items():
        if key in HOLDING:
            yield from value if isinstance(value, list) else [value]
        elif key in HOLDING_BY_NAME and isinstance(value, dict):
            yield from value.values()


def unknown_keywords(root: Any) -> Iterator[str]:
    """The keywords in a schema that no draft defines, a schema's before those of its parts, perhaps
    repeatedly. One whose value is null is as good as absent.
    """
    left = [root]
    while left:
        schema = left.pop()
        # A body may have thousands of small ones: only those that need it are looked at in Python.
        if not isinstance(schema, dict):
            continue
        if not _DEFINED.issuperset(schema):
            yield from (name for name in schema if schema[name] is not None and is_unknown(name))
        if not _HOLDERS.isdisjoint(schema):
            left += reversed([*subschemas(schema)])


def near_miss(name: str) -> str | None:
    """The restricting keyword that an unknown one is but for its spelling; None if there is none.

    A name that begins with an underscore, holds a colon, or is a keyword with more before or behind
    it is one of somebody's own.
    """
    if not name[:1].isalpha() or ":" in name or len(name) > _LONGEST:
        return None
    return _alike(name)


@functools.lru_cache(4096)
def _alike(name: str) -> str | None:
    folded = _folded(name)
    if folded in _FOLDED or len(folded) < _SHORTEST:
        return _FOLDED.get(folded)
    swapped = [each for each in _FOLDED if sorted(each) == sorted(folded)]
    cutoff = _SHORT_ALIKE if len(folded) <= _SHORT else _ALIKE
    found = swapped or difflib.get_close_matches(folded, _FOLDED, n=1, cutoff=cutoff)
    return _FOLDED[found[0]] if found and not _is_longer(folded, found[0]) else None


def _is_longer(folded: str, keyword: str) -> bool:
    """Tell whether a word is a keyword with more before or behind it than a letter typed twice."""
    more = folded.removeprefix(keyword) if folded.startswith(keyword) else ""
    more = more or (folded.removesuffix(keyword) if folded.endswith(keyword) else "")
    return more not in ("", keyword[-1])


def _folded(name: str) -> str:
    return name.lower().replace("_", "").replace("-", "").replace("$", "")


_FOLDED = {_folded(keyword): keyword for keyword in sorted(RESTRICTING)}
