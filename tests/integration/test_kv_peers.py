"""Shards as peers: who may fetch KV blocks, of what, and what a drain makes of it."""

from __future__ import annotations

import asyncio
import dataclasses
import random
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from support.processes import Shard, free_port, running

from penstock_client import (
    Attempt,
    Fleet,
    GenerationRequest,
    InvalidRequest,
    NotServed,
    SamplingParams,
    ShardClient,
    ShardUnavailable,
)
from penstock_proto import shard_pb2 as pb
from penstock_proto.shard_pb2_grpc import KvTransferStub

_CLIENTS, _PEERS = "the key of clients", "the key of peers"
_PROMPT = list(range(1, 161))


def _metric(port: int, name: str) -> int:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
        lines = answer.read().decode().splitlines()
    (line,) = (line for line in lines if line.startswith(f"penstock_shard_{name} "))
    return int(float(line.split()[1]))


@pytest.fixture(scope="module")
def ports() -> list[int]:
    return [free_port() for _ in range(3)]


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory, ports: list[int]) -> Iterator[list[Shard]]:
    """Two, each a peer of the other."""
    folder = tmp_path_factory.mktemp("shards")
    first, second, metrics = ports
    flags = ("--step-ms", "5", "--kv-host-bytes", "4M", "--check-integrity")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PENSTOCK_API_KEY", _CLIENTS)
        patch.setenv("PENSTOCK_KV_PEER_KEY", _PEERS)
        made = [
            Shard(folder / "first", *flags, "--kv-peers", f"localhost:{second}", port=first),
            Shard(
                folder / "second",
                *flags,
                *("--kv-peers", f"localhost:{first}", "--metrics-port", str(metrics)),
                port=second,
            ),
        ]
    with running(*made):
        yield made


async def _fetch(shard: Shard, key: str, request: pb.FetchBlocksRequest) -> list[bytes]:
    async with grpc.aio.insecure_channel(shard.address) as channel:
        stub = KvTransferStub(channel)
        metadata = (("authorization", f"Bearer {key}"),) if key else ()
        return [each.record async for each in stub.FetchBlocks(request, metadata=metadata)]


def _request(**changes: object) -> pb.FetchBlocksRequest:
    fields: dict[str, Any] = {
        "namespace": b"n" * 16,
        "root": b"r" * 16,
        "digests": b"d" * 32,
        "token_ids": range(32),
        **changes,
    }
    return pb.FetchBlocksRequest(**fields)


@pytest.mark.parametrize("key", ["", "another", _CLIENTS])
async def test_who_has_not_the_key_of_peers_gets_no_block(shards: list[Shard], key: str) -> None:
    with pytest.raises(grpc.aio.AioRpcError, match="missing or wrong API key") as refused:
        await _fetch(shards[0], key, _request())
    assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED


async def test_the_key_of_peers_is_none_for_requests(shards: list[Shard]) -> None:
    async with ShardClient(shards[0].address, api_key=_PEERS) as client:
        with pytest.raises(Exception, match="missing or wrong API key"):
            await client.info()


async def test_of_another_namespace_there_are_no_blocks(shards: list[Shard]) -> None:
    assert await _fetch(shards[0], _PEERS, _request()) == []


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"root": b"short"}, "root and digests: hashes have 16 bytes"),
        ({"digests": b"d" * 31}, "root and digests: hashes have 16 bytes"),
        ({"digests": b""}, "token_ids: 32 are not as many for each of 0 blocks"),
        ({"token_ids": range(31)}, "token_ids: 31 are not as many for each of 2 blocks"),
        ({"num_known": 3}, "num_known: 3 is over the 2 blocks"),
    ],
)
async def test_a_request_that_cannot_be_is_refused_by_field(
    shards: list[Shard], changes: dict[str, object], text: str
) -> None:
    with pytest.raises(grpc.aio.AioRpcError, match=text) as refused:
        await _fetch(shards[0], _PEERS, _request(**changes))
    assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shard]:
    shard = Shard(tmp_path_factory.mktemp("alone") / "log")
    with running(shard):
        yield shard


async def test_without_peers_the_service_is_not_there(alone: Shard) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await _fetch(alone, _PEERS, _request())
    assert refused.value.code() is grpc.StatusCode.UNIMPLEMENTED


async def test_blocks_are_fetched_while_their_request_runs_elsewhere(shards: list[Shard]) -> None:
    rng = random.Random(11)
    request = GenerationRequest(
        [rng.randrange(500) for _ in range(300)], SamplingParams(seed=1), max_tokens=60
    )
    there, here = (ShardClient(shard.address, api_key=_CLIENTS) for shard in shards)
    async with there, here:
        async with there.submit(request) as stream:
            first = await anext(stream)
            source = Attempt(kv_source=shards[0].address)
            # All whole blocks but the last, which is computed here too.
            assert await here.prefetch(request, source) == 272
            rest = [token_id async for output in stream for token_id in output.token_ids]
        async with here.submit(request) as stream:
            outputs = [output async for output in stream]
    assert outputs[0].cached_tokens == 272
    assert [id_ for output in outputs for id_ in output.token_ids] == [*first.token_ids, *rest]


async def test_what_cannot_be_fetched_is_no_error(shards: list[Shard]) -> None:
    request = GenerationRequest(list(range(1, 301)), cache_salt="nobody's")
    async with ShardClient(shards[1].address, api_key=_CLIENTS) as client:
        for source in ("", "127.0.0.1:9", shards[0].address):
            assert await client.prefetch(request, Attempt(kv_source=source)) == 0


@pytest.mark.parametrize(
    ("request_", "attempt", "error", "text"),
    [
        (GenerationRequest([1, 10**6]), Attempt(), InvalidRequest, "prompt_token_ids"),
        (GenerationRequest([1], adapter="no"), Attempt(), NotServed, "adapter is not served"),
        (GenerationRequest([1]), Attempt(instance_id="x"), ShardUnavailable, "this is another"),
    ],
)
async def test_a_prefetch_of_what_could_not_run_is_refused_as_that_would_be(
    shards: list[Shard],
    request_: GenerationRequest,
    attempt: Attempt,
    error: type[Exception],
    text: str,
) -> None:
    async with ShardClient(shards[1].address, api_key=_CLIENTS) as client:
        with pytest.raises(error, match=text):
            await client.prefetch(request_, attempt)


async def test_a_shard_without_peers_is_not_told_to_fetch(alone: Shard) -> None:
    async with ShardClient(alone.address) as client:
        assert "prefetch" not in (await client.info()).capabilities
        prompt = GenerationRequest([1] * 200)
        assert await client.prefetch(prompt, Attempt(kv_source="127.0.0.1:1")) == 0


async def test_long_prompts_are_computed_on_one_shard_and_go_on_at_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PENSTOCK_API_KEY", _CLIENTS)
    monkeypatch.setenv("PENSTOCK_KV_PEER_KEY", _PEERS)
    first, second = free_port(), free_port()
    flags = ("--step-ms", "5", "--kv-host-bytes", "4M", "--check-integrity")
    prefill = Shard(
        tmp_path / "prefill",
        *(*flags, "--role", "prefill", "--kv-peers", f"localhost:{second}"),
        port=first,
    )
    decode = Shard(
        tmp_path / "decode",
        *(*flags, "--role", "decode", "--kv-peers", f"localhost:{first}"),
        port=second,
    )
    events: list[tuple[str, str]] = []
    with running(prefill, decode):
        addresses = [prefill.address, decode.address]
        fleet = Fleet(
            addresses, api_key=_CLIENTS, prefill_tokens=200, observe=lambda *e: events.append(e)
        )
        async with fleet:
            while not all(shard.ready for shard in fleet.shards):
                await asyncio.sleep(0.02)
            for length, attempts in ((250, addresses), (100, addresses[1:])):
                prompt = GenerationRequest([5] * length, SamplingParams(seed=2), max_tokens=200)
                async with fleet.submit(prompt) as stream:
                    moved = [id_ async for output in stream for id_ in output.token_ids]
                assert [attempt.shard for attempt in stream.attempts] == attempts
                pinned = dataclasses.replace(prompt, shard=addresses[1], cache_salt="calm")
                assert await _tokens(fleet, pinned) == moved
    assert events.count(("moved", "role")) == 1


async def test_a_drained_shards_blocks_go_where_its_requests_go(
    shards: list[Shard], ports: list[int]
) -> None:
    rng = random.Random(7)
    requests = [
        GenerationRequest(
            [rng.randrange(500) for _ in range(200)], SamplingParams(seed=number), max_tokens=200
        )
        for number in range(4)
    ]
    before = _metric(ports[2], "kv_fetched_blocks_total")
    addresses = [shard.address for shard in shards]
    async with Fleet(addresses, policy="round-robin", api_key=_CLIENTS) as fleet:
        while not all(shard.ready for shard in fleet.shards):
            await asyncio.sleep(0.02)
        running_ = [asyncio.create_task(_tokens(fleet, request)) for request in requests]
        await asyncio.sleep(0.4)
        async with ShardClient(addresses[0], api_key=_CLIENTS) as client:
            async for _ in client.drain(hand_over=True):
                pass
        outputs = await asyncio.gather(*running_)
    # Each moved once its blocks were there.
    assert _metric(ports[2], 'requests_total{outcome="fetched"}') >= 2
    assert _metric(ports[2], "kv_fetched_blocks_total") > before
    async with Fleet(addresses[1:], api_key=_CLIENTS) as fleet:
        assert outputs == [await _tokens(fleet, _salted(request)) for request in requests]


def _salted(request: GenerationRequest) -> GenerationRequest:
    """Return the request with a cache salt, so that none of its KV blocks is cached."""
    return dataclasses.replace(request, cache_salt="calm")


async def _tokens(fleet: Fleet, request: GenerationRequest) -> list[int]:
    async with fleet.submit(request) as stream:
        return [token_id async for output in stream for token_id in output.token_ids]
