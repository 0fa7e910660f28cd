"""Calls that a request demands, from a shard's masks: what they allow is read as calls that obey
the tools' schemas, and as nothing else.
"""

from __future__ import annotations

import functools
import json
import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from jsonschema import Draft202012Validator
from llguidance.numpy import allocate_token_bitmask, fill_next_token_bitmask
from support.budget import budget, seeded
from support.compilers import LIMITS
from support.families import FAMILIES
from support.families.family import Family
from support.random_calls import format_of, style_of, text_of, token_marks, written_calls
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from penstock_proto.types import Constraint
from penstock_router.request import ChatRequest, Tool, ToolChoice
from penstock_router.text.answer_constraint import answer_constraint
from penstock_router.text.answer_pieces import Piece, PieceKind, join_pieces
from penstock_router.text.answer_reader import make_reader
from penstock_router.text.formats.channels import ChannelFormat
from penstock_router.text.marks import MarkingDetokenizer
from penstock_router.text.model_conventions import Conventions
from penstock_router.text.tokenizer import Tokenizer as RouterTokenizer
from penstock_router.text.tokenizer import load_tokenizer
from penstock_shard.structured_output.compiler import Compiler

each_family = pytest.mark.parametrize("family", FAMILIES, ids=[one.format for one in FAMILIES])
TOOLS = (
    Tool(
        "set_mode",
        {
            "type": "object",
            "properties": {
                "kind": {"enum": ["a b", "ü\n\"'", "c"]},
                "level": {"type": "integer", "minimum": 0, "maximum": 9},
                "flags": {"type": "array", "items": {"type": "boolean"}, "maxItems": 2},
            },
            "required": ["kind"],
            "additionalProperties": False,
        },
    ),
    Tool(
        "note",
        {
            "type": "object",
            "properties": {
                "text": {"type": "string", "maxLength": 12},
                "place": {
                    "type": "object",
                    "properties": {"x": {"type": "integer", "maximum": 99}, "on": {"const": True}},
                    "required": ["x"],
                    "additionalProperties": False,
                },
                "more": {"enum": [None, 1.5]},
                "any": {"type": "string"},
            },
            "required": ["text", "place"],
            "additionalProperties": False,
        },
    ),
    Tool("nothing", {"type": "object", "properties": {}, "additionalProperties": False}),
)
_CHECKS = {tool.name: Draft202012Validator(tool.parameters or {}) for tool in TOOLS}
EOS = 0
_MOST_TOKENS = 1_500


class Model:
    """A tokenizer of bytes, in which a family's marks are special tokens, at both ends."""

    def __init__(self, family: Family) -> None:
        alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
        vocabulary = {"<|eos|>": EOS} | {text: number for number, text in enumerate(alphabet, 1)}
        fast = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
        fast.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        fast.decoder = decoders.ByteLevel()
        tool_format, style = format_of(family), style_of(family)
        if isinstance(tool_format, ChannelFormat):
            style = tool_format.style
        self.conventions = Conventions(tool_format, style)
        texts = sorted(token_marks(family))
        marks = [AddedToken(mark, special=True) for mark in ("<|eos|>", *texts)]
        fast.add_special_tokens(marks)
        data = fast.to_str().encode()
        files = {"tokenizer.json": data, "tokenizer_config.json": b'{"eos_token": "<|eos|>"}'}
        self.tokenizer: RouterTokenizer = load_tokenizer(files)
        self.compiler = Compiler(data, fast.get_vocab_size(), [EOS], LIMITS)
        self.texts = (*tool_format.marks, *(style.texts if style else ()))
        # The marks as text: a token for each byte.
        fast.encode_special_tokens = True
        self.spelled = [fast.encode(text, add_special_tokens=False).ids for text in texts]
        self.size = fast.get_vocab_size()
        # Marks, characters that close something, and all that stand for themselves.
        self.marks = set(range(len(vocabulary), self.size))
        self.closing = {fast.encode(text).ids[0] for text in "\"'}])<\n"}
        self.usual = {vocabulary[text] for text in alphabet if text.isascii()}

    def constraint(self, **options: Any) -> Constraint:
        """Return the constraint that a shard gets with a request."""
        asked = ChatRequest(messages=[], tools=TOOLS, **options)
        # The reasoning is over: the prompt has ended it.
        made = answer_constraint(asked, self.conventions.tool_format, None)
        assert made is not None
        return made

    def read(self, token_ids: Sequence[int], bundle: int) -> list[Piece]:
        """The answer's pieces as the router reads them."""
        marks = self.tokenizer.marks_among(self.texts)
        detokenizer = MarkingDetokenizer(
            self.tokenizer.detokenizers.start(
                [EOS],
                skip_special_tokens=True,
                spaces_between_special_tokens=False,
                shown_ids=self.tokenizer.special_ids_of(self.texts),
            ),
            marks,
        )
        reader = make_reader(self.conventions, TOOLS, marks, begun=False)
        pieces: list[Piece] = []
        for at in range(0, len(token_ids), bundle):
            pieces += reader.feed(detokenizer.feed(token_ids[at : at + bundle]))
        return join_pieces([*pieces, *reader.flush()])


@functools.cache
def model_of(family: Family) -> Model:
    return Model(family)


def drawn(rng: random.Random, model: Model, constraint: Constraint) -> list[int] | None:
    """An answer's tokens, drawn from the masks; None where it does not end in time."""
    matcher = model.compiler.compile(constraint)
    mask = allocate_token_bitmask(1, model.size)
    token_ids: list[int] = []
    while len(token_ids) < _MOST_TOKENS:
        fill_next_token_bitmask(matcher, mask)
        bits = np.unpackbits(mask.view(np.uint8), bitorder="little")[: model.size]
        allowed = np.flatnonzero(bits).tolist()
        assert allowed, "nothing is allowed"
        if EOS in allowed and (rng.random() < 0.5 or allowed == [EOS]):
            return token_ids
        if model.spelled and rng.random() < 0.03:
            said = rng.choice(model.spelled)
            if matcher.validate_tokens(said) == len(said):
                assert matcher.consume_tokens(said)
                token_ids += said
                continue
        token_id = chosen(rng, model, [each for each in allowed if each != EOS])
        assert matcher.consume_token(token_id)
        token_ids.append(token_id)
    return None


def chosen(rng: random.Random, model: Model, allowed: list[int]) -> int:
    """White space and odd bytes seldom, what closes and marks often: so texts come to an end."""
    for some, chance in ((model.marks, 0.4), (model.closing, 0.35), (model.usual, 0.9)):
        if rng.random() < chance and (found := some.intersection(allowed)):
            return rng.choice(sorted(found))
    return rng.choice(allowed)


def forced(family: Family, wanted: int, **options: Any) -> list[list[tuple[str, str]]]:
    """Calls of answers at random to a request with these options, which have nothing beside."""
    rng = seeded(family.format)
    model = model_of(family)
    constraint = model.constraint(**options)
    answers: list[list[tuple[str, str]]] = []
    for _ in range(3 * wanted):
        if len(answers) == wanted:
            break
        token_ids = drawn(rng, model, constraint)
        if token_ids is None:
            continue
        pieces = model.read(token_ids, 1)
        text = "".join(model.tokenizer.token_text(each) for each in token_ids)
        assert model.read(token_ids, rng.randint(2, 50)) == pieces, text
        assert text_of(pieces, PieceKind.CONTENT) == "", text
        assert text_of(pieces, PieceKind.REASONING) == "", text
        calls = written_calls(pieces)
        assert calls, text
        for name, arguments in calls:
            _CHECKS[name].validate(json.loads(arguments))
        answers.append(calls)
    assert len(answers) >= wanted / 2
    return answers


@each_family
def test_required_calls_are_read_as_calls_that_obey_their_schemas(family: Family) -> None:
    answers = forced(family, budget(14, 200), tool_choice=ToolChoice("required"))
    if len(answers) < 50:
        # A few answers may all have one call, or call one tool, by chance.
        return
    if family.is_parallel:
        assert any(len(calls) > 1 for calls in answers)
    assert len({name for calls in answers for name, _ in calls}) > 1


@each_family
def test_one_call_is_all_where_calls_are_not_parallel(family: Family) -> None:
    for calls in forced(
        family, budget(6, 200), tool_choice=ToolChoice("required"), parallel_tool_calls=False
    ):
        assert len(calls) == 1


@each_family
@pytest.mark.parametrize("name", ["note", "nothing"])
def test_a_named_function_is_the_one_that_is_called(family: Family, name: str) -> None:
    for calls in forced(family, budget(6, 200), tool_choice=ToolChoice("named", name)):
        assert [called for called, _ in calls] == [name]
