"""Keeps a session's requests on one shard, until prompts wait there longer than the allowance.

A hash of session key and address ranks the shards (rendezvous hashing). So all routers agree, and a
new or removed shard does not move the sessions of other shards.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from penstock_client.load_balancing.base import (
    DEFAULT_ALLOWANCE_S,
    Candidate,
    Decision,
    Policy,
    Reason,
    least_loaded,
)
from penstock_client.load_balancing.session_turns import SessionTurns
from penstock_proto.types import GenerationRequest


class SessionAffinity(Policy):
    """Sends a session's first turn to the first shard in the key's ranking, and later turns to the
    shard of the turn before.
    """

    name = "session"

    def __init__(self, allowance_s: float = DEFAULT_ALLOWANCE_S) -> None:
        self._allowance_s = allowance_s
        self._turns = SessionTurns()

    def choose(
        self, candidates: Sequence[Candidate], request: GenerationRequest, session: str
    ) -> Decision:
        if len(candidates) == 1:
            return Decision(candidates[0].address, "only")
        if not session:
            return Decision(least_loaded(candidates).address, "least_load")
        held = {each.address: self._turns.tokens_at(session, each) for each in candidates}
        ranked = _ranked(candidates, session)
        home = max(ranked, key=lambda each: held[each.address])
        chosen = home
        if home.delays(self._allowance_s):
            chosen = min(ranked, key=lambda each: each.load_tokens - held[each.address])
        self._turns.note(session, chosen, len(request.prompt_token_ids))
        reason: Reason = "session" if chosen is home else "imbalance"
        return Decision(chosen.address, reason, held_tokens=held[chosen.address])


def _ranked(candidates: Sequence[Candidate], session: str) -> list[Candidate]:
    # Hash the key once, because it may be long.
    keyed = hashlib.blake2b(session.encode("utf-8", "surrogatepass"), digest_size=16).digest()

    def rank(candidate: Candidate) -> bytes:
        return hashlib.blake2b(candidate.address.encode(), key=keyed, digest_size=8).digest()

    return sorted(candidates, key=rank)
