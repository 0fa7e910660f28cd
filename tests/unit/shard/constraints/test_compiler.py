"""Matchers: kept, copied, bounded; and tokenizers as models have them."""

from __future__ import annotations

import dataclasses
import json
import re
import threading

import pytest
from support.budget import seeded
from support.compilers import (
    END,
    LIMITS,
    VOCAB_SIZE,
    allows,
    ids_of,
    marked_compiler,
    new_compiler,
    plain_compiler,
    tokenizer_json,
    two_ended_compiler,
)
from support.random_schemas import random_schema
from support.walks import accepts, allowed, walk

from penstock_proto.types import Constraint
from penstock_shard.structured_output.compiler import Compiler, TokenizerUnusable
from penstock_shard.structured_output.refusal import ConstraintRefused

REGEX = Constraint("regex", "[ab]{3}")


def test_each_request_has_a_matcher_of_its_own():
    compiler = plain_compiler()
    first, second = compiler.compile(REGEX), compiler.compile(REGEX)
    assert accepts(first, ids_of(compiler, "aba"))
    assert accepts(second, ids_of(compiler, "bbb"))


def test_copies_in_several_threads_allow_what_one_alone_allows():
    compiler = new_compiler()
    rng = seeded("copies")
    constraints = [Constraint("json_schema", json.dumps(random_schema(rng))) for _ in range(6)]
    walks = [
        (constraint, walk(compiler.compile(constraint), compiler.tokenizer, rng, 60).token_ids)
        for constraint in constraints
        for _ in range(4)
    ]
    expected = [_masks(new_compiler().compile(constraint), walked) for constraint, walked in walks]
    found: dict[int, list[list[int]]] = {}

    def follow(index: int) -> None:
        constraint, walked = walks[index]
        found[index] = _masks(compiler.compile(constraint), walked)

    threads = [threading.Thread(target=follow, args=(index,)) for index in range(len(walks))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [found[index] for index in range(len(walks))] == expected


def _masks(matcher, token_ids):
    masks = []
    for token in token_ids:
        masks.append(allowed(matcher, VOCAB_SIZE))
        assert matcher.consume_token(token)
    return masks


def test_all_tokens_that_end_a_text_may_end_it():
    compiler = two_ended_compiler()
    matcher = compiler.compile(REGEX)
    assert matcher.consume_tokens(ids_of(compiler, "aba"))
    assert allowed(matcher, VOCAB_SIZE) == [0, END]


def test_tokens_beyond_the_vocabulary_are_never_allowed():
    compiler = Compiler(tokenizer_json({}), VOCAB_SIZE + 40, [END], LIMITS)
    matcher = compiler.compile(Constraint("regex", "(?s:.)*"))
    assert max(allowed(matcher, VOCAB_SIZE + 40)) < VOCAB_SIZE


def test_what_a_tokenizer_adds_that_is_no_mark_is_text():
    added = {"   ": False, "ö": False, "<x>": False, "word": True}
    compiler = new_compiler(added)
    assert {"<x>", "word"} <= set(compiler.special_tokens)
    assert not {"   ", "ö"} & set(compiler.special_tokens)
    assert accepts(compiler.compile(Constraint("regex", " *ö")), [VOCAB_SIZE, VOCAB_SIZE + 1])
    assert not accepts(compiler.compile(Constraint("regex", ".*")), [VOCAB_SIZE + 2])


def test_marks_are_not_text_of_schemas_and_lark_names_them():
    compiler = marked_compiler()
    think = compiler.special_tokens["<think>"]
    string = compiler.compile(Constraint("json_schema", '{"type": "string"}'))
    assert string.consume_tokens(ids_of(compiler, '"a'))
    assert think not in allowed(string, compiler.tokenizer.vocab_size)
    lark = Constraint("grammar", 'start: <think> "a"')
    assert accepts(compiler.compile(lark), [think, *ids_of(compiler, "a")])


@pytest.mark.parametrize(
    "raw",
    [
        b"{",
        b"[]",
        b'{"added_tokens": [{}]}',
        b'{"model": {}}',
        tokenizer_json({}).replace(b"ByteLevel", b"Metaspace"),
    ],
)
def test_a_tokenizer_that_cannot_be_read_is_told_in_one_line(raw):
    with pytest.raises(TokenizerUnusable) as failure:
        Compiler(raw, VOCAB_SIZE, [END], LIMITS)
    assert "\n" not in str(failure.value)


def _nested(depth: int) -> str:
    return '{"items":' * depth + "{}" + "}" * depth


HARMLESS = {
    "ten million letters that must come": Constraint("regex", "(((a{99}){99}){99}){9}"),
    "repeats of repeats": Constraint("regex", "((((a{1,99}){1,99}){1,99}){1,99}){1,99}"),
    "a million letters": Constraint("regex", "a" * 1_000_000),
    "wide alternatives": Constraint("regex", "(.*a){25}(.*b){25}|" * 200 + "x"),
}
HOSTILE = {
    "groups within groups": Constraint("regex", "(" * 20_000 + "a" + ")" * 20_000),
    "deep schema": Constraint("json_schema", _nested(20_000)),
    "deep JSON": Constraint("json_schema", "[" * 100_000),
    "many cases": Constraint(
        "json_schema",
        json.dumps({"allOf": [{"oneOf": [{"not": {"minimum": i}} for i in range(60)]}] * 60}),
    ),
    "references in a circle": Constraint(
        "json_schema", '{"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}}'
    ),
    "deep Lark": Constraint("grammar", "start: " + "(" * 5_000 + '"a"' + ")" * 5_000),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_what_would_take_too_much_is_refused_in_one_short_line(name):
    compiler = new_compiler()
    with pytest.raises(ConstraintRefused) as refusal:
        compiler.compile(HOSTILE[name])
    assert "\n" not in str(refusal.value)
    assert len(str(refusal.value)) <= 300
    assert allows(compiler, REGEX, "aba")


@pytest.mark.parametrize("name", HARMLESS)
def test_what_only_looks_like_too_much_is_served(name):
    compiler = new_compiler()
    matcher = compiler.compile(HARMLESS[name])
    assert walk(matcher, compiler.tokenizer, seeded(name), 50).token_ids


def test_no_more_is_kept_than_there_is_room_for(monkeypatch):
    monkeypatch.setattr("penstock_shard.structured_output.compiler._MOST_KEPT", 2)
    compiler = new_compiler()
    compiled, whole = [], compiler.compile_alone

    def noted(constraint):
        compiled.append(constraint)
        return whole(constraint)

    monkeypatch.setattr(compiler, "compile_alone", noted)
    one, two, three = (Constraint("regex", pattern) for pattern in ("a", "b", "c"))
    for each in (one, two, one, three, one, two):
        compiler.compile(each)
    assert compiled == [one, two, three, two]


@pytest.mark.parametrize(("memory_bytes", "most"), [(256 << 20, 16), (2 << 30, 8), (1 << 20, 64)])
def test_what_is_kept_never_takes_more_than_four_gigabytes(monkeypatch, memory_bytes, most):
    # However much one may take: it has as many states as llguidance has in all at most.
    compiler = new_compiler(limits=dataclasses.replace(LIMITS, memory_bytes=memory_bytes))
    compiled, whole = [], compiler.compile_alone

    def noted(constraint):
        compiled.append(constraint)
        return whole(constraint)

    monkeypatch.setattr(compiler, "compile_alone", noted)
    each = [Constraint("regex", f"a{number}") for number in range(most + 1)]
    for constraint in (*each, *each[1:], each[0]):
        compiler.compile(constraint)
    assert compiled == [*each, each[0]]


@pytest.mark.parametrize(
    ("constraint", "told"),
    [
        (Constraint("json_schema", '{"type": 3}'), "json_schema: type: 3"),
        (Constraint("json_schema", "{"), "json_schema: not JSON"),
        (
            Constraint(
                "structural_tag",
                '{"type": "structural_tag", "format": '
                '{"type": "json_schema", "json_schema": {"type": 3}}}',
            ),
            "structural_tag: type: 3",
        ),
        (Constraint("regex", "a[^\\s\\S]"), "regex: no text is allowed"),
    ],
)
def test_a_refusal_names_the_kind_once(constraint, told):
    with pytest.raises(ConstraintRefused) as refusal:
        plain_compiler().compile(constraint)
    assert str(refusal.value).startswith(told)


def test_messages_are_for_callers():
    with pytest.raises(ConstraintRefused) as refusal:
        plain_compiler().compile(Constraint("regex", "a(?=b)"))
    assert re.match("regex: error: look-around", str(refusal.value))
