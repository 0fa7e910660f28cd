"""Sequences wait for blocks on disk, for as long as that is worth it."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.engines import CACHE_GROUPS, EngineUnderTest, make_engine, make_request, runner_info
from support.processes import wait_until

from penstock_shard.engine import pending_reads
from penstock_shard.ipc.runner_info import CacheGroup
from penstock_shard.kv_transfer.arena import Arena, namespace_of
from penstock_shard.kv_transfer.disk_tier import DiskTier
from penstock_shard.kv_transfer.segments import Segments

_PROMPT = list(range(100, 200))


class _Shards:
    """Shards that run one after another on the same directory, each with empty memory."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self.disks: list[DiskTier] = []

    def start(self, groups: tuple[CacheGroup, ...] = (CacheGroup(),)) -> EngineUnderTest:
        if self.disks:
            disk = self.disks[-1]
            wait_until(lambda: not disk._written, timeout_s=5, what="all is written")
        memory, info = memoryview(bytearray(2**18)), runner_info(num_blocks=40, cache_groups=groups)
        arena = Arena(memory, info)
        segments = Segments(
            self._directory, namespace_of(info), arena, max_bytes=2**20, age_s=3600.0
        )
        self.disks.append(DiskTier(segments))
        wait_until(lambda: not self.disks[-1]._busy_since_s, timeout_s=5, what="scanned")
        return make_engine(
            num_blocks=40, host_memory=memory, cache_groups=groups, disk=self.disks[-1]
        )


@pytest.fixture
def shards(tmp_path: Path) -> Iterator[_Shards]:
    made = _Shards(tmp_path)
    yield made
    for disk in made.disks:
        disk.close()


def _ask(engine: EngineUnderTest, name: str, cache_salt: str = "") -> int:
    """Have a request computed. Returns how many of its tokens were cached."""
    engine.engine.submit(make_request(name, _PROMPT, seed=7, cache_salt=cache_salt))
    while not engine.endings(name):
        engine.step()
        time.sleep(0.001)
    return next(o.cached_tokens for o in engine.outputs if o.request_id == name) or 0


@pytest.mark.parametrize("groups", CACHE_GROUPS)
def test_what_was_used_twice_is_found_by_the_next_shard(
    shards: _Shards, groups: tuple[CacheGroup, ...]
) -> None:
    engine = shards.start(groups)
    assert _ask(engine, "first") == 0
    found = _ask(engine, "second")
    again = shards.start(groups)
    assert _ask(again, "third") == found >= 80
    assert again.tokens("third") == engine.tokens("second")
    assert shards.disks[1].loaded_total > 0
    again.engine.check_integrity()


def test_what_is_salted_is_not_found_on_disk(shards: _Shards) -> None:
    engine = shards.start()
    for name in ("first", "second"):
        _ask(engine, name, "mine")
    assert _ask(shards.start(), "third", "mine") == 0


def _blocked(
    shards: _Shards, monkeypatch: pytest.MonkeyPatch
) -> tuple[EngineUnderTest, threading.Event]:
    """A shard whose disk has the prompt, but gives nothing before the event."""
    engine = shards.start()
    for name in ("first", "second"):
        _ask(engine, name)
    again, goes_on = shards.start(), threading.Event()
    segments = shards.disks[-1]._segments
    read = segments.read
    monkeypatch.setattr(segments, "read", lambda name: goes_on.wait(10) and read(name))
    return again, goes_on


def test_an_abort_while_waiting_leaves_nothing(
    shards: _Shards, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, goes_on = _blocked(shards, monkeypatch)
    for name in ("third", "fourth"):
        engine.engine.submit(make_request(name, _PROMPT))
    engine.step()
    assert not engine.engine.has_work
    assert engine.engine.due_s is not None
    engine.engine.abort("third", 0)
    engine.engine.abort("fourth", 0)
    engine.run()
    assert len(engine.endings("third")) == 1
    assert engine.engine.load().waiting == len(engine.blocks.prefixes._tree) == 0
    assert not engine.engine.has_work
    assert not engine.blocks._tables
    goes_on.set()
    assert _ask(engine, "fifth") == 96


def test_who_has_waited_enough_is_computed(
    shards: _Shards, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, goes_on = _blocked(shards, monkeypatch)
    monkeypatch.setattr(pending_reads, "_MOST_WAIT_S", 0.1)
    assert _ask(engine, "third") == 0
    goes_on.set()
