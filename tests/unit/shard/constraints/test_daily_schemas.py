"""Schemas as pydantic and its like write them, and what is malformed."""

from __future__ import annotations

import json
from typing import Any

import pytest
from support.compilers import allows, plain_compiler

from penstock_proto.types import Constraint
from penstock_shard.structured_output.refusal import ConstraintRefused


def _allows(schema: object, text: str) -> bool:
    return allows(plain_compiler(), Constraint("json_schema", json.dumps(schema)), text)


# ---- What has no end ---------------------------------------------------------------------------

ENDLESS: dict[str, Any] = {
    "type": "object",
    "properties": {"next": {"$ref": "#/$defs/endless"}},
    "required": ["next"],
}


@pytest.mark.parametrize(
    "endless",
    [
        {"$ref": "#/$defs/endless"},
        {"allOf": [{"$ref": "#/$defs/endless"}]},
        {"anyOf": [{"$ref": "#/$defs/endless"}, {"type": "array", "items": False, "minItems": 1}]},
        {"type": "array", "items": {"$ref": "#/$defs/endless"}, "minItems": 1},
        {"type": "array", "prefixItems": [{"$ref": "#/$defs/endless"}], "minItems": 1},
        {
            "type": "object",
            "additionalProperties": {"$ref": "#/$defs/endless"},
            "required": ["a"],
        },
        ENDLESS,
    ],
)
def test_a_place_where_only_a_value_without_an_end_could_stand_is_left_out(endless):
    schema = {
        "type": "object",
        "properties": {"a": {"$ref": "#/$defs/endless"}, "b": {"type": "null"}},
        "$defs": {"endless": endless},
    }
    matcher = plain_compiler().compile(Constraint("json_schema", json.dumps(schema)))
    assert not matcher.consume_tokens(plain_compiler().tokenizer.tokenize_str('{"a":'))
    assert _allows(schema, '{"b":null}')
    assert _allows(schema, '{"c":1}')
    with pytest.raises(ConstraintRefused, match="no value is valid: each would go on without end"):
        _allows({"$ref": "#/$defs/endless", "$defs": {"endless": endless}}, "")


def test_what_refers_to_itself_and_may_end_is_served():
    tree = {
        "type": "object",
        "properties": {
            "next": {"anyOf": [{"$ref": "#"}, {"type": "null"}]},
            "children": {"type": "array", "items": {"$ref": "#"}},
        },
        "required": ["next", "children"],
    }
    leaf = '{"next":null,"children":[]}'
    assert _allows(tree, f'{{"next":{leaf},"children":[{leaf},{leaf}]}}')


# ---- Alternatives ------------------------------------------------------------------------------


def _kind(name: str, **more: Any) -> dict[str, Any]:
    properties = {"kind": {"const": name, "type": "string"}, "size": {"type": "integer"}}
    return {"type": "object", "properties": properties, **more}


def test_many_alternatives_that_a_property_tells_apart_are_served():
    kinds = [_kind(f"k{index}", required=["kind", "size"]) for index in range(100)]
    assert _allows({"oneOf": kinds}, '{"kind":"k77","size":3}')
    assert not _allows({"oneOf": kinds}, '{"kind":"k100","size":3}')


def test_alternatives_are_told_apart_also_where_the_property_has_a_default():
    schema = {"oneOf": [_kind("a"), _kind("b"), _kind("c")]}
    assert _allows(schema, '{"kind":"b","size":3}')
    # Several of them allow it.
    for text in ('{"size":3}', "{}", "3"):
        assert not _allows(schema, text)


@pytest.mark.parametrize("values", [("a", "a"), (1, 1.0)])
def test_alternatives_with_the_same_value_are_not_told_apart_by_it(values):
    parts = [
        {"type": "object", "properties": {"kind": {"const": value}}, "required": ["kind"]}
        for value in values
    ]
    with pytest.raises(ConstraintRefused):
        _allows({"oneOf": parts}, "")


def test_alternatives_may_hold_each_other():
    def node(kind: str) -> dict[str, Any]:
        children = {"type": "array", "items": union}
        properties = {"kind": {"const": kind}, "children": children}
        return {"type": "object", "properties": properties, "required": ["kind"]}

    union = {"oneOf": [{"$ref": "#/$defs/A"}, {"$ref": "#/$defs/B"}]}
    schema = {**union, "$defs": {"A": node("A"), "B": node("B")}}
    assert _allows(schema, '{"kind":"A","children":[{"kind":"B","children":[{"kind":"A"}]}]}')
    assert not _allows(schema, '{"kind":"A","children":[{"kind":"C"}]}')


# ---- Sets, formats -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "items", [{"enum": ["a", "b", "c"]}, {"$ref": "#/$defs/Letter"}, {"enum": ["a", "b", "c", "a"]}]
)
def test_where_json_may_begin_or_not_a_set_of_few_listed_values_is_served_in_any_order(items):
    schema = {"type": "array", "uniqueItems": True, "items": items, "minItems": 1}
    schema["$defs"] = {"Letter": {"enum": ["a", "b", "c"], "type": "string"}}
    for text in ('["b"]', '["c","a"]', '["b","c","a"]'):
        assert allows(plain_compiler(), _tagged(schema), text)
    for text in ("[]", '["a","a"]', '["a","b","a"]', '["d"]'):
        assert not allows(plain_compiler(), _tagged(schema), text)


def _tagged(schema: dict[str, Any]) -> Constraint:
    content = {"type": "json_schema", "json_schema": schema}
    other = {"type": "const_string", "value": "set: "}
    # Of two that may begin at the same place.
    format_ = {"type": "or", "elements": [content, other]}
    return Constraint("structural_tag", json.dumps({"type": "structural_tag", "format": format_}))


@pytest.mark.parametrize(
    "schema",
    [
        {"items": {"type": "integer"}},
        {"items": {"enum": list("abcde")}},
        {"items": {"enum": [[1], [2]]}},
        {"prefixItems": [{"const": 1}], "items": {"enum": [1, 2]}},
        {},
    ],
)
def test_where_json_may_begin_or_not_other_sets_are_refused(schema):
    with pytest.raises(ConstraintRefused, match="uniqueItems: cannot be held"):
        plain_compiler().compile(_tagged({"type": "array", "uniqueItems": True, **schema}))
    with pytest.raises(ConstraintRefused, match="minProperties: 2 of unknown names"):
        plain_compiler().compile(_tagged({"minProperties": 2}))


def test_a_uuid_may_be_of_a_version_and_a_name():
    fourth, first = "550e8400-e29b-41d4-a716-446655440000", "550e8400-e29b-11d4-a716-446655440000"
    assert _allows({"type": "string", "format": "uuid4"}, f'"{fourth}"')
    assert not _allows({"type": "string", "format": "uuid4"}, f'"{first}"')
    assert _allows({"type": "string", "format": "uuid"}, f'"{first}"')
    named = {"type": "object", "propertyNames": {"format": "uuid"}}
    assert _allows(named, f'{{"{first}":1}}')
    assert not _allows(named, '{"a":1}')


# ---- What is malformed -------------------------------------------------------------------------

LISTS = ("allOf", "anyOf", "oneOf", "prefixItems", "enum", "required")
BY_NAME = ("properties", "patternProperties", "dependentSchemas", "dependentRequired")
SCHEMAS = ("not", "if", "contains", "items", "additionalProperties", "unevaluatedItems")


@pytest.mark.parametrize("keyword", [*LISTS, *BY_NAME, *SCHEMAS, "type", "pattern", "format"])
@pytest.mark.parametrize(
    "around",
    [
        lambda schema: schema,
        lambda schema: {"not": schema},
        lambda schema: {"oneOf": [schema, {"type": "null"}]},
        lambda schema: {"unevaluatedProperties": False, **schema},
        lambda schema: {"unevaluatedProperties": False, "allOf": [schema]},
        lambda schema: {"maxProperties": 2, **schema},
        lambda schema: {"minProperties": 2, **schema},
    ],
)
def test_a_keyword_with_a_value_that_means_nothing_is_refused_by_name(keyword, around):
    with pytest.raises(ConstraintRefused, match=f"{keyword}: 5 is no "):
        _allows(around({keyword: 5}), "")


@pytest.mark.parametrize(
    ("schema", "told"),
    [
        ({"$id": "http://[", "$ref": "#"}, "is no URI"),
        ({"$id": "http://[x", "$ref": "a"}, "is no URI"),
        ({"propertyNames": {"format": ["x"]}}, "format: \\['x'\\] is no text"),
        ({"uniqueItems": "x"}, "uniqueItems: 'x' is no bool"),
        ({"not": {"type": "text"}}, "type: 'text' is no type"),
        ({"not": {"required": [5]}}, "required: \\[5\\] is no list of names"),
        ({"properties": {"a": 5}}, "properties: {'a': 5} is no object of schemas"),
        ({"multipleOf": -1}, "multipleOf: -1 is no number above 0"),
    ],
)
def test_other_nonsense_is_refused_by_name(schema, told):
    with pytest.raises(ConstraintRefused, match=told):
        _allows(schema, "")


# ---- How it is written -------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [
        *({"whitespace_pattern": text} for text in ("x", '"', "[^a]", r"\d?", "[ -~]", r"[\s\S]*")),
        *({"item_separator": text} for text in (";", ",|x", "", ",?", ",{2}", "[,;]")),
        *({"key_separator": text} for text in ("=", ":+", '","b":', "(:)?")),
    ],
)
def test_nothing_may_be_written_that_is_no_json(options):
    with pytest.raises(ConstraintRefused, match=f"x-guidance: {next(iter(options))}: "):
        _allows({"type": "object", "x-guidance": options}, "")


@pytest.mark.parametrize(
    "pattern", [r"\s*", r"[\s]*", "[ ]?", "[\n\t ]*", r"[\n ]{0,3}", "( |\n)*"]
)
def test_white_space_is_that_of_json(pattern):
    schema = {"type": "object", "x-guidance": {"whitespace_pattern": pattern}}
    assert _allows(schema, '{"a": 1}')
    assert not _allows(schema, '{"a":\u00a01}')


def test_a_regex_that_ends_with_a_backslash_is_refused():
    tag = {"type": "structural_tag", "format": {"type": "regex", "pattern": "a\\"}}
    for constraint in (Constraint("regex", "a\\"), Constraint("structural_tag", json.dumps(tag))):
        with pytest.raises(ConstraintRefused, match="ends with a backslash"):
            plain_compiler().compile(constraint)
    assert allows(plain_compiler(), Constraint("regex", "a\\\\"), "a\\")


@pytest.mark.parametrize(
    "constraint", [Constraint("regex", r"[^\s\S]"), Constraint("grammar", "start: a\na: a")]
)
def test_a_constraint_of_no_text_is_refused_in_words(constraint):
    with pytest.raises(ConstraintRefused, match="no text is allowed"):
        plain_compiler().compile(constraint)
