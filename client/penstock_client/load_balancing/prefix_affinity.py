"""Chooses the shard that has most of the prompt in its prefix cache, unless its load is too high.

`held_pieces` knows what shards hold; the choice is made here.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import NamedTuple

from penstock_client.load_balancing.base import Candidate, Decision, Policy, least_loaded
from penstock_client.types import GenerationRequest
from penstock_proto.prefix_hash import PIECE_TOKENS, Tier, piece_blocks, piece_names, root_hash

# Hashing runs on the event loop and takes half a millisecond for these. Prompts that agree so far
# count as equal.
MAX_HASHED_TOKENS = 8192

# A cached token outweighs this many tokens of a shard's load: computing it anew delays all requests
# of that shard, and the session's next turn goes there too. A smaller weight spreads sessions over
# shards; a larger one crowds first turns onto the shard that has their system prompt.
_WORTH_OF_HELD = 4
# What is to be copied to the device first saves so much of the work.
_WORTH_OF_TIER: dict[int, float] = {Tier.DEVICE: 1.0, Tier.HOST: 0.9, Tier.DISK: 0.7}
# A shard whose load exceeds the lowest load by more than this, in tokens or as a ratio, whichever
# allows more, is not chosen, whatever it has cached.
_MAX_TOKENS_MORE = 8192
_MAX_TIMES = 2.0


class Held(NamedTuple):
    """Numbers of a prompt's tokens: those a shard holds, and those on the device worth as much."""

    tokens: int
    worth: float


class PrefixAffinity(Policy):
    """Weighs what a shard holds of the prompt against what it has to do, within bounds."""

    name = "prefix-affinity"
    uses_pieces = True

    def __init__(self) -> None:
        self._last: _Names | None = None

    def choose(
        self, candidates: Sequence[Candidate], request: GenerationRequest, session: str
    ) -> Decision:
        if len(candidates) == 1:
            return Decision(candidates[0].address, "only")
        names = self._names_of(request)
        chosen, decision = decide(
            candidates, [held_by(each, names.at(each)) for each in candidates]
        )
        chosen.pieces.note_sent(names.at(chosen))
        return decision

    def held_tokens(self, candidate: Candidate, request: GenerationRequest) -> int:
        names = self._names_of(request).at(candidate)
        held = held_by(candidate, names).tokens
        # Prompts that agree so far count as equal.
        is_whole = held >= MAX_HASHED_TOKENS - PIECE_TOKENS
        return len(request.prompt_token_ids) if is_whole else held

    def _names_of(self, request: GenerationRequest) -> _Names:
        """Hashed once, however often it is asked for in a row."""
        if self._last is None or self._last.request is not request:
            self._last = _Names(request)
        return self._last


class _Names:
    """The names of a prompt's pieces: the same at all shards that have the same model."""

    def __init__(self, request: GenerationRequest) -> None:
        self.request = request
        self._known: dict[tuple[str, str, int], list[int]] = {}

    def at(self, candidate: Candidate) -> list[int]:
        adapter_hash = candidate.adapter_hashes.get(self.request.adapter, "")
        key = candidate.weights_hash, adapter_hash, candidate.block_size
        if key not in self._known:
            self._known[key] = prompt_pieces(self.request, *key)
        return self._known[key]


def prompt_pieces(
    request: GenerationRequest, weights_hash: str, adapter_hash: str, block_size: int
) -> list[int]:
    """Names of the prompt's pieces that a shard could find cached: never that with its last token.

    Empty if the prompt's log-probabilities are asked for: those are computed, whatever is cached;
    and of what are no token ids, which is refused where it is sent.
    """
    if request.prompt_logprobs is not None:
        return []
    findable = request.prompt_token_ids[: min(MAX_HASHED_TOKENS, len(request.prompt_token_ids) - 1)]
    root = root_hash(weights_hash, request.cache_salt, adapter_hash)
    try:
        return piece_names(root, findable, block_size, request.images)
    except struct.error:
        return []


def held_by(candidate: Candidate, names: Sequence[int]) -> Held:
    """The share of a prompt with these pieces that a shard holds."""
    size = piece_blocks(candidate.block_size) * candidate.block_size
    tokens, worth = 0, 0.0
    for tier, count in candidate.pieces.runs(names):
        tokens += count * size
        worth += _WORTH_OF_TIER[tier] * count * size
    return Held(tokens, worth)


def decide(candidates: Sequence[Candidate], held: Sequence[Held]) -> tuple[Candidate, Decision]:
    """`held` says what each candidate holds of the prompt."""
    least = least_loaded(candidates)
    best = max(each.worth for each in held)
    if best == 0:
        return least, Decision(least.address, "least_load")
    most = max(least.load_tokens + _MAX_TOKENS_MORE, least.load_tokens * _MAX_TIMES)
    pairs = list(zip(candidates, held, strict=True))
    chosen, own = min((pair for pair in pairs if pair[0].load_tokens <= most), key=_cost_tokens)
    if own.worth == best:
        return chosen, Decision(chosen.address, "prefix")
    with_more = [pair for pair in pairs if pair[1].tokens > own.tokens]
    source = max(with_more, key=lambda pair: pair[1].worth)[0].address if with_more else ""
    return chosen, Decision(chosen.address, "imbalance", source)


def _cost_tokens(pair: tuple[Candidate, Held]) -> float:
    candidate, held = pair
    return candidate.load_tokens - _WORTH_OF_HELD * held.worth
