"""Turns the fields that constrain an answer's text into one `Constraint`.

The fields are OpenAI's `response_format`, vLLM's `structured_outputs` and older `guided_*`, and
those of Hugging Face's clients.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from penstock_proto.limits import MAX_CHOICE_OPTIONS
from penstock_proto.types import Constraint, ConstraintKind
from penstock_router.errors import BadRequest
from penstock_router.json_fields import (
    BOOLEAN,
    STRING,
    Field,
    JsonObject,
    Kind,
    add_warning,
    array_of,
    decode_json,
    one_of,
    or_null,
    read_array,
    read_object,
    refusal,
    string,
    unless,
)
from penstock_router.text.schema_keywords import keyword_warnings

# Later code may recurse over the schema.
MAX_NESTING = 200
# The key in a schema that tells shards how to write JSON.
_WRITTEN_KEY = "x-guidance"
_COMPACT: JsonObject = {"whitespace_flexible": False}
_FLEXIBLE: JsonObject = {"whitespace_flexible": True}
_TEXT = string(1)
_CHOICES = array_of(STRING, at_least=1, at_most=MAX_CHOICE_OPTIONS, unit="choices")


@dataclass(frozen=True, slots=True)
class OfSchema:
    """JSON that conforms to a schema; other fields may still set its whitespace."""

    schema: JsonObject


# The constraint that a field asks for.
Wish = Constraint | OfSchema
ANY_OBJECT = OfSchema({"type": "object"})


# ---- JSON in a field ---------------------------------------------------------------------------


def check_nesting(name: str, value: object) -> None:
    level, depth = [value], 0
    while level := [item for item in level if isinstance(item, dict | list)]:
        depth += 1
        if depth > MAX_NESTING:
            text = f"{name}: at most {MAX_NESTING} objects and arrays within each other"
            raise BadRequest(text, param=name)
        within: list[Any] = []
        for item in level:
            within += item.values() if isinstance(item, dict) else item
        level = within


def _object_or_text(name: str, value: Any) -> JsonObject:
    """Read an object, or its JSON as text, as some clients send schemas."""
    if isinstance(value, str):
        try:
            value = decode_json(value)
        except (msgspec.DecodeError, UnicodeError) as error:
            raise BadRequest(f"{name}: not valid JSON: {error}", param=name) from None
        except RecursionError:
            raise BadRequest(f"{name}: nested too deeply", param=name) from None
    if not isinstance(value, dict):
        raise refusal(name, "an object or a string with the JSON of one", value)
    check_nesting(name, value)
    return value


def _json(value: object) -> str:
    return msgspec.json.encode(value).decode()


def wish_of_schema(name: str, value: Any) -> OfSchema:
    return OfSchema(_object_or_text(name, value))


def _constraint_of_text(kind: ConstraintKind) -> Callable[[str, Any], Constraint]:
    return lambda name, value: Constraint(kind, _TEXT.read(name, value))


_constraint_of_regex = _constraint_of_text(ConstraintKind.REGEX)


def _constraint_of_choices(name: str, value: Any) -> Constraint:
    return Constraint(ConstraintKind.CHOICE, options=_CHOICES.read(name, value))


def _wish_of_flag(name: str, value: Any) -> OfSchema | None:
    return ANY_OBJECT if BOOLEAN.read(name, value) else None


def _constraint_of_tag(name: str, value: Any) -> Constraint:
    """Translate a structural tag, which has one format, or structures and triggers."""
    given = _object_or_text(name, value)
    tag: JsonObject = {"type": "structural_tag"}
    newer, older = given.get("format"), given.get("structures")
    if (newer is None) == (older is None):
        text = f"{name}: must have either format, or structures and triggers"
        raise BadRequest(text, param=name)
    if newer is not None:
        tag["format"] = read_object(f"{name}.format", newer)
    else:
        tag["structures"] = read_array(f"{name}.structures", older)
        tag["triggers"] = read_array(f"{name}.triggers", given.get("triggers"))
    return Constraint(ConstraintKind.STRUCTURAL_TAG, _json(tag))


_SCHEMA: JsonObject = {"anyOf": [{"type": "object"}, {"type": "string"}]}
_NEWER_TAG: JsonObject = {"format": {"type": "object"}}
_OLDER_TAG: JsonObject = {"structures": {"type": "array"}, "triggers": {"type": "array"}}
_TAG: JsonObject = {
    "anyOf": [
        {"type": "object", "properties": _NEWER_TAG, "required": list(_NEWER_TAG)},
        {"type": "object", "properties": _OLDER_TAG, "required": list(_OLDER_TAG)},
        {"type": "string"},
    ]
}
# The keys of `structured_outputs`, each read as a wish or None.
_LANGUAGES: Mapping[str, Kind] = {
    "json": Kind(wish_of_schema, _SCHEMA),
    "regex": Kind(_constraint_of_regex, _TEXT.schema),
    "choice": Kind(_constraint_of_choices, _CHOICES.schema),
    "grammar": Kind(_constraint_of_text(ConstraintKind.GRAMMAR), _TEXT.schema),
    "json_object": Kind(_wish_of_flag, BOOLEAN.schema),
    "structural_tag": Kind(_constraint_of_tag, _TAG),
}


# ---- Writing of JSON ---------------------------------------------------------------------------


def _leaves_writing(wish: Wish) -> bool:
    """True for a schema that does not set the whitespace of its JSON."""
    return isinstance(wish, OfSchema) and wish.schema.get(_WRITTEN_KEY) in (None, {})


def _add_writing(name: str, how: JsonObject, wish: Wish) -> OfSchema:
    """Set how the JSON is written; `name` is the field that asks for this."""
    if not isinstance(wish, OfSchema):
        raise BadRequest(f"{name}: only for JSON", param=name)
    if not _leaves_writing(wish):
        text = f"{name}: not beside {_WRITTEN_KEY} in the schema, which says it already"
        raise BadRequest(text, param=name)
    return OfSchema({**wish.schema, _WRITTEN_KEY: how})


def _constraint_of(wish: Wish) -> Constraint:
    """Make the constraint for shards. By default, JSON is written without whitespace."""
    if isinstance(wish, Constraint):
        return wish
    schema = {**wish.schema, _WRITTEN_KEY: _COMPACT} if _leaves_writing(wish) else wish.schema
    return Constraint(ConstraintKind.JSON_SCHEMA, _json(schema))


# Keywords with a schema or a list of schemas, and keywords with schemas by name. `not` and `if` are
# missing: closing objects within them would allow more, not less.
_HOLDING = frozenset(
    (
        *("items", "prefixItems", "additionalItems", "unevaluatedItems", "contains"),
        *("allOf", "anyOf", "oneOf", "then", "else"),
        *("additionalProperties", "unevaluatedProperties"),
    )
)
_HOLDING_BY_NAME = frozenset(
    (
        *("properties", "patternProperties", "$defs", "definitions"),
        *("dependentSchemas", "dependencies"),
    )
)
_LISTING = frozenset(("properties", "patternProperties"))
_OF_OTHERS = frozenset(("additionalProperties", "unevaluatedProperties"))


def close(schema: JsonObject) -> None:
    """Forbid properties that a schema does not list, unless it allows or forbids them itself.
    Changes `schema`.
    """
    rest: list[Any] = [schema]
    while rest:
        part = rest.pop()
        # A part may also be true, false, or the names in `dependencies`.
        if isinstance(part, dict):
            rest += _parts_of(part)
            given = {key for key, value in part.items() if value is not None}
            if given & _LISTING and not given & _OF_OTHERS:
                part["additionalProperties"] = False


def _parts_of(schema: JsonObject) -> list[Any]:
    parts: list[Any] = []
    for key, value in schema.items():
        if key in _HOLDING:
            parts += value if isinstance(value, list) else [value]
        elif key in _HOLDING_BY_NAME and isinstance(value, dict):
            parts += value.values()
    return parts


# ---- response_format and its equivalents -------------------------------------------------------

FORMATS = ("text", "json_object", "json_schema", "json", "regex", "structural_tag")


def wish_of_format(name: str, value: Any) -> Wish | None:
    """Translate all forms of `response_format`: OpenAI's for chats, its flat form for responses,
    the form of Messages, and Hugging Face's forms, which have a `value`. None: any text.
    """
    given = read_object(name, value)
    match given.get("type"):
        case "text":
            return None
        case "json_object":
            return _wish_of_object(name, given)
        case "json_schema":
            return _wish_of_named_schema(name, given)
        case "json":
            return wish_of_schema(f"{name}.value", given.get("value"))
        case "regex":
            return _constraint_of_regex(f"{name}.value", given.get("value"))
        case "structural_tag":
            return _constraint_of_tag(name, given)
        case other:
            raise refusal(f"{name}.type", f"one of {', '.join(FORMATS)}", other)


def _wish_of_object(name: str, given: JsonObject) -> OfSchema:
    key = _only_key(name, given, "value", "schema")
    if key is None:
        return ANY_OBJECT
    return wish_of_schema(f"{name}.{key}", given[key])


def _wish_of_named_schema(name: str, given: JsonObject) -> OfSchema:
    key = _only_key(name, given, "json_schema", "value", "schema")
    if key is None:
        raise BadRequest(f"{name}: needs json_schema with a schema in it", param=name)
    holder = given
    if key != "schema":
        name, holder = f"{name}.{key}", read_object(f"{name}.{key}", given[key])
    # The schema is enforced with or without `strict`.
    for key, kind in (("strict", BOOLEAN), ("name", STRING), ("description", STRING)):
        if holder.get(key) is not None:
            kind.read(f"{name}.{key}", holder[key])
    return wish_of_schema(f"{name}.schema", holder.get("schema"))


def _only_key(name: str, given: JsonObject, *keys: str) -> str | None:
    """Return the only given key, if any; two are refused."""
    found = [key for key in keys if given.get(key) is not None]
    if len(found) > 1:
        raise BadRequest(f"{name}: not both {found[0]} and {found[1]}", param=name)
    return found[0] if found else None


# ---- structured_outputs ------------------------------------------------------------------------

_FLAGS = ("disable_any_whitespace", "disable_additional_properties", "disable_fallback")


def wish_of_outputs(name: str, value: Any) -> Wish | None:
    """Read vLLM's `structured_outputs`: one language, and how JSON is written. None: any text."""
    given = {key: item for key, item in read_object(name, value).items() if item is not None}
    if not given:
        return None
    languages = [key for key in _LANGUAGES if key in given]
    if len(languages) != 1:
        found = f"; given: {' and '.join(languages)}" if languages else ""
        text = f"{name}: must have one of {', '.join(_LANGUAGES)}{found}"
        raise BadRequest(text, param=name)
    for key in [key for key in _FLAGS if key in given]:
        BOOLEAN.read(f"{name}.{key}", given[key])
    [language] = languages
    wish: Wish | None = _LANGUAGES[language].read(f"{name}.{language}", given[language])
    if wish is not None and given.get("disable_additional_properties"):
        wish = _closed(f"{name}.disable_additional_properties", wish)
    writing = _read_writing(name, given)
    # vLLM's clients always send `disable_any_whitespace` false, so false contradicts nothing.
    if wish is None or writing is None or (writing[1] is _FLEXIBLE and not _leaves_writing(wish)):
        return wish
    return _add_writing(*writing, wish)


def _closed(name: str, wish: Wish) -> OfSchema:
    if not isinstance(wish, OfSchema) or wish is ANY_OBJECT:
        raise BadRequest(f"{name}: only beside json", param=name)
    # Close a copy, because the schema belongs to the body.
    schema = decode_json(_json(wish.schema))
    close(schema)
    return OfSchema(schema)


def _read_writing(name: str, given: JsonObject) -> tuple[str, JsonObject] | None:
    """Return the key that says how JSON is written, and its value, if any."""
    compact = given.get("disable_any_whitespace")
    if "whitespace_pattern" in given:
        name = f"{name}.whitespace_pattern"
        pattern = _TEXT.read(name, given["whitespace_pattern"])
        if compact:
            text = f"{name}: not together with disable_any_whitespace"
            raise BadRequest(text, param=name)
        return name, {"whitespace_pattern": pattern}
    if compact is None:
        return None
    return f"{name}.disable_any_whitespace", _COMPACT if compact else _FLEXIBLE


# ---- A body's constraint -----------------------------------------------------------------------

# Fields that ask for a constraint; the last ones belong to only one API.
_ASKING = (
    *("response_format", "structured_outputs"),
    *("guided_json", "guided_regex", "guided_choice", "guided_grammar"),
    *("json_schema", "regex", "ebnf", "grammar"),
    *("output_config", "output_format", "text.format", "format"),
)


def constraint_options(values: JsonObject) -> JsonObject:
    """Turn the fields into fields of `Options`. May add warnings to `values`."""
    name = _only_asking(values)
    pattern = values.get("guided_whitespace_pattern")
    if name is None:
        if pattern is not None:
            text = "guided_whitespace_pattern: needs guided_json"
            raise BadRequest(text, param="guided_whitespace_pattern")
        return {}
    wish: Wish = values[name]
    if pattern is not None:
        wish = _add_writing("guided_whitespace_pattern", {"whitespace_pattern": pattern}, wish)
    for warning in keyword_warnings(name, _schemas_in(wish)):
        add_warning(values, warning)
    return {"constraint": _constraint_of(wish), "constraint_field": name}


def _only_asking(values: JsonObject) -> str | None:
    found = [name for name in _ASKING if values.get(name) is not None]
    if len(found) > 1:
        text = f"{found[1]}: not together with {found[0]}; an answer has one constraint"
        raise BadRequest(text, param=found[1])
    return found[0] if found else None


def _schemas_in(wish: Wish) -> Iterator[Any]:
    if isinstance(wish, OfSchema):
        yield wish.schema
    elif wish.kind == ConstraintKind.STRUCTURAL_TAG:
        left = [("", decode_json(wish.value))]
        while left:
            key, part = left.pop()
            if key in ("json_schema", "schema"):
                yield part
            elif isinstance(part, dict):
                left += reversed(part.items())
            elif isinstance(part, list):
                left += [("", each) for each in reversed(part)]


# ---- Kinds, and the fields of completions and chats --------------------------------------------


def _form(*types: str, required: tuple[str, ...] = (), **properties: JsonObject) -> JsonObject:
    return {
        "type": "object",
        "properties": {"type": {"enum": list(types)}, **properties},
        "required": ["type", *required],
    }


_NAMED: JsonObject = {
    "type": "object",
    "properties": {
        "name": or_null(STRING.schema),
        "description": or_null(STRING.schema),
        "schema": _SCHEMA,
        "strict": or_null(BOOLEAN.schema),
    },
    "required": ["schema"],
}
FORMAT = Kind(
    wish_of_format,
    {
        "anyOf": [
            _form("text"),
            _form("json_object", value=or_null(_SCHEMA), schema=or_null(_SCHEMA)),
            _form("json_schema", required=("json_schema",), json_schema=_NAMED),
            _form("json_schema", required=("value",), value=_NAMED),
            _form("json_schema", required=("schema",), schema=_SCHEMA),
            _form("json", required=("value",), value=_SCHEMA),
            _form("regex", required=("value",), value=_TEXT.schema),
            _form("structural_tag", required=tuple(_NEWER_TAG), **_NEWER_TAG),
            _form("structural_tag", required=tuple(_OLDER_TAG), **_OLDER_TAG),
        ]
    },
)
OUTPUTS = Kind(
    wish_of_outputs,
    {
        "type": "object",
        "properties": {
            name: or_null(schema)
            for name, schema in {
                **{name: language.schema for name, language in _LANGUAGES.items()},
                "whitespace_pattern": _TEXT.schema,
                **dict.fromkeys(_FLAGS, BOOLEAN.schema),
            }.items()
        },
    },
)


# vLLM's names for its grammar backends.
_BACKENDS = ("auto", "xgrammar", "guidance", "outlines", "lm-format-enforcer")

CONSTRAINT_FIELDS = (
    Field(
        "response_format",
        FORMAT,
        "text, json_object, json_schema (kept to with or without strict) or structural_tag; also "
        "the forms with a value of Hugging Face's clients. At most one of these fields.",
    ),
    Field(
        "structured_outputs",
        OUTPUTS,
        "One of json, regex, choice, grammar (Lark or EBNF), json_object and structural_tag; for "
        "JSON: how it is written, without white space unless disable_any_whitespace is false. "
        "disable_fallback changes nothing: there is none.",
    ),
    *(
        Field(f"guided_{name}", _LANGUAGES[name], f"As structured_outputs.{name}.")
        for name in ("json", "regex", "choice", "grammar")
    ),
    *(
        Field(name, unless(_LANGUAGES[language], ""), f"As structured_outputs.{language}, in {of}.")
        for name, language, of in (
            ("json_schema", "json", "llama.cpp and SGLang"),
            ("regex", "regex", "SGLang"),
            ("ebnf", "grammar", "SGLang"),
            ("grammar", "grammar", "llama.cpp, which calls it GBNF"),
        )
    ),
    Field("guided_whitespace_pattern", _TEXT, "A regular expression; only for JSON."),
    Field(
        "guided_decoding_backend",
        one_of(*_BACKENDS),
        "Accepted without effect: there is only one backend.",
    ),
)
