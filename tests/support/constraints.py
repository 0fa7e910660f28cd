"""Compilers of constraints over the built-in vocabulary, with marks as chat models have them."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import penstock_shard
from penstock_shard.constraints.compiler import Compiler, ConstraintLimits
from penstock_shard.request import Constraint

_MODEL = Path(penstock_shard.__file__).parent / "builtin_model"
VOCAB_SIZE = 3072
END = 2
# Text -> whether it is "special": whoever decodes may leave such out of the text.
MARKS = {
    "<tool_call>": False,
    "</tool_call>": False,
    "<think>": False,
    "</think>": False,
    "[TOOL_CALLS]": True,
    "<|python_tag|>": True,
}


def tokenizer_json(added: dict[str, bool]) -> bytes:
    """The built-in tokenizer with tokens added to it, the first with the first free id."""
    tokenizer: dict[str, Any] = json.loads((_MODEL / "tokenizer.json").read_bytes())
    tokenizer["added_tokens"] += [
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
    return json.dumps(tokenizer).encode()


@cache
def plain_compiler() -> Compiler:
    return Compiler(tokenizer_json({}), VOCAB_SIZE, [END], ConstraintLimits())


@cache
def marked_compiler() -> Compiler:
    return Compiler(tokenizer_json(MARKS), VOCAB_SIZE + len(MARKS), [END], ConstraintLimits())


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
    """Whether the whole text is one of the constraint's."""
    matcher = compiler.compile(constraint)
    return matcher.consume_tokens(ids_of(compiler, text)) and matcher.is_accepting()
