"""Shards that do as they are told, and the continuations over them."""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from penstock_client import (
    Attempt,
    ConstraintKind,
    GenerationRequest,
    GenerationStream,
    LoadReport,
    Patience,
    PixelSource,
    PromptImage,
    SamplingParams,
    ShardInfo,
    ShardLimits,
    ShardState,
)
from penstock_client.fleet.failover import Continuations
from penstock_client.fleet.fleet_stream import FleetStream
from penstock_client.load_balancing.policies import make_policy

_instances = itertools.count()
# What every shard of the first revision serves; tests of later fields add them.
FIRST_CAPABILITIES = frozenset(
    (
        *("typical_p", "repetition_penalty", "presence_penalty", "frequency_penalty"),
        *("logit_bias", "bad_words", "allowed_token_ids", "logprob_token_ids", "min_tokens"),
        *("logprobs", "prompt_logprobs", "priority", "time_to_first_token_s", "adapter"),
        *("seconds_between_tokens", "latency_sensitive"),
        *(kind.value for kind in ConstraintKind),
    )
)


def info(address: str, **differences: object) -> ShardInfo:
    facts = ShardInfo(
        address=address,
        schema_revision=2,
        min_schema_revision=1,
        version="1",
        instance_id=f"engine {next(_instances)}",
        model="m",
        model_aliases=(),
        revision="",
        architecture="",
        weights_hash="w",
        tokenizer_hash="t",
        max_model_len=100,
        vocab_size=1000,
        eos_token_ids=(9,),
        default_sampling=SamplingParams(temperature=0.5),
        block_size=16,
        num_blocks=10,
        limits=ShardLimits(8, 512, 8, 1000, 20),
        dtype="",
        kv_dtype="",
        device="",
        attention_backend="",
        capabilities=FIRST_CAPABILITIES,
        batch_invariant=True,
        numerics_fingerprint="f",
        adapters={},
    )
    return dataclasses.replace(facts, **differences)  # type: ignore[arg-type]


@dataclasses.dataclass
class Sent:
    """A request that a shard was sent, with its attempt and its stream."""

    stream: GenerationStream
    request: GenerationRequest
    attempt: Attempt


def as_read(request: GenerationRequest, attempt: Attempt) -> GenerationRequest:
    """The request as a shard reads it: with the attempt's rest of the deadline, and its trace."""
    if attempt.left_s is not None:
        objective = dataclasses.replace(request.objective, deadline_s=attempt.left_s)
        request = dataclasses.replace(request, objective=objective)
    if attempt.traceparent:
        request = dataclasses.replace(request, traceparent=attempt.traceparent)
    return request


class Double:
    """Stands for a shard's client: keeps what it is sent, answers when the test says so."""

    def __init__(self, address: str) -> None:
        self.address = address
        self.sent: list[Sent] = []
        self.detached: list[int] = []
        self.refusal: Exception | None = None
        self.in_flight = 0
        # Digests of images that were put, and the answers that the test gives; None: at once.
        self.puts: list[tuple[str, asyncio.Future[None]]] = []
        # What it was to fetch, and the answers that the test gives.
        self.prefetches: list[tuple[GenerationRequest, Attempt, asyncio.Future[int]]] = []

    def attach(
        self, stream: GenerationStream, request: GenerationRequest, attempt: Attempt
    ) -> None:
        if self.refusal is not None:
            raise self.refusal
        self.sent.append(Sent(stream, as_read(request, attempt), attempt))

    def detach(self, stream: GenerationStream) -> None:
        self.detached.append(stream.attempt)

    async def prefetch(
        self, request: GenerationRequest, attempt: Attempt, *, timeout_s: float
    ) -> int:
        answer: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self.prefetches.append((request, attempt, answer))
        async with asyncio.timeout(timeout_s):
            return await answer

    async def put_image(
        self, image: PromptImage, pixels: bytes | memoryview, *, instance_id: str
    ) -> None:
        answer: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.puts.append((image.sha256, answer))
        await answer

    async def close(self) -> None:
        return


class World:
    """Shards and the continuations over them."""

    def __init__(self, *names: str, patience: Patience, **options: Any) -> None:
        self.shards: dict[str, ShardState] = {}
        self.events: list[tuple[str, str]] = []
        self.ended: list[FleetStream] = []
        self.continuations = Continuations(
            self.shards,
            options.pop("policy", make_policy("least-load")),
            patience,
            lambda *event: self.events.append(event),
            self.ended.append,
            **options,
        )
        for name in names:
            self.add(name)

    def add(self, name: str, **differences: object) -> ShardState:
        shard = ShardState(name)
        shard.client = Double(name)  # type: ignore[assignment]
        shard.update_info(info(name, **differences))
        shard.load = LoadReport(serving=True, num_blocks=10)
        self.shards[name] = shard
        return shard

    def at(self, name: str) -> Double:
        double = self.shards[name].client
        assert isinstance(double, Double)
        return double

    def start(self, pixels: PixelSource | None = None, **fields: object) -> FleetStream:
        request = GenerationRequest([1, 2, 3], max_tokens=20, label="x")
        return self.continuations.start(dataclasses.replace(request, **fields), pixels)  # type: ignore[arg-type]

    def where(self, stream: FleetStream) -> str:
        assert stream.shard is not None
        return stream.shard.address

    def last(self, stream: FleetStream) -> Sent:
        return self.at(self.where(stream)).sent[-1]


Make = Callable[..., World]


@pytest.fixture
async def make() -> AsyncIterator[Make]:
    worlds: list[World] = []

    def world(*names: str, wait_s: float = 5.0, attempts: int = 16, **options: Any) -> World:
        patience = Patience(wait_s=wait_s, attempts=attempts)
        worlds.append(World(*names, patience=patience, **options))
        return worlds[-1]

    yield world
    for each in worlds:
        each.continuations.close()
        await asyncio.sleep(0)


async def settled() -> None:
    for _ in range(5):
        await asyncio.sleep(0)
