"""Requests of one session meet on one shard while it has not much more to do than the others.

Remembers nothing: shards are ranked for each key by a hash of key and address (rendezvous hashing),
so that all routers agree, and a shard that comes or goes moves the sessions of no other.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from penstock_client.load_balancing.base import Candidate, Decision, Policy, least_loaded
from penstock_client.types import GenerationRequest

# A shard of a session may have so many times the mean load,
_MAX_OF_MEAN = 1.25
# and in a fleet with little to do so many tokens above it: else the only busy shard of eight,
# with one request, would have eight times the mean.
_SLACK_TOKENS = 2048


class SessionAffinity(Policy):
    """The first shard in the key's own order that has not too much to do."""

    name = "session"

    def choose(
        self, candidates: Sequence[Candidate], request: GenerationRequest, session: str
    ) -> Decision:
        if len(candidates) == 1:
            return Decision(candidates[0].address, "only")
        if not session:
            return Decision(least_loaded(candidates).address, "least_load")
        mean = sum(candidate.load_tokens for candidate in candidates) / len(candidates)
        most = max(mean * _MAX_OF_MEAN, mean + _SLACK_TOKENS)
        ranked = _ranked(candidates, session)
        # At least one has no more than the mean.
        chosen = next(candidate for candidate in ranked if candidate.load_tokens <= most)
        return Decision(chosen.address, "session" if chosen is ranked[0] else "imbalance")


def _ranked(candidates: Sequence[Candidate], session: str) -> list[Candidate]:
    # One digest of the key, so that a long key is read once and not for every shard.
    keyed = hashlib.blake2b(session.encode("utf-8", "surrogatepass"), digest_size=16).digest()

    def rank(candidate: Candidate) -> bytes:
        return hashlib.blake2b(candidate.address.encode(), key=keyed, digest_size=8).digest()

    return sorted(candidates, key=rank)
