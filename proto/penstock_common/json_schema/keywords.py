"""The keywords of JSON Schema drafts 4 to 2020-12, and of OpenAPI 3.0.

An undefined keyword is an annotation: it forbids nothing (JSON Schema core, 6.5).
"""

from __future__ import annotations

import difflib
import functools
from collections.abc import Callable, Iterator
from typing import Any

# Keywords that hold a schema or a list of schemas; below, keywords that hold schemas by name.
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
# Keywords that restrict values; and OpenAPI's `nullable`, which allows null too.
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
# Restricting keywords of drafts before 4.
OUTDATED = frozenset(("divisibleBy", "disallow", "extends", "requires"))
_DEFINED = ANNOTATIONS | RESTRICTING | OUTDATED
# The least similarity (0 to 1) of a misspelt keyword to the right one. It is higher for short
# names, which are more often words of their own, such as "note".
_ALIKE, _SHORT_ALIKE = 0.85, 0.88
_SHORT, _SHORTEST, _LONGEST = 6, 4, 40


def is_unknown(keyword: str) -> bool:
    """True if no draft defines the keyword, and its name does not mark it as an extension."""
    return keyword not in _DEFINED and not keyword.startswith("x-")


def restricting(schema: dict[str, Any]) -> dict[str, Any]:
    """Return a schema's keywords that restrict values, with their values."""
    return {key: value for key, value in schema.items() if key in RESTRICTING or key in OUTDATED}


def with_subschemas(schema: dict[str, Any], change: Callable[[Any], Any]) -> dict[str, Any]:
    """Copy the schema, with `change` applied to each schema in its keywords."""
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
    """Yield the schemas in a schema's keywords, and any invalid values there."""
    for key, value in schema.items():
        if key in HOLDING:
            yield from value if isinstance(value, list) else [value]
        elif key in HOLDING_BY_NAME and isinstance(value, dict):
            yield from value.values()


def unknown_keywords(root: Any) -> Iterator[str]:
    """Yield the undefined keywords of a schema, then of its parts; some may be repeated. A keyword
    with the value null counts as absent.
    """
    left = [root]
    while left:
        schema = left.pop()
        if not isinstance(schema, dict):
            continue
        # This test runs in C and skips most schemas: a body may have thousands.
        if not _DEFINED.issuperset(schema):
            yield from (name for name in schema if schema[name] is not None and is_unknown(name))
        if not _HOLDERS.isdisjoint(schema):
            left += reversed([*subschemas(schema)])


def near_miss(name: str) -> str | None:
    """Return the restricting keyword that this name misspells, or None.

    A name that begins with an underscore, has a colon, or extends a keyword at either end is
    intentional.
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
    """True if a word extends a keyword by more than a letter typed twice."""
    more = folded.removeprefix(keyword) if folded.startswith(keyword) else ""
    more = more or (folded.removesuffix(keyword) if folded.endswith(keyword) else "")
    return more not in ("", keyword[-1])


def _folded(name: str) -> str:
    return name.lower().replace("_", "").replace("-", "").replace("$", "")


_FOLDED = {_folded(keyword): keyword for keyword in sorted(RESTRICTING)}
