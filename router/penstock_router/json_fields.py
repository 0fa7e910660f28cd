"""Reads the fields of JSON bodies, and refuses wrong values.

A `Kind` reads one value and describes itself as a JSON schema, so that documentation and checks
agree. A body is a table of `Field`s. A field that would change the answer is honoured, or refused
by name if it is not served, unless its value has no effect. Other servers' names for a field are
accepted. A field that cannot change the answer, or is in no table, is ignored, and a warning names
it. null means that the field is missing.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from enum import Enum, auto
from typing import Any

import msgspec

from penstock_proto.limits import Range
from penstock_router.errors import BadRequest

INT32_MAX = 2**31 - 1
INT64_MAX = 2**63 - 1
UINT32_MAX = 2**32 - 1
FLOAT_MAX = sys.float_info.max

JsonObject = dict[str, Any]
# (name, value) -> value, or `BadRequest`.
Reader = Callable[[str, Any], Any]


@dataclass(frozen=True, slots=True)
class Kind:
    read: Reader
    schema: JsonObject


def or_null(schema: JsonObject) -> JsonObject:
    return {"anyOf": [schema, {"type": "null"}]}


class Use(Enum):
    HONOURED = auto()
    # Refused after a check of the type, unless the value has no effect.
    REFUSED = auto()
    # Ignored, with a warning unless the value is in `neutral`.
    TAKEN = auto()


@dataclass(frozen=True, slots=True)
class Field:
    """A field of a body. Values in `neutral` have no effect."""

    name: str
    kind: Kind
    help: str = ""
    required: bool = False
    use: Use = Use.HONOURED
    neutral: tuple[Any, ...] = ()
    # JSON schema of values without effect, if `neutral` does not list them all.
    nothing: JsonObject | None = None
    # The original field, if `name` is another name for it.
    stands_for: str = ""

    @property
    def schema(self) -> JsonObject:
        """The schema of accepted values, including null."""
        nothing = self.nothing or {"enum": list(self.neutral)}
        schema = nothing if self.use is Use.REFUSED else self.kind.schema
        if not self.required:
            schema = or_null(schema)
        return {**schema, "description": self.help} if self.help else schema


Table = Mapping[str, Field]


def table(fields: Iterable[Field]) -> Table:
    return {entry.name: entry for entry in fields}


def not_served(name: str, kind: Kind, *neutral: Any, help: str = "Not served.") -> Field:
    """A field that is not served: only values without effect are accepted."""
    return Field(name, kind, help, use=Use.REFUSED, neutral=neutral)


def taken(name: str, *neutral: Any, help: str = "Taken without effect.") -> Field:
    """A field that cannot change the answer; `neutral` values need no warning."""
    return Field(name, ANYTHING, help, use=Use.TAKEN, neutral=neutral)


def label(name: str) -> Field:
    """A field by which clients name their own requests."""
    nothing = Kind(lambda name, value: None, {})
    return Field(
        name, nothing, "The client's own; nothing comes of it.", use=Use.TAKEN, neutral=(None,)
    )


def renamed(name: str, of: Field) -> Field:
    """Use another route's field under a new name; its value is stored under the original name."""
    return replace(of, name=name, stands_for=of.name)


def another_name(name: str, of: Field, kind: Kind | None = None) -> Field:
    """Accept another server's name for a field, with that server's bounds if they differ."""
    help_text = f"Another name of {of.name}."
    return replace(renamed(name, of), kind=kind or of.kind, help=help_text, required=False)


def body_schema(fields: Table) -> JsonObject:
    return {
        "type": "object",
        "properties": {name: entry.schema for name, entry in fields.items()},
        "required": [name for name, entry in fields.items() if entry.required],
    }


# The key under which `read_fields` returns warnings.
WARNINGS = "warnings"
# A warning names at most `_NAMED_FIELDS` unknown fields, and none if the body has more than
# `_MAX_SOUGHT` fields.
_NAMED_FIELDS = 16
_MAX_SOUGHT = 1024


def read_fields(fields: Table, body: JsonObject) -> JsonObject:
    """Return the values of honoured fields by name, and warnings under `WARNINGS`. Raise
    `BadRequest` for the first wrong field in the body or, if the body is huge, in the table.
    """
    values: JsonObject = {}
    warnings: list[str] = []
    # Use the body's order only if it is small: a body may have millions of names.
    is_small = len(body) <= _MAX_SOUGHT
    for name in body if is_small else fields:
        entry, value = fields.get(name), body.get(name)
        if entry is None or value is None:
            continue
        parsed = entry.kind.read(name, value)
        if entry.use is Use.HONOURED:
            _put(values, entry, parsed)
        elif parsed not in entry.neutral:
            if entry.use is Use.REFUSED:
                text = f"{name}: not served by this server; leave it out"
                raise BadRequest(text, param=name)
            warnings.append(without_effect(name))
    for name, entry in fields.items():
        if entry.required and name not in values:
            raise BadRequest(f"{name}: required", param=name)
    if is_small and not body.keys() <= fields.keys():
        warnings += _name_unknown(body, fields)
    if warnings:
        values[WARNINGS] = (*values.get(WARNINGS, ()), *warnings)
    return values


def without_effect(name: str) -> str:
    return f"{name}: taken without effect"


def add_warning(values: JsonObject, warning: str) -> None:
    values[WARNINGS] = (*values.get(WARNINGS, ()), warning)


def _put(values: JsonObject, entry: Field, parsed: Any) -> None:
    """Store a value under the field's original name. Raise `BadRequest` if two names of the field
    have different values.
    """
    name = entry.stands_for or entry.name
    if values.setdefault(name, parsed) != parsed:
        text = f"{entry.name}: not together with another name of {name} that has another value"
        raise BadRequest(text, param=entry.name)


def _name_unknown(body: JsonObject, fields: Table) -> list[str]:
    """Return a warning that names unknown fields which have a value, if any."""
    unknown = sorted(name for name in body.keys() - fields.keys() if body[name] is not None)
    if not unknown:
        return []
    names = ", ".join(map(shorten, unknown[:_NAMED_FIELDS]))
    more = f" and {len(unknown) - _NAMED_FIELDS} more" if len(unknown) > _NAMED_FIELDS else ""
    return [f"unknown fields without effect: {names}{more}"]


# ---- Bytes -> object ---------------------------------------------------------------------------


def decode_object(body: bytes | memoryview) -> JsonObject:
    """Decode a UTF-8 JSON object without NaN. If a key is repeated, its last value counts."""
    try:
        value = decode_json(body)
    except UnicodeDecodeError:
        raise BadRequest("the body is not valid UTF-8") from None
    except RecursionError:
        raise BadRequest("the body is nested too deeply") from None
    except msgspec.DecodeError as error:
        # msgspec before 0.23 raised UnicodeDecodeError.
        if "UTF-8" in str(error):
            raise BadRequest("the body is not valid UTF-8") from None
        problem = str(error) if len(body) else "it is empty"
        raise BadRequest(f"the body is not valid JSON: {problem}") from None
    if not isinstance(value, dict):
        raise BadRequest(f"the body must be a JSON object, not {json_type(value)}")
    return value


def decode_json(data: bytes | memoryview | str) -> Any:
    """Decode like `msgspec.json.decode`, but with the garbage collector off.

    The collector would traverse the growing objects repeatedly, which takes seconds for millions of
    lists.
    """
    collects = gc.isenabled()
    gc.disable()
    try:
        return msgspec.json.decode(data)
    finally:
        if collects:
            gc.enable()


def object_in(text: str) -> JsonObject | None:
    """Decode a JSON object; None if the text is not an object."""
    try:
        value = decode_json(text)
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def json_type(value: object) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "a boolean"
    if isinstance(value, int | float):
        return "a number"
    if isinstance(value, str):
        return "a string"
    return "an array" if isinstance(value, list) else "an object"


def shorten(value: object) -> str:
    if isinstance(value, list | dict):
        # The value may be huge, or nested deeper than `repr` allows.
        return json_type(value)
    text = repr(value[:60] if isinstance(value, str) else value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def refusal(name: str, wanted: str, value: object) -> BadRequest:
    given = json_type(value) if value is None else shorten(value)
    return BadRequest(f"{name}: must be {wanted}; given: {given}", param=name)


# ---- Kinds -------------------------------------------------------------------------------------


def integer(low: int, high: int) -> Kind:
    """An integer, also if written as 3.0."""

    def read(name: str, value: Any) -> int:
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if isinstance(value, bool) or not isinstance(value, int):
            raise refusal(name, "an integer", value)
        # Tests of vLLM's clients look for pydantic's name of the bound, in the parentheses.
        if value < low:
            raise refusal(name, f"at least {low} (greater_than_equal)", value)
        if value > high:
            raise refusal(name, f"at most {high} (less_than_equal)", value)
        return value

    return Kind(read, {"type": "integer", "minimum": low, "maximum": high})


def number(low: float, high: float, *, above_low: bool = False, below_high: bool = False) -> Kind:
    def read(name: str, value: Any) -> float:
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise refusal(name, "a number", value)
        high_enough = low < value if above_low else low <= value
        if not (high_enough and (value < high if below_high else value <= high)):
            bounds = f"{'above' if above_low else 'at least'} {low:g} and "
            bounds += f"{'below' if below_high else 'at most'} "
            shown = high if isinstance(high, int) else f"{high:g}"
            raise refusal(name, f"{bounds}{shown}", value)
        return float(value)

    schema: JsonObject = {"type": "number"}
    schema["exclusiveMinimum" if above_low else "minimum"] = low
    schema["exclusiveMaximum" if below_high else "maximum"] = high
    return Kind(read, schema)


def within(allowed: Range) -> Kind:
    """A number in the range that shards accept."""
    return number(allowed.low, allowed.high, above_low=allowed.above_low)


def integers_within(allowed: Range) -> Kind:
    return integer(int(allowed.low), int(allowed.high))


def _read_boolean(name: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise refusal(name, "true or false", value)
    return value


def _read_word_for_boolean(name: str, value: Any) -> bool:
    words = {"true": True, "false": False}
    if isinstance(value, str) and value.lower() in words:
        return words[value.lower()]
    return _read_boolean(name, value)


def read_object(name: str, value: Any) -> JsonObject:
    if not isinstance(value, dict):
        raise refusal(name, "an object", value)
    return value


def read_array(name: str, value: Any) -> list[Any]:
    if not isinstance(value, list):
        raise refusal(name, "an array", value)
    return value


def string(min_chars: int = 0, max_chars: int | None = None, *, without: str = "") -> Kind:
    """A string of bounded length, without the characters in `without`."""
    bounds = "any" if max_chars is None else str(max_chars)

    def read(name: str, value: Any) -> str:
        if not isinstance(value, str):
            raise refusal(name, "a string", value)
        if len(value) < min_chars or (max_chars is not None and len(value) > max_chars):
            wanted = f"a string of {min_chars} to {bounds} characters"
            raise BadRequest(f"{name}: must be {wanted}; given: {len(value)}", param=name)
        for character in without:
            if character in value:
                raise refusal(name, f"a string without {character!r}", value)
        return value

    schema: JsonObject = {"type": "string"}
    if min_chars:
        schema["minLength"] = min_chars
    if max_chars is not None:
        schema["maxLength"] = max_chars
    if without:
        escaped = "".join(f"\\u{ord(character):04x}" for character in without)
        schema["pattern"] = f"^[^{escaped}]*$"
    return Kind(read, schema)


def unless(kind: Kind, *nothing: Any) -> Kind:
    """A kind that reads the values in `nothing` as None."""
    schema = {"anyOf": [*({"const": each} for each in nothing), kind.schema]}
    return Kind(lambda name, value: None if value in nothing else kind.read(name, value), schema)


def one_of(*values: str) -> Kind:
    def read(name: str, value: Any) -> str:
        if not isinstance(value, str) or value not in values:
            raise refusal(name, f"one of {', '.join(values)}", value)
        return value

    return Kind(read, {"type": "string", "enum": list(values)})


def token_ids(*, at_least: int = 0, at_most: int) -> Kind:
    def read(name: str, value: Any) -> tuple[int, ...]:
        ids = read_array(name, value)
        if not at_least <= len(ids) <= at_most:
            bound = f"at least {at_least}" if len(ids) < at_least else f"at most {at_most}"
            raise BadRequest(f"{name}: {bound} ids; given: {len(ids)}", param=name)
        ids = whole_numbers(name, ids)
        if ids:
            TOKEN_ID.read(name, min(ids))
            TOKEN_ID.read(name, max(ids))
        return tuple(ids)

    schema = {"type": "array", "items": TOKEN_ID.schema, "minItems": at_least, "maxItems": at_most}
    return Kind(read, schema)


def whole_numbers(name: str, values: list[Any]) -> list[int]:
    """Return the values as ints, accepting 3.0; raise `BadRequest` for others."""
    # Avoid Python loops: `map`, `set` and `min` take 1 to 2 ms for 100,000 values.
    types = set(map(type, values))
    if types <= {int}:
        return values
    if types <= {int, float}:
        whole = list(map(int, values))
        if whole == values:
            return whole
    wrong = (value for value in values if type(value) is not int and not _is_whole(value))
    raise refusal(name, "an integer", next(wrong))


def _is_whole(value: Any) -> bool:
    return isinstance(value, float) and value.is_integer()


def array_of(item: Kind, *, at_least: int = 0, at_most: int, unit: str) -> Kind:
    def read(name: str, value: Any) -> tuple[Any, ...]:
        items = read_array(name, value)
        if len(items) < at_least:
            raise BadRequest(f"{name}: must name at least {at_least} of {unit}", param=name)
        if len(items) > at_most:
            text = f"{name}: at most {at_most} {unit}; given: {len(items)}"
            raise BadRequest(text, param=name)
        return tuple([item.read(name, entry) for entry in items])

    schema = {"type": "array", "items": item.schema, "minItems": at_least, "maxItems": at_most}
    return Kind(read, schema)


def object_of(**entries: Kind) -> Kind:
    """An object with these entries, each of which may be missing or null."""

    def read(name: str, value: Any) -> JsonObject:
        given = read_object(name, value)
        return {
            key: kind.read(f"{name}.{key}", given[key])
            for key, kind in entries.items()
            if given.get(key) is not None
        }

    properties = {key: or_null(kind.schema) for key, kind in entries.items()}
    return Kind(read, {"type": "object", "properties": properties})


BOOLEAN = Kind(_read_boolean, {"type": "boolean"})
# Some clients send Python's True and False as strings.
WORD_OR_BOOLEAN = Kind(
    _read_word_for_boolean,
    {
        "anyOf": [
            {"type": "boolean"},
            {"type": "string", "enum": ["True", "False", "true", "false"]},
        ]
    },
)
STRING = string()
OBJECT = Kind(read_object, {"type": "object"})
ARRAY = Kind(read_array, {"type": "array"})
ANYTHING = Kind(lambda name, value: value, {})
POSITIVE = integer(1, INT32_MAX)
INT64 = integer(-INT64_MAX - 1, INT64_MAX)
ANY_NUMBER = number(-FLOAT_MAX, FLOAT_MAX)
TOKEN_ID = integer(0, UINT32_MAX)
