"""Texts of each form that answers are held to, drawn at random: the parsers read them as calls."""

from __future__ import annotations

import functools
import itertools
import json
import random
from typing import Any

import numpy as np
import pytest
from llguidance import LLMatcher, LLTokenizer
from llguidance.numpy import allocate_token_bitmask, fill_next_token_bitmask
from support.budget import budget, seeded
from support.families import FAMILIES
from support.families.family import Family

from penstock_proto.types import Constraint
from penstock_router.errors import BadRequest
from penstock_router.json_fields import JsonObject
from penstock_router.request import Tool
from penstock_router.text.answer_pieces import PieceKind, content_of, join_pieces
from penstock_router.text.answer_reader import make_reader
from penstock_router.text.formats.base import CallRule
from penstock_router.text.formats.reading.named_arguments import Part, with_commas
from penstock_router.text.formats.registry import FORMATS
from penstock_router.text.marks import NO_MARKS
from penstock_router.text.model_conventions import Conventions
from penstock_router.text.structural_tag_builder import encoded, literal
from penstock_shard.structured_output.grammars import grammar_of

NAMES = sorted({one.name for one in FORMATS.values()})
_PLAIN: JsonObject = {
    "type": "object",
    "properties": {"kind": {"enum": ["a\n\"'é", None, 3]}, "deep": {"$ref": "#/$defs/flag"}},
    "required": ["kind"],
    "additionalProperties": False,
    "$defs": {"flag": {"type": "array", "items": {"type": "boolean"}, "maxItems": 2}},
}
_OPTIONAL: JsonObject = {
    "type": "object",
    "properties": {"a": {"const": 1}, "b": {"const": True}, "c": {"const": None}},
    "additionalProperties": False,
}
_NONE: JsonObject = {"type": "object", "properties": {}, "additionalProperties": False}
TOOLS = (
    Tool("set-kind", _PLAIN, strict=True),
    Tool("maybe", _OPTIONAL, strict=True),
    Tool("nothing", _NONE, strict=True),
)
_BYTES = LLTokenizer("byte")


@functools.lru_cache
def grammar(name: str, *, required: bool, parallel: bool) -> str:
    form = FORMATS[name].calls(TOOLS, CallRule(required=required, parallel=parallel))
    return compiled(form)


def compiled(form: JsonObject) -> str:
    return grammar_of(Constraint("structural_tag", encoded(form)), {})


def matcher_of(text: str) -> LLMatcher:
    matcher = LLMatcher(_BYTES, text)
    assert not matcher.is_error(), matcher.get_error()
    return matcher


def accepts(text: str, answer: str) -> bool:
    """Tell whether the answer, and its end there, are of the form."""
    matcher = matcher_of(text)
    tokens = list(answer.encode())
    return (
        matcher.validate_tokens(tokens) == len(tokens)
        and matcher.consume_tokens(tokens)
        and (matcher.is_accepting() or matcher.is_stopped())
    )


def drawn(rng: random.Random, text: str, limit: int) -> str | None:
    """A text of the form; None where it does not end within the limit."""
    matcher = matcher_of(text)
    mask = allocate_token_bitmask(1, _BYTES.vocab_size)
    said = bytearray()
    while not matcher.is_stopped():
        if len(said) > limit:
            return None
        if matcher.is_accepting() and rng.random() < 0.5:
            break
        fill_next_token_bitmask(matcher, mask)
        bits = np.unpackbits(mask.view(np.uint8), bitorder="little")[:256]
        allowed = np.flatnonzero(bits).tolist()
        if not allowed:
            break
        # White space is allowed nearly everywhere: seldom drawn, texts come to an end.
        dense = [byte for byte in allowed if byte not in b" \t\r\n"] or allowed
        token = rng.choice(dense if rng.random() < 0.95 else allowed)
        matcher.consume_token(token)
        said.append(token)
    return said.decode()


def finished(rng: random.Random, form: str, count: int) -> list[str]:
    """Return `count` or more whole texts of the form. Many drawn texts have no end that is near."""
    texts = [drawn(rng, form, 1_000) for _ in range(2 * count)]
    while len(found := [text for text in texts if text is not None]) < count:
        texts.append(drawn(rng, form, 1_000))
        assert len(texts) < 20 * count
    return found


def calls_of(name: str, text: str) -> tuple[str, list[tuple[str, Any]]]:
    """The content, and the calls."""
    conventions = Conventions(FORMATS[name])
    reader = make_reader(conventions, TOOLS, NO_MARKS, begun=False)
    pieces = join_pieces([*reader.feed(text), *reader.flush()])
    names = [piece.text for piece in pieces if piece.kind is PieceKind.CALL]
    arguments = [piece.text for piece in pieces if piece.kind is PieceKind.ARGUMENTS]
    return content_of(pieces), list(zip(names, map(json.loads, arguments), strict=True))


def obeys(name: str, arguments: Any) -> bool:
    if name == "set-kind":
        flags = arguments.get("deep", [])
        return arguments["kind"] in ("a\n\"'é", None, 3) and set(flags) <= {True, False}
    meant = {"a": 1, "b": True, "c": None} if name == "maybe" else {}
    return bool(arguments.items() <= meant.items())


@pytest.mark.parametrize("parallel", [True, False])
@pytest.mark.parametrize("name", NAMES)
def test_what_is_forced_is_read_as_calls_and_nothing_else(name: str, parallel: bool) -> None:
    rng = seeded(name)
    form = grammar(name, required=True, parallel=parallel)
    for text in finished(rng, form, budget(3, 300)):
        content, calls = calls_of(name, text)
        assert content == "", text
        assert calls, text
        assert all(obeys(*call) for call in calls), text
        assert parallel or len(calls) == 1, text


def maybe(family: Family, count: int = 1, **arguments: Any) -> str:
    """Write `count` calls of the tool `maybe` as the family does."""
    return family.write([("maybe", arguments or {"a": 1})] * count)


each_family = pytest.mark.parametrize("family", FAMILIES, ids=[each.format for each in FAMILIES])
each_parallel_family = pytest.mark.parametrize(
    "family",
    [each for each in FAMILIES if each.is_parallel],
    ids=[each.format for each in FAMILIES if each.is_parallel],
)


@each_family
def test_a_familys_own_words_are_allowed_and_wrong_arguments_are_not(family: Family) -> None:
    for required in (True, False):
        form = grammar(family.format, required=required, parallel=False)
        assert accepts(form, maybe(family))
        assert not accepts(form, maybe(family, a=2))
        assert accepts(form, family.says_alone("No call, f(x) < 3.\n")) is not required
        if required or family.says_alone("") == "":
            assert accepts(form, "") is not required


@each_parallel_family
def test_several_calls_are_allowed_where_calls_are_parallel(family: Family) -> None:
    for required in (True, False):
        form = grammar(family.format, required=required, parallel=True)
        assert accepts(form, maybe(family, 3))
        assert not accepts(form, maybe(family, 3, a=2))
    assert calls_of(family.format, maybe(family, 3)) == ("", [("maybe", {"a": 1})] * 3)


@each_family
def test_calls_may_come_after_text_where_the_family_says_some_before(family: Family) -> None:
    if family.says_before is None:
        return
    form = grammar(family.format, required=False, parallel=True)
    before = family.says_before("Let me see.")
    count = 2 if family.is_parallel else 1
    assert accepts(form, before + maybe(family, count))
    content, calls = calls_of(family.format, before + maybe(family, count))
    assert content == "Let me see."
    assert calls == [("maybe", {"a": 1})] * count
    assert not accepts(form, before + maybe(family, count, a=2))


@each_parallel_family
def test_one_call_is_all_where_calls_are_not_parallel(family: Family) -> None:
    for required in (True, False):
        form = grammar(family.format, required=required, parallel=False)
        assert accepts(form, maybe(family))
        assert not accepts(form, maybe(family, 2))


@each_family
def test_arguments_of_a_tool_that_is_not_strict_are_any_where_calls_are_not_forced(
    family: Family,
) -> None:
    tools = [Tool("maybe", _OPTIONAL)]
    form = FORMATS[family.format]
    loose = compiled(form.calls(tools, CallRule(required=False, parallel=False)))
    assert accepts(loose, maybe(family, a=7))
    forced = compiled(form.calls(tools, CallRule(required=True, parallel=False)))
    assert not accepts(forced, maybe(family, a=7))


@pytest.mark.parametrize(
    ("schema", "named"),
    [
        ({"type": "object", "anyOf": [{"required": ["a"]}]}, "anyOf"),
        ({"type": "object", "properties": {"a-b": {}}}, "a-b"),
        ({"type": "object", "properties": {}, "required": ["x"]}, "x"),
    ],
)
def test_a_strict_schema_that_python_arguments_cannot_be_held_to_is_refused(
    schema: JsonObject, named: str
) -> None:
    tool = Tool("f", schema, strict=True)
    with pytest.raises(BadRequest, match=f"'f' cannot be strict with .*'{named}'") as refused:
        FORMATS["pythonic"].calls([tool], CallRule(required=False, parallel=True))
    assert refused.value.param == "tools"


@pytest.mark.parametrize("size", [1, 2, 9, 20])
def test_optional_parts_stand_in_order_with_commas_between_them(size: int) -> None:
    names = [chr(ord("a") + at) for at in range(size)]
    form = compiled(with_commas([Part(False, f"{name}=", literal("1")) for name in names]))
    for few in itertools.chain.from_iterable(itertools.permutations(names, n) for n in range(3)):
        text = ", ".join([f"{name}=1" for name in few])
        assert accepts(form, text) == (list(few) == sorted(few)), text
        assert not few or not (accepts(form, f"{text}, ") or accepts(form, f", {text}"))
    rng = seeded("parts")
    for _ in range(budget(5, 200)):
        some = sorted(rng.sample(names, rng.randint(1, size)))
        assert accepts(form, ", ".join([f"{name}=1" for name in some])), some
