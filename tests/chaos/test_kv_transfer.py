"""KV blocks of a real model that go from one shard to another, over a wire that harms them."""

from __future__ import annotations

import os
import random
import urllib.request
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

import grpc
import pytest
from support.budget import budget, seeded
from support.chaos import Proxy, Trouble, proxies
from support.processes import Shard, free_port, running

from penstock_client import GenerationRequest, SamplingParams
from penstock_client.rpc import proto_codec
from penstock_client.types import Attempt
from penstock_proto.shard_pb2_grpc import ShardStub

_KEY = "what clients do not know"
_SMALL = (
    *("--runner", "model", "--device", "cpu", "--threads", "1", "--kv-memory", "64M"),
    *("--kv-host-bytes", "64M"),
)
_LENGTH = 400
_ROUNDS = budget(6, 200)


@dataclass
class Pair:
    """Two shards, the second of which fetches from the first through proxies: each is a peer, from
    which nothing is fetched for a while after it did harm.
    """

    first: Shard
    second: Shard
    metrics_port: int
    proxy_ports: list[int]

    def count(self, name: str) -> int:
        """A counter of the second."""
        url = f"http://127.0.0.1:{self.metrics_port}/metrics"
        with urllib.request.urlopen(url, timeout=10) as answer:
            for line in answer.read().decode().splitlines():
                if line.startswith(f"penstock_shard_kv_{name}_blocks_total "):
                    return int(float(line.split()[1]))
        raise AssertionError(name)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    folder = tmp_path_factory.mktemp("shards")
    metrics_port = free_port()
    proxy_ports = [free_port() for _ in range(_ROUNDS + 1)]
    peers = [f"127.0.0.1:{port}" for port in proxy_ports]
    flags = (*_SMALL, "--kv-peers", *peers)
    metrics = ("--metrics-port", str(metrics_port))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PENSTOCK_KV_PEER_KEY", _KEY)
        first = Shard(folder / "first", *flags)
        # With the same flags, and after it: it takes what the first has kept of its load.
        with running(first), running(second := Shard(folder / "second", *flags, *metrics)):
            yield Pair(first, second, metrics_port, proxy_ports)
            for shard in (first, second):
                assert "Traceback" not in shard.log


@asynccontextmanager
async def _proxy(pair: Pair, trouble: Trouble) -> AsyncIterator[Proxy]:
    proxy = Proxy(pair.first.address, delay_s=0.02)
    await proxy.start(pair.proxy_ports.pop())
    proxy.set(trouble)
    try:
        yield proxy
    finally:
        await proxy.close()


async def _ask(shard: Shard, prompt: list[int], source: str = "") -> tuple[list[int], int]:
    """All tokens, and how many of the prompt's were cached."""
    request = GenerationRequest(prompt, SamplingParams(seed=3), max_tokens=4)
    message = proto_codec.generate_request(request, os.urandom(8).hex(), Attempt(kv_source=source))
    tokens, cached = list[int](), 0
    async with grpc.aio.insecure_channel(shard.address) as channel:
        stub = ShardStub(channel)
        async for response in stub.Generate(iter([message])):
            for output in response.outputs:
                tokens += output.token_ids
                cached = output.cached_tokens or cached
                assert not output.HasField("error"), output.error
    return tokens, cached


def _prompt(rng: random.Random) -> list[int]:
    return [rng.randrange(10, 1000) for _ in range(_LENGTH)]


async def test_a_prefix_that_a_peer_has_is_fetched(pair: Pair) -> None:
    prompt = _prompt(random.Random(1))
    before = pair.count("fetched")
    async with _proxy(pair, Trouble.NONE) as proxy:
        calm, _ = await _ask(pair.first, prompt)
        assert await _ask(pair.second, prompt, proxy.address) == (calm, _LENGTH - 2 * 16)
    assert pair.count("fetched") - before == _LENGTH // 16 - 1


@pytest.mark.timeout(1800)
async def test_whatever_the_wire_does_tokens_are_the_same(pair: Pair) -> None:
    rng = seeded("transfers")
    refused = pair.count("refused")
    for number in range(_ROUNDS):
        trouble = list(Trouble)[number % len(Trouble)]
        prompt = _prompt(rng)
        async with _proxy(pair, trouble) as proxy:
            calm, _ = await _ask(pair.first, prompt)
            tokens, _ = await _ask(pair.second, prompt, proxy.address)
        assert tokens == calm, trouble
    assert pair.count("refused") > refused


async def test_a_shard_that_is_no_peer_is_not_asked(pair: Pair) -> None:
    prompt = _prompt(random.Random(2))
    async with proxies(pair.first.address) as (stranger,):
        calm, _ = await _ask(pair.first, prompt)
        assert await _ask(pair.second, prompt, stranger.address) == (calm, 0)
        assert not stranger.was_reached
