"""Clients that tie up whatever a router lends: honest ones beside them are served all the same."""

from __future__ import annotations

import sys
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks.router_bench.attack import ATTACKED, Site, serving_site, window

_MAX_GROWTH_MB = 200
# A router gives up what takes ten seconds.
_MAX_GIVE_BACK_S = 20
_ARGS = Namespace(rate=5.0, seconds=60.0, step_ms=20.0, pin=False, shard_flags=[], router_flags=[])


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    with serving_site(_ARGS, tmp_path) as served:
        yield served


@pytest.mark.soak
def test_attackers_with_and_without_a_key_cost_the_honest_nothing_but_time(site: Site) -> None:
    stored = site.store()
    row = window(site, ATTACKED, 0, _ARGS)
    print(row["with a key"], row["without"], {name: row[name] for name in row if "_" in name})
    assert (row["failed"], row["hung"], row["refused"]) == (0, 0, 0)
    assert row["long_lost"] == 0
    assert site.has(stored)
    assert row["grown_mb"] < _MAX_GROWTH_MB
    assert row["gave_back_s"] < _MAX_GIVE_BACK_S
    without = {kind.rsplit(" ", 1)[1] for kind in row["without"]}
    assert without <= {"401", "closed", "off"}, "an answer without a key"
