"""Turns Python types into JSON schemas.

msgspec cannot describe a union of two TypedDicts, which answers need.
"""

from __future__ import annotations

import types
from typing import (
    Any,
    Literal,
    NotRequired,
    Union,
    get_args,
    get_origin,
    get_type_hints,
    is_typeddict,
)

from penstock_router.json_fields import JsonObject

_SIMPLE: dict[Any, JsonObject] = {
    Any: {},
    type(None): {"type": "null"},
    bool: {"type": "boolean"},
    int: {"type": "integer"},
    float: {"type": "number"},
    str: {"type": "string"},
}


class TypeSchemas:
    """Schemas of types. Each TypedDict is described once, in `components`, and referred to."""

    def __init__(self, prefix: str) -> None:
        """References begin with `prefix`, the path of `components` in the document."""
        self.components: dict[str, JsonObject] = {}
        self._prefix = prefix
        self._names: dict[Any, str] = {}

    def schema(self, given: Any) -> JsonObject:
        """Return a type's schema. Raise `TypeError` if it has none."""
        if given in _SIMPLE:
            return dict(_SIMPLE[given])
        if is_typeddict(given):
            return {"$ref": self._prefix + self._component(given)}
        origin, arguments = get_origin(given), get_args(given)
        if origin in (Union, types.UnionType):
            return {"anyOf": [self.schema(argument) for argument in arguments]}
        if origin is Literal:
            return {"enum": list(arguments)}
        if origin is list:
            return {"type": "array", "items": self.schema(arguments[0])}
        if origin is dict and arguments[0] is str:
            return {"type": "object", "additionalProperties": self.schema(arguments[1])}
        raise TypeError(f"{given!r} has no JSON schema here")

    def _component(self, given: Any) -> str:
        if given in self._names:
            return self._names[given]
        # Two modules may each have a Usage.
        taken = given.__name__ in self.components
        name = f"{given.__module__}.{given.__qualname__}" if taken else given.__name__
        self._names[given] = name
        # Register the name before the description, because the type may be recursive.
        self.components[name] = {}
        self.components[name] = self._object(given)
        return name

    def _object(self, given: Any) -> JsonObject:
        properties, required = {}, []
        for name, hint in get_type_hints(given, include_extras=True).items():
            wrapper = get_origin(hint)
            inner = get_args(hint)[0] if wrapper is NotRequired else hint
            properties[name] = self.schema(inner)
            # If annotations are kept as text, __required_keys__ ignores their wrappers.
            if wrapper is not NotRequired and name in given.__required_keys__:
                required.append(name)
        described: JsonObject = {"type": "object", "properties": properties, "required": required}
        return {"description": given.__doc__, **described} if given.__doc__ else described
