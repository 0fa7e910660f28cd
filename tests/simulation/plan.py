"""What is to happen in a history: requests, and what goes wrong meanwhile; drawn from a seed.

Plain data, so that a history that fails can be made shorter.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

from simulation.engine import EngineKind
from support.engines import EOS_ID

from penstock_client.types import GenerationRequest, Objective, SamplingParams
from penstock_shard.config import ShardConfig

# An id that ends the engine which computes a prompt with it, if the history has such.
POISON_ID = 13


@dataclass(frozen=True)
class Arrival:
    """A request, and how its reader behaves."""

    number: int
    at_s: float
    request: GenerationRequest
    # Sent to this shard by a client of its own, not through the fleet.
    direct: int | None = None
    # The reader leaves once it has so many tokens.
    leaves_at: int | None = None
    # How long it does something else between two looks.
    pause_s: float = 0.0


@dataclass(frozen=True)
class Trouble:
    """Something that goes wrong at a shard (or in the router), for a while or at once."""

    number: int
    at_s: float
    what: str
    shard: int
    lasts_s: float = 0.0
    amount: float = 0.0


# What may go wrong, and how often it does beside the others.
TROUBLES = {
    "crash engine": 4,
    "hang engine": 2,
    "kill": 3,
    "stop": 2,
    "stop router": 1,
    "upgrade": 3,
    "drain": 2,
    "leave": 1,
    "cut": 3,
    "slow": 2,
    "late": 2,
    "double": 2,
    "half open": 3,
    "deaf": 1,
    "mute": 1,
    "refuse": 2,
}


@dataclass(frozen=True)
class Plan:
    """A history before it happens."""

    seed: int
    num_shards: int
    kind: EngineKind
    config: ShardConfig
    policy: str
    arrivals: tuple[Arrival, ...]
    troubles: tuple[Trouble, ...]

    @property
    def calm_at_s(self) -> float:
        """When the last trouble is over."""
        return max((each.at_s + each.lasts_s for each in self.troubles), default=0.0)


def draw(seed: int) -> Plan:
    """The plan of a seed."""
    rng = random.Random(seed)
    poisoned = rng.random() < 0.05
    kind = EngineKind(
        step_s=rng.choice([0.005, 0.02, 0.05]),
        num_blocks=rng.choice([40, 64, 256]),
        max_num_seqs=rng.choice([2, 4, 8]),
        max_num_batched_tokens=rng.choice([16, 64, 256]),
        speculative_tokens=rng.choice([0, 0, 3]),
        eos_rate=rng.choice([0.0, 0.02]),
        load_s=rng.choice([0.1, 1.0]),
        fingerprint=rng.choice(["fake", "fake", ""]),
        crash_on=POISON_ID if poisoned else None,
    )
    config = ShardConfig(
        max_num_seqs=kind.max_num_seqs,
        max_queued_requests=rng.choice([2, 8, 100]),
        stall_timeout_s=rng.choice([1.0, 3.0]),
        drain=rng.choice(["migrate", "migrate", "finish"]),
        drain_timeout_s=5.0,
        check_integrity=True,
        step_ms=kind.step_s * 1000,
        max_restarts=1000,
    )
    num_shards = rng.choice([1, 2, 2, 3])
    troubles = tuple(_trouble(rng, number, num_shards) for number in range(rng.randint(1, 5)))
    arrivals = tuple(
        _arrival(rng, number, num_shards, poisoned=poisoned)
        for number in range(rng.randint(3, 12))
    )
    policy = rng.choice(["least-load", "round-robin", "prefix-affinity", "session"])
    return Plan(seed, num_shards, kind, config, policy, arrivals, troubles)


def _trouble(rng: random.Random, number: int, num_shards: int) -> Trouble:
    (what,) = rng.choices(list(TROUBLES), weights=list(TROUBLES.values()))
    return Trouble(
        number,
        at_s=rng.uniform(0.2, 4.0),
        what=what,
        shard=rng.randrange(num_shards),
        lasts_s=rng.choice([0.05, 0.5, 2.0, 5.0]) * rng.uniform(0.5, 1.5),
        amount=rng.random(),
    )


def _arrival(rng: random.Random, number: int, num_shards: int, *, poisoned: bool) -> Arrival:
    request = _request(rng)
    if poisoned and rng.random() < 0.2:
        prompt = [*request.prompt_token_ids, POISON_ID]
        request = GenerationRequest(prompt, request.sampling, max_tokens=request.max_tokens)
    return Arrival(
        number,
        at_s=rng.uniform(0.0, 3.0),
        request=request,
        direct=rng.randrange(num_shards) if rng.random() < 0.1 else None,
        leaves_at=rng.randrange(10) if rng.random() < 0.15 else None,
        pause_s=rng.choice([0.0, 0.0, 0.3]),
    )


def _request(rng: random.Random) -> GenerationRequest:
    shared = [rng.randrange(20, 40)] * rng.choice([0, 20, 50])
    prompt = [*shared, *(rng.randrange(100, EOS_ID) for _ in range(rng.randint(1, 60)))]
    maybe = rng.random
    sampling = SamplingParams(
        temperature=rng.choice([None, 0.0, 0.7]),
        top_p=0.9 if maybe() < 0.3 else None,
        top_k=5 if maybe() < 0.2 else None,
        min_p=0.1 if maybe() < 0.1 else None,
        typical_p=0.8 if maybe() < 0.1 else None,
        repetition_penalty=1.1 if maybe() < 0.1 else None,
        presence_penalty=0.5 if maybe() < 0.1 else None,
        frequency_penalty=0.5 if maybe() < 0.1 else None,
        seed=rng.randrange(2**64),
        logit_bias={200: 1.5} if maybe() < 0.1 else {},
        bad_words=[[300, 301], [302]] if maybe() < 0.1 else (),
        allowed_token_ids=range(400, 440) if maybe() < 0.1 else (),
    )
    scored = maybe() < 0.25
    max_tokens = rng.choice([1, 8, 40, 90])
    return GenerationRequest(
        prompt,
        sampling,
        max_tokens=max_tokens,
        min_tokens=max_tokens // 2 if maybe() < 0.1 else None,
        stop_token_ids=[500, 501] if maybe() < 0.1 else (),
        ignore_eos=maybe() < 0.3,
        logprobs=rng.randrange(4) if scored else None,
        prompt_logprobs=rng.randrange(3) if maybe() < 0.1 else None,
        logprob_token_ids=[150, 160] if scored and maybe() < 0.3 else (),
        objective=Objective(
            priority=rng.choice([None, None, -1, 5]),
            deadline_s=rng.uniform(0.5, 20.0) if maybe() < 0.05 else None,
        ),
        session=rng.choice(["", "a", "b"]),
    )
