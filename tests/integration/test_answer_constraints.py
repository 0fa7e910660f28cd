"""A shard enforces the constraint that a router makes for an answer: both ends, without a wire."""

from __future__ import annotations

from typing import Any

import pytest
from support.compilers import LIMITS
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from penstock_proto.types import Constraint, ConstraintKind
from penstock_router.request import ChatRequest, Tool, ToolChoice
from penstock_router.text.answer_constraint import answer_constraint
from penstock_router.text.formats.registry import FORMATS
from penstock_router.text.reasoning import STYLES
from penstock_shard.structured_output.compiler import Compiler

THINK, HERMES = STYLES["think"], FORMATS["hermes"]
ADD = Tool(
    "add",
    {
        "type": "object",
        "properties": {"a": {"type": "integer"}},
        "required": ["a"],
        "additionalProperties": False,
    },
    strict=True,
)
JSON = Constraint(
    ConstraintKind.JSON_SCHEMA,
    '{"type":"object","properties":{"x":{"enum":[1,2]}},"required":["x"],'
    '"additionalProperties":false}',
)
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
AUTO: dict[str, Any] = {"tools": (ADD,), "tool_choice": ToolChoice("auto")}
REQUIRED: dict[str, Any] = {"tools": (ADD,), "tool_choice": ToolChoice("required")}


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    """Bytes, and marks that are special tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {"<|eos|>": 0} | {text: number for number, text in enumerate(alphabet, 1)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    marks = ["<|eos|>", "<think>", "</think>", "<tool_call>", "</tool_call>"]
    tokenizer.add_special_tokens([AddedToken(mark, special=True) for mark in marks])
    return tokenizer


@pytest.fixture(scope="module")
def compiler(tokenizer: Tokenizer) -> Compiler:
    data = tokenizer.to_str().encode()
    return Compiler(data, tokenizer.get_vocab_size(), [0], LIMITS)


def made(options: dict[str, Any], *, begun: bool = False, **names: Any) -> Constraint:
    asked = ChatRequest(messages=[], **options)
    tool_format, style = names.get("tool_format", HERMES), names.get("style", THINK)
    constraint = answer_constraint(asked, tool_format, style, begun=begun)
    assert constraint is not None
    return constraint


@pytest.mark.parametrize(
    ("options", "begun", "allowed", "refused"),
    [
        (
            {"constraint": JSON},
            False,
            ['{"x": 1}', '<think>\nhm {</think>\n\n{"x": 1}', '<think></think>{"x": 2}'],
            ['hm {"x": 1}', "<think>hm", '<think>hm</think>{"x": 3}'],
        ),
        ({"constraint": JSON}, True, ['\nhm\n</think>\n\n{"x": 1}'], ['{"x": 1}']),
        (
            REQUIRED,
            False,
            [CALL, f"<think>hm</think>\n\n{CALL}", f"{CALL}\n{CALL}"],
            ["no", f"no {CALL}"],
        ),
        (REQUIRED, True, [f"hm</think>{CALL}"], [CALL, "hm</think>no"]),
        (
            AUTO,
            False,
            [CALL, "no", f"well {CALL} so", f"<think>so <b> hm</think>{CALL}"],
            [CALL.replace("1", "true")],
        ),
        (AUTO | {"parallel_tool_calls": False}, False, [CALL, "no"], [f"{CALL}\n{CALL}"]),
        (
            AUTO | {"constraint": JSON},
            False,
            [CALL, '{"x": 1}', '<think>hm</think>{"x": 1}'],
            ["no", '{"x": 3}'],
        ),
    ],
)
def test_a_shard_allows_what_was_meant_and_nothing_else(
    tokenizer: Tokenizer,
    compiler: Compiler,
    options: dict[str, Any],
    begun: bool,
    allowed: list[str],
    refused: list[str],
) -> None:
    constraint = made(options, begun=begun)
    for text in [*allowed, *refused]:
        matcher = compiler.compile(constraint)
        ids = [*tokenizer.encode(text, add_special_tokens=False).ids, 0]
        assert all(matcher.consume_token(i) for i in ids) == (text in allowed), text


@pytest.mark.parametrize("name", sorted({known.name for known in FORMATS.values()}))
def test_what_every_family_is_held_to_compiles_with_every_style(
    compiler: Compiler, name: str
) -> None:
    for style in set(STYLES.values()):
        for options in (AUTO, REQUIRED, AUTO | {"constraint": JSON}):
            for begun in (False, True):
                compiler.compile(made(options, begun=begun, tool_format=FORMATS[name], style=style))
