"""The cost of moves on simulated GPUs. `benchmarks/simulated_moves.py` measures it for longer."""

from __future__ import annotations

import gc
import logging
from collections.abc import Iterator

import pytest

from simulation.device_loads import (
    Load,
    Setting,
    drain,
    first_tokens_when_one_joins,
    long_prompts,
    pause_of_move,
)

_SPLIT = ("prefill", "decode", "decode")


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    logging.disable()
    gc.disable()
    yield
    gc.enable()
    logging.disable(logging.NOTSET)


def test_a_stream_that_moves_behind_its_blocks_pauses_for_three_steps_whatever_its_length() -> None:
    pauses_s = [pause_of_move(Setting(25.0), num_tokens) for num_tokens in (1000, 8000)]
    assert max(pauses_s) <= 3 * 0.0082
    assert pause_of_move(Setting(blocks="none"), 8000) > 10 * max(pauses_s)


def test_no_stream_of_a_shard_that_drains_pauses_for_more_than_three_steps() -> None:
    seen = drain(Setting(), num_streams=8, num_tokens=2000, num_others=2)
    assert max(seen.steps) <= 3.0
    # Nor do those that run where they go pause.
    assert seen.others_longest_s <= 1.5 * seen.others_usual_s


def test_long_prompts_on_a_prefill_shard_do_not_slow_streams_on_others() -> None:
    none, load = (Load(rate, 4000, 40, seconds=2.0, num_streams=12) for rate in (0, 4))
    calm = long_prompts(Setting(), _SPLIT, none)
    busy = long_prompts(Setting(), _SPLIT, load)
    assert len(busy.first_tokens_s) > 4
    assert busy.gap_p99_s <= 1.1 * calm.gap_p99_s
    alike = long_prompts(Setting(), ("both",) * 3, load)
    assert alike.gap_p99_s > 1.5 * calm.gap_p99_s


def test_a_shard_that_joins_takes_its_share_of_a_queue() -> None:
    left, shared = (
        max(first_tokens_when_one_joins(num_requests=24, num_tokens=4000, rebalances=rebalances))
        for rebalances in (False, True)
    )
    assert shared < 0.75 * left
