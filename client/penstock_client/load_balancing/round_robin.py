"""Chooses one shard after another, regardless of load."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from penstock_client.load_balancing.base import Candidate, Decision, Policy
from penstock_proto.types import GenerationRequest

# The least recently chosen addresses are forgotten.
_MAX_ADDRESSES = 1024


class RoundRobin(Policy):
    """Chooses the candidate whose last turn is longest ago. A counter would favor some candidates,
    because each model has its own candidates.
    """

    name = "round-robin"

    def __init__(self) -> None:
        self._turns = 0
        self._last_turn: OrderedDict[str, int] = OrderedDict()

    def choose(
        self, candidates: Sequence[Candidate], request: GenerationRequest, session: str
    ) -> Decision:
        address = min(candidates, key=lambda c: self._last_turn.get(c.address, 0)).address
        self._turns += 1
        self._last_turn[address] = self._turns
        self._last_turn.move_to_end(address)
        if len(self._last_turn) > _MAX_ADDRESSES:
            self._last_turn.popitem(last=False)
        return Decision(address, "only" if len(candidates) == 1 else "round_robin")
