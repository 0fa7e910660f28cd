"""The metrics that Prometheus gets: all of them, and the event loop never waits long for them."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path

import pytest
from prometheus_client import Counter, generate_latest
from prometheus_client.core import CounterMetricFamily, Metric
from support.router_doubles import INFO, FakeFleet, FakeShard

from penstock_proto.facts import LoadReport
from penstock_router.observe import exposition
from penstock_router.observe.exposition import Exposition
from penstock_router.observe.fleet_metrics import FleetCollector
from penstock_router.observe.metrics import Metrics


def many_series(count: int) -> Metrics:
    metrics = Metrics()
    counter = Counter("many", "Of a test.", ("number",), registry=metrics.registry)
    for number in range(count):
        counter.labels(str(number)).inc(number)
    return metrics


async def test_the_pieces_are_the_whole() -> None:
    metrics = many_series(1000)
    assert await Exposition(metrics).text() == generate_latest(metrics.registry)


async def test_a_thousand_series_are_written_in_many_turns_of_the_event_loop(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    turns = 0

    async def count_turns() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    # Each piece takes longer than that, on whatever machine.
    monkeypatch.setattr(exposition, "_TURN_S", 0.0)
    counting = asyncio.create_task(count_turns())
    await Exposition(many_series(1000)).text()
    counting.cancel()
    assert turns >= 1000 / exposition._SAMPLES_A_PIECE


async def test_what_alerts_take_an_increase_of_is_there_before_the_first() -> None:
    lines = (await Exposition(Metrics()).text()).decode().splitlines()
    counted = {
        *("store_failures_total", "audit_dropped_total"),
        'fleet_events_total{event="verified",reason="different"}',
    }
    assert {f"penstock_router_{name} 0.0" for name in counted} <= set(lines)


async def test_a_shard_that_is_gone_has_a_state_and_no_numbers() -> None:
    here = FakeShard(
        address="here:1", load=LoadReport(running=3, num_blocks=8, referenced_blocks=2)
    )
    gone = FakeShard(address="gone:1", ready=False, info=None, connected=False)
    fleet = FakeFleet({}, members=[here, gone])
    text = (await Exposition(Metrics(), FleetCollector(fleet, dict)).text()).decode()
    labels = f'model="{INFO.model}",shard="here:1"'
    assert f"penstock_router_shard_running{{{labels}}} 3.0" in text
    assert f"penstock_router_shard_kv_used_ratio{{{labels}}} 0.25" in text
    assert f'penstock_router_shard_state{{{labels},state="serving"}} 1.0' in text
    assert 'penstock_router_shard_state{model="",shard="gone:1",state="gone"} 1.0' in text
    assert "penstock_router_shards_serving 1.0" in text
    assert "penstock_router_shards 2.0" in text
    assert text.count("gone:1") == 1
    size = 'block_size="16",blocks="100",dtype="float32"'
    line = f'model="{INFO.model}",sequences="",shard="here:1",tokens="1600"'
    assert f"shard_kv_cache_info{{{size},{line}}} 1.0" in text


async def test_files_of_several_workers_are_read_once_for_all_who_ask_and_again_when_old(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(exposition.MULTIPROCESS_DIR, "/nowhere")
    reads = 0

    def merge() -> list[Metric]:
        nonlocal reads
        reads += 1
        assert threading.current_thread() is not threading.main_thread()
        return [CounterMetricFamily("read", "Of a test.", value=reads)]

    monkeypatch.setattr(exposition, "_merge", merge)
    shown = Exposition(Metrics())
    first, *others = (asyncio.create_task(shown.text()) for _ in range(5))
    await asyncio.sleep(0)
    # Who leaves does not take it away from the others.
    first.cancel()
    for text in [*await asyncio.gather(*others), await shown.text()]:
        assert b"read_total 1.0" in text
    monkeypatch.setattr(shown, "_read_again_at_s", 0.0)
    assert b"read_total 2.0" in await shown.text()


async def test_a_reading_that_fails_is_tried_again(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv(exposition.MULTIPROCESS_DIR, str(tmp_path / "none"))
    shown = Exposition(Metrics())
    with pytest.raises(ValueError, match="PROMETHEUS_MULTIPROC_DIR"):
        await shown.text()
    monkeypatch.setenv(exposition.MULTIPROCESS_DIR, str(tmp_path))
    monkeypatch.setattr(shown, "_read_again_at_s", 0.0)
    assert await shown.text() == b""
