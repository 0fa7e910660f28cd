"""Chooses the shard with the least load, minus the prompt tokens that its prefix cache has. A
session stays at its last turn's shard, until prompts wait there longer than the allowance.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import NamedTuple

from penstock_client.load_balancing.base import (
    DEFAULT_ALLOWANCE_S,
    Candidate,
    Decision,
    Policy,
    least_loaded,
)
from penstock_client.load_balancing.known_prompts import KnownPrompts
from penstock_client.load_balancing.session_turns import SessionTurns
from penstock_proto.prefix_hash import PIECE_TOKENS, Tier, piece_blocks, piece_names, root_hash
from penstock_proto.types import GenerationRequest

# Hashing this many tokens blocks the event loop for 0.5 ms. Prompts that agree in these tokens
# count as equal.
MAX_HASHED_TOKENS = 8192

# The weight of a cached token in tokens of load: computing it again would delay all requests of a
# shard. A smaller weight spreads sessions over shards; a larger one sends too many first turns to
# the shard that has their system prompt.
_WORTH_OF_HELD = 2
# The share of work that cached tokens save; less if blocks must be copied to the device first.
_WORTH_OF_TIER: dict[int, float] = {Tier.DEVICE: 1.0, Tier.HOST: 0.9, Tier.DISK: 0.7}


# The names of pieces depend on tokens and on these: weights hash, adapter hash, block size.
_Key = tuple[str, str, int]


class Held(NamedTuple):
    """Prompt tokens that a shard holds, and their worth in tokens on the device."""

    tokens: int
    worth: float
    # True if the shard holds the session's whole last turn.
    is_last_turn: bool = False


class PrefixAffinity(Policy):
    name = "prefix-affinity"
    uses_pieces = True

    def __init__(self, allowance_s: float = DEFAULT_ALLOWANCE_S) -> None:
        self._allowance_s = allowance_s
        self._turns = SessionTurns()
        self._prompts = KnownPrompts()
        self._last: _Names | None = None

    def choose(
        self, candidates: Sequence[Candidate], request: GenerationRequest, session: str
    ) -> Decision:
        if len(candidates) == 1:
            return Decision(candidates[0].address, "only")
        chosen, decision = self._decide(candidates, request, session)
        names = self._names_of(request).at(chosen)
        chosen.pieces.note_sent(names)
        if session:
            self._turns.note(session, chosen, len(request.prompt_token_ids))
        else:
            self._prompts.note(names, request.prompt_token_ids, chosen)
        return decision

    def peek(
        self, candidates: Sequence[Candidate], request: GenerationRequest, session: str
    ) -> Decision | None:
        return self._decide(candidates, request, session)[1]

    def _decide(
        self, candidates: Sequence[Candidate], request: GenerationRequest, session: str
    ) -> tuple[Candidate, Decision]:
        held = [self._held(each, request, session) for each in candidates]
        return decide(candidates, held, self._allowance_s)

    def held_tokens(self, candidate: Candidate, request: GenerationRequest) -> int:
        held = self._held(candidate, request, request.session).tokens
        is_whole = held >= MAX_HASHED_TOKENS - PIECE_TOKENS
        return len(request.prompt_token_ids) if is_whole else held

    def _held(self, candidate: Candidate, request: GenerationRequest, session: str) -> Held:
        """Count the prompt tokens that a shard holds. Reports cover the hashed part of the prompt.
        If the shard holds all of that part, it also counts as holding what the session's last turn
        left there.
        """
        held = held_by(candidate, self._names_of(request).at(candidate))
        left = self._left_by_last_turn(candidate, request, session)
        if not left or held.tokens + PIECE_TOKENS < min(left, MAX_HASHED_TOKENS):
            return held
        more = max(0, left - held.tokens)
        return Held(held.tokens + more, held.worth + more, is_last_turn=True)

    def _left_by_last_turn(
        self, candidate: Candidate, request: GenerationRequest, session: str
    ) -> int:
        """Return how many tokens of this prompt the session's last turn left at a shard. For an
        unnamed session, the longest known prompt that this prompt begins with counts as the last
        turn.
        """
        if session:
            left = self._turns.tokens_at(session, candidate)
            return min(left, len(request.prompt_token_ids))
        left, instance_id = self._names_of(request).known(self._prompts, candidate)
        return left if instance_id == candidate.instance_id else 0

    def _names_of(self, request: GenerationRequest) -> _Names:
        if self._last is None or self._last.request is not request:
            self._last = _Names(request)
        return self._last


class _Names:
    """The names of a prompt's pieces: the same at all shards of a model."""

    def __init__(self, request: GenerationRequest) -> None:
        self.request = request
        self._names: dict[_Key, list[int]] = {}
        self._known: dict[_Key, tuple[int, str]] = {}

    def at(self, candidate: Candidate) -> list[int]:
        key = self._key(candidate)
        if key not in self._names:
            self._names[key] = prompt_pieces(self.request, *key)
        return self._names[key]

    def known(self, prompts: KnownPrompts, candidate: Candidate) -> tuple[int, str]:
        """See `KnownPrompts.longest_within`."""
        key = self._key(candidate)
        if key not in self._known:
            token_ids = self.request.prompt_token_ids
            self._known[key] = prompts.longest_within(self.at(candidate), token_ids)
        return self._known[key]

    def _key(self, candidate: Candidate) -> _Key:
        adapter_hash = candidate.adapter_hashes.get(self.request.adapter, "")
        return candidate.weights_hash, adapter_hash, candidate.block_size


def prompt_pieces(
    request: GenerationRequest, weights_hash: str, adapter_hash: str, block_size: int
) -> list[int]:
    """Return the names of the pieces that a shard could find cached. The last token is always
    computed.

    Empty if the prompt's log-probabilities are requested (they must be computed), or if token ids
    are invalid (sending refuses them).
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
    """Count the part of a prompt that a shard holds."""
    size = piece_blocks(candidate.block_size) * candidate.block_size
    tokens, worth = 0, 0.0
    for tier, count in candidate.pieces.runs(names):
        tokens += count * size
        worth += _WORTH_OF_TIER[tier] * count * size
    return Held(tokens, worth)


def decide(
    candidates: Sequence[Candidate], held: Sequence[Held], allowance_s: float
) -> tuple[Candidate, Decision]:
    """Choose a candidate. `held`: the part of the prompt that each candidate holds."""
    best = max(each.worth for each in held)
    if best == 0:
        least = least_loaded(candidates)
        return least, Decision(least.address, "least_load")
    pairs = list(zip(candidates, held, strict=True))
    holder, own = min((pair for pair in pairs if pair[1].worth == best), key=_cost_tokens)
    if own.is_last_turn and not holder.delays(allowance_s):
        return holder, Decision(holder.address, "session", held_tokens=own.tokens)
    chosen, own = min(pairs, key=_cost_tokens)
    if own.worth == best:
        return chosen, Decision(chosen.address, "prefix", held_tokens=own.tokens)
    with_more = [pair for pair in pairs if pair[1].tokens > own.tokens]
    source = max(with_more, key=lambda pair: pair[1].worth)[0].address if with_more else ""
    return chosen, Decision(chosen.address, "imbalance", source, own.tokens)


def _cost_tokens(pair: tuple[Candidate, Held]) -> float:
    candidate, held = pair
    return candidate.load_tokens - _WORTH_OF_HELD * held.worth
