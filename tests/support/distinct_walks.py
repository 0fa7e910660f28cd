"""Walks over what a constraint's whole mask allows: the matcher's, less what must differ."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from penstock_proto.types import Constraint
from penstock_shard.structured_output.compiler import Compiler
from penstock_shard.structured_output.matcher_state import ConstraintState, MaskFiller, allowed_ids
from support.engines import make_request
from support.walks import Walk


class Walker:
    """A sequence of tokens under a constraint."""

    def __init__(self, compiler: Compiler, constraint: Constraint) -> None:
        self._compiler = compiler
        self._masks = MaskFiller(compiler.tokenizer.vocab_size)
        ends = compiler.tokenizer.eos_tokens
        request = make_request("walk", [1], constraint=constraint, stop_token_ids=ends)
        matcher = compiler.compile(constraint)
        self.state = ConstraintState(request, matcher, compiler.distinct(constraint, matcher))

    def allowed(self) -> list[int]:
        """Return the tokens that may follow; none if the state has an error."""
        self._masks.fill([self.state])
        if self.state.mask is None:
            assert self.state.error
            return []
        return [int(token_id) for token_id in allowed_ids(self.state.mask)]

    def bits(self) -> bytes:
        """Return the mask of the tokens that may follow, as bytes."""
        self._masks.fill([self.state])
        return np.zeros(1).tobytes() if self.state.mask is None else self.state.mask.tobytes()

    def walk(
        self, rng: random.Random, limit: int = 300, liked: frozenset[int] = frozenset()
    ) -> Walk:
        """Walk over random allowed tokens, all equally likely, up to a token that ends a text. With
        `liked`, choose among its tokens and ends of texts where any is allowed. From `limit`
        tokens on, choose among ends and closing signs where any is allowed.
        """
        token_ids: list[int] = []
        ends = self._compiler.tokenizer.eos_tokens
        closing = [*map(self._compiler.vocabulary.exactly, (b'"', b"]", b"}"))]
        while len(token_ids) < 3 * limit:
            choices = self.allowed()
            assert choices, f"{self.state.error} after {token_ids}"
            if len(token_ids) >= limit:
                wished = {*ends, *(token_id for sign in closing for token_id in sign)}
                choices = sorted(wished.intersection(choices)) or choices
            elif liked:
                choices = sorted({*liked, *ends}.intersection(choices)) or choices
            token = rng.choice(choices)
            if token in ends:
                return Walk(token_ids, True)
            self.state.append(token)
            token_ids.append(token)
        return Walk(token_ids, False)

    def may_follow(self, text: str) -> bool:
        """True if a token with this text may follow."""
        return bool(set(self._compiler.vocabulary.exactly(text.encode())) & set(self.allowed()))

    def takes(self, text: str) -> bool:
        """True if the whole text may be written: marks as tokens, everything else byte by byte. The
        walker is used up.
        """
        for piece in self._pieces(text):
            found = set(piece).intersection(self.allowed())
            if not found:
                return False
            self.state.append(min(found))
        return bool(set(self._compiler.tokenizer.eos_tokens) & set(self.allowed()))

    def _pieces(self, text: str) -> Iterator[Sequence[int]]:
        marks = self._compiler.special_tokens
        while text:
            mark = next((mark for mark in marks if text.startswith(mark)), None)
            if mark is not None:
                yield (marks[mark],)
            else:
                yield from map(self._compiler.vocabulary.exactly, _bytes_of(text[0]))
            text = text[len(mark or "x") :]


def _bytes_of(text: str) -> list[bytes]:
    return [bytes((byte,)) for byte in text.encode()]


def of_schema(compiler: Compiler, schema: Any) -> Walker:
    return Walker(compiler, Constraint("json_schema", json.dumps(schema)))


def text_of(compiler: Compiler, token_ids: Sequence[int]) -> str:
    return compiler.tokenizer.decode_bytes(list(token_ids)).decode()
