"""The interface of policies: their input and their decision."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Literal, Protocol

from penstock_client.load_balancing.held_pieces import HeldPieces
from penstock_proto.facts import ClassLoad
from penstock_proto.types import GenerationRequest

# A request's cost to the rest of its shard's batch, in prompt tokens. Decoding adds one token to
# each step: a few hundred over a typical answer.
_TOKENS_OF_A_REQUEST = 256

# For a new request, this many less urgent running requests count as one.
_LESS_URGENT = 8

MOST_URGENT, LEAST_URGENT = -(2**31), 2**31 - 1

# The longest time that a turn may wait at its session's shard for earlier prompts.
DEFAULT_ALLOWANCE_S = 2.0
# The same bound in tokens, while the prefill rate is unknown.
UNMEASURED_TOKENS = 8192

# Reasons for metrics. "only": no other shard was possible. "imbalance": the preferred shard had too
# much load.
Reason = Literal["only", "least_load", "round_robin", "prefix", "session", "imbalance"]


def load_tokens(num_requests: int, prompt_tokens: int) -> int:
    """Return the work in prompt tokens."""
    return num_requests * _TOKENS_OF_A_REQUEST + prompt_tokens


def work_ahead(classes: Iterable[ClassLoad], priority: int) -> tuple[int, int]:
    """Measure the work at a shard ahead of a new request of this priority: all tokens, and prompt
    tokens alone. Less urgent requests wait for the new one or are preempted, so only running ones
    count, with a lower weight.
    """
    tokens = uncached = 0
    for each in classes:
        if each.priority <= priority:
            num_requests = each.running + each.waiting
            tokens += load_tokens(num_requests, each.queued_prompt_tokens)
            uncached += each.queued_prompt_tokens
        else:
            tokens += load_tokens(each.running, 0) // _LESS_URGENT
    return tokens, uncached


@dataclass(frozen=True, slots=True)
class Candidate:
    address: str
    # New at each start of the engine, when the prefix cache is empty.
    instance_id: str
    # Work at the last report, plus requests sent since. Without the latter, all requests of one
    # moment would choose the same shard.
    load_tokens: int
    # The names of pieces depend on the block size and the two hashes. `pieces`: those that the
    # engine holds.
    block_size: int
    weights_hash: str = ""
    adapter_hashes: Mapping[str, str] = field(default_factory=dict)
    pieces: HeldPieces = field(default_factory=HeldPieces)
    # Prompt tokens to compute before a new request; below, the shard's rate of computing them, or 0
    # if not measured.
    uncached_tokens: int = 0
    prefill_tokens_per_s: float = 0.0

    def delays(self, allowance_s: float) -> bool:
        """True if a new request would wait longer than `allowance_s` for earlier prompts."""
        rate = self.prefill_tokens_per_s
        most = rate * allowance_s if rate else UNMEASURED_TOKENS
        return self.uncached_tokens > most


@dataclass(frozen=True, slots=True)
class Decision:
    """The chosen address and the reason. `kv_source`: the address of a shard that may have more of
    the prompt cached, or "". `held_tokens`: prompt tokens that the chosen shard holds.
    """

    address: str
    reason: Reason
    kv_source: str = ""
    held_tokens: int = 0


class Policy(Protocol):
    """Chooses shards for all requests of a fleet, and may remember them."""

    name: ClassVar[str]
    # True if shards must report the pieces of prefixes that they hold.
    uses_pieces: ClassVar[bool] = False

    def choose(
        self, candidates: Sequence[Candidate], request: GenerationRequest, session: str
    ) -> Decision:
        """Choose one of the candidates (at least 1). Requests of a session share the key `session`;
        it is "" without a session.
        """
        ...

    def peek(
        self, candidates: Sequence[Candidate], request: GenerationRequest, session: str
    ) -> Decision | None:
        """Choose, but do not remember it; None if the policy does not use prefixes."""
        return None

    def held_tokens(self, candidate: Candidate, request: GenerationRequest) -> int:
        """Return how many prompt tokens a candidate holds; 0 if unknown."""
        return 0


def least_loaded(candidates: Sequence[Candidate]) -> Candidate:
    return min(candidates, key=lambda candidate: candidate.load_tokens)
