"""Random walks over what a matcher allows: the least a constraint must hold against."""

from __future__ import annotations

import random
from dataclasses import dataclass

from llguidance import LLMatcher, LLTokenizer
from llguidance.numpy import allocate_token_bitmask, fill_next_token_bitmask

from penstock_shard.structured_output.matcher_state import allowed_ids


@dataclass(frozen=True, slots=True)
class Walk:
    """The tokens of a walk. `finished`: it ended with a token that ends a text."""

    token_ids: list[int]
    finished: bool


def allowed(matcher: LLMatcher, vocab_size: int) -> list[int]:
    mask = allocate_token_bitmask(1, vocab_size)
    fill_next_token_bitmask(matcher, mask)
    return [int(token_id) for token_id in allowed_ids(mask[0])]


def walk(matcher: LLMatcher, tokenizer: LLTokenizer, rng: random.Random, limit: int = 2000) -> Walk:
    """Walk over random tokens, where all allowed tokens are equally likely."""
    token_ids: list[int] = []
    while len(token_ids) < limit:
        choices = allowed(matcher, tokenizer.vocab_size)
        assert choices, f"nothing is allowed: {matcher.get_error()} after {token_ids}"
        token = rng.choice(choices)
        if token in tokenizer.eos_tokens:
            return Walk(token_ids, True)
        assert matcher.consume_token(token), matcher.get_error()
        token_ids.append(token)
    return Walk(token_ids, False)


def accepts(matcher: LLMatcher, token_ids: list[int]) -> bool:
    """True if the tokens are a whole text of the constraint. The matcher is used up."""
    return matcher.consume_tokens(token_ids) and matcher.is_accepting()
