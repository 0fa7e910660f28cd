"""What answers are held to is what the parsers read: texts of a form, drawn at random."""

from __future__ import annotations

import functools
import json
import random
from typing import Any

import numpy as np
import pytest
from llguidance import LLMatcher, LLTokenizer
from llguidance.numpy import allocate_token_bitmask, fill_next_token_bitmask
from support.budget import budget, seeded

from penstock_router.errors import BadRequest
from penstock_router.json_fields import JsonObject
from penstock_router.request import Tool
from penstock_router.text.answer_pieces import PieceKind, content_of, join_pieces
from penstock_router.text.formats.registry import FORMATS
from penstock_shard.ipc.request import Constraint
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
    form = FORMATS[name].calls(TOOLS, required=required, parallel=parallel)
    return compiled(form)


def compiled(form: JsonObject) -> str:
    tag = json.dumps({"type": "structural_tag", "format": form})
    return grammar_of(Constraint("structural_tag", tag), {})


def matcher_of(text: str) -> LLMatcher:
    matcher = LLMatcher(_BYTES, text)
    assert not matcher.is_error(), matcher.get_error()
    return matcher


def accepts(text: str, answer: str) -> bool:
    """Whether the answer, and its end there, are of the form."""
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


def calls_of(name: str, text: str) -> tuple[str, list[tuple[str, Any]]]:
    """The content, and the calls."""
    parser = FORMATS[name].parser(TOOLS)
    pieces = join_pieces([*parser.feed(text), *parser.flush()])
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
    texts = [drawn(rng, form, 1_000) for _ in range(budget(10, 1_000))]
    finished = [text for text in texts if text is not None]
    assert len(finished) >= len(texts) / 5
    for text in finished:
        content, calls = calls_of(name, text)
        assert content == "", text
        assert calls, text
        assert all(obeys(*call) for call in calls), text
        assert parallel or len(calls) == 1, text


_WORDS = {
    "hermes": '<tool_call>\n{"name": "maybe", "arguments": {"a": %s}}\n</tool_call>',
    "llama_json": '{"name": "maybe", "parameters": {"a": %s}}',
    "pythonic": "[maybe(a=%s)]",
    "mistral": '[TOOL_CALLS][{"name": "maybe", "arguments": {"a": %s}}]',
    "mistral_named": '[TOOL_CALLS]maybe[ARGS]{"a": %s}',
    "deepseek_v3": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>maybe\n"
    '```json\n{"a": %s}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>',
    "deepseek_v31": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>maybe<｜tool▁sep｜>"
    '{"a": %s}<｜tool▁call▁end｜><｜tool▁calls▁end｜>',
    "plain_json": '[{"name": "maybe", "arguments": {"a": %s}}]',
}
# Of the same words: what stands around all calls, and between two.
_AROUND = {
    "hermes": ("", "\n", ""),
    "llama_json": ("", "; ", ""),
    "pythonic": ("[", ", ", "]"),
    "mistral": ("[TOOL_CALLS][", ", ", "]"),
    "mistral_named": ("", "", ""),
    "deepseek_v3": ("<｜tool▁calls▁begin｜>", "\n", "<｜tool▁calls▁end｜>"),
    "deepseek_v31": ("<｜tool▁calls▁begin｜>", "", "<｜tool▁calls▁end｜>"),
    "plain_json": ("[", ", ", "]"),
}
_ANYWHERE = ("hermes", "mistral", "mistral_named", "deepseek_v3", "deepseek_v31")


@pytest.mark.parametrize("name", NAMES)
def test_a_familys_own_words_are_allowed_and_wrong_arguments_are_not(name: str) -> None:
    for required in (True, False):
        form = grammar(name, required=required, parallel=True)
        assert accepts(form, _WORDS[name] % 1)
        assert not accepts(form, _WORDS[name] % 2)
        assert accepts(form, "No call, f(x) < 3.\n") is not required
        assert accepts(form, "") is not required


@pytest.mark.parametrize("name", NAMES)
def test_several_calls_are_allowed_where_calls_are_parallel(name: str) -> None:
    before, between, behind = _AROUND[name]
    one = (_WORDS[name] % 1).removeprefix(before).removesuffix(behind)
    text = before + between.join([one] * 3) + behind
    for required in (True, False):
        assert accepts(grammar(name, required=required, parallel=True), text)
    assert calls_of(name, text) == ("", [("maybe", {"a": 1})] * 3)


@pytest.mark.parametrize("name", _ANYWHERE)
def test_calls_may_come_after_text_where_their_marker_may(name: str) -> None:
    form = grammar(name, required=False, parallel=True)
    text = "Let me see.\n" + _WORDS[name] % 1
    assert accepts(form, text)
    assert calls_of(name, text) == ("Let me see.", [("maybe", {"a": 1})])
    assert not accepts(form, "Let me see.\n" + _WORDS[name] % 2)


@pytest.mark.parametrize("name", NAMES)
def test_one_call_is_all_where_calls_are_not_parallel(name: str) -> None:
    before, between, behind = _AROUND[name]
    one = (_WORDS[name] % 1).removeprefix(before).removesuffix(behind)
    if name == "plain_json":
        # One is an object, and no list of one.
        before = behind = ""
    for required in (True, False):
        form = grammar(name, required=required, parallel=False)
        assert accepts(form, before + one + behind)
        assert not accepts(form, before + one + between + one + behind)


@pytest.mark.parametrize("name", NAMES)
def test_arguments_of_a_tool_that_is_not_strict_are_any_where_calls_are_not_forced(
    name: str,
) -> None:
    tools = [Tool("maybe", _OPTIONAL)]
    loose = compiled(FORMATS[name].calls(tools, required=False, parallel=True))
    assert accepts(loose, _WORDS[name] % '{"x": ["y"]}')
    forced = compiled(FORMATS[name].calls(tools, required=True, parallel=True))
    assert not accepts(forced, _WORDS[name] % '{"x": ["y"]}')


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
        FORMATS["pythonic"].calls([tool], required=False, parallel=True)
    assert refused.value.param == "tools"
