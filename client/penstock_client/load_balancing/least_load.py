"""Chooses the shard where a new request waits for the fewest tokens of other requests."""

from __future__ import annotations

from collections.abc import Sequence

from penstock_client.load_balancing.base import Candidate, Decision, Policy, least_loaded
from penstock_proto.types import GenerationRequest


class LeastLoad(Policy):
    name = "least-load"

    def choose(
        self, candidates: Sequence[Candidate], request: GenerationRequest, session: str
    ) -> Decision:
        address = least_loaded(candidates).address
        return Decision(address, "only" if len(candidates) == 1 else "least_load")
