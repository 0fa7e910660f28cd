"""A fleet of simulated devices and links on virtual time, and when each token came."""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import random
from collections.abc import Coroutine, Iterable, Sequence
from dataclasses import dataclass, field

from penstock_client import Fleet
from penstock_client.rpc.generation_stream import GenerationStream
from penstock_proto.types import Attempt, GenerationRequest, PixelSource, SamplingParams
from penstock_shard.config import ShardConfig
from penstock_shard.server.kv.transfers import BlockTransfers
from simulation.channel import MemoryConnector
from simulation.devices import Device, Links
from simulation.engine import ORDINARY_IDS, EngineKind
from simulation.expected import expected
from simulation.network import Network
from simulation.shard import SimulatedShard
from simulation.virtual_time import Process, VirtualLoop

_BLOCK_TOKENS = 16
# Of a record of the fake runner's, with its header; and how many copies the memory of a host holds:
# 64 GiB of such blocks as Llama-3.1-8B has.
_RECORD_BYTES = 320
_HOST_BLOCKS = 32_768
# What is left of 80 GB beside the weights.
_NUM_BLOCKS = 25_000
_POLL_S = 0.001


@dataclass
class Timeline:
    """The times in seconds when a request was sent and when each of its tokens came."""

    request: GenerationRequest
    sent_s: float
    token_ids: list[int] = field(default_factory=list)
    times_s: list[float] = field(default_factory=list)
    reading: asyncio.Task[None] | None = None

    async def over(self) -> None:
        """Wait for the last token. Raises the error that the request failed with."""
        assert self.reading is not None
        await self.reading

    @property
    def first_token_s(self) -> float:
        return self.times_s[0] - self.sent_s

    def gaps_s(self, since_s: float = 0.0, until_s: float = float("inf")) -> list[float]:
        """Return the seconds from the token before to each token that came in this time."""
        return [
            later - before
            for before, later in itertools.pairwise(self.times_s)
            if since_s <= later < until_s
        ]

    def longest_gap_s(self, since_s: float) -> float:
        """Return the most seconds between a token and the next, for tokens that came since."""
        return max(self.gaps_s(since_s))


class DeviceFleet:
    """Shards of these roles, each a device with links to all others, and a client's library."""

    def __init__(
        self,
        loop: VirtualLoop,
        roles: Sequence[str],
        *,
        device: Device,
        gbit_per_s: float,
        moves_blocks: bool = True,
        policy: str = "least-load",
        max_prefill_tokens: int = 1024,
    ) -> None:
        self._loop = loop
        self._readings: list[asyncio.Task[None]] = []
        self.network = Network(loop, random.Random(0), window_bytes=2**20)
        self.links = Links(gbit_per_s, device.token_bytes * _BLOCK_TOKENS)
        self.kind = EngineKind(
            step_s=1.0,
            num_blocks=_NUM_BLOCKS,
            max_num_seqs=256,
            max_num_batched_tokens=2048,
            max_prefill_tokens=max_prefill_tokens,
            host_bytes=_HOST_BLOCKS * _RECORD_BYTES if moves_blocks else 0,
            has_peers=moves_blocks,
            device=device,
            max_model_len=131_072,
        )
        peers = ("peers:1",) if moves_blocks else ()
        self.shards = [
            SimulatedShard(
                loop,
                self.network,
                f"127.0.0.{number}:1",
                ShardConfig(kv_peers=peers, role=role, drain_timeout_s=120.0),
                dataclasses.replace(self.kind, prompts_first=role == "prefill"),
                self._transfers_at,
                self.links,
            )
            for number, role in enumerate(roles, 1)
        ]
        self.router = Process(loop, "router")
        self.fleet = self.router.context.run(self._make_fleet, policy)

    def _transfers_at(self, address: str) -> BlockTransfers | None:
        return next((s.transfers for s in self.shards if s.address == address), None)

    def _make_fleet(self, policy: str) -> Fleet:
        return Fleet(
            [shard.address for shard in self.shards],
            connector=MemoryConnector(self.network),
            policy=policy,
            clock=self._loop.time,
        )

    async def start(self, *numbers: int) -> None:
        """Start these shards, or all if none is named, and wait until they serve."""
        numbers = numbers or tuple(range(len(self.shards)))
        for number in numbers:
            self.shards[number].start()
        addresses = {self.shards[number].address for number in numbers}
        while not addresses <= {state.address for state in self.fleet.shards if state.ready}:
            await asyncio.sleep(_POLL_S)

    def send(
        self, prompt: Sequence[int], max_tokens: int, *, only_at: int | None = None
    ) -> Timeline:
        """Send a request to the fleet, or to one of its shards only."""
        shard = "" if only_at is None else self.shards[only_at].address
        return self.submit(request_of(prompt, max_tokens, shard=shard))

    def submit(self, request: GenerationRequest, pixels: PixelSource | None = None) -> Timeline:
        """Send a request to the fleet, perhaps with images."""
        timeline = Timeline(request, self._loop.time())
        stream = self.router.context.run(self.fleet.submit, request, pixels)
        return self._follow(timeline, self._read(stream, timeline))

    def send_from(self, source: int, target: int, prompt: Sequence[int]) -> Timeline:
        """Send a shard a request for one token. `source` may have KV blocks of the prompt."""
        request = request_of(prompt, 1)
        timeline = Timeline(request, self._loop.time())

        async def ask() -> None:
            (state,) = [s for s in self.fleet.shards if s.address == self.shards[target].address]
            stream = GenerationStream(f"move-{timeline.sent_s}", 0, 0, state.client.detach)
            state.client.attach(stream, request, Attempt(0, kv_source=self.shards[source].address))
            await self._read(stream, timeline)

        return self._follow(timeline, ask())

    def _follow(self, timeline: Timeline, reading: Coroutine[None, None, None]) -> Timeline:
        timeline.reading = self.router.run(reading)
        self._readings.append(timeline.reading)
        return timeline

    async def _read(self, stream: GenerationStream, timeline: Timeline) -> None:
        async for output in stream:
            timeline.token_ids += output.token_ids
            timeline.times_s += [self._loop.time()] * len(output.token_ids)

    @property
    def now_s(self) -> float:
        return self._loop.time()

    async def wait_for_tokens(self, timelines: Iterable[Timeline], count: int) -> None:
        """Wait until each timeline has `count` tokens."""
        for timeline in timelines:
            while len(timeline.times_s) < count:
                await asyncio.sleep(_POLL_S)

    async def wait_until_left(self, number: int) -> None:
        """Wait until no request is live on a shard."""
        while self.shards[number].num_live:
            await asyncio.sleep(_POLL_S)

    def check_answers(self, timelines: Iterable[Timeline]) -> None:
        """Check that the tokens so far are those that undisturbed runs give."""
        config = self.shards[0].config
        for timeline in timelines:
            count = len(timeline.token_ids)
            request = dataclasses.replace(timeline.request, max_tokens=count)
            assert timeline.token_ids == expected(request, self.kind, config).token_ids

    async def close(self) -> None:
        """End all streams, and leave nothing that would go on."""
        for reading in self._readings:
            reading.cancel()
        await self.router.run(self.fleet.close())


def request_of(prompt: Sequence[int], max_tokens: int, *, shard: str = "") -> GenerationRequest:
    """Return a request with a fixed seed."""
    sampling = SamplingParams(temperature=1.0, seed=7)
    return GenerationRequest(prompt, sampling, max_tokens, shard=shard)


def prompts(rng: random.Random, count: int, num_tokens: int) -> list[list[int]]:
    """Return `count` random prompts, which share no beginning."""
    return [rng.choices(ORDINARY_IDS, k=num_tokens) for _ in range(count)]
