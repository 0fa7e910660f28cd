"""Constraints of answers in channels, at a shard whose tokenizer has the marks as tokens."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest
from integration.test_answer_constraints import ADD, AUTO, JSON, REQUIRED, made
from support.compilers import LIMITS
from support.families import FAMILIES
from support.families.family import Family
from support.router_doubles import id_of
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from penstock_router.text.formats.registry import CHANNELS
from penstock_shard.structured_output.compiler import Compiler

BY_NAME: dict[str, Family] = {family.format: family for family in FAMILIES}
NAMES = sorted({each.name for each in CHANNELS.values()})
# Tokens that end an answer, by the format; the first ends every one.
ENDS = {
    "harmony": ("<|return|>", "<|call|>"),
    "kimi_k3": ("<|end_of_msg|>",),
    "muse_glimmer": ("<|eot|>",),
    "solar_open": ("<|eos|>",),
}


class Model:
    """A tokenizer of bytes and marks, and its compiler."""

    def __init__(self, name: str) -> None:
        alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
        vocabulary = {text: number for number, text in enumerate(alphabet)}
        tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
        ends = ENDS[name]
        marks = [mark for mark in CHANNELS[name].marks if re.fullmatch(r"<\|.*\|>", mark)]
        added = dict.fromkeys([*ends, *marks])
        tokenizer.add_special_tokens([AddedToken(mark, special=True) for mark in added])
        self.tokenizer = tokenizer
        self._ends = [id_of(tokenizer, end) for end in ends]
        data = tokenizer.to_str().encode()
        self.compiler = Compiler(data, tokenizer.get_vocab_size(), self._ends, LIMITS)

    def allows(self, constraint: Any, text: str) -> bool:
        """Tell whether an answer may be this text, which ends by its own token or another."""
        matcher = self.compiler.compile(constraint)
        ids = [*self.tokenizer.encode(text, add_special_tokens=False).ids, self._ends[0]]
        end = next(at for at, id_ in enumerate(ids) if id_ in self._ends)
        return all(matcher.consume_token(id_) for id_ in ids[: end + 1]) and end >= len(ids) - 2


@pytest.fixture(scope="module", params=NAMES)
def model(request: pytest.FixtureRequest) -> tuple[str, Model]:
    return request.param, Model(request.param)


@pytest.mark.parametrize("begun", [False, True])
def test_reasoning_may_come_before_the_channel_that_is_asked_for(
    model: tuple[str, Model], begun: bool
) -> None:
    name, shard = model
    family, format_ = BY_NAME[name], CHANNELS[name]
    assert family.reasons is not None
    assert format_.style is not None
    reasoning = family.reasons("hm {").removeprefix(format_.style.begin if begun else "")
    call, wrong = family.write([("add", {"a": 1})]), family.write([("add", {"a": "x"})])
    text, other = family.says_alone('{"x": 1}'), family.says_alone('{"x": 3}')
    before = () if family.says_before is None else (family.says_before("I look."),)
    cases: list[tuple[dict[str, Any], list[str], list[str]]] = [
        ({"constraint": JSON}, [text], [other, call, "{}"]),
        (REQUIRED, [call], [wrong, text]),
        (AUTO, [call, text, *(each + call for each in before)], [wrong]),
        (AUTO | {"parallel_tool_calls": False}, [call, text], [wrong]),
        (AUTO | {"constraint": JSON}, [call, text], [wrong, other]),
        (
            AUTO | {"tools": (replace(ADD, strict=False),), "constraint": JSON},
            [call, text],
            [other],
        ),
    ]
    for options, allowed, refused in cases:
        constraint = made(options, begun=begun, tool_format=format_, style=format_.style)
        for answer in [*allowed, *refused]:
            assert shard.allows(constraint, reasoning + answer) is (answer in allowed), answer
            if not begun:
                assert shard.allows(constraint, answer) is (answer in allowed), answer
