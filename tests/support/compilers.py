"""Compilers of constraints over the built-in vocabulary, with marks as chat models have them."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

import penstock_shard
from penstock_proto.types import Constraint
from penstock_shard.config import ConstraintLimits, ShardConfig
from penstock_shard.structured_output.compiler import Compiler

BUILTIN = Path(penstock_shard.__file__).with_name("builtin_model")
VOCAB_SIZE = 3072
# What ends a text of the built-in model; and two that do, as many a model has them.
END = 2
EOS_IDS = (0, END)
LIMITS = ShardConfig().constraint_limits
# Text -> whether it is "special": whoever decodes may leave such out of the text.
MARKS = {
    "<tool_call>": False,
    "</tool_call>": False,
    "<think>": False,
    "</think>": False,
    "[TOOL_CALLS]": True,
    "<|python_tag|>": True,
}


@cache
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(BUILTIN / "tokenizer.json"))


def tokenizer_json(added: dict[str, bool]) -> bytes:
    """The built-in tokenizer with tokens added to it, the first with the first free id."""
    written: dict[str, Any] = json.loads((BUILTIN / "tokenizer.json").read_bytes())
    written["added_tokens"] += [
        {
            "id": VOCAB_SIZE + index,
            "content": text,
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": special,
        }
        for index, (text, special) in enumerate(added.items())
    ]
    return json.dumps(written).encode()


def new_compiler(
    added: dict[str, bool] | None = None,
    eos_token_ids: tuple[int, ...] = (END,),
    limits: ConstraintLimits = LIMITS,
) -> Compiler:
    """Return a compiler that has compiled nothing yet, for the vocabulary with `added` tokens."""
    added = added or {}
    return Compiler(tokenizer_json(added), VOCAB_SIZE + len(added), eos_token_ids, limits)


@cache
def plain_compiler() -> Compiler:
    return new_compiler()


@cache
def marked_compiler() -> Compiler:
    return new_compiler(MARKS)


@cache
def two_ended_compiler() -> Compiler:
    """Return a compiler for models whose texts any of `EOS_IDS` ends."""
    return new_compiler(eos_token_ids=EOS_IDS)


def ids_of(compiler: Compiler, text: str) -> list[int]:
    """A text as models write it: marks are tokens of their own."""
    token_ids: list[int] = []
    while text:
        found = [(text.find(mark), mark) for mark in compiler.special_tokens if mark in text]
        at, mark = min(found, default=(len(text), ""))
        token_ids += compiler.tokenizer.tokenize_str(text[:at])
        if mark:
            token_ids.append(compiler.special_tokens[mark])
        text = text[at + len(mark) :]
    return token_ids


def allows(compiler: Compiler, constraint: Constraint, text: str) -> bool:
    """True if the constraint allows the text as a whole."""
    matcher = compiler.compile(constraint)
    return matcher.consume_tokens(ids_of(compiler, text)) and matcher.is_accepting()
