"""Keywords of JSON Schema one by one: unknown ones, oneOf, names, patterns, conditions."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest
from support.compilers import allows, plain_compiler

from penstock_common.json_schema.keywords import near_miss, unknown_keywords
from penstock_proto.types import Constraint
from penstock_shard.structured_output.refusal import ConstraintRefused, reason_of


def _allows(schema: Any, text: str) -> bool:
    return allows(plain_compiler(), Constraint("json_schema", json.dumps(schema)), text)


def _check(schema: Any, allowed: list[str], forbidden: list[str]) -> None:
    for text in allowed:
        assert _allows(schema, text), text
    for text in forbidden:
        assert not _allows(schema, text), text


# ---- Unknown keywords --------------------------------------------------------------------------


@pytest.mark.parametrize(
    "keyword",
    [
        *("propertyOrder", "propertyOrdering", "enumNames", "enumDescriptions", "errorMessage"),
        *("markdownDescription", "defaultSnippets", "links", "self", "tsType", "ui:widget"),
        *("options", "units", "label", "name", "version", "optional", "_meta", "note", "x-a"),
        *(
            "xrequired",
            "_uniqueItems",
            "min",
            "values",
            "choices",
            "strict",
            "",
            "é",
            "Description",
        ),
    ],
)
def test_a_keyword_that_no_draft_defines_forbids_nothing(keyword: str) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer", keyword: ["b"]}}}
    _check(schema, ['{"a":1}'], ['{"a":"b"}'])


@pytest.mark.parametrize(
    ("keyword", "value", "meant"),
    [
        ("additionalPropeties", False, "additionalProperties"),
        ("additionalproperties", False, "additionalProperties"),
        ("additional_properties", False, "additionalProperties"),
        ("addtionalProperties", False, "additionalProperties"),
        ("exclusivMinimum", 1, "exclusiveMinimum"),
        ("requred", ["a"], "required"),
        ("Required", ["a"], "required"),
        ("minimun", 1, "minimum"),
        ("maxitems", 1, "maxItems"),
        ("min_length", 1, "minLength"),
        ("patern", "a", "pattern"),
        ("tpye", "null", "type"),
        ("item", {}, "items"),
        ("requiredd", ["a"], "required"),
        ("anyof", [{}], "anyOf"),
        ("ref", "#", "$ref"),
        ("contians", {}, "contains"),
        ("propertNames", {}, "propertyNames"),
        ("exclusiveMaximun", 1, "exclusiveMaximum"),
    ],
)
def test_a_near_miss_of_a_keyword_is_refused_with_the_guess(
    keyword: str, value: Any, meant: str
) -> None:
    assert near_miss(keyword) == meant
    with pytest.raises(ConstraintRefused, match=f"'{keyword}': is {meant.replace('$', '.')} meant"):
        _allows({"properties": {"a": {keyword: value}}}, "")


def test_a_name_like_a_keyword_with_a_value_that_the_keyword_cannot_have_is_an_annotation() -> None:
    _check({"type": "string", "patterns": [], "minimal": "a"}, ['"a"'], ["1"])


@pytest.mark.parametrize(
    ("keyword", "value"),
    [
        *(("requiredBy", ["x"]), ("isNullable", True), ("ref", "User"), ("types", ["string"])),
        *(("patterns", "x"), ("patternId", "x"), ("x_type", "string"), ("consts", [1])),
        *(("isRequired", True), ("formatter", "a"), ("itemsPerPage", 1), ("notNull", True)),
    ],
)
def test_a_word_that_has_a_keyword_in_it_is_an_annotation(keyword: str, value: Any) -> None:
    _check({"properties": {"a": {"type": "integer", keyword: value}}}, ['{"a":1}'], ['{"a":"b"}'])


@pytest.mark.parametrize("keyword", ["divisibleBy", "disallow", "extends", "requires"])
def test_a_keyword_of_old_drafts_that_forbids_something_is_refused(keyword: str) -> None:
    with pytest.raises(ConstraintRefused, match=f"{keyword} is a keyword of drafts before 4"):
        _allows({keyword: 2}, "")


def test_names_and_values_are_no_keywords() -> None:
    schema = {
        "properties": {"propertyOrder": {"enum": [{"enums": 1}], "default": {"tpye": 1}}},
        "patternProperties": {"requred": {"const": {"maxitems": 1}}},
        "examples": [{"patern": 1}],
        "anyOf": [{"label": 1}],
        "items": [{"unit": 1}, True],
        "x-b": {"c": 1},
        "note": None,
    }
    assert sorted(set(unknown_keywords(schema))) == ["label", "unit"]
    assert sorted(set(unknown_keywords({"a": 1, "not": {"b": 2}}))) == ["a", "b"]
    assert list(unknown_keywords(True)) == []


@pytest.mark.parametrize(
    ("schema", "allowed", "forbidden"),
    [
        ({"type": "integer", "nullable": True}, ["1", "null"], ['"a"']),
        ({"type": ["integer", "string"], "nullable": True}, ["1", "null", '"a"'], ["true"]),
        ({"type": "integer", "nullable": False}, ["1"], ["null"]),
        ({"type": "string", "enum": ["a"], "nullable": True}, ['"a"'], ["null"]),
        ({"type": "string", "enum": ["a", None], "nullable": True}, ['"a"', "null"], []),
        ({"not": {"type": "integer", "nullable": True}}, ['"a"'], ["1", "null"]),
    ],
)
def test_nullable_lets_null_pass_beside_a_type(
    schema: Any, allowed: list[str], forbidden: list[str]
) -> None:
    _check(schema, allowed, forbidden)


def test_a_keyword_that_is_null_is_as_good_as_absent_but_for_const() -> None:
    schema = {"type": "string", "enum": None, "items": None, "anyOf": None, "pattern": None}
    _check({**schema, "x-guidance": None}, ['"a"'], ["1"])
    _check({"const": None}, ["null"], ["1"])


# ---- oneOf -------------------------------------------------------------------------------------


def _tagged(name: str, **more: Any) -> dict[str, Any]:
    properties = {"type": {"type": "string", "enum": [name]}, "v": {"type": "number"}}
    return {"type": "object", "properties": properties, "required": ["type"], **more}


_NAMED = {"properties": {"a": {"type": "integer"}}, "additionalProperties": False}
_OTHER = {"properties": {"b": {"type": "integer"}}, "additionalProperties": False}


@pytest.mark.parametrize(
    ("schema", "allowed", "forbidden"),
    [
        (
            {"oneOf": [{"type": "null"}, *map(_tagged, "abcdef")]},
            ["null", '{"type":"a","v":1}', '{"type":"f"}'],
            ['{"type":"g"}', "{}", '{"v":1}', "1"],
        ),
        (
            {"oneOf": [{"type": ["null", "string"]}, {"type": "string", "enum": ["a"]}]},
            ["null", '"b"'],
            ['"a"'],
        ),
        ({"oneOf": [{"enum": [1, "a"]}, {"enum": ["a", 2]}]}, ["1", "2"], ['"a"']),
        ({"oneOf": [{"enum": [1]}, {"enum": [1.0]}]}, [], ["1", "1.0"]),
        (
            {"type": "object", "oneOf": [{"required": ["a"]}, {"required": ["b"]}]},
            ['{"a":1}', '{"b":1}'],
            ["{}", '{"a":1,"b":1}', '{"b":1,"a":1}'],
        ),
        (
            {"oneOf": [{"required": ["a"]}, {"required": ["b"]}]},
            ['{"a":1}', '{"b":1}'],
            ["{}", '{"a":1,"b":1}', "1"],
        ),
        (
            {"type": "object", "oneOf": [_NAMED, _OTHER]},
            ['{"a":1}', '{"b":1}'],
            ["{}", '{"a":1,"b":1}'],
        ),
        (
            {"oneOf": [{**_NAMED, "type": "object"}, {"type": "object", "required": ["c"]}]},
            ['{"a":1}', "{}", '{"c":1}'],
            ['{"b":1}'],
        ),
        (
            {"oneOf": [{"pattern": "^a", "type": "string"}, {"pattern": "b$", "type": "string"}]},
            ['"ac"', '"cb"'],
            ['"ab"', '"c"'],
        ),
        (
            {
                "oneOf": [{"$ref": "#/$defs/a"}, {"allOf": [{"$ref": "#/$defs/b"}]}],
                "$defs": {"a": _tagged("a"), "b": {"anyOf": [_tagged("b"), _tagged("c")]}},
            },
            ['{"type":"a"}', '{"type":"b"}', '{"type":"c"}'],
            ['{"type":"d"}'],
        ),
    ],
)
def test_one_of_is_met_by_exactly_one(
    schema: Any, allowed: list[str], forbidden: list[str]
) -> None:
    if not allowed:
        with pytest.raises(ConstraintRefused, match=r"no value is valid|Unsatisfiable"):
            _allows(schema, "")
        return
    _check(schema, allowed, forbidden)


def test_many_tagged_alternatives_beside_null_are_checked_soon() -> None:
    schema = {"oneOf": [{"type": "null"}, *(_tagged(f"t{index}") for index in range(60))]}
    began_s = time.process_time()
    assert _allows({"properties": {"a": schema}}, '{"a":{"type":"t59","v":1}}')
    assert time.process_time() - began_s < 1.0


# ---- Names -------------------------------------------------------------------------------------

_INTEGER: dict[str, Any] = {"type": "integer"}


@pytest.mark.parametrize(
    ("schema", "allowed", "forbidden"),
    [
        (
            {
                "type": "object",
                "properties": {"grade": {"type": "boolean"}},
                "required": ["grade"],
                "patternProperties": {"^grade$": {"type": "boolean"}},
                "additionalProperties": False,
            },
            ['{"grade":true}'],
            ["{}", '{"grade":true,', '{"grade":1}'],
        ),
        (
            {"patternProperties": {"^(a|b)$": _INTEGER}, "additionalProperties": False},
            ["{}", '{"a":1}', '{"b":1}', '{"a":1,"b":1}'],
            ['{"c":1}', '{"a":1,"a":2}', '{"a":1,"b":1,'],
        ),
        (
            {"patternProperties": {".*": _INTEGER, "^a": {"minimum": 3}}},
            ['{"b":1}', '{"a":3}'],
            ['{"a":1}', '{"b":"c"}'],
        ),
        (
            {"patternProperties": {"^a": _INTEGER, "b$": {"minimum": 3}, "c": {"maximum": 5}}},
            ['{"ab":4}', '{"a":1}', '{"b":"x"}', '{"acb":4}', '{"d":"x"}'],
            ['{"ab":1}', '{"ab":"x"}', '{"a":"x"}', '{"b":1}', '{"acb":6}'],
        ),
        (
            {
                "properties": {"ab": {"maximum": 5}, "ac": _INTEGER},
                "patternProperties": {"^a": _INTEGER},
                "required": ["ab"],
            },
            ['{"ab":5}', '{"ab":5,"ac":1}', '{"ab":1,"ad":2}'],
            ['{"ab":6}', '{"ab":"a"}', '{"ab":1,"ac":"a"}', '{"ab":1,"ad":"a"}'],
        ),
        (
            {"patternProperties": {"^(?!a)": _INTEGER}},
            ['{"a":"x"}', '{"b":1}'],
            ['{"b":"x"}'],
        ),
        (
            {"type": "object", "propertyNames": {"pattern": "^a", "maxLength": 2}},
            ["{}", '{"a":1}', '{"ab":1}'],
            ['{"b":1}', '{"abc":1}'],
        ),
        (
            {"type": "object", "propertyNames": {"not": {"enum": ["a", "b"]}}},
            ['{"c":1}', '{"aa":1}'],
            ['{"a":1}', '{"b":1}'],
        ),
        (
            {"type": "object", "propertyNames": {"anyOf": [{"const": "a"}, {"pattern": "^bb?$"}]}},
            ['{"a":1,"b":1,"bb":1}', '{"bb":1}'],
            ['{"c":1}', '{"bbb":1}', '{"a":1,"b":1,"bb":1,'],
        ),
        (
            {"propertyNames": {"$ref": "#/$defs/n"}, "$defs": {"n": {"enum": ["a"]}}},
            ['{"a":1}', "1"],
            ['{"b":1}'],
        ),
        (
            {
                "type": "object",
                "properties": {"b": {}, "xb": {}},
                "propertyNames": {"pattern": "^[a-z]+$"},
                "patternProperties": {"^x": _INTEGER},
            },
            ['{"a":"c"}', '{"xb":1}', '{"b":{},"xa":1}'],
            ['{"xa":"b"}', '{"1":1}', '{"xb":"c"}'],
        ),
        (
            {
                "type": "object",
                "allOf": [
                    {"patternProperties": {"^x-": _INTEGER}},
                    {"patternProperties": {"^x": {"maximum": 5}, "^x-": {"minimum": 2}}},
                ],
            },
            ['{"x-a":3}', '{"xa":"b"}', '{"b":"c"}'],
            ['{"x-a":"b"}', '{"x-a":6}', '{"x-a":1}', '{"xa":6}'],
        ),
        (
            {"type": "object", "propertyNames": {"oneOf": [{"const": "a"}, {"enum": ["a", "b"]}]}},
            ['{"b":1}', "{}"],
            ['{"a":1}', '{"c":1}'],
        ),
        ({"type": "object", "propertyNames": {"maximum": 1, "items": {}}}, ['{"a":1}'], ["1"]),
        ({"type": "object", "propertyNames": {"format": "uri"}}, [], []),
    ],
)
def test_names_are_held(schema: Any, allowed: list[str], forbidden: list[str]) -> None:
    if not allowed:
        with pytest.raises(ConstraintRefused, match="propertyNames: format uri is not served"):
            _allows(schema, "")
    _check(schema, allowed, forbidden)


@pytest.mark.parametrize(
    ("pattern", "allowed", "forbidden"),
    [
        ("^(?!no)[a-z]+$", ['"yes"', '"n"'], ['"no"', '"now"', '"A"']),
        (r"\bcat\b", ['"a cat."', '"cat"'], ['"cats"', '"concat"']),
        ("^((?!ab).)*$", ['"ba"', '""'], ['"cab"']),
        ("(^a|b$)", ['"ac"', '"cb"'], ['"ca"']),
        (r"[-a-z]{1,256}\.[a-z]{1,6}\b([-a-z/]*)", ['"a.com/x"', '"x.y"'], ['"a"', '"a."']),
    ],
)
def test_patterns_may_look_ahead_and_at_words(
    pattern: str, allowed: list[str], forbidden: list[str]
) -> None:
    _check({"type": "string", "pattern": pattern}, allowed, forbidden)
    _check({"type": "string", "not": {"pattern": pattern}}, forbidden, allowed)


def test_a_text_that_is_a_regular_expression_is_written() -> None:
    allowed = [r'"^a+(b|c)?$"', r'"[^a-z0-9_]"', r'"\\d.\\."', '""']
    _check({"type": "string", "format": "regex"}, allowed, ['"("', '"*"', '"[z-a]"', '"a{2,1}"'])


# ---- Conditions, recursion, references ---------------------------------------------------------


def _when(value: Any, **then: Any) -> dict[str, Any]:
    return {"if": {"properties": {"kind": {"const": value}}, "required": ["kind"]}, "then": then}


def test_conditions_on_one_property_are_alternatives_by_its_value() -> None:
    conditions = [_when(name, required=[f"of_{name}"]) for name in "abcdefghijkl"]
    schema = {
        "type": "object",
        "properties": {"kind": {"type": "string"}, **{f"of_{name}": {} for name in "abcdefghijkl"}},
        "additionalProperties": False,
        "allOf": conditions,
    }
    allowed = ["{}", '{"kind":"a","of_a":1}', '{"kind":"z"}', '{"kind":"l","of_a":1,"of_l":1}']
    _check(schema, allowed, ['{"kind":"a"}', '{"kind":"b","of_a":1}'])


def test_a_chain_of_conditions_is_checked_soon() -> None:
    schema: dict[str, Any] = {"required": ["r"]}
    for index in reversed(range(30)):
        schema = {**_when(f"v{index}", required=[f"r{index}"]), "else": schema}
    began_s = time.process_time()
    _check({"type": "object", **schema}, ['{"kind":"v29","r29":1}', '{"r":1}'], ["{}"])
    assert time.process_time() - began_s < 1.0


def test_a_condition_without_required_is_met_where_the_property_is_absent() -> None:
    condition = {"if": {"properties": {"a": {"const": 1}}}, "then": {"required": ["b"]}}
    schema = {"properties": {"a": {}, "b": {}}, **condition, "else": {"required": ["c"]}}
    _check(schema, ['{"b":1}', '{"a":1,"b":1}', '{"a":2,"c":1}', "1"], ["{}", '{"a":2,"b":1}'])


def test_recursive_definitions_may_stand_beside_others() -> None:
    node = {
        "type": "object",
        "additionalProperties": {"minProperties": 1, "anyOf": [{"$ref": "#"}]},
    }
    _check(node, ["{}", '{"a":{"b":{}}}'.replace("{}", '{"c":{"d":{"e":{}}}}')][:1], ['{"a":{}}'])
    tree = {
        "$defs": {
            "node": {
                "type": "object",
                "properties": {"left": {"allOf": [{"$ref": "#/$defs/node"}, {"required": ["v"]}]}},
            }
        },
        "$ref": "#/$defs/node",
    }
    allowed = ['{"left":{"v":1}}', '{"left":{"left":{"v":1},"v":1}}', "{}"]
    _check(tree, allowed, ['{"left":{}}', '{"left":{"left":{},"v":1}}'])


def test_implications_that_contradict_each_other_leave_few_cases() -> None:
    schema = {
        "type": "object",
        "properties": {name: {} for name in "abcdefghij"},
        "additionalProperties": False,
        "dependentRequired": {name: ["a"] for name in "bcdefghij"},
        "anyOf": [{"required": ["a"]}, {"not": {"required": ["a"]}}],
    }
    _check(schema, ["{}", '{"a":1,"j":1}', '{"a":1,"b":1,"c":1}'], ['{"b":1}', '{"b":1,"c":1}'])


def test_a_reference_within_a_named_part_may_mean_the_whole_document() -> None:
    part = {"$id": "part", "type": "array", "items": {"$ref": "#/definitions/one"}}
    schema = {**part, "$id": "whole", "definitions": {"one": _INTEGER, "part": part}}
    _check({**schema, "items": {"$ref": "#/definitions/part"}}, ["[[1]]"], ['[["a"]]'])


def test_up_to_draft_4_an_id_may_be_an_anchor() -> None:
    schema = {
        "$schema": "http://json-schema.org/draft-04/schema#",
        "properties": {"d": {"$ref": "#foo"}},
        "definitions": {"d": {"id": "#foo", "type": "null"}},
    }
    _check(schema, ['{"d":null}'], ['{"d":1}'])


def test_any_schema_of_ones_own_is_read_as_of_all_drafts() -> None:
    _check({"$schema": "https://example.com/mine", "type": "integer"}, ["1"], ['"a"'])


# ---- Schemas that look the same, and conditions that ask for more -----------------------------


def _with(name: str, **of: Any) -> dict[str, Any]:
    return {"type": "object", "properties": {name: of}}


@pytest.mark.parametrize(
    ("schema", "forbidden"),
    [
        ({"allOf": [_with("a", const=1), _with("a", const=True)]}, ['{"a":1}', '{"a":true}']),
        (
            {**_with("a1", const=1), "patternProperties": {"^a": {"const": True}}},
            ['{"a1":1}', '{"a1":true}'],
        ),
        (
            {"type": "array", "items": {"enum": [True]}, "contains": {"enum": [1]}},
            ["[true]", "[1]"],
        ),
        (
            {
                "type": "object",
                "if": {
                    "properties": {"k": {"enum": ["a", "b"], "pattern": "^a"}},
                    "required": ["k"],
                },
                "else": {"required": ["z"]},
            },
            ['{"k":"b"}', "{}"],
        ),
        (
            {
                "type": "object",
                "if": {
                    "properties": {"k": {"type": "string", "enum": ["a", None]}},
                    "required": ["k"],
                },
                "else": {"required": ["z"]},
            },
            ['{"k":null}', '{"k":1}'],
        ),
        (
            {
                "oneOf": [
                    {**_with("a", type="boolean", nullable=True), "required": ["a"]},
                    {**_with("a", const=None), "required": ["a"]},
                ]
            },
            ['{"a":null}'],
        ),
        (
            {"type": "string", "not": {"pattern": "^(?:(?!ab)[a-z]{2})*$"}},
            ['"cabd"', '"cd"'],
        ),
        ({"type": "integer", "not": {"const": 2**53 + 1}}, [str(2**53 + 1)]),
        (
            {
                "type": "object",
                "patternProperties": {"^.*$": {"type": "string"}},
                "additionalProperties": False,
            },
            [r'{"a\nb":"x"}', '{"a":1}'],
        ),
        (
            {
                "$defs": {"f": {"format": "date"}},
                "type": "object",
                "propertyNames": {"not": {"$ref": "#/$defs/f"}},
            },
            ['{"0500-01-01":1}'],
        ),
    ],
)
def test_what_only_looks_alike_is_told_apart(schema: Any, forbidden: list[str]) -> None:
    for text in forbidden:
        try:
            assert not _allows(schema, text), text
        except ConstraintRefused:
            continue


@pytest.mark.parametrize(
    "schema",
    [
        {"if": {"properties": ["a"]}, "then": {"required": ["b"]}},
        {"allOf": [{"pattern": ["a"]}, {"pattern": "b$"}]},
        {"propertyNames": {"patern": "^a"}},
        {"not": {"requred": ["a"]}},
        {"allOf": [{"anyOf": [{"$ref": "#"}, {"$ref": "#/$defs/a"}]}] * 12, "$defs": {"a": {}}},
        {"oneOf": [_tagged(f"t{index}") for index in range(1001)]},
    ],
)
def test_a_schema_with_a_mistake_or_too_much_is_refused_soon(schema: Any) -> None:
    began_s = time.process_time()
    with pytest.raises(ConstraintRefused):
        _allows(schema, "1")
    assert time.process_time() - began_s < 1.0


def test_many_names_are_listed_and_values_are_compared_as_json_compares_them() -> None:
    names = [f"{index:012}" for index in range(80)]
    schema = {"type": "object", "propertyNames": {"enum": names}}
    _check(schema, [f'{{"{names[0]}":1,"{names[79]}":2}}'], ['{"x":1}'])
    same = {"allOf": [{**_with("v", const=1), "required": ["v"]}, _with("v", const=1.0)]}
    _check(same, ['{"v":1}'], ['{"v":2}'])
    noted = {"type": "object", "propertyNames": {"pattern": "^a", "x-note": 1, "hint": 2}}
    _check(noted, ['{"a":1}'], ['{"b":1}'])


# ---- What llguidance says ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("error", "told"),
    [
        ("NoExtensionBias", "no text is allowed"),
        (
            "panic: assertion failed: grammar.symbols.len() < u16::MAX as usize - 10\n<backtrace>",
            "",
        ),
        ("Parser Error: Current row has 2901 items; max is 2000\n<non-verbose/>", ""),
        ("lexer error: too many states: 20 >= 20\n<non-verbose/>", "regular expressions"),
        ("at 1(8): failed to compile JSON schema: schema too large", "come to too much"),
        (
            "at 1(8): failed to compile JSON schema: circular references with sibling keys are not "
            "supported: json-schema:///#/$defs/s1",
            "recursive reference",
        ),
        ("something::else at json-schema:///#", "cannot be compiled"),
        ("", "cannot be compiled"),
        ('at 1(8): unknown name: "x"', 'unknown name: "x"'),
    ],
)
def test_an_error_of_the_library_is_told_in_one_line_of_ours(error: str, told: str) -> None:
    reason = reason_of(error)
    assert told in reason
    assert reason
    for word in ("NoExtension", "panic", "assertion", "::", "json-schema:", "non-verbose", "\n"):
        assert word not in reason
