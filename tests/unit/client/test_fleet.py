"""A fleet's bookkeeping, without shards behind its addresses."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest

from penstock_client import (
    Fleet,
    GenerationRequest,
    InvalidRequest,
    LoadReport,
    NoShardAvailable,
    Patience,
    ShardState,
    ShardUnavailable,
)


@pytest.mark.parametrize("addresses", [[], ["a:1", "a:1"]])
async def test_no_addresses_or_one_twice_is_an_error(addresses: list[str]) -> None:
    with pytest.raises(ValueError, match="address"):
        Fleet(addresses)


async def test_without_a_shard_every_door_says_which_shard_and_why() -> None:
    async with Fleet(["127.0.0.1:1"], patience=Patience(wait_s=0.1)) as fleet:
        with pytest.raises(NoShardAvailable, match=r"127\.0\.0\.1:1"):
            await fleet.wait_ready(0.3)
        with pytest.raises(NoShardAvailable, match=r"127\.0\.0\.1:1"):
            await anext(fleet.submit(GenerationRequest([1])))
        with pytest.raises(NoShardAvailable):
            await fleet.tokenizer_files()


async def test_a_report_settles_what_was_sent_before_it() -> None:
    shard = ShardState("127.0.0.1:1")
    shard.sent_requests, shard.sent_prompt_tokens = 3, 500
    shard.reported(LoadReport(running=3))
    assert (shard.sent_requests, shard.sent_prompt_tokens, shard.load.running) == (0, 0, 3)
    await shard.client.close()


async def test_a_model_that_no_ready_shard_serves_is_named_with_those_that_are(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Info:
        model = "served"
        model_aliases = ("alias",)
        tokenizer_hash = "one"

    async with Fleet(["127.0.0.1:1"]) as fleet:
        (shard,) = fleet.shards
        monkeypatch.setattr(shard, "info", Info())
        monkeypatch.setattr(shard, "load", LoadReport(serving=True))
        assert fleet.info("alias").model == "served"
        with pytest.raises(NoShardAvailable, match="tokenizer"):
            fleet.submit(GenerationRequest([1], tokenizer_hash="two"))
        with pytest.raises(NoShardAvailable, match="'alias' with that tokenizer"):
            await fleet.tokenizer_files("alias", "two")
        with pytest.raises(InvalidRequest, match="'other' is not served; served: served"):
            fleet.submit(GenerationRequest([1], model="other"))


async def test_a_fleet_tells_of_the_model_whose_own_name_it_is_asked_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with Fleet(["127.0.0.1:1", "127.0.0.1:2"]) as fleet:
        for shard, (model, alias) in zip(fleet.shards, [("a", "b"), ("b", "c")], strict=True):
            info = SimpleNamespace(model=model, model_aliases=(alias,), tokenizer_hash="t")
            monkeypatch.setattr(shard, "info", info)
            monkeypatch.setattr(shard, "load", LoadReport(serving=True))
        assert [fleet.info(name).model for name in ("a", "b", "c")] == ["a", "b", "b"]


async def test_a_shard_that_comes_back_while_it_is_seen_off_is_another_and_the_first_is_closed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    address = "127.0.0.1:1"
    async with Fleet([address, "127.0.0.1:2"]) as fleet, asyncio.timeout(10):
        shard = fleet.shards[0]
        may_close, closed = asyncio.Event(), asyncio.Event()
        close = shard.client.close

        async def slow_close() -> None:
            await may_close.wait()
            await close()
            closed.set()

        monkeypatch.setattr(shard.client, "close", slow_close)
        fleet.remove(address)
        while shard in fleet.shards:
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.1)
        fleet.add(address)
        may_close.set()
        await closed.wait()
        (again,) = (other for other in fleet.shards if other.address == address)
        assert again is not shard
        assert not again.leaving


async def test_closing_a_fleet_waits_for_whoever_is_seen_off(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with Fleet(["127.0.0.1:1", "127.0.0.1:2"]) as fleet, asyncio.timeout(10):
        shard = fleet.shards[0]
        closed: list[bool] = []
        close = shard.client.close

        async def slow_close() -> None:
            await asyncio.sleep(0.2)
            await close()
            closed.append(True)

        monkeypatch.setattr(shard.client, "close", slow_close)
        fleet.remove(shard.address)
        while shard in fleet.shards:
            await asyncio.sleep(0.01)
    assert closed == [True]
    with pytest.raises(ShardUnavailable, match="closed"):
        fleet.submit(GenerationRequest([1]))
