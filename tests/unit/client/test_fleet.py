"""A fleet's bookkeeping, without shards behind its addresses."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
from support.fleet_doubles import info as info_of

from penstock_client import (
    Adapter,
    Fleet,
    GenerationRequest,
    InvalidRequest,
    LoadReport,
    NoShardAvailable,
    Patience,
    ShardInfo,
    ShardState,
    ShardUnavailable,
)
from penstock_client.fleet.shard_state import ShardWatch
from penstock_proto.facts import ClassLoad
from penstock_proto.transport import CLOSES_AT_ONCE, CONNECTION_REFUSED


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
    shard.record_sent(500, 0.0, num_requests=3)
    assert shard.sent
    shard.update_load(LoadReport(running=3))
    assert not shard.sent
    assert shard.load.running == 3
    await shard.client.close()


async def test_a_shard_is_seen_alike_by_all_classes_between_two_that_it_tells_of() -> None:
    shard = ShardState("127.0.0.1:1")
    shard.info = info_of("127.0.0.1:1", schema_revision=15)
    classes = (ClassLoad(0, 1, 0, 100), ClassLoad(5, 2, 7, 9000))
    shard.update_load(LoadReport(serving=True, classes=classes))
    seen = {priority: shard.candidate(priority) for priority in range(-3, 1000)}
    assert len({id(each) for each in seen.values()}) == 3
    assert [seen[priority].uncached_tokens for priority in (-1, 0, 4, 5, 999)] == [
        *(0, 100, 100, 9100, 9100)
    ]
    # What was sent since is there at once.
    shard.record_sent(50, 0.0, priority=3)
    assert [shard.candidate(priority).uncached_tokens for priority in (2, 3)] == [100, 150]
    await shard.client.close()


@pytest.mark.parametrize(("revision", "urgent_tokens"), [(14, 700), (15, 0)])
async def test_the_load_of_an_older_shard_counts_for_every_class(
    revision: int, urgent_tokens: int
) -> None:
    shard = ShardState("127.0.0.1:1")
    shard.info = info_of("127.0.0.1:1", schema_revision=revision)
    shard.update_load(LoadReport(serving=True, waiting=2, queued_prompt_tokens=700))
    assert shard.candidate(0).uncached_tokens == 700
    assert shard.candidate(-1).uncached_tokens == urgent_tokens
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


async def test_an_adapter_that_is_unloaded_is_not_expected_from_shards_that_are_away() -> None:
    @dataclass(frozen=True)
    class Info:
        model: str
        instance_id: str
        adapters: dict[str, Adapter]

    def told(shard: ShardState, *names: str, model: str = "m", instance_id: str = "first") -> None:
        info = Info(model, instance_id, {name: Adapter(name, "hash", "", 4) for name in names})
        fleet._learned(shard, info)  # type: ignore[arg-type]

    async with Fleet([f"127.0.0.1:{port}" for port in range(1, 5)]) as fleet:
        up, away, other, stranger = fleet.shards
        for shard in (up, away, other):
            told(shard, "x", "y")
        told(stranger, "x", "y", model="another")
        away.info = stranger.info = None
        told(up, "y")
        both = ["x", "y"]
        for shard, names in ((up, ["y"]), (away, ["y"]), (other, both), (stranger, both)):
            assert shard.last_info is not None
            assert list(shard.last_info.adapters) == names
        # An engine that begins without it was not told to unload it.
        told(up, instance_id="second")
        assert away.last_info is not None
        assert "y" in away.last_info.adapters


async def test_when_adapters_change_another_engine_is_left_for_the_watch_to_learn_of(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def told(instance_id: str, *names: str) -> Any:
        adapters = {name: Adapter(name, "hash", "", 4) for name in names}
        return SimpleNamespace(model="m", instance_id=instance_id, adapters=adapters)

    async def change(_: ShardState) -> None:
        pass

    async with Fleet(["127.0.0.1:1"]) as fleet:
        (shard,) = fleet.shards
        for said, learned in [("first", True), ("second", False), ("first", True)]:
            shard.info = before = told("first")
            after = told(said, "x")

            async def info(after: ShardInfo = after) -> ShardInfo:
                return after

            monkeypatch.setattr(shard.client, "info", info)
            await fleet._change_at(shard, change)
            assert shard.info is (after if learned else before)


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


@pytest.mark.parametrize(
    ("api_key", "address", "warned"),
    [
        *((None, "10.0.0.1:1", 0), ("key", "127.0.0.1:1", 0), ("key", "localhost:1", 0)),
        *(("key", "10.0.0.1:1", 1), ("key", "shard.example:1", 1)),
    ],
)
async def test_a_key_that_leaves_the_machine_in_the_clear_is_warned_of_once_with_the_remedy(
    api_key: str | None,
    address: str,
    warned: int,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def connects_to_nobody(self: ShardWatch) -> None:
        await asyncio.Event().wait()

    monkeypatch.setattr(ShardWatch, "_watch", connects_to_nobody)
    async with Fleet([address, "127.0.0.1:2"], api_key=api_key) as fleet:
        fleet.add("10.0.0.2:2" if warned else "127.0.0.1:3")
    warnings = [record.message for record in caplog.records if "unencrypted" in record.message]
    assert len(warnings) == warned
    assert all(address in text and "--shard-tls-ca-file" in text for text in warnings)


async def test_a_shard_whose_watch_meets_an_error_nobody_foresaw_is_down_until_it_is_watched_again(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    instances = iter(["first", "odd", "third"])

    async def reports() -> AsyncGenerator[LoadReport, None]:
        while True:
            yield LoadReport(serving=True, instance_id=next(instances))

    async def info(timeout_s: float) -> Any:
        return SimpleNamespace(instance_id="", adapters={})

    def learn(shard: ShardState, info: Any) -> None:
        info.instance_id = shard.load.instance_id
        if shard.ready:
            raise ZeroDivisionError("nobody foresaw this")
        shard.update_info(info)

    seen: list[tuple[bool, str]] = []
    changed = asyncio.Semaphore(0)

    def note(shard: ShardState) -> None:
        seen.append((shard.ready, shard.problem))
        changed.release()

    shard = ShardState("127.0.0.1:1")
    monkeypatch.setattr(shard.client, "watch_load", reports)
    monkeypatch.setattr(shard.client, "info", info)
    watch = ShardWatch(shard, 5.0, learn, note)
    async with asyncio.timeout(10):
        for _ in range(3):
            await changed.acquire()
    await watch.close()
    assert seen[:3] == [(True, ""), (False, "watching it failed, as the log says"), (True, "")]
    assert "the watch of shard 127.0.0.1:1 failed" in caplog.text
    assert "nobody foresaw this" in caplog.text


async def test_a_source_of_addresses_that_fails_is_followed_again(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Source:
        asked = 0

        async def addresses(self) -> AsyncGenerator[frozenset[str], None]:
            self.asked += 1
            yield frozenset({f"127.0.0.1:{self.asked}"})
            if self.asked == 1:
                raise ZeroDivisionError("nobody foresaw this")
            await asyncio.Event().wait()

    async with Fleet(Source()) as fleet, asyncio.timeout(10):
        while [shard.address for shard in fleet.shards] != ["127.0.0.1:2"]:
            await asyncio.sleep(0.01)
    assert "following the addresses of shards failed" in caplog.text


async def test_a_shard_whose_reports_are_cancelled_from_below_is_watched_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """gRPC cancels a call in this way when its channel is closed; nobody asked the watch to end."""
    asked = asyncio.Semaphore(0)

    async def reports() -> AsyncGenerator[LoadReport, None]:
        asked.release()
        if False:
            yield LoadReport()
        raise asyncio.CancelledError

    shard = ShardState("127.0.0.1:1")
    monkeypatch.setattr(shard.client, "watch_load", reports)
    watch = ShardWatch(shard, 0.1, lambda *_: None, lambda *_: None)
    async with asyncio.timeout(10):
        for _ in range(3):
            await asked.acquire()
    await watch.close()
    assert "closed" in shard.problem


async def test_a_fleet_tells_of_each_change_of_a_shard_and_not_of_one_that_stays_away(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # None: it is not to be reached, or not any more.
    said: asyncio.Queue[LoadReport | None] = asyncio.Queue()

    async def reports() -> AsyncGenerator[LoadReport, None]:
        while (load := await said.get()) is not None:
            yield load

    async def info(timeout_s: float) -> Any:
        return SimpleNamespace(instance_id="one", adapters={})

    async def says(*loads: LoadReport | None) -> None:
        for load in loads:
            said.put_nowait(load)
        while not said.empty():
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.01)

    up = LoadReport(serving=True, instance_id="one")
    async with Fleet(["127.0.0.1:1"]) as fleet, asyncio.timeout(10):
        (shard,) = fleet.shards
        monkeypatch.setattr(shard.client, "watch_load", reports)
        monkeypatch.setattr(shard.client, "info", info)
        changed = [asyncio.create_task(fleet.wait_changed()) for _ in range(2)]
        await says(None, None)
        assert not any(waiting.done() for waiting in changed)
        await says(up)
        await asyncio.gather(*changed)
        assert shard.ready
        waiting = asyncio.create_task(fleet.wait_changed())
        await says(up, up)
        assert not waiting.done()
        await says(None)
        await waiting
        assert not shard.ready
        waiting = asyncio.create_task(fleet.wait_changed())
        await asyncio.sleep(0)
        fleet.remove(shard.address)
        await waiting
        waiting = asyncio.create_task(fleet.wait_changed())
        await asyncio.sleep(0)
        await fleet.close()
        for told in (waiting, asyncio.create_task(fleet.wait_changed())):
            with pytest.raises(NoShardAvailable, match="closed"):
                await told


_REFUSED: tuple[list[LoadReport], str] = ([], CONNECTION_REFUSED)


class _Reported:
    """The load reports of one connection after another; each ends in its error."""

    def __init__(self, *connections: tuple[list[LoadReport], str]) -> None:
        self._left = list(connections)
        self.over = asyncio.Event()

    async def __call__(self) -> AsyncGenerator[LoadReport, None]:
        if not self._left:
            self.over.set()
            await asyncio.Event().wait()
        reports, error = self._left.pop(0)
        for report in reports:
            yield report
        raise ShardUnavailable(error)


async def _watched(
    reported: _Reported, monkeypatch: pytest.MonkeyPatch, last_info: ShardInfo | None = None
) -> ShardState:
    shard = ShardState("127.0.0.1:1")
    shard.last_info = last_info
    monkeypatch.setattr("penstock_client.fleet.shard_state._RETRY_S", 0.0)
    monkeypatch.setattr(shard.client, "watch_load", reported)
    watch = ShardWatch(shard, 10, lambda *_: None, lambda *_: None)
    async with asyncio.timeout(10):
        await reported.over.wait()
    await watch.close()
    return shard


async def test_a_shard_that_ends_after_its_drain_is_no_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    draining = LoadReport(draining=True)
    shard = await _watched(
        _Reported(([draining], "Cancelling all calls"), _REFUSED, _REFUSED), monkeypatch
    )
    assert [(line.levelname, line.getMessage()) for line in caplog.records] == [
        ("INFO", "shard 127.0.0.1:1: shut down after its drain")
    ]
    assert shard.problem == "shut down after its drain"


async def test_what_is_wrong_with_a_shard_that_did_not_drain_is_a_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    await _watched(_Reported(([LoadReport()], "Socket closed"), _REFUSED), monkeypatch)
    drained = ([LoadReport(draining=True)], "Cancelling all calls")
    await _watched(_Reported(drained, ([], "TLS handshake failed: x"), _REFUSED), monkeypatch)
    assert [line.getMessage().partition(": ")[2] for line in caplog.records] == [
        *("Socket closed", CONNECTION_REFUSED, "TLS handshake failed: x", CONNECTION_REFUSED)
    ]


async def test_an_outage_is_logged_by_its_cause_and_not_by_each_symptom(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    symptoms: tuple[tuple[list[LoadReport], str], ...] = (([], "Broken pipe"), _REFUSED) * 5
    shard = await _watched(_Reported(([LoadReport()], "Socket closed"), *symptoms), monkeypatch)
    assert [line.getMessage().partition(": ")[2] for line in caplog.records] == [
        *("Socket closed", CONNECTION_REFUSED)
    ]
    assert shard.problem == CONNECTION_REFUSED


async def test_nobody_guesses_at_the_tls_of_a_shard_that_has_worked(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    closes: tuple[list[LoadReport], str] = ([], CLOSES_AT_ONCE)
    shard = await _watched(_Reported(closes), monkeypatch)
    assert shard.problem == CLOSES_AT_ONCE
    caplog.clear()
    has_worked = info_of("127.0.0.1:1")
    shard = await _watched(_Reported(closes), monkeypatch, has_worked)
    assert shard.problem.startswith("it closes connections at once, which it did not before")
    killed = _Reported(([LoadReport()], "Socket closed"), closes, _REFUSED)
    shard = await _watched(killed, monkeypatch, has_worked)
    assert shard.problem == CONNECTION_REFUSED
    assert "TLS" not in caplog.text
