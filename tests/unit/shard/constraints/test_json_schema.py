"""Parts of JSON Schema that the official suite does not reach."""

from __future__ import annotations

import json

import jsonschema_rs
import pytest
from conformance.json_schema_suite import NARROWED, Narrowed
from support.compilers import plain_compiler
from support.distinct_walks import of_schema

from penstock_proto.types import Constraint
from penstock_shard.structured_output.patterns.rust import rust_pattern
from penstock_shard.structured_output.refusal import ConstraintRefused

EXACT = 2**53


def _allows(schema: object, text: str) -> bool:
    return of_schema(plain_compiler(), schema).takes(text)


@pytest.mark.parametrize("narrowed", NARROWED, ids=lambda narrowed: narrowed.keywords)
def test_the_page_of_conformance_says_which_valid_values_cannot_be_written(narrowed: Narrowed):
    for value, is_written in ((narrowed.written, True), (narrowed.not_written, False)):
        assert jsonschema_rs.is_valid(narrowed.schema, value)
        assert _allows(narrowed.schema, json.dumps(value)) == is_written


@pytest.mark.parametrize("keyword", ["maximum", "exclusiveMaximum"])
def test_a_bound_that_is_not_exact_is_drawn_in(keyword):
    schema = {"type": "integer", keyword: 2**63 - 1, "minimum": 0}
    assert _allows(schema, "7")
    assert _allows(schema, str(EXACT - 1))
    assert not _allows(schema, str(EXACT + 1))
    assert not _allows({**schema, "maximum": 5}, "6")


@pytest.mark.parametrize(
    "schema", [{"const": EXACT + 1}, {"minimum": EXACT + 1}, {"enum": [1e300]}]
)
def test_numbers_that_are_not_exact_are_refused(schema):
    with pytest.raises(ConstraintRefused, match="beyond 2\\^53"):
        _allows(schema, "1")


@pytest.mark.parametrize(
    ("schema", "allowed", "forbidden"),
    [
        ({"not": {"anyOf": [{"type": "string"}, {"const": 1}]}}, ["2", "null"], ['"a"', "1"]),
        ({"not": {"enum": ["ab", "a", ""]}, "type": "string"}, ['"b"', '"abc"'], ['"a"', '""']),
        ({"oneOf": [{"minimum": 3}, {"type": "number", "maximum": 5}]}, ["2", "6"], ["4"]),
        (
            {
                "properties": {"a": {}, "b": {}, "c": {}},
                "minProperties": 2,
                "additionalProperties": False,
            },
            ['{"a":1,"c":1}'],
            ['{"a":1}', '{"a":1,"a":2}'],
        ),
        (
            {"type": "object", "properties": {"a": {}, "b": {}}, "maxProperties": 1},
            ["{}", '{"b":1}', '{"c":1}'],
            ['{"a":1,"b":1}', '{"a":1,"c":1}'],
        ),
        (
            {
                "$schema": "http://json-schema.org/draft-04/schema#",
                "minimum": 3,
                "exclusiveMinimum": True,
            },
            ["4"],
            ["3"],
        ),
        (
            {
                "$schema": "https://json-schema.org/draft/2019-09/schema",
                "items": [],
                "unevaluatedItems": {"type": "null"},
            },
            ["[]", "[null]", "1"],
            ["[1]"],
        ),
        (
            {"dependencies": {"a": ["b"], "b": {"properties": {"c": {"type": "null"}}}}},
            ['{"c":null,"b":1}', '{"c":1}', '{"d":1}'],
            ['{"a":1}', '{"c":2,"b":1}', '{"a":1,"c":1}'],
        ),
        (
            {"not": {"dependencies": {"a": ["b"]}}},
            ['{"a":1}', '{"a":1,"c":2}'],
            ["{}", '{"b":1}', '{"a":1,"b":1}', "1"],
        ),
        (
            {"type": "object", "required": ["a"], "minProperties": 2},
            ['{"a":1,"c":2}'],
            ['{"a":1}', '{"a":1,"a":2}', '{"c":1,"d":2}'],
        ),
        (
            {"not": {"enum": [[], [1], {}, {"a": 1}]}},
            ["[2]", "[1,1]", '{"a":2}', '{"b":1}', "null"],
            ["[]", "[1]", "{}", '{"a":1}'],
        ),
    ],
)
def test_a_schema_allows_what_it_says(schema, allowed, forbidden):
    for text in allowed:
        assert _allows(schema, text), text
    for text in forbidden:
        assert not _allows(schema, text), text


@pytest.mark.parametrize(
    ("schema", "told"),
    [
        ({"additionalPropeties": False}, "no keyword 'additionalPropeties': is addit"),
        ({"divisibleBy": 2}, "divisibleBy is a keyword of drafts before 4"),
        ({"$ref": "https://example.com/s"}, "is outside of the schema"),
        ({"$ref": "#/$defs/gone"}, "names nothing in the schema"),
        ({"nullable": 1}, "nullable: 1 is no bool"),
        ({"type": "text"}, "type: 'text' is no type"),
        ({"pattern": "a(?<=b)"}, "look-behind"),
        ({"pattern": "(a)\\1"}, "\\1 is not served"),
        ({"const": "a\u0000"}, "a control character"),
        ({"required": "a"}, "required: 'a' is no list of names"),
        (False, "no value is valid"),
        ({"properties": {"a": 3}}, "properties: {'a': 3} is no object of schemas"),
        ({"minLength": 2.5}, "minLength: 2.5 is no count"),
        ({"maxLength": 10**400}, "maxLength: 1000"),
        ({"minimum": 10**400}, "beyond 2^53"),
        ({"type": "number", "not": {"maximum": 10**400}}, "beyond 2^53"),
    ],
)
def test_what_cannot_be_held_is_refused_by_keyword(schema, told):
    with pytest.raises(ConstraintRefused) as refusal:
        _allows(schema, "{}")
    assert told in str(refusal.value)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ('{"not": {"minLength": 1e400}}', "minLength: inf is no count"),
        ('{"contains": {}, "minContains": 1e400}', "minContains: inf is no count"),
        ('{"exclusiveMinimum": 1e400}', "exclusiveMinimum: inf is no number"),
        ('{"const": 1e400}', "const: inf is beyond 2^53"),
    ],
)
def test_a_number_too_large_to_be_read_is_refused_by_keyword(text: str, told: str) -> None:
    with pytest.raises(ConstraintRefused) as refusal:
        plain_compiler().compile(Constraint("json_schema", text))
    assert told in str(refusal.value)


def test_a_bound_that_no_number_reaches_is_as_good_as_the_farthest() -> None:
    assert _allows({"type": "integer", "maximum": 10**400}, "9007199254740992")


@pytest.mark.parametrize(
    ("pattern", "allowed", "forbidden"),
    [
        (r"^.$", "aé", "\n\r\u2028"),
        (r"^\s$", " \ufeff\u2003\t", "\x85a"),
        (r"^\S$", "a\x85", "\ufeff "),
        (r"^\d$", "7", "٣"),
        (r"^\w$", "a_", "é"),
        (r"^[^\d&&-]$", "a", "7&-"),
        (r"^[[]$", "[", "]"),
        (r"^[a&&b]$", "a&b", "c"),
        (r"^\x61|\u0062$", "ab", "c"),
        (r"^[\b]$", "\b", "b"),
        (r"^(?<name>a)$", "a", "n"),
    ],
)
def test_patterns_are_read_as_ecma_262_has_them(pattern, allowed, forbidden):
    schema = {"type": "string", "pattern": pattern}
    for character in allowed:
        assert _allows(schema, json.dumps(character, ensure_ascii=False)), repr(character)
    for character in forbidden:
        assert not _allows(schema, json.dumps(character, ensure_ascii=False)), repr(character)


def test_a_folder_in_a_uri_counts_once_where_the_rest_of_an_object_is_closed() -> None:
    schema = {
        "$id": "http://schemas/",
        "properties": {
            "a": {
                "$id": "parts/",
                "properties": {"b": {"$ref": "one"}},
                "anyOf": [{"$ref": "two"}],
                "unevaluatedProperties": False,
            }
        },
        "$defs": {
            "one": {"$id": "http://schemas/parts/one", "type": "integer"},
            "two": {"$id": "http://schemas/parts/two", "properties": {"c": {"type": "null"}}},
        },
    }
    assert _allows(schema, '{"a":{"b":1,"c":null}}')
    assert not _allows(schema, '{"a":{"d":1}}')


def test_names_that_need_others_make_no_cases_of_what_is_evaluated() -> None:
    names = "abcdefghij"
    schema = {
        "properties": {name: {"type": "integer"} for name in names},
        "dependentRequired": {name: ["a"] for name in names[1:]},
        "unevaluatedProperties": False,
    }
    assert _allows(schema, '{"a":1,"i":2}')
    assert not _allows(schema, '{"i":2}')
    assert not _allows(schema, '{"a":1,"k":2}')


def test_braces_that_repeat_nothing_are_letters():
    assert rust_pattern("a{,3}{2}") == r"a\{,3\}{2}"
