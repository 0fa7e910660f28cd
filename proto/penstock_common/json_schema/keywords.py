"""The keywords of JSON Schema: what each draft from 4 to 2020-12 defines, and OpenAPI 3.0.

A keyword that none of them defines is an annotation: it forbids nothing (JSON Schema core, 6.5).
"""

from __future__ import annotations

from collections.abc import Iterator
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
OUTDATED = frozenset(("divisibleBy", "disallow", "extends"))
_DEFINED = ANNOTATIONS | RESTRICTING | OUTDATED


def is_unknown(keyword: str) -> bool:
    """Tell whether no draft defines a keyword, and its name does not mark it as an extension."""
    return keyword not in _DEFINED and not keyword.startswith("x-")


def subschemas(schema: dict[str, Any]) -> Iterator[Any]:
    """The schemas that the keywords of a schema hold, and whatever else stands in their place."""
    for key, value in schema.items():
        if key in HOLDING:
            yield from value if isinstance(value, list) else [value]
        elif key in HOLDING_BY_NAME and isinstance(value, dict):
            yield from value.values()


def unknown_keywords(root: Any) -> Iterator[str]:
    """The keywords in a schema that no draft defines, in the order in which they stand there,
    perhaps repeatedly. One whose value is null is as good as absent.
    """
    left = [root]
    while left:
        schema = left.pop()
        if isinstance(schema, dict):
            for keyword, value in schema.items():
                if value is not None and is_unknown(keyword):
                    yield keyword
            left += reversed([*subschemas(schema)])
