"""Constraints on arguments that a format writes one by one, each with its name.

A schema of the whole object cannot be enforced on them; one of each argument can.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import msgspec

from penstock_router.argument_kinds import STRING, Kinds, SchemaKinds
from penstock_router.errors import BadRequest
from penstock_router.json_fields import JsonObject
from penstock_router.request import Tool
from penstock_router.text.structural_tag_builder import ANY_TEXT, either, literal, regex, sequence

# Top-level keywords of a schema that can be enforced on arguments written one by one, or that
# constrain nothing.
_EXPRESSIBLE = frozenset({"type", "properties", "required", "additionalProperties"}) | {
    *("$defs", "definitions", "$schema", "$id", "$comment"),
    *("title", "description", "default", "examples"),
}
_DEFINITIONS = ("$defs", "definitions")
# The keywords by which a schema refers to another, in JSON.
_REFERENCE = re.compile(rb'"\$(?:ref|dynamicRef|recursiveRef)"')
# Keywords of a string's schema that constrain its text.
_OF_TEXT = ("pattern", "format", "minLength", "maxLength")

# So many parts may each be the first in a way of its own.
_FEW_PARTS = 4

# A pattern of whole texts in what ECMA's and Rust's dialects have in common, without marks.
_WHOLE = re.compile(r"\^[\w \-\[\]{},.+*?:#]+\$", re.ASCII)


@dataclass(frozen=True, slots=True)
class Argument:
    """An argument that a schema describes."""

    name: str
    is_needed: bool
    # With the definitions that it may refer to.
    schema: JsonObject
    # What is known of the schemas of all arguments of the tool.
    known: SchemaKinds = field(default_factory=lambda: SchemaKinds({}), compare=False)

    @property
    def kinds(self) -> Kinds:
        """JSON's types that it may have; none if its schema does not say."""
        return self.known.of(self.schema)

    @property
    def may_be_text(self) -> bool:
        """Tell whether it may be a string."""
        return not self.kinds or bool(self.kinds & STRING)


def arguments_of(
    tool: Tool, *, required: bool, is_name: Callable[[str], bool] = bool
) -> list[Argument]:
    """The arguments in the order of the schema, which counts if rule.required or strict.

    Raises `BadRequest` for a strict schema that cannot be enforced on arguments written one by one.
    """
    if tool.strict:
        _check_expressible(tool.name, tool.parameters or {}, is_name)
    counts = required or tool.strict
    schema = (tool.parameters if counts else None) or {}
    shared = {key: schema[key] for key in _DEFINITIONS if key in schema}
    needed, known = set(schema.get("required") or ()), SchemaKinds(schema)
    return [
        Argument(name, name in needed, _alone(_schema_of(schema, name), shared), known)
        for name in _object_of(tool.parameters or {}, "properties")
        if is_name(name)
    ]


def _alone(schema: JsonObject, shared: JsonObject) -> JsonObject:
    """An argument's schema as a whole one: with the definitions, if it may refer to any."""
    refers = bool(shared) and _REFERENCE.search(msgspec.json.encode(schema)) is not None
    return shared | schema if refers else schema


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
    """A string that is written without quotes. What ends it must follow.

    Raises `BadRequest` for a strict tool whose schema says more of it than can be enforced.
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
    """The words of Python that an argument may be; [] if it may be anything else."""
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
    """The text as a regular expression, if that can be said without what begins a mark."""
    pattern = schema.get("pattern")
    if pattern is not None:
        is_whole = isinstance(pattern, str) and _WHOLE.fullmatch(pattern) is not None
        return regex(pattern[1:-1]) if is_whole else None
    least, most = schema.get("minLength", 0), schema.get("maxLength")
    if "format" in schema or (least == 0 and most is None):
        return None
    return regex(f"[^<]{{{least},{'' if most is None else most}}}")


def one_after_another(parts: Sequence[tuple[bool, JsonObject]]) -> JsonObject:
    """Match all needed parts and any of the others, in order."""
    return sequence(
        literal(""), *(part if needed else either([part, literal("")]) for needed, part in parts)
    )


def with_commas(parts: Sequence[tuple[bool, JsonObject]], comma: str = ", ") -> JsonObject:
    """Match all needed parts and any of the others, in order, with commas between them."""
    behind = [_behind_another(needed, part, comma) for needed, part in parts]
    first_needed = next((at for at, (needed, _) in enumerate(parts) if needed), None)
    if first_needed is None:
        plain = [part for _, part in parts]
        return either([*_first_of(plain, behind), literal("")])
    # What may come before the first needed part has its comma behind it.
    before = [either([sequence(part, literal(comma)), literal("")]) for _, part in parts]
    return sequence(*before[:first_needed], parts[first_needed][1], *behind[first_needed + 1 :])


def _first_of(parts: Sequence[JsonObject], behind: Sequence[JsonObject]) -> list[JsonObject]:
    """Match one or more parts, `behind` being what each is behind another: ways that begin in the
    first half, and ways that begin in the second.

    Halves of halves: with a way for each part that may be the first, each with all others behind
    it, the whole would grow with the square of their number.
    """
    if len(parts) <= _FEW_PARTS:
        return [sequence(part, *behind[at + 1 :]) for at, part in enumerate(parts)]
    half = len(parts) // 2
    first = either(_first_of(parts[:half], behind[:half]))
    return [sequence(first, *behind[half:]), *_first_of(parts[half:], behind[half:])]


def _behind_another(needed: bool, part: JsonObject, comma: str) -> JsonObject:
    with_comma = sequence(literal(comma), part)
    return with_comma if needed else either([with_comma, literal("")])
