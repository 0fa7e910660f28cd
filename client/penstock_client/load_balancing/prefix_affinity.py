"""Chooses the shard that should have most of the prompt in its prefix cache, unless its load is too
high.

`prefix_memory` remembers which prompts were sent where; the choice is made here.
"""

from __future__ import annotations

from collections.abc import Sequence

from penstock_client.load_balancing.base import Candidate, Decision, Policy, least_loaded
from penstock_client.load_balancing.prefix_memory import PIECE_TOKENS, PrefixMemory, prompt_pieces
from penstock_client.types import GenerationRequest

# A cached token outweighs this many tokens of a shard's load: computing it anew delays all requests
# of that shard, and the session's next turn goes there too. A smaller weight spreads sessions over
# shards; a larger one crowds first turns onto the shard that has their system prompt.
_WORTH_OF_HELD = 4
# A shard whose load exceeds the lowest load by more than this, in tokens or as a ratio, whichever
# allows more, is not chosen, whatever it has cached.
_MAX_TOKENS_MORE = 8192
_MAX_TIMES = 2.0


class PrefixAffinity(Policy):
    """Weighs what a shard holds of the prompt against what it has to do, within bounds."""

    name = "prefix-affinity"

    def __init__(self, memory: PrefixMemory | None = None) -> None:
        self._memory = PrefixMemory() if memory is None else memory

    def choose(
        self, candidates: Sequence[Candidate], request: GenerationRequest, session: str
    ) -> Decision:
        pieces = prompt_pieces(request)
        held = [self._memory.num_held(candidate, pieces) for candidate in candidates]
        chosen, decision = decide(candidates, held)
        self._memory.record_sent(chosen, request, pieces)
        return decision

    def learn(
        self, address: str, instance_id: str, request: GenerationRequest, cached_tokens: int
    ) -> None:
        self._memory.record_answer(instance_id, request, cached_tokens)


def decide(candidates: Sequence[Candidate], held: Sequence[int]) -> tuple[Candidate, Decision]:
    """`held` says of each candidate how many pieces of the prompt it should have."""
    least = least_loaded(candidates)
    if len(candidates) == 1:
        return least, Decision(least.address, "only")
    longest = max(held)
    if longest == 0:
        return least, Decision(least.address, "least_load")
    most = max(least.load_tokens + _MAX_TOKENS_MORE, least.load_tokens * _MAX_TIMES)
    allowed = [pair for pair in zip(candidates, held, strict=True) if pair[0].load_tokens <= most]
    chosen, num_held = min(allowed, key=_cost_tokens)
    if num_held == longest:
        return chosen, Decision(chosen.address, "prefix")
    source = candidates[held.index(longest)].address
    return chosen, Decision(chosen.address, "imbalance", source)


def _cost_tokens(pair: tuple[Candidate, int]) -> int:
    candidate, num_held = pair
    return candidate.load_tokens - _WORTH_OF_HELD * num_held * PIECE_TOKENS
