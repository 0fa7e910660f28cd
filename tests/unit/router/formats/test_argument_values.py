"""Values without quotes become JSON of the types that a tool's schema allows."""

from __future__ import annotations

import json
from typing import Any

import pytest

from penstock_router.argument_kinds import STRING, SchemaKinds, outline
from penstock_router.json_fields import JsonObject
from penstock_router.text.formats.reading.argument_values import json_of


@pytest.mark.parametrize(
    ("text", "kinds", "value"),
    [
        ("null", "string null", None),
        ("None", "string null", None),
        ("", "string null", ""),
        ("", "integer null", None),
        ("", "integer", ""),
        ("None", "string", "None"),
        ("3", "integer", 3),
        ("3.0", "integer", 3),
        ("3.5", "integer", 3.5),
        ("3.0", "number", 3.0),
        ("3", "number string", 3),
        ("3.0", "integer string", "3.0"),
        ("007", "string null", "007"),
        ("True", "boolean", True),
        ("TRUE", "boolean", True),
        ("True", "string null", "True"),
        ("[]", "array string", []),
        ("[]", "string", "[]"),
        ("{'a': None}", "object", {"a": None}),
        ('"q"', "string null", '"q"'),
        ('"q"', "integer", "q"),
        ("abc", "number", "abc"),
        (" 3\n", "integer", 3),
        (" a\n", "string null", " a\n"),
    ],
)
def test_a_text_is_the_value_that_its_types_make_of_it(text: str, kinds: str, value: Any) -> None:
    given = json_of(text, frozenset(kinds.split()))
    assert json.loads(given) == value
    assert type(json.loads(given)) is type(value)


def test_a_number_too_large_to_be_exact_stays_as_it_was_written() -> None:
    assert json_of("12345678901234567890.0", frozenset({"integer"})) == "12345678901234567890.0"
    assert json_of("1e400", frozenset({"integer"})) == "1e400"


_SCHEMA: JsonObject = {
    "$defs": {
        "one": {"enum": ["a", 1]},
        "many": {"type": "object", "properties": {"k": {"type": "integer"}}},
        "circle": {"anyOf": [{"$ref": "#/$defs/circle"}, {"type": "boolean"}]},
    },
    "properties": {
        "enum": {"$ref": "#/$defs/one"},
        "maybe": {"anyOf": [{"$ref": "#/$defs/many"}, {"type": "null"}]},
        "nullable": {"type": "string", "nullable": True},
        "anything": {},
        "items": {"items": {}},
        "of_another_name": {"type": "int"},
        "circle": {"$ref": "#/$defs/circle"},
        "const": {"const": None},
    },
    "additionalProperties": {"type": "number"},
}


@pytest.mark.parametrize(
    ("name", "kinds"),
    [
        ("enum", {"string", "integer"}),
        ("maybe", {"object", "null"}),
        ("nullable", {"string", "null"}),
        ("anything", {"string"}),
        ("items", {"array"}),
        ("of_another_name", {"integer"}),
        ("circle", {"boolean"}),
        ("const", {"null"}),
        ("unknown", {"number"}),
    ],
)
def test_a_schema_says_the_types_of_an_argument(name: str, kinds: set[str]) -> None:
    assert SchemaKinds(_SCHEMA).of_argument(name) == kinds
    assert SchemaKinds(outline(_SCHEMA)).of_argument(name) == kinds


def test_an_argument_that_no_schema_describes_is_a_string() -> None:
    assert SchemaKinds({}).of_argument("a") == STRING
    assert SchemaKinds({"properties": {"b": {"type": "integer"}}}).of_argument("a") == STRING


def test_arguments_may_be_described_in_parts() -> None:
    whole = {"allOf": [{"$ref": "#/$defs/many"}, {"description": ""}], "$defs": _SCHEMA["$defs"]}
    assert SchemaKinds(whole).of_argument("k") == {"integer"}
    assert SchemaKinds(outline(whole)).of_argument("k") == {"integer"}


def test_references_that_repeat_without_end_are_followed_once() -> None:
    again = {"$ref": "#/$defs/a"}
    schema = {
        "$defs": {"a": {"anyOf": [again] * 30, "properties": dict.fromkeys("abcdefgh", again)}},
        "properties": {"x": again},
    }
    assert SchemaKinds(schema).of_argument("x") == {"object"}
    assert len(json.dumps(outline(schema))) < 200_000
