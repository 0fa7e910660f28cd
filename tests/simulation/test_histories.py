"""Histories of failures on virtual time. Outputs are those of a calm run, whatever fails."""

from __future__ import annotations

import asyncio
import dataclasses
import gc
import logging
import os
import random
import re
import subprocess
import sys
from collections.abc import AsyncGenerator, Iterator
from pathlib import Path

import pytest
from support.budget import budget, seeded

from penstock_client.fleet.fleet_stream import FleetStream
from penstock_client.fleet.shard_state import ShardState, ShardWatch
from penstock_proto.facts import LoadReport
from penstock_proto.types import GenerationRequest, SamplingParams
from penstock_shard.engine import pending_fetches
from simulation import virtual_time
from simulation.channel import MemoryConnector
from simulation.history import Report, run
from simulation.moving import draw_moving
from simulation.network import Network
from simulation.peers import SEEN
from simulation.plan import TROUBLES, Trouble, draw
from simulation.shorten import shorten
from simulation.virtual_time import Process, VirtualLoop

_TESTS = Path(__file__).parents[1]


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    """No logs, which failures write by the thousand, and no garbage collection, which pauses at any
    time.
    """
    logging.disable()
    gc.disable()
    yield
    gc.enable()
    logging.disable(logging.NOTSET)


@pytest.mark.timeout(3600)
def test_no_history_of_failures_loses_doubles_or_changes_an_output() -> None:
    first = seeded("histories").randrange(2**32)
    for seed in range(first, first + budget(300, 20_000)):
        # In a small run one in twelve has its scenes.
        report = run(draw(seed, has_scenes=budget(seed % 12, 0) == 0))
        again = f"PYTHONPATH=tests python -m simulation --replay {seed}"
        again += "" if report.plan.scenes else " --no-scenes"
        assert not report.faults, "\n".join([again, *report.faults])
        if seed % 50 == 0:
            gc.collect()


@pytest.mark.timeout(3600)
def test_no_history_in_which_blocks_move_changes_an_output(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # Otherwise few of these short prompts are worth a fetch.
    monkeypatch.setattr(pending_fetches, "_LEAST_BLOCKS", 1)
    before = SEEN.copy()
    first = seeded("moves").randrange(2**32)
    for seed in range(first, first + budget(10, 2000)):
        report = run(draw_moving(seed))
        assert not report.faults, f"draw_moving({seed}): {report.faults}"
    seen = SEEN - before
    print(f"{seen['carried']} blocks were carried, {seen['damaged']} of them found to be damaged")
    assert seen["carried"] > 0


@pytest.mark.parametrize("amount", [0.5, 0.9])
@pytest.mark.parametrize("what", TROUBLES)
def test_each_trouble_is_survived_alone(what: str, amount: float) -> None:
    for seed in range(budget(1, 3)):
        plan = draw(seed)
        trouble = Trouble(0, at_s=1.0, what=what, shard=0, lasts_s=2.0, amount=amount)
        report = run(dataclasses.replace(plan, troubles=(trouble,)))
        assert not report.faults


def test_a_seed_is_the_same_history_in_every_process() -> None:
    said = set()
    for hash_seed in ("1", "2"):
        environment = {**os.environ, "PYTHONHASHSEED": hash_seed, "PYTHONPATH": str(_TESTS)}
        command = [sys.executable, "-m", "simulation", "--replay", "93"]
        told = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
        # Ids of requests are new in each process.
        said.add(re.sub("[0-9a-f]{32}", "id", told.stdout))
    assert len(said) == 1


def test_a_router_that_stood_still_judges_a_silent_shard_by_its_next_report() -> None:
    async def silence() -> AsyncGenerator[LoadReport, None]:
        await asyncio.Event().wait()
        yield LoadReport()

    def watch(loop: VirtualLoop) -> ShardState:
        connector = MemoryConnector(Network(loop, random.Random(0)))
        shard = ShardState("127.0.0.1:1", connector=connector, clock=loop.time)
        shard.client.watch_load = silence  # type: ignore[method-assign]
        ShardWatch(shard, 3.0, lambda *_: None, lambda *_: None, loop.time)
        return shard

    async def main(loop: VirtualLoop) -> float:
        router = Process(loop, "router")
        shard = router.context.run(watch, loop)
        await asyncio.sleep(2.5)
        router.stop()
        await asyncio.sleep(1.2)
        router.resume()
        while shard.problem == "not connected yet":
            await asyncio.sleep(0.1)
        return loop.time()

    # It ran for 2.5 s, and then for as long as a report may take.
    assert virtual_time.run(main, ends_s=60.0) == pytest.approx(2.5 + 1.2 + 1.5, abs=0.2)


def _another_seed(stream: FleetStream) -> GenerationRequest:
    """A fault: who takes a request up draws otherwise."""
    seed = stream.attempt + 2
    return dataclasses.replace(stream.request, sampling=SamplingParams(seed=seed))


def _first_failure(seeds: range) -> Report:
    plans = (dataclasses.replace(draw(seed), scenes=()) for seed in seeds)
    return next(report for plan in plans if (report := run(plan)).faults)


def test_a_fault_is_found_and_its_history_made_shorter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FleetStream, "request_now", _another_seed)
    found = _first_failure(range(100))
    shorter = shorten(found)
    assert shorter.faults
    assert len(shorter.plan.arrivals) == 1 < len(found.plan.arrivals)
    assert len(shorter.plan.troubles) <= 1
