"""KV blocks are retained at a real shard for requests that have ended, as clients ask."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import re
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest
from support.processes import Router, Shard, free_port, running, wait_until

from penstock_client import Fleet, GenerationRequest, Retain, SamplingParams, ShardClient
from penstock_proto import shard_pb2 as pb

# 128 blocks of 16 tokens, of which half may be retained.
FLAGS = ("--step-ms", "0", "--max-model-len", "1024", "--kv-blocks", "128", "--max-num-seqs", "4")
METRICS_PORT = free_port()


@pytest.fixture(scope="module")
def shard(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shard]:
    port = ("--metrics-port", str(METRICS_PORT))
    shard = Shard(tmp_path_factory.mktemp("shard") / "log", *FLAGS, *port)
    with running(shard):
        yield shard


def request_of(begin: int, num_tokens: int = 400) -> GenerationRequest:
    prompt = [begin + place % 7 for place in range(num_tokens)]
    return GenerationRequest(prompt, SamplingParams(seed=1), max_tokens=2, ignore_eos=True)


async def cached_tokens(fleet: Fleet, request: GenerationRequest, retain_s: float = 0.0) -> int:
    stream = fleet.submit(request)
    cached = 0
    async for output in stream:
        cached = output.cached_tokens or cached
    if retain_s:
        fleet.retain(stream, Retain(retain_s))
    return cached


async def use_all_blocks(fleet: Fleet) -> None:
    for begin in range(200, 360, 20):
        await cached_tokens(fleet, request_of(begin, 900))


async def test_what_a_client_has_retained_is_found_after_others_used_all_blocks(
    shard: Shard,
) -> None:
    async with Fleet([shard.address]) as fleet:
        await fleet.wait_ready(30)
        await cached_tokens(fleet, request_of(10))
        await cached_tokens(fleet, request_of(30), retain_s=60.0)
        await use_all_blocks(fleet)
        assert await cached_tokens(fleet, request_of(10)) == 0
        assert await cached_tokens(fleet, request_of(30)) == 384
        # A hint of a stream whose engine is gone, or that nobody served, is none.
        stream = fleet.submit(request_of(50))
        fleet.retain(stream, Retain(60.0))
        stream.cancel()


async def test_hints_out_of_bounds_are_refused_in_one_line_and_unknown_ids_are_no_error(
    shard: Shard,
) -> None:
    async with ShardClient(shard.address) as client:
        await client.retain(["nobody", ""], Retain(10.0))
        for ids, seconds, words in (
            (["a"], 1e6, "seconds: 1000000.0 is out of bounds; allowed: 0..86400"),
            (["a"], -1.0, "seconds: -1.0 is out of bounds; allowed: 0..86400"),
            (["a"], float("nan"), "seconds: nan is out of bounds; allowed: 0..86400"),
            (["a"] * 1025, 1.0, "request_ids: 1025 ids in one call; at most 1024"),
        ):
            message = pb.RetainRequest(request_ids=ids, seconds=seconds)
            with pytest.raises(grpc.aio.AioRpcError, match="INVALID_ARGUMENT") as refused:
                await client._stub.Retain(message)
            assert words in (refused.value.details() or "")
        late = pb.RetainRequest(request_ids=["a"], seconds=1.0, expected_seconds=-1.0)
        with pytest.raises(grpc.aio.AioRpcError, match="expected_seconds: -1"):
            await client._stub.Retain(late)
        with pytest.raises(grpc.aio.AioRpcError, match="priority: 101 is out of bounds"):
            await client._stub.Retain(pb.RetainRequest(request_ids=["a"], priority=101))
    with pytest.raises(
        ValueError, match=re.escape("seconds: -1.0 is out of bounds; allowed: 0..86400")
    ):
        Retain(-1.0)
    with pytest.raises(ValueError, match="expected_s: nan is out of bounds"):
        Retain(1.0, float("nan"))
    with pytest.raises(ValueError, match="priority: -1 is out of bounds"):
        Retain(1.0, priority=-1)


def retained_blocks() -> float:
    text = metrics_of(f"http://127.0.0.1:{METRICS_PORT}/metrics")
    (line,) = (x for x in text.splitlines() if x.startswith("penstock_shard_kv_retained_blocks "))
    return float(line.split()[1])


async def test_an_idle_engine_lets_go_in_time(shard: Shard) -> None:
    async with Fleet([shard.address]) as fleet:
        await fleet.wait_ready(20)
        before = retained_blocks()
        request = GenerationRequest(list(range(2000, 2100)), max_tokens=4, ignore_eos=True)
        async with fleet.submit(request) as stream:
            async for _ in stream:
                pass
        assert fleet.retain(stream, Retain(2.0))
        for is_due in (lambda: retained_blocks() > before, lambda: retained_blocks() <= before):
            async with asyncio.timeout(10):
                while not is_due():
                    await asyncio.sleep(0.05)


def test_a_hint_in_a_request_has_its_metrics(shard: Shard, tmp_path: Path) -> None:
    router = Router(tmp_path / "log", [shard.address])
    with running(router):
        hint = {"action_type": "retain", "payload": {"ttl_seconds": 60}}
        body = {"prompt": "the fox " * 40, "max_tokens": 2, "kv_hints": {"actions": [hint]}}
        body["model"] = "penstock-toy"
        request = urllib.request.Request(
            f"{router.url}/v1/completions",
            json.dumps(body).encode(),
            {"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=10) as answer:
            assert answer.status == 200
        counted = 'penstock_router_retained_sequences_total{because="hint"} 1.0'
        assert counted in metrics_of(f"{router.url}/metrics")
        wait_until(lambda: retained_blocks() > 0, timeout_s=10, what="blocks are retained")


def metrics_of(url: str) -> str:
    with urllib.request.urlopen(url, timeout=10) as answer:
        return str(answer.read().decode())


async def test_what_the_device_lost_is_loaded_before_the_next_turn_is_likely(
    tmp_path: Path,
) -> None:
    port = free_port()
    few = ("--step-ms", "5", "--max-model-len", "1024", "--kv-blocks", "128", "--max-num-seqs", "4")
    kept = ("--kv-host-bytes", "4M", "--retained-kv-share", "1", "--metrics-port", str(port))
    shard = Shard(tmp_path / "log", *few, *kept)

    def count(name: str) -> int:
        text = metrics_of(f"http://127.0.0.1:{port}/metrics")
        (line,) = (each for each in text.splitlines() if each.startswith(f"penstock_shard_{name} "))
        return int(float(line.split()[1]))

    async def until_more_than(name: str, least: int) -> None:
        async with asyncio.timeout(20):
            while await asyncio.to_thread(count, name) <= least:
                await asyncio.sleep(0.05)

    with running(shard):
        async with Fleet([shard.address]) as fleet:
            await fleet.wait_ready(30)
            stream = fleet.submit(request_of(10))
            async for _ in stream:
                pass
            fleet.retain(stream, Retain(60.0, expected_s=3.0))
            await until_more_than("kv_saved_blocks_total", 24)
            # Together they need all blocks.
            others = [
                dataclasses.replace(request_of(begin, 990), max_tokens=30)
                for begin in (300, 400, 500)
            ]
            await asyncio.gather(*(cached_tokens(fleet, each) for each in others))
            assert count("kv_retained_taken_total") > 10
            assert count("kv_loaded_blocks_total") == 0
            # Nobody asks for anything.
            await until_more_than("kv_loaded_blocks_total", 10)
            loaded = count("kv_loaded_blocks_total")
            assert await cached_tokens(fleet, request_of(10)) == 384
            assert count("kv_loaded_blocks_total") == loaded
