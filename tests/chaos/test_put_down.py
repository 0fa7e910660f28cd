"""A full fleet puts requests of a lower class down for higher ones. They go on later."""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import Callable
from pathlib import Path

from support.processes import Shard, running

from penstock_client import Fleet, GenerationRequest, Objective, SamplingParams

SLOTS = 4
FLAGS = ("--step-ms", "5", "--max-num-seqs", str(SLOTS))


def lower(number: int) -> GenerationRequest:
    return GenerationRequest(
        [7 + number, *range(20, 60)],
        SamplingParams(seed=number),
        max_tokens=300,
        ignore_eos=True,
        objective=Objective(priority=1),
    )


def upper(number: int) -> GenerationRequest:
    request = dataclasses.replace(lower(100 + number), max_tokens=20, objective=Objective())
    return dataclasses.replace(request, sampling=SamplingParams(seed=number))


async def read(fleet: Fleet, request: GenerationRequest) -> tuple[list[int], float]:
    """Return the tokens of an answer, and the seconds until the first one came."""
    began_s, first_s, tokens = time.monotonic(), 0.0, list[int]()
    async for output in fleet.submit(request):
        if output.token_ids and not tokens:
            first_s = time.monotonic() - began_s
        tokens += output.token_ids
    return tokens, first_s


async def tokens_of(fleet: Fleet, make: Callable[[int], GenerationRequest]) -> list[list[int]]:
    """Return the tokens of `2 * SLOTS` requests, which all have places."""
    answers = await asyncio.gather(*(read(fleet, make(number)) for number in range(2 * SLOTS)))
    return [tokens for tokens, _ in answers]


async def test_a_full_fleet_puts_lower_requests_down_and_each_ends_as_if_it_had_been_alone(
    tmp_path: Path,
) -> None:
    shards = [Shard(tmp_path / f"shard{number}", *FLAGS) for number in range(2)]
    with running(*shards):
        async with Fleet([shard.address for shard in shards]) as fleet:
            await fleet.wait_ready(30)
            calm = await tokens_of(fleet, lower) + await tokens_of(fleet, upper)
            # More than there are slots: a request that is put down finds no slot elsewhere.
            low = [asyncio.create_task(read(fleet, lower(number % 8))) for number in range(12)]
            await asyncio.sleep(0.6)
            high = [asyncio.create_task(read(fleet, upper(number))) for number in range(8)]
            firsts_s = [first_s for _, first_s in await asyncio.gather(*high)]
            assert not any(task.done() for task in low)
            lows = [tokens for tokens, _ in await asyncio.gather(*low)]
            highs = [(await task)[0] for task in high]
            preemptions = sum(shard.load.preemptions_total for shard in fleet.shards)
    assert highs == calm[8:]
    assert lows == [calm[number % 8] for number in range(12)]
    assert preemptions >= 4
    # Alone, a lower request takes 1.5 s.
    assert max(firsts_s) < 0.8
