"""Two classes at twice the capacity: the upper one is served as if it were nearly alone."""

from __future__ import annotations

import pytest
from simulation.policies import percentile
from support.budget import budget

from benchmarks.two_classes import run, trace


@pytest.mark.parametrize("seed", range(budget(1, 3)))
def test_the_upper_class_is_served_whatever_waits_below_it_and_all_end(seed: int) -> None:
    # Longer than what waits takes to age.
    seconds, shards = 60.0, 2
    arrivals = trace(shards, load=2.0, upper=0.5, seconds=seconds, seed=seed)
    both = run(arrivals, shards, seconds, has_classes=True)
    one = run(arrivals, shards, seconds, has_classes=False)
    assert both.unfinished == one.unfinished == 0
    assert both.preemptions > 20
    assert percentile(both.upper_firsts_s, 0.5) < 0.5
    assert percentile(both.upper_firsts_s, 0.99) < 3.0 < percentile(one.upper_firsts_s, 0.5)
    assert both.tokens_per_s > 0.95 * one.tokens_per_s
