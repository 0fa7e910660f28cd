"""Items of sets, and names of objects, are different from one another wherever they are written."""

from __future__ import annotations

import json
import math
import random
from functools import cache
from typing import Any

import jsonschema
import pytest
from support.budget import budget, seeded
from support.compilers import (
    END,
    LIMITS,
    VOCAB_SIZE,
    ids_of,
    marked_compiler,
    plain_compiler,
    tokenizer_json,
)
from support.distinct_walks import Walker, of_schema, text_of
from support.walks import allowed

from penstock_proto.types import Constraint
from penstock_shard.structured_output.compiler import Compiler
from penstock_shard.structured_output.distinct.distinct import DEEPEST, MOST_ITEMS
from penstock_shard.structured_output.distinct.position import Position
from penstock_shard.structured_output.distinct.watched import watched_in
from penstock_shard.structured_output.languages import schema_of
from penstock_shard.structured_output.refusal import ConstraintRefused

_WALKS = budget(6, 300)
# Tokens that end or hold whole names and items, as vocabularies of real models have them.
_PIECES = (
    r"""
,"a": § , "a": § {"a": § {"a":1,"a": § },"a": § 1,"a": § ":{"a": § ","a":"
 {" § : {"tags" § : {"tags": ["a", "b"
["a","a" § ["a" § [" § "] § "," § ""," § ,1 § ],[ § [1, § [1,1
[] § [], § 1e1 § ":["a","a"] § "a" § "a":
"a § ]} § }] § },{ § "},{" § true, § [true, § null § .0
""".strip("\n")
    .replace("\n", " § ")
    .split(" § ")
)
# Few characters, so that names and items would often be equal.
_FEW = b'ab"\\n[]{}:,01.-etrufalsn'


def _set(items: Any, **more: Any) -> dict[str, Any]:
    return {"type": "array", "uniqueItems": True, "items": items, **more}


def _closed(**properties: Any) -> dict[str, Any]:
    members = {"properties": properties, "required": list(properties)}
    return {"type": "object", **members, "additionalProperties": False}


def _enum(count: int) -> dict[str, Any]:
    return {"enum": [f"{'ab' * (index % 3)}{index}" for index in range(count)]}


def _part(schema: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": schema}


_LETTER = {"type": "string", "pattern": "^[abc]$"}
_CELL = _closed(kind={"enum": ["a", "ab"]}, on={"type": "boolean"})
SETS: list[dict[str, Any]] = [
    _set({"type": "string"}),
    _set({"type": "string", "maxLength": 1}),
    _set(_LETTER),
    _set({"type": "string", "pattern": "^[ab]{0,2}$"}, minItems=3),
    _set({"type": "string", "format": "date"}, maxItems=3),
    *(_set(_enum(count)) for count in range(2, 13)),
    *(_set(_enum(count), minItems=count) for count in (2, 5, 12)),
    _set({"type": "boolean"}, minItems=2),
    _set({"type": ["boolean", "null"]}),
    _set({"type": "integer"}, maxItems=9),
    _set({"type": "integer", "minimum": -2, "maximum": 12}, minItems=15),
    _set({"type": "number"}, maxItems=9),
    _set({"type": "number", "minimum": 0, "maximum": 1}, maxItems=9),
    _set({"type": "number", "multipleOf": 0.5, "minimum": 0, "maximum": 2}, minItems=3),
    _set({"enum": [1, 2.5, 1.0, "1", True, None, [1], {"a": 1}]}, minItems=7),
    _set(_CELL),
    _set(_CELL, minItems=4),
    _set(_closed(size={"type": "number", "multipleOf": 1, "minimum": 0, "maximum": 2})),
    _set({"type": "object", "properties": {"k": _enum(2)}, "required": ["k"]}, maxItems=5),
    _set({"type": "object", "additionalProperties": {"type": "boolean"}}, maxItems=5),
    _set(
        {"type": "object", "patternProperties": {"^[ab]$": _enum(2)}, "additionalProperties": False}
    ),
    _set(_set({"enum": ["a", "b"]}), minItems=4),
    _set(_set({"type": "boolean"}), minItems=5),
    _set({"type": "array", "items": {"enum": ["a", "b"]}, "maxItems": 2}, minItems=6),
    _set(_closed(tags=_set(_enum(3)), of=_set({"type": "boolean"}))),
    _set({"anyOf": [_CELL, {"type": "string", "maxLength": 1}]}, maxItems=6),
    _set({"anyOf": [{"enum": ["a", "b"]}, {"enum": ["b", "c"]}]}),
    _set(True, maxItems=6),
    {**_set(False), "prefixItems": [_enum(2), {"type": "boolean"}, _enum(3)], "minItems": 3},
    {**_set(_enum(3)), "prefixItems": [{"type": "boolean"}, {"const": 7}]},
    {"type": "array", "uniqueItems": True, "maxItems": 6},
    {"allOf": [{"uniqueItems": True}, {"type": "array", "items": {"enum": list("abc")}}]},
    {"anyOf": [_set({"enum": list("ab")}), {"type": "string", "maxLength": 3}]},
    {
        "$ref": "#/$defs/Set",
        "$defs": {"Set": _set({"$ref": "#/$defs/L"}), "L": {"enum": list("ab")}},
    },
    {"type": "object", "patternProperties": {"s$": _set(_enum(3))}, "additionalProperties": True},
    {"type": "object", "additionalProperties": _set(_enum(3)), "maxProperties": 4},
    {"type": "object", "properties": {"a": _set(_enum(4)), "b": _set(_LETTER)}},
    {
        **_set({"enum": list("ab")}),
        "x-guidance": {"item_separator": ", ", "whitespace_flexible": False},
    },
]
OBJECTS: list[dict[str, Any]] = [
    {"type": "object"},
    {"type": "object", "additionalProperties": {"type": "boolean"}},
    {"type": "object", "properties": {"a": {"type": "integer"}, "ab": True}},
    {
        "type": "object",
        "patternProperties": {"^[ab]$": {"type": "boolean"}},
        "additionalProperties": False,
    },
    {"type": "object", "patternProperties": {"^a": {"type": "boolean"}}},
    {"type": "object", "propertyNames": {"enum": ["a", "ab", "b"]}},
    {
        "type": "object",
        "propertyNames": {"maxLength": 1},
        "additionalProperties": {"type": "boolean"},
    },
    {
        "type": "array",
        "items": {"type": "object", "additionalProperties": {"const": 1}},
        "maxItems": 4,
    },
    {"type": "object", "additionalProperties": {"type": "object"}},
    {"anyOf": [_CELL, {"type": "object", "additionalProperties": {"type": "null"}}]},
    {},
]


@cache
def _compiler() -> Compiler:
    """A vocabulary with tokens that hold whole names and items."""
    written = json.loads(tokenizer_json({}))
    vocabulary = written["model"]["vocab"]
    for piece in _PIECES:
        vocabulary[piece.replace(" ", "Ġ")] = VOCAB_SIZE + _PIECES.index(piece)
    return Compiler(json.dumps(written).encode(), VOCAB_SIZE + len(_PIECES), [END], LIMITS)


def _few(compiler: Compiler) -> frozenset[int]:
    texts = enumerate(compiler.vocabulary.texts)
    return frozenset(index for index, text in texts if text and not text.strip(_FEW))


def _names_differ(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    assert len(dict(pairs)) == len(pairs), pairs
    return dict(pairs)


def _check(schema: dict[str, Any], text: str) -> Any:
    value = json.loads(text, object_pairs_hook=_names_differ)
    formats = jsonschema.Draft202012Validator.FORMAT_CHECKER
    jsonschema.Draft202012Validator(schema, format_checker=formats).validate(value)
    return value


@pytest.mark.parametrize("schema", [*SETS, *OBJECTS], ids=json.dumps)
def test_what_is_written_is_valid_and_no_name_comes_twice(schema: dict[str, Any]) -> None:
    rng, finished = seeded("walks over sets and objects"), 0
    for compiler in (plain_compiler(), _compiler()):
        for number in range(_WALKS):
            walker = of_schema(compiler, schema)
            walk = walker.walk(rng, 120, _few(compiler) if number % 3 else frozenset())
            finished += walk.finished
            if walk.finished:
                _check(schema, text_of(compiler, walk.token_ids))
    assert finished >= _WALKS


@pytest.mark.parametrize(
    ("items", "count"),
    [
        (_enum(4), 4),
        ({"type": "boolean"}, 2),
        ({"type": "integer", "minimum": 8, "maximum": 11}, 4),
        (_CELL, 4),
        (_set({"enum": ["a", "b"]}), 5),
        (_LETTER, 3),
    ],
    ids=json.dumps,
)
def test_every_order_of_few_values_is_written_by_some_walk(items: Any, count: int) -> None:
    rng, found = seeded("orders"), set()
    schema = {**_set(items, minItems=min(count, 3)), "x-guidance": {"whitespace_flexible": False}}
    orders = sum(math.perm(count, length) for length in range(min(count, 3), count + 1))
    for _ in range(budget(150, 5000)):
        value = _check(schema, _text(of_schema(plain_compiler(), schema), rng))
        assert count >= len(value) >= min(count, 3)
        found.add(json.dumps(value))
    assert len(found) >= orders * budget(10, 99) // 100


def _text(walker: Walker, rng: random.Random) -> str:
    walk = walker.walk(rng)
    assert walk.finished
    return text_of(plain_compiler(), walk.token_ids)


@pytest.mark.parametrize("schema", [*SETS[::3], *OBJECTS[::2]], ids=json.dumps)
def test_masks_are_the_same_wherever_an_output_is_taken_up(schema: dict[str, Any]) -> None:
    rng, compiler = seeded("outputs that are taken up"), _compiler()
    token_ids = of_schema(compiler, schema).walk(rng, 80, _few(compiler)).token_ids
    followed, back_and_forth = of_schema(compiler, schema), of_schema(compiler, schema)
    for end in range(len(token_ids) + 1):
        expected = followed.bits()
        taken_up = of_schema(compiler, schema)
        taken_up.state.move_to(token_ids[:end])
        assert taken_up.bits() == expected
        back_and_forth.state.move_to(token_ids[: rng.randrange(len(token_ids) + 1)])
        back_and_forth.bits()
        back_and_forth.state.move_to(token_ids[:end])
        assert back_and_forth.bits() == expected
        if end < len(token_ids):
            followed.state.append(token_ids[end])


_INTEGERS = _set({"type": "integer"})


@pytest.mark.parametrize(
    ("schema", "written", "not_written"),
    [
        (_INTEGERS, ["[]", "[1]", "[1, 11, 111]", "[0,-1]"], ["[1,1]", "[0,-0]", "[1,2,1]"]),
        (_set({"type": "number"}), ["[1, 1.5, 1.05]"], ["[1, 1.0]", "[1.50, 1.5]", "[0, -0.0]"]),
        (_set(True), ['[1, "1", true]', "[0, false]", "[[], {}]"], ['["", ""]', "[[1],[1 ]]"]),
        (_set(True), ['[{"a": 1}, {"b": 1}]'], ['[{"a":1,"b":2},{ "b" : 2, "a": 1}]']),
        (_set(True), ['["a\\n", "a\\t"]'], ['["a\\n", "a\\n"]', '["é","é"]']),
        (_set(_INTEGERS), ["[[1, 2], [2, 1], []]"], ["[[1, 2], [1, 2]]", "[[1, 1]]", "[[], []]"]),
        ({"type": "object"}, ['{"a": 1, "A": 1}', '{"a": {"a": 1}}'], ['{"a": 1, "a": 2}']),
        ({"type": "array"}, ["[1, 1]", '[{"a":1},{"a":1}]'], ['[{"a":1,"a":1}]']),
        ({"type": "object", "properties": {"a": True}}, ['{"a": 1, "b": 1}'], ['{"b":1,"b":2}']),
        ({"properties": {"s": _INTEGERS}}, ['{"s": [1], "t": [1, 1]}'], ['{"s": [1, 1]}']),
        ({"type": "array", "uniqueItems": False}, ["[1, 1]"], []),
        ({"minProperties": 2}, ['{"a": 1, "b": 1}', "1"], ['{"a": 1, "a": 1}', '{"a": 1}']),
    ],
)
def test_values_are_told_apart_as_json_tells_them(
    schema: Any, written: list[str], not_written: list[str]
) -> None:
    for text in written:
        assert of_schema(plain_compiler(), schema).takes(text), text
    for text in not_written:
        assert not of_schema(plain_compiler(), schema).takes(text), text


@pytest.mark.parametrize(
    "schema",
    [
        _set(_enum(5), minItems=6),
        _set({"enum": [1, 2, 1.0]}, minItems=4),
        _set({"type": "boolean"}, minItems=3),
        _set(_CELL, minItems=5),
        _set({"type": "integer", "minimum": 1, "maximum": 3}, minItems=4),
        _set({"anyOf": [{"const": 1}, {"type": "null"}]}, minItems=3),
        {**_set(True), "prefixItems": [{"const": 1}, {"const": 1}], "minItems": 2},
        _set({"type": "string"}, minItems=MOST_ITEMS + 1),
    ],
    ids=json.dumps,
)
def test_a_set_that_needs_more_items_than_there_are_is_refused(schema: dict[str, Any]) -> None:
    with pytest.raises(ConstraintRefused, match="uniqueItems"):
        of_schema(plain_compiler(), schema)


def test_a_set_that_only_turns_out_to_have_too_few_ends_with_a_reason() -> None:
    compact = {"x-guidance": {"whitespace_flexible": False}}
    walker = of_schema(plain_compiler(), {**_set(_LETTER, minItems=4), **compact})
    assert not walker.takes('["a","b","c"]')
    assert walker.state.error == (
        "json_schema: cannot be followed any further: no other item or name differs"
    )


@pytest.mark.parametrize(
    "schema",
    [{"enum": [1]}, {"type": "array", "items": {"type": "integer"}}, _CELL],
    ids=json.dumps,
)
def test_where_nothing_is_to_differ_nothing_is_watched(schema: dict[str, Any]) -> None:
    assert watched_in(schema_of(schema, is_watched=True)) is None
    constraint = Constraint("json_schema", json.dumps(schema))
    for each in (constraint, Constraint("regex", "a")):
        assert plain_compiler().distinct(each, plain_compiler().compile(each)) is None


def test_of_an_open_object_only_tokens_that_end_an_earlier_name_are_missing() -> None:
    compiler, rng = _compiler(), seeded("tokens of open objects")
    constraint, missing = Constraint("json_object"), 0
    watched = watched_in(schema_of({"type": "object"}, is_watched=True))
    assert watched is not None
    for _ in range(_WALKS):
        token_ids = Walker(compiler, constraint).walk(rng, 60, _few(compiler)).token_ids
        walker, matcher, position = (
            Walker(compiler, constraint),
            compiler.compile(constraint),
            Position(watched.root),
        )
        for token_id in token_ids:
            left = set(allowed(matcher, compiler.tokenizer.vocab_size)) - set(walker.allowed())
            missing += len(left)
            assert not any(position.copy().feed(compiler.vocabulary.texts[each]) for each in left)
            walker.state.append(token_id)
            assert matcher.consume_token(token_id)
            assert position.feed(compiler.vocabulary.texts[token_id])
    assert missing


def test_sets_have_bounds_in_items_and_depth() -> None:
    compact = {"x-guidance": {"whitespace_flexible": False}}
    walker = of_schema(plain_compiler(), {**_set({"type": "integer"}), **compact})
    items = ",".join(map(str, range(MOST_ITEMS - 1)))
    assert not walker.takes(f"[{items},{MOST_ITEMS - 1},")
    assert walker.may_follow("]")
    nested = of_schema(plain_compiler(), {**_set(True), **compact})
    assert not nested.takes("[" * DEEPEST + "[")
    assert nested.may_follow("]")
    assert not of_schema(plain_compiler(), {"type": "array"}).takes("[" * (DEEPEST + 1))


# ---- JSON within structural tags ---------------------------------------------------------------

_TAGS = _set({"enum": list("abcde")}, minItems=2)
_CALLS = [
    {"begin": f'<call>{{"name": "{name}", "with": ', "content": _part(schema), "end": "}</call>"}
    for name, schema in (("f", _closed(tags=_TAGS)), ("g", {"type": "object"}))
]
_TRIGGERED = {"type": "triggered_tags", "triggers": ["<call>"], "tags": _CALLS}
_THOUGHT = {"type": "tag", "begin": "<think>", "content": {"type": "any_text"}, "end": "</think>"}
FORMATS: dict[str, tuple[dict[str, Any], list[str], list[str]]] = {
    "json": (_part(_TAGS), ['["a", "b"]'], ['["a", "a"]']),
    "a tag": (
        {"type": "tag", "begin": "set: ", "content": _part(_TAGS), "end": " ["},
        ['set: ["a", "b"] ['],
        ['set: ["a","a"] ['],
    ),
    "behind reasoning": (
        {"type": "sequence", "elements": [_THOUGHT, _part(_TAGS)]},
        ['<think>["a", "a", {</think>["a","b"]'],
        ['<think>["a","b"]</think>["a","a"]'],
    ),
    "calls among text": (
        _TRIGGERED,
        [
            '[1, 1] <call>{"name": "f", "with": {"tags": ["a", "b"]}}</call> {"a": 1, "a": 1} '
            '<call>{"name": "f", "with": {"tags": ["a", "b"]}}</call>',
            '<call>{"name": "g", "with": {"tags": ["a", "a"]}}</call>',
        ],
        [
            '<call>{"name": "f", "with": {"tags": ["a", "a"]}}</call>',
            '<call>{"name": "g", "with": {"a": 1, "b": 1}}</call> '
            '<call>{"name": "f", "with": {"tags": ["a", "b", "a"]}}</call>',
            '<call>{"name": "g", "with": {"a": 1, "a": 1}}</call>',
            '<call>{"name": "f", "with": {"tags": ["a", "b"]}}</call>'
            '<call>{"name": "f", "with": {"tags": ["a", "a"]}}</call>',
        ],
    ),
    "parts behind one another": (
        {
            "type": "sequence",
            "elements": [_part(_TAGS), {"type": "const_string", "value": ";"}, _part(_TAGS)],
        },
        ['["a","b"];["b","a"]'],
        ['["a","b"];["b","b"]', '["b","b"];["b","a"]'],
    ),
}


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("compiler", [plain_compiler, marked_compiler])
def test_json_in_a_structural_tag_is_watched_from_where_it_begins(name: str, compiler: Any) -> None:
    format_, written, not_written = FORMATS[name]
    value = json.dumps({"type": "structural_tag", "format": format_})
    constraint = Constraint("structural_tag", value)
    for text in written:
        assert Walker(compiler(), constraint).takes(text), text
    for text in not_written:
        assert not Walker(compiler(), constraint).takes(text), text


def test_masks_within_tags_are_the_same_wherever_an_output_is_taken_up() -> None:
    rng, compiler = seeded("outputs of tags that are taken up"), marked_compiler()
    value = json.dumps({"type": "structural_tag", "format": _TRIGGERED})
    constraint = Constraint("structural_tag", value)
    token_ids = ids_of(compiler, FORMATS["calls among text"][1][0])
    followed, back_and_forth = Walker(compiler, constraint), Walker(compiler, constraint)
    for end in range(len(token_ids)):
        expected = followed.bits()
        taken_up = Walker(compiler, constraint)
        taken_up.state.move_to(token_ids[:end])
        assert taken_up.bits() == expected
        back_and_forth.state.move_to(token_ids[: rng.randrange(len(token_ids) + 1)])
        back_and_forth.state.move_to(token_ids[:end])
        assert back_and_forth.bits() == expected
        followed.state.append(token_ids[end])
        assert not followed.state.error


def test_json_in_a_tag_is_watched_however_the_text_before_it_is_cut_into_tokens() -> None:
    rng, compiler = seeded("cuts of a text before JSON"), _compiler()
    constraint = Constraint(
        "structural_tag", json.dumps({"type": "structural_tag", "format": _TRIGGERED})
    )
    text = b'a [1,1] {"a" <call>{"name": "f", "with": {"tags": ["a", "b", "'
    for _ in range(budget(20, 500)):
        walker, at = Walker(compiler, constraint), 0
        while at < len(text):
            allowed_ids = set(walker.allowed())
            ways = compiler.vocabulary.leading_into(text[at:], 0)
            token_id = rng.choice([each for way in ways for each in way if each in allowed_ids])
            walker.state.append(token_id)
            at += len(compiler.vocabulary.texts[token_id])
        letters = [text for text in "abcde" if walker.may_follow(text)]
        assert letters == ["c", "d", "e"]


def test_what_is_written_in_tags_has_no_item_twice() -> None:
    rng, compiler = seeded("walks over tags"), _compiler()
    schema = _closed(tags=_TAGS, on=_set({"type": "boolean"}, minItems=1))
    calls = [{"begin": f"<{name}>", "content": _part(schema), "end": ";"} for name in ("f", "g")]
    format_ = {"type": "tags_with_separator", "tags": calls, "separator": "", "at_least_one": True}
    value = json.dumps({"type": "structural_tag", "format": format_})
    finished = 0
    for _ in range(_WALKS * 3):
        walk = Walker(compiler, Constraint("structural_tag", value)).walk(rng, 150)
        finished += walk.finished
        for written in text_of(compiler, walk.token_ids).split(";")[:-1]:
            _check(schema, written[3:])
    assert finished


def test_an_output_of_an_older_shard_is_gone_on_with_though_it_has_a_name_twice() -> None:
    compiler = plain_compiler()
    walker = Walker(compiler, Constraint("json_object"))
    walker.state.move_to(ids_of(compiler, '{"a":1,"a":2,"b":'))
    assert not walker.state.error
    assert walker.takes('3,"c":4}')


def test_a_vocabulary_without_the_signs_of_json_is_refused_where_something_is_watched() -> None:
    written = json.loads(tokenizer_json({}))
    written["model"]["merges"] = []
    vocabulary = written["model"]["vocab"]
    vocabulary["a sign that is gone"] = vocabulary.pop("}")
    compiler = Compiler(json.dumps(written).encode(), VOCAB_SIZE, [END], LIMITS)
    with pytest.raises(ConstraintRefused, match="json_object: "):
        compiler.compile(Constraint("json_object"))
