"""A fleet follows what its shards hold where its policy uses that, and goes on without."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import grpc
import pytest

from penstock_client import Fleet, NoShardAvailable
from penstock_client.fleet import piece_watch
from penstock_client.fleet.shard_state import ShardState
from penstock_proto import SCHEMA_REVISION
from penstock_proto import shard_pb2 as pb
from penstock_proto.prefix_hash import Tier
from penstock_proto.shard_pb2_grpc import ShardServicer, add_ShardServicer_to_server


class _Older(ShardServicer):
    """A shard of a release that does not tell what it holds."""

    def __init__(self) -> None:
        self.instance_id = "engine"
        self.num_calls = 0

    async def GetInfo(self, request, context):
        return pb.InfoResponse(
            schema_revision=SCHEMA_REVISION,
            min_schema_revision=1,
            instance_id=self.instance_id,
            model="model",
            weights_hash="w",
            tokenizer_hash="t",
            max_model_len=100,
            vocab_size=1000,
            block_size=16,
        )

    async def WatchLoad(self, request, context):
        while True:
            yield pb.LoadReport(instance_id=self.instance_id, serving=True, num_blocks=100)
            await asyncio.sleep(0.02)

    async def WatchBlocks(self, request, context):
        self.num_calls += 1
        # As a server does that does not know the method.
        await context.abort(grpc.StatusCode.UNIMPLEMENTED, "Method not found!")
        yield


class _Scripted(_Older):
    """Tells what is put into `reports`; None ends the call."""

    def __init__(self) -> None:
        super().__init__()
        self.reports: asyncio.Queue[pb.BlocksReport | None] = asyncio.Queue()

    async def WatchBlocks(self, request, context):
        self.num_calls += 1
        while (report := await self.reports.get()) is not None:
            yield report

    def tell(self, *, begins: bool = False, ends: bool = False, **names: list[int]) -> None:
        report = pb.BlocksReport(
            instance_id=self.instance_id, snapshot_begins=begins, snapshot_ends=ends
        )
        for tier, given in names.items():
            getattr(report, tier).extend(given)
        self.reports.put_nowait(report)


@asynccontextmanager
async def _fleet(
    shard: _Older, policy: str = "prefix-affinity"
) -> AsyncIterator[tuple[Fleet, ShardState]]:
    server = grpc.aio.server()
    add_ShardServicer_to_server(shard, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        async with Fleet([f"127.0.0.1:{port}"], policy=policy) as fleet:
            await fleet.wait_ready(5)
            yield fleet, fleet.shards[0]
    finally:
        await server.stop(0)


async def _until(is_so: Callable[[], bool]) -> None:
    async with asyncio.timeout(5):
        while not is_so():
            await asyncio.sleep(0.01)


def _tiers(state: ShardState, *names: int) -> list[int]:
    return [state.candidate().pieces.told.tier(name) for name in names]


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(piece_watch, "_RETRY_S", 0.01)


async def test_a_snapshot_and_changes_reach_the_policy() -> None:
    shard = _Scripted()
    async with _fleet(shard) as (_, state):
        shard.tell(begins=True, device=[16, 32], host=[48])
        shard.tell(ends=True, disk=[64])
        await _until(lambda: len(state.pieces.told) == 4)
        assert _tiers(state, 16, 48, 64, 80) == [Tier.DEVICE, Tier.HOST, Tier.DISK, Tier.GONE]
        shard.tell(host=[16], gone=[32], device=[80])
        await _until(lambda: _tiers(state, 80) == [Tier.DEVICE])
        assert _tiers(state, 16, 32, 48) == [Tier.HOST, Tier.GONE, Tier.HOST]


async def test_what_was_known_is_used_until_a_snapshot_is_complete() -> None:
    shard = _Scripted()
    async with _fleet(shard) as (_, state):
        shard.tell(begins=True, ends=True, device=[16])
        await _until(lambda: len(state.pieces.told) == 1)
        shard.reports.put_nowait(None)
        await _until(lambda: shard.num_calls == 2)
        shard.tell(begins=True, device=[32])
        await asyncio.sleep(0.05)
        assert _tiers(state, 16, 32) == [Tier.DEVICE, Tier.GONE]
        shard.tell(ends=True)
        await _until(lambda: _tiers(state, 32) == [Tier.DEVICE])
        assert _tiers(state, 16) == [Tier.GONE]


async def test_an_engine_that_starts_anew_holds_nothing_of_the_one_before() -> None:
    shard = _Scripted()
    async with _fleet(shard) as (_, state):
        shard.tell(begins=True, ends=True, device=[16])
        await _until(lambda: len(state.pieces.told) == 1)
        state.pieces.note_sent([96])
        shard.instance_id = "another"
        # Known by its load reports first.
        await _until(lambda: state.pieces.instance_id == "another")
        assert _tiers(state, 16) == [Tier.GONE]
        assert list(state.pieces.runs([96])) == []
        shard.tell(begins=True, ends=True, device=[32])
        await _until(lambda: _tiers(state, 32) == [Tier.DEVICE])


async def test_a_shard_that_does_not_tell_serves_all_the_same(
    caplog: pytest.LogCaptureFixture,
) -> None:
    shard = _Older()
    async with _fleet(shard) as (_, state):
        await _until(lambda: shard.num_calls == 1)
        await asyncio.sleep(0.1)
        # It is not asked again and again.
        assert shard.num_calls == 1
        assert state.ready
        assert len(state.pieces.told) == 0
    assert not [record for record in caplog.records if record.levelname == "ERROR"]


async def test_silence_means_nothing() -> None:
    shard = _Scripted()
    async with _fleet(shard) as (_, state):
        await _until(lambda: shard.num_calls == 1)
        await asyncio.sleep(0.2)
        assert state.ready
        assert shard.num_calls == 1


@pytest.mark.parametrize("policy", ["least-load", "round-robin", "session"])
async def test_a_policy_that_does_not_use_it_asks_no_shard(policy: str) -> None:
    shard = _Scripted()
    async with _fleet(shard, policy):
        await asyncio.sleep(0.1)
        assert shard.num_calls == 0


async def test_who_leaves_the_fleet_is_followed_no_more() -> None:
    shard = _Scripted()
    async with _fleet(shard) as (fleet, state):
        await _until(lambda: shard.num_calls == 1)
        fleet.remove(state.address)
        await _until(lambda: not fleet.shards)
        before = shard.num_calls
        await asyncio.sleep(0.1)
        assert shard.num_calls == before
        with pytest.raises(NoShardAvailable):
            await fleet.wait_ready(0.01)
