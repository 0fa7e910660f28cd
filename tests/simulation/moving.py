"""Histories in which KV blocks move: long prompts that begin alike, on shards that are peers."""

from __future__ import annotations

import dataclasses
import random

from penstock_proto.types import EmbeddingRequest
from simulation.plan import Arrival, Plan, Trouble, draw

_SHARED = 160
# Troubles after which requests go on elsewhere, most of them while their shard is still there.
_MOVES = ("drain", "drain", "upgrade", "leave", "crash engine", "kill")


def draw_moving(seed: int) -> Plan:
    """Draw a plan as `draw` does, but of exact shards with memory for copies. Requests are moved
    between them often.
    """
    plan, rng = draw(seed), random.Random(seed)
    kind = dataclasses.replace(
        plan.kind,
        is_exact=True,
        has_peers=True,
        host_bytes=rng.choice([32_768, 262_144]),
        num_blocks=max(plan.kind.num_blocks, 64),
    )
    num_shards = max(2, plan.num_shards)
    return dataclasses.replace(
        plan,
        num_shards=num_shards,
        kind=kind,
        next_kind=dataclasses.replace(kind, weights=plan.next_kind.weights),
        config=dataclasses.replace(plan.config, kv_peers=("peers:1",), drain="migrate"),
        policy=rng.choice(["prefix-affinity", "round-robin", "least-load"]),
        arrivals=tuple(
            dataclasses.replace(_longer(rng, arrival), number=number)
            for number, arrival in enumerate(plan.arrivals * 2)
        ),
        troubles=tuple(
            dataclasses.replace(_move(rng, trouble, num_shards), number=number)
            for number, trouble in enumerate(plan.troubles * 2)
        ),
        scenes=(),
    )


def _longer(rng: random.Random, arrival: Arrival) -> Arrival:
    if isinstance(arrival.request, EmbeddingRequest):
        return arrival
    start = [rng.choice((20, 30))] * _SHARED
    prompt = [*start, *arrival.request.prompt_token_ids]
    salt = rng.choice(("", "", "another"))
    request = dataclasses.replace(
        arrival.request, prompt_token_ids=prompt, cache_salt=salt, prompt_logprobs=None
    )
    return dataclasses.replace(arrival, request=request, at_s=rng.uniform(0.0, 4.0))


def _move(rng: random.Random, trouble: Trouble, num_shards: int) -> Trouble:
    """Return the trouble at another time and shard, and half of the time another trouble."""
    what = rng.choice([trouble.what, rng.choice(_MOVES)])
    shard = rng.randrange(num_shards)
    return dataclasses.replace(trouble, what=what, shard=shard, at_s=rng.uniform(0.2, 5.0))
