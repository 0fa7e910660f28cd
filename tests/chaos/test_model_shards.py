"""A real model on the CPU kernels: KV blocks that go from one shard to another over a wire that
harms them, and streams that outlive their engines, log-probabilities and all.
"""

from __future__ import annotations

import asyncio
import os
import random
import urllib.request
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import grpc
import pytest
from support.budget import budget, seeded
from support.chaos import Proxy, Trouble, proxies
from support.processes import Shard, free_port, running
from support.streams import mixed_request, run_whole

from penstock_client import Fleet, GenerationRequest, SamplingParams
from penstock_proto import codec
from penstock_proto.shard_pb2_grpc import ShardStub
from penstock_proto.types import Attempt

_KEY = "what clients do not know"
_FLAGS = (
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
    pytest.importorskip("torch")
    folder = tmp_path_factory.mktemp("shards")
    metrics_port = free_port()
    proxy_ports = [free_port() for _ in range(_ROUNDS + 1)]
    peers = [f"127.0.0.1:{port}" for port in proxy_ports]
    flags = (*_FLAGS, "--kv-peers", *peers)
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
    """Return the tokens of an answer, and the number of prompt tokens that were cached."""
    request = GenerationRequest(prompt, SamplingParams(seed=3), max_tokens=4)
    message = codec.generate_request(request, os.urandom(8).hex(), Attempt(kv_source=source))
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


# ---- streams that outlive their engines --------------------------------------------------------


async def test_streams_of_a_real_model_outlive_its_engines_bit_for_bit(pair: Pair) -> None:
    await _streams_outlive_engines([pair.first, pair.second])


def _model_flags(name: str, folder: Path) -> tuple[str, ...]:
    from model_maker import make_model, write_tokenizer
    from models.tiny_families import make_family

    if name in ("gemma4_unified", "mamba2", "qwen3_next"):
        # Of weights as others are made states would remember nothing.
        make_family(folder / "model", name)
        write_tokenizer(folder / "model")
    else:
        make_model(folder / "model", name, max_position_embeddings=512)
    return ("--model", str(folder / "model"), "--max-model-len", "512")


# A larger model, one with windows beside all keys, one whose windows have a
# pool of their own, one with chunks, one with latents, one with states, and one of states alone.
_OTHERS = (
    "llama-3m",
    "gemma2",
    "gemma4_unified",
    "llama4",
    "deepseek_v3",
    "qwen3_next",
    "mamba2",
)


@pytest.mark.soak
@pytest.mark.parametrize("model", _OTHERS)
async def test_streams_of_other_models_outlive_their_engines_bit_for_bit(
    tmp_path: Path, model: str
) -> None:
    flags = (*_model_flags(model, tmp_path), "--threads", "1")
    # One after the other: the second takes what the first has kept of its load.
    first = Shard(tmp_path / "first", *flags)
    with running(first), running(second := Shard(tmp_path / "second", *flags)):
        await _streams_outlive_engines([first, second])


async def _streams_outlive_engines(shards: Sequence[Shard]) -> None:
    rng = seeded("streams_of_a_real_model")
    async with Fleet([shard.address for shard in shards]) as fleet:
        for _ in range(budget(1, 30)):
            await _all_ready(fleet)
            info = fleet.info()
            assert info.batch_invariant
            requests = [
                mixed_request(rng, info.vocab_size, max_tokens=80) for _ in range(budget(6, 64))
            ]
            calm = await asyncio.gather(*(run_whole(fleet, request) for request in requests))
            tasks = [asyncio.create_task(run_whole(fleet, request)) for request in requests]
            await asyncio.sleep(rng.uniform(0.05, budget(1, 4) * 0.5))
            rng.choice(shards).engine.kill()
            after = await asyncio.gather(*tasks)
            for request, before, broken in zip(requests, calm, after, strict=True):
                assert broken == before, request


async def _all_ready(fleet: Fleet) -> None:
    async with asyncio.timeout(60):
        while not all(shard.ready for shard in fleet.shards):
            await asyncio.sleep(0.05)
