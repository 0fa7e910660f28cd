"""Checks the JSON type of each keyword's value; other modules rely on it.

Keywords that are not listed here are checked where they are handled.
"""

from __future__ import annotations

import re
import sys
from typing import Annotated, Any, Literal

import msgspec

from penstock_shard.structured_output.refusal import ConstraintRefused, shown

_Schema = dict[str, Any] | bool
_Schemas = Annotated[list[_Schema], msgspec.Meta(min_length=1)]
_Type = Literal["integer", "null", "boolean", "number", "string", "array", "object"]
_LARGEST = sys.float_info.max
_Number = int | Annotated[float, msgspec.Meta(ge=-_LARGEST, le=_LARGEST)]
_Positive = Annotated[int, msgspec.Meta(gt=0)] | Annotated[float, msgspec.Meta(gt=0, le=_LARGEST)]
# 2.0 is a valid count. Above 2^53 floats are not exact, and no value is so long.
_Count = Annotated[float, msgspec.Meta(ge=0, le=2**53, multiple_of=1)]

_SHAPES: dict[str, tuple[str, Any]] = {
    **dict.fromkeys(("$ref", "$dynamicRef", "$recursiveRef", "$anchor", "$id"), ("text", str)),
    **dict.fromkeys(("format", "pattern"), ("text", str)),
    **dict.fromkeys(("not", "if", "then", "else", "contains"), ("schema", _Schema)),
    **dict.fromkeys(("propertyNames", "additionalProperties"), ("schema", _Schema)),
    **dict.fromkeys(("additionalItems", "unevaluatedItems"), ("schema", _Schema)),
    "unevaluatedProperties": ("schema", _Schema),
    **dict.fromkeys(("allOf", "anyOf", "oneOf", "prefixItems"), ("list of schemas", _Schemas)),
    **dict.fromkeys(
        ("properties", "patternProperties", "dependentSchemas"),
        ("object of schemas", dict[str, _Schema]),
    ),
    **{
        f"{end}{of}": ("count", _Count)
        for end in ("min", "max")
        for of in ("Length", "Items", "Contains", "Properties")
    },
    **dict.fromkeys(("minimum", "maximum"), ("number", _Number)),
    # In draft 4, a boolean that is true if the bound itself is excluded.
    **dict.fromkeys(("exclusiveMinimum", "exclusiveMaximum"), ("number", _Number | bool)),
    "multipleOf": ("number above 0", _Positive),
    **dict.fromkeys(("uniqueItems", "nullable"), ("bool", bool)),
    "type": ("type", _Type | Annotated[list[_Type], msgspec.Meta(min_length=1)]),
    "items": ("schema", _Schema | list[_Schema]),
    "enum": ("list", list),
    "required": ("list of names", list[str]),
    "dependentRequired": ("object of lists of names", dict[str, list[str]]),
    "dependencies": ("object of schemas and lists of names", dict[str, _Schema | list[str]]),
}
# One structure, so that msgspec checks all keywords in one call.
_Shapes = msgspec.defstruct(
    "_Shapes",
    [
        (f"field_{index}", shape | msgspec.UnsetType, msgspec.UNSET)
        for index, (_, shape) in enumerate(_SHAPES.values())
    ],
    rename={f"field_{index}": keyword for index, keyword in enumerate(_SHAPES)},
)
# Threads must not build msgspec's type information at once: build it at import.
_READ_ONCE = msgspec.json.Decoder(_Shapes)
_KEYWORD = re.compile(r"at `\$\.(\$?\w+)")


def check_shapes(schema: dict[str, Any]) -> None:
    """Refuse keywords with values of the wrong type."""
    try:
        msgspec.convert(schema, _Shapes)
    except msgspec.ValidationError as error:
        found = _KEYWORD.search(str(error))
        assert found is not None
        keyword = found[1]
        raise ConstraintRefused(
            f"{keyword}: {shown(schema[keyword])} is no {_SHAPES[keyword][0]}"
        ) from error


def has_shape(keyword: str, value: Any) -> bool:
    try:
        check_shapes({keyword: value})
    except ConstraintRefused:
        return False
    return True
