"""The plan of a history: its requests, and the troubles meanwhile, drawn from a seed.

A plan is plain data, so that a history that fails can be made shorter.
"""

from __future__ import annotations

import dataclasses
import random
from dataclasses import dataclass

from support.engines import CACHE_GROUPS

from penstock_proto.types import (
    Constraint,
    ConstraintKind,
    EmbeddingRequest,
    GenerationRequest,
    Objective,
    SamplingParams,
    ThinkingBudget,
)
from penstock_shard.config import ShardConfig
from simulation.engine import ORDINARY_IDS, POISON_ID, EngineKind
from simulation.scenes import ENDINGS, SCENES, SCENES_OF_SEVERAL

# Names and sources of what every shard has loaded, in half of the histories.
ADAPTERS = (("styled", "a source"), ("plain", "another source"))


@dataclass(frozen=True)
class Arrival:
    """A request, and how its reader behaves."""

    number: int
    at_s: float
    request: GenerationRequest | EmbeddingRequest
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
    # From 0 to 1: how slow or late, in seconds; above 0.7 other weights after a crash, and a hang
    # before a step.
    amount: float = 0.0


# What may go wrong, and how often it does beside the others. A new one makes another history of
# every seed.
TROUBLES = {
    "crash engine": 4,
    "hang engine": 2,
    "kill": 3,
    "stop": 2,
    "stop engine": 1,
    "stop router": 1,
    "upgrade": 3,
    "drain": 2,
    "leave": 1,
    "move": 2,
    "no names": 1,
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
    # What engines are after an upgrade.
    next_kind: EngineKind
    config: ShardConfig
    policy: str
    # How much of a call may be written that is not read yet.
    window_bytes: int
    arrivals: tuple[Arrival, ...]
    troubles: tuple[Trouble, ...]
    # Played when all is over, one after the other.
    scenes: tuple[str, ...]

    @property
    def calm_at_s(self) -> float:
        """The time in seconds when the last trouble is over."""
        return max((each.at_s + each.lasts_s for each in self.troubles), default=0.0)


def draw(seed: int, *, has_scenes: bool = True) -> Plan:
    """The plan of a seed; without its scenes it takes half the time."""
    rng = random.Random(seed)
    poisoned = rng.random() < 0.1
    groups = CACHE_GROUPS[seed % len(CACHE_GROUPS)]
    # A state cannot go back behind a rejected draft.
    drafts = [0] if any(group.has_state for group in groups) else [0, 0, 3]
    kind = EngineKind(
        step_s=rng.choice([0.005, 0.02, 0.05]),
        num_blocks=rng.choice([40, 64, 256]),
        max_num_seqs=rng.choice([2, 4, 8]),
        max_num_batched_tokens=rng.choice([16, 64, 256]),
        speculative_tokens=rng.choice(drafts),
        eos_rate=rng.choice([0.0, 0.02]),
        load_s=rng.choice([0.1, 1.0]),
        is_exact=rng.random() < 0.8,
        cache_groups=groups,
        host_bytes=rng.choice([0, 16_384, 262_144]),
        has_peers=rng.random() < 0.7,
    )
    next_kind = dataclasses.replace(
        kind,
        weights=rng.choice(["fake", "fake", "others"]),
        default_temperature=rng.choice([1.0, 0.5]),
        num_blocks=rng.choice([kind.num_blocks, 64]),
        is_exact=kind.is_exact and rng.random() < 0.9,
    )
    has_adapters = rng.random() < 0.5
    config = ShardConfig(
        max_num_seqs=kind.max_num_seqs,
        max_queued_requests=rng.choice([2, 8, 100]),
        stall_timeout_s=rng.choice([1.0, 3.0]),
        drain=rng.choice(["migrate", "migrate", "finish"]),
        drain_timeout_s=5.0,
        check_integrity=True,
        step_ms=kind.step_s * 1000,
        max_restarts=1000,
        loras=ADAPTERS if has_adapters else (),
        kv_peers=("peers:1",) if kind.has_peers and kind.host_bytes else (),
    )
    num_shards = rng.choice([1, 2, 2, 3])
    troubles = tuple(_trouble(rng, number, num_shards) for number in range(rng.randint(1, 5)))
    arrivals = tuple(
        _arrival(rng, number, num_shards, poisoned=poisoned) for number in range(rng.randint(3, 12))
    )
    if not has_adapters:
        arrivals = tuple(_without_adapter(arrival) for arrival in arrivals)
    policy = rng.choice(["least-load", "round-robin", "prefix-affinity", "session"])
    window_bytes = rng.choice([512, 4096, 64 * 1024])
    scenes = _scenes(rng, num_shards) if has_scenes else ()
    return Plan(
        seed, num_shards, kind, next_kind, config, policy, window_bytes, arrivals, troubles, scenes
    )


def _scenes(rng: random.Random, num_shards: int) -> tuple[str, ...]:
    """A few: they take longer than the rest of a history."""
    names = [*SCENES, *(SCENES_OF_SEVERAL if num_shards > 1 else ())]
    return (*rng.sample(names, 2), rng.choice(list(ENDINGS)))


# What nobody is told of for a while.
_SILENT = {"half open", "deaf", "mute"}


def _trouble(rng: random.Random, number: int, num_shards: int) -> Trouble:
    (what,) = rng.choices(list(TROUBLES), weights=list(TROUBLES.values()))
    lengths_s = [0.05, 0.5, 2.0, 5.0, *([15.0] if what in _SILENT else [])]
    return Trouble(
        number,
        at_s=rng.uniform(0.2, 4.0),
        what=what,
        shard=rng.randrange(num_shards),
        lasts_s=rng.choice(lengths_s) * rng.uniform(0.5, 1.5),
        amount=rng.random(),
    )


def _arrival(rng: random.Random, number: int, num_shards: int, *, poisoned: bool) -> Arrival:
    request = _embedding(rng) if rng.random() < 0.07 else _request(rng)
    if poisoned and isinstance(request, GenerationRequest) and rng.random() < 0.2:
        prompt = [*request.prompt_token_ids, POISON_ID]
        request = dataclasses.replace(request, prompt_token_ids=prompt)
    return Arrival(
        number,
        at_s=rng.uniform(0.0, 3.0),
        request=request,
        direct=_direct(rng, request, num_shards),
        leaves_at=rng.randrange(10) if rng.random() < 0.15 else None,
        pause_s=rng.choice([0.0, 0.0, 0.3]),
    )


def _without_adapter(arrival: Arrival) -> Arrival:
    if isinstance(arrival.request, EmbeddingRequest):
        return arrival
    return dataclasses.replace(arrival, request=dataclasses.replace(arrival.request, adapter=""))


def _direct(
    rng: random.Random, request: GenerationRequest | EmbeddingRequest, num_shards: int
) -> int | None:
    shard, chance = rng.randrange(num_shards), rng.random()
    # Who goes to a shard directly draws a seed that is not known here.
    is_seeded = isinstance(request, GenerationRequest) and request.sampling.seed is not None
    return shard if is_seeded and chance < 0.1 else None


def _embedding(rng: random.Random) -> EmbeddingRequest:
    inputs = [_prompt(rng) for _ in range(rng.choice([1, 5, 80]))]
    return EmbeddingRequest(inputs, rng.choice(["last", "mean"]), None, normalize=True)


def _prompt(rng: random.Random) -> list[int]:
    """Draw a prompt. Some prompts begin alike, so that prefixes are shared."""
    shared = [rng.randrange(20, 40)] * rng.choice([0, 20, 50])
    return [*shared, *(rng.choice(ORDINARY_IDS) for _ in range(rng.randint(1, 60)))]


def _constraint(rng: random.Random) -> Constraint:
    return rng.choice(
        [
            Constraint(ConstraintKind.REGEX, "[a-z ]{10,60}"),
            Constraint(ConstraintKind.CHOICE, options=("yes, of course", "no, never")),
            Constraint(
                ConstraintKind.JSON_SCHEMA, '{"type": "array", "items": {"type": "integer"}}'
            ),
        ]
    )


def _request(rng: random.Random) -> GenerationRequest:
    maybe = rng.random
    constraint = _constraint(rng) if maybe() < 0.08 else None
    free = constraint is None
    sampling = SamplingParams(
        temperature=rng.choice([None, 0.0, 0.7]),
        top_p=0.9 if maybe() < 0.3 else None,
        top_k=5 if maybe() < 0.2 else None,
        min_p=0.1 if maybe() < 0.1 else None,
        typical_p=0.8 if maybe() < 0.1 else None,
        repetition_penalty=1.1 if maybe() < 0.1 else None,
        presence_penalty=0.5 if maybe() < 0.1 else None,
        frequency_penalty=0.5 if maybe() < 0.1 else None,
        seed=rng.randrange(2**64) if maybe() < 0.9 else None,
        logit_bias={200: 1.5} if maybe() < 0.1 else {},
        bad_words=[[300, 301], [302]] if free and maybe() < 0.1 else (),
        allowed_token_ids=range(400, 440) if free and maybe() < 0.1 else (),
    )
    scored = maybe() < 0.25
    max_tokens = rng.choice([1, 8, 40, 90])
    return GenerationRequest(
        _prompt(rng),
        sampling,
        max_tokens=max_tokens,
        min_tokens=max_tokens // 2 if free and maybe() < 0.1 else None,
        stop_token_ids=[500, 501] if maybe() < 0.1 else (),
        ignore_eos=maybe() < 0.3,
        logprobs=rng.randrange(4) if scored else None,
        prompt_logprobs=rng.randrange(3) if maybe() < 0.1 else None,
        logprob_token_ids=[150, 160] if scored and maybe() < 0.3 else (),
        objective=Objective(
            priority=rng.choice([None, None, -1, 5]),
            deadline_s=rng.uniform(0.5, 20.0) if maybe() < 0.1 else None,
        ),
        session=rng.choice(["", "a", "b"]),
        constraint=constraint,
        thinking_budget=ThinkingBudget(5, 110, 111, begun=True)
        if free and maybe() < 0.05
        else None,
        adapter="styled" if maybe() < 0.1 else "",
        exact=maybe() < 0.1,
    )
