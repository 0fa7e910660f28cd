"""Builds constraints on arguments that are written one by one, each with its name.

Single arguments' schemas are enforced, but not the whole object's.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from penstock_router.argument_kinds import STRING, Kinds, SchemaKinds
from penstock_router.errors import BadRequest
from penstock_router.json_fields import JsonObject
from penstock_router.request import Tool
from penstock_router.text.formats.reading.definitions import Definitions
from penstock_router.text.structural_tag_builder import (
    ANY_TEXT,
    either,
    literal,
    packed,
    regex,
    sequence,
    tag,
)

# Top-level schema keywords that can be enforced on single arguments, or that constrain nothing.
_EXPRESSIBLE = frozenset({"type", "properties", "required", "additionalProperties"}) | {
    *("$defs", "definitions", "$schema", "$id", "$comment"),
    *("title", "description", "default", "examples"),
}
# Keywords that constrain a string's text.
_OF_TEXT = ("pattern", "format", "minLength", "maxLength")

# Blocks on each level. Nesting all parts in each other would be too deep for JSON readers.
_MAX_BLOCKS = 8

# A pattern of whole texts without `<`, in syntax that ECMAScript's and Rust's regular expressions
# share.
_WHOLE = re.compile(r"\^[\w \-\[\]{},.+*?:#]+\$", re.ASCII)


@dataclass(frozen=True, slots=True)
class Argument:
    name: str
    is_needed: bool
    # The argument's schema, with the definitions that it refers to.
    schema: JsonObject
    # Facts about the schemas of all the tool's arguments.
    known: SchemaKinds = field(default_factory=lambda: SchemaKinds({}), compare=False)
    # The definitions in the tool's schema, which complete parts of this argument's schema.
    definitions: Definitions = field(default_factory=lambda: Definitions({}), compare=False)

    @property
    def kinds(self) -> Kinds:
        """The JSON types that the argument may have; empty if its schema does not say."""
        return self.known.of(self.schema)

    @property
    def may_be_text(self) -> bool:
        return not self.kinds or bool(self.kinds & STRING)


def arguments_of(
    tool: Tool, *, required: bool, is_name: Callable[[str], bool] = bool
) -> list[Argument]:
    """Return the arguments in the schema's order. Their schemas are enforced if `required` or
    strict.

    Raises `BadRequest` for a strict schema that cannot be enforced on single arguments.
    """
    if tool.strict:
        _check_expressible(tool.name, tool.parameters or {}, is_name)
    counts = required or tool.strict
    schema = (tool.parameters if counts else None) or {}
    definitions = Definitions(schema)
    needed, known = set(schema.get("required") or ()), SchemaKinds(schema)
    return [
        Argument(
            name,
            name in needed,
            definitions.given_to(_schema_of(schema, name)),
            known,
            definitions,
        )
        for name in _object_of(tool.parameters or {}, "properties")
        if is_name(name)
    ]


def _schema_of(schema: JsonObject, name: str) -> JsonObject:
    found = _object_of(schema, "properties").get(name, {})
    return found if isinstance(found, dict) else {}


def _object_of(schema: JsonObject, key: str) -> Mapping[str, object]:
    found = schema.get(key)
    return found if isinstance(found, dict) else {}


def _check_expressible(name: str, schema: JsonObject, is_name: Callable[[str], bool]) -> None:
    beyond = sorted(schema.keys() - _EXPRESSIBLE)
    if beyond:
        raise BadRequest(
            f"the function {name!r} cannot be strict with {beyond[0]!r} at the top of its "
            "parameters: this model writes its arguments one by one",
            param="tools",
        )
    unwritable = [key for key in _object_of(schema, "properties") if not is_name(key)]
    unwritable += sorted(set(schema.get("required") or ()) - set(schema.get("properties") or ()))
    if unwritable:
        raise BadRequest(
            f"the function {name!r} cannot be strict with the argument {unwritable[0]!r}: this "
            "model writes arguments by names that a schema describes and its format allows",
            param="tools",
        )


def text_format(tool: Tool, argument: Argument) -> JsonObject:
    """Match a string that is written without quotes. The text that ends it must follow.

    Raises `BadRequest` for a strict tool if the string's schema cannot be enforced.
    """
    if tool.text_format is not None:
        return tool.text_format
    schema = argument.schema
    values = schema.get("enum", [schema["const"]] if "const" in schema else None)
    if isinstance(values, list) and values:
        return either([literal(_as_text(value)) for value in values])
    asked = [key for key in _OF_TEXT if key in schema]
    bounded = _bounded(schema) if len(asked) == 1 or "pattern" not in schema else None
    if bounded is None and asked and tool.strict:
        raise BadRequest(
            f"the function {tool.name!r} cannot be strict with {asked[0]!r} of the argument "
            f"{argument.name!r}: this model writes strings without quotes",
            param="tools",
        )
    return bounded or ANY_TEXT


def python_words(argument: Argument) -> list[JsonObject]:
    """Return formats of the Python words that an argument may be; [] if it may be anything else."""
    schema, kinds = argument.schema, argument.kinds
    if not kinds <= {"boolean", "null"}:
        return []
    values = schema.get("enum", [schema["const"]] if "const" in schema else None)
    if not isinstance(values, list):
        values = [True, False] * ("boolean" in kinds) + [None] * ("null" in kinds)
    return [literal(str(value)) for value in values]


def _as_text(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _bounded(schema: JsonObject) -> JsonObject | None:
    """Return a regular expression for the schema's strings that excludes marks; None if there is
    none.
    """
    pattern = schema.get("pattern")
    if pattern is not None:
        is_whole = isinstance(pattern, str) and _WHOLE.fullmatch(pattern) is not None
        return regex(pattern[1:-1]) if is_whole else None
    least, most = schema.get("minLength", 0), schema.get("maxLength")
    if "format" in schema or (least == 0 and most is None):
        return None
    return regex(f"[^<]{{{least},{'' if most is None else most}}}")


def one_after_another(parts: Sequence[tuple[bool, JsonObject]]) -> JsonObject:
    """Match all needed parts and any of the other parts, in order."""
    ways = (part if needed else either([part, literal("")]) for needed, part in parts)
    return sequence(literal(""), *packed(ways))


@dataclass(frozen=True, slots=True)
class Part:
    """Part of a list with commas: a text and a value."""

    is_needed: bool
    text: str
    value: Any

    @property
    def alone(self) -> JsonObject:
        return tag(self.text, self.value, "")

    def before_another(self, comma: str) -> JsonObject:
        """Match the part and a comma; both may be missing."""
        return either([tag(self.text, self.value, comma), literal("")])

    def behind_another(self, comma: str) -> JsonObject:
        """Match a comma and the part, which may be missing unless it is needed."""
        with_comma = tag(comma + self.text, self.value, "")
        return with_comma if self.is_needed else either([with_comma, literal("")])


def with_commas(parts: Sequence[Part], comma: str = ", ") -> JsonObject:
    """Match all needed parts and any of the other parts, in order, with commas between them."""
    values = packed(part.value for part in parts)
    packed_parts = zip(parts, values, strict=True)
    parts = [dataclasses.replace(part, value=value) for part, value in packed_parts]
    first_needed = next((at for at, part in enumerate(parts) if part.is_needed), None)
    if first_needed is None:
        alone = packed(part.alone for part in parts)
        before = packed(part.before_another(comma) for part in parts)
        return either([_some_of(alone, before), literal("")]) if parts else literal("")
    # A part before the first needed part has its comma after it.
    leading = [part.before_another(comma) for part in parts[:first_needed]]
    behind = [part.behind_another(comma) for part in parts[first_needed + 1 :]]
    return sequence(*leading, parts[first_needed].alone, *behind)


def _some_of(alone: Sequence[Any], before: Sequence[Any]) -> Any:
    """Match one or more parts, in order; `alone` and `before` have each part without and with a
    part after it. Either some parts of the first block match, or any of them and then some of the
    later blocks.

    So the size does not grow with the square of the number of parts.
    """
    if len(alone) == 1:
        return alone[0]
    size = -(-len(alone) // _MAX_BLOCKS)
    *blocks, last = [slice(at, at + size) for at in range(0, len(alone), size)]
    found = _some_of(alone[last], before[last])
    for block in reversed(blocks):
        within = _some_of(alone[block], before[block])
        found = either([sequence(*before[block], found), within])
    return found
