"""Converts dataclasses to JSON values and back, by their fields and types.

Handles dataclasses, None, sequences, mappings, enums, int, float, bool and str. Other types are
refused, so that a new field is never silently left out.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import json
import math
import operator
import types
import typing
from collections.abc import Mapping, Sequence
from typing import Any

# Handling a million ids at once in C would hold the GIL for tens of milliseconds.
_IDS_AT_ONCE = 4096
_encode = json.JSONEncoder(separators=(",", ":"), allow_nan=False).encode


@functools.cache
def _field_types(of: type) -> Mapping[str, Any]:
    hints = typing.get_type_hints(of)
    return {each.name: hints[each.name] for each in dataclasses.fields(of)}


def _optional(hint: Any) -> tuple[Any, bool]:
    """Return the type without None, and whether None is allowed."""
    if typing.get_origin(hint) not in (types.UnionType, typing.Union):
        return hint, False
    (rest,) = (each for each in typing.get_args(hint) if each is not type(None))
    return rest, True


def to_plain(hint: Any, value: Any) -> Any:
    """Raise `TypeError` if the value is not of this type."""
    hint, optional = _optional(hint)
    if value is None and optional:
        return None
    if dataclasses.is_dataclass(hint):
        if not isinstance(value, typing.cast(type, hint)):
            raise TypeError(f"{hint} is wanted, not {type(value).__name__}")
        fields = _field_types(typing.cast(type, hint)).items()
        return {name: to_plain(inner, getattr(value, name)) for name, inner in fields}
    if typing.get_origin(hint) is Sequence:
        (item,) = typing.get_args(hint)
        return plain_ids(value) if item is int else [to_plain(item, each) for each in value]
    if typing.get_origin(hint) is Mapping:
        key_type, item = typing.get_args(hint)
        return {str(to_plain(key_type, key)): to_plain(item, value[key]) for key in value}
    return _plain_scalar(hint, value)


def _plain_scalar(hint: Any, value: Any) -> object:
    if hint is int:
        return int(operator.index(value))
    if hint is float:
        number = float(operator.pos(value))  # fails for strings
        # JSON has no NaN or infinity.
        return number if math.isfinite(number) else repr(number)
    if hint not in (bool, str) and not issubclass(hint, enum.Enum):
        raise TypeError(f"an audit record has no way to write a {hint}")
    if not isinstance(value, hint):
        raise TypeError(f"{hint.__name__} is wanted, not {type(value).__name__}")
    return value.value if isinstance(value, enum.Enum) else value


def plain_ids(ids: Sequence[int]) -> list[int]:
    """Return token ids as plain integers. Raise `TypeError`."""
    plain: list[int] = []
    for start in range(0, len(ids), _IDS_AT_ONCE):
        plain += map(operator.index, ids[start : start + _IDS_AT_ONCE])
    return plain


def from_plain(hint: Any, value: Any, where: str) -> Any:
    """Restore a value of this type; sequences become tuples. Raise `ValueError` that names the
    place.
    """
    hint, optional = _optional(hint)
    if value is None and optional:
        return None
    if dataclasses.is_dataclass(hint):
        return _dataclass_from(typing.cast(type, hint), value, where)
    if typing.get_origin(hint) is Sequence:
        (item,) = typing.get_args(hint)
        items = require(list, value, where)
        if all(type(each) is item for each in items):
            return tuple(items)  # fast path, mostly for ids
        return tuple(from_plain(item, each, where) for each in items)
    if typing.get_origin(hint) is Mapping:
        key_type, item = typing.get_args(hint)
        pairs = require(dict, value, where).items()
        return {key_type(key): from_plain(item, each, where) for key, each in pairs}
    if hint is float:
        return float(value if value in ("nan", "inf", "-inf") else require(float, value, where))
    if issubclass(hint, enum.Enum):
        return hint(value)
    return require(hint, value, where)


def _dataclass_from(of: type, value: Any, where: str) -> Any:
    types_of_fields = _field_types(of)
    data = require(dict, value, where)
    if unknown := sorted(data.keys() - types_of_fields.keys()):
        raise ValueError(f"{where}: {unknown[0]!r} is not known here")
    given = {
        name: from_plain(types_of_fields[name], each, f"{where}.{name}")
        for name, each in data.items()
    }
    try:
        return of(**given)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{where}: {error}") from None


def require(wanted: type, value: Any, where: str) -> Any:
    """Return the value if it has exactly this type (an int is a float too, True is no int). Raise
    `ValueError` that names the place.
    """
    if type(value) is wanted or (wanted is float and type(value) is int):
        return value
    raise ValueError(f"{where}: {wanted.__name__} is wanted, not {type(value).__name__}")


def compact_json(value: Any) -> str:
    """Encode JSON without spaces, in small steps (see _IDS_AT_ONCE). Raise `ValueError` for NaN."""
    if isinstance(value, dict):
        members = (f"{_encode(key)}:{compact_json(inner)}" for key, inner in value.items())
        return "{" + ",".join(members) + "}"
    if isinstance(value, list) and len(value) > _IDS_AT_ONCE:
        starts = range(0, len(value), _IDS_AT_ONCE)
        parts = (compact_json(value[start : start + _IDS_AT_ONCE])[1:-1] for start in starts)
        return "[" + ",".join(parts) + "]"
    return _encode(value)
