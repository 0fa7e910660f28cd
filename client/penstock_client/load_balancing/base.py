"""The interface of policies: what one sees, and what it decides."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Literal, Protocol

from penstock_client.load_balancing.held_pieces import HeldPieces
from penstock_client.types import GenerationRequest

# What one request in a shard's batch costs the others, in prompt tokens of equal cost.
# A decode row adds one token to each step; over the life of a typical answer that is a few hundred.
_TOKENS_OF_A_REQUEST = 256

# Why a shard was chosen, for metrics. "only": there was no other. "imbalance": another one was
# preferred, but had too much load.
Reason = Literal["only", "least_load", "round_robin", "prefix", "session", "imbalance"]


def load_tokens(num_requests: int, prompt_tokens: int) -> int:
    """The work, in tokens, of so many requests and of so many tokens of prompts to compute."""
    return num_requests * _TOKENS_OF_A_REQUEST + prompt_tokens


@dataclass(frozen=True, slots=True)
class Candidate:
    """A shard as a policy sees it."""

    address: str
    # New at each start of its engine, when its prefix cache is empty.
    instance_id: str
    # Work ahead of a new request: what the shard last reported, and what was sent since. Without
    # that, requests of one moment would all pick one shard.
    load_tokens: int
    # What names blocks of a prompt there, and which pieces of such its engine holds.
    block_size: int
    weights_hash: str = ""
    adapter_hashes: Mapping[str, str] = field(default_factory=dict)
    pieces: HeldPieces = field(default_factory=HeldPieces)


@dataclass(frozen=True, slots=True)
class Decision:
    """The address of the candidate that was chosen, and why; and of another that may have more of
    the prompt cached, empty if there is none.
    """

    address: str
    reason: Reason
    kv_source: str = ""


class Policy(Protocol):
    """Chooses, and may remember; one object serves all requests of a fleet."""

    name: ClassVar[str]
    # Whether shards are to tell which pieces of prefixes they hold.
    uses_pieces: ClassVar[bool] = False

    def choose(
        self, candidates: Sequence[Candidate], request: GenerationRequest, session: str
    ) -> Decision:
        """Choose which of the candidates, of which there is at least one, takes the request.

        `session` is the key that requests of one session share; "" is none.
        """
        ...

    def held_tokens(self, candidate: Candidate, request: GenerationRequest) -> int:
        """The number of the prompt's tokens that a candidate holds; 0 where that is not known."""
        return 0


def least_loaded(candidates: Sequence[Candidate]) -> Candidate:
    """The one with the least work ahead; the first of equals."""
    return min(candidates, key=lambda candidate: candidate.load_tokens)
