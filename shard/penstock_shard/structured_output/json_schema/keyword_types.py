"""Which JSON type the value of each keyword must have, so that other modules may rely on it.

Keywords not listed here are checked by the code that handles them.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from penstock_shard.structured_output.json_schema.combine import TYPES
from penstock_shard.structured_output.refusal import ConstraintRefused, shown


def check_shapes(schema: dict[str, Any]) -> None:
    """Refuses a schema whose keywords have values of the wrong type."""
    for keyword, (what, is_one) in _SHAPES.items():
        if keyword in schema and not is_one(schema[keyword]):
            raise ConstraintRefused(f"{keyword}: {shown(schema[keyword])} is no {what}")


def _is_text(value: object) -> bool:
    return isinstance(value, str)


def _is_schema(value: object) -> bool:
    return isinstance(value, dict | bool)


def _are_schemas(value: object) -> bool:
    return isinstance(value, list) and bool(value) and all(map(_is_schema, value))


def _is_items(value: object) -> bool:
    return _is_schema(value) or (isinstance(value, list) and all(map(_is_schema, value)))


def _by_name(value: object) -> bool:
    return isinstance(value, dict) and all(map(_is_schema, value.values()))


def _are_names(value: object) -> bool:
    return isinstance(value, list) and all(map(_is_text, value))


def _is_type(value: object) -> bool:
    named = value if isinstance(value, list) else [value]
    return bool(named) and all(name in ("integer", *TYPES) for name in named)


def _names_by_name(value: object) -> bool:
    return isinstance(value, dict) and all(map(_are_names, value.values()))


def _dependencies(value: object) -> bool:
    return isinstance(value, dict) and all(
        _is_schema(needed) or _are_names(needed) for needed in value.values()
    )


def _is_number(value: Any) -> bool:
    return type(value) is int or (type(value) is float and math.isfinite(value))


def _is_count(value: Any) -> bool:
    # 2.0 is a valid count. Beyond 2^53 a float is not exact, and no value is that long.
    return bool(_is_number(value) and 0 <= value <= 2**53 and value == int(value))


_Shape = tuple[str, Callable[[object], bool]]
_COUNTS = ("Length", "Items", "Contains", "Properties")
_TEXT: _Shape = ("text", _is_text)
_SCHEMA: _Shape = ("schema", _is_schema)
_LIST: _Shape = ("list of schemas", _are_schemas)
_BY_NAME: _Shape = ("object of schemas", _by_name)
_SHAPES: dict[str, _Shape] = {
    **dict.fromkeys(("$ref", "$dynamicRef", "$anchor", "$id", "format", "pattern"), _TEXT),
    **dict.fromkeys(("not", "if", "then", "else", "contains", "propertyNames"), _SCHEMA),
    **dict.fromkeys(("additionalProperties", "additionalItems"), _SCHEMA),
    **dict.fromkeys(("unevaluatedProperties", "unevaluatedItems"), _SCHEMA),
    **dict.fromkeys(("allOf", "anyOf", "oneOf", "prefixItems"), _LIST),
    **dict.fromkeys(("properties", "patternProperties", "dependentSchemas"), _BY_NAME),
    **{f"{end}{of}": ("count", _is_count) for end in ("min", "max") for of in _COUNTS},
    **dict.fromkeys(("minimum", "maximum", "multipleOf"), ("number", _is_number)),
    # In draft 4 a boolean: whether the bound itself is excluded.
    **dict.fromkeys(
        ("exclusiveMinimum", "exclusiveMaximum"),
        ("number", lambda value: isinstance(value, bool) or _is_number(value)),
    ),
    "type": ("type", _is_type),
    "items": ("schema", _is_items),
    "enum": ("list", lambda value: isinstance(value, list)),
    "required": ("list of names", _are_names),
    "dependentRequired": ("object of lists of names", _names_by_name),
    "dependencies": ("object of schemas and lists of names", _dependencies),
}
