"""The number of compute threads that a shard starts where no flag says it."""

from __future__ import annotations

import os

import pytest

from penstock_shard.device import cgroup
from penstock_shard.device.cpu_threads import default_threads


@pytest.mark.parametrize(
    ("cores", "quota", "threads"),
    [(8, None, 7), (8, 16.0, 7), (8, 4.0, 3), (8, 3.9, 2), (8, 0.5, 1), (1, None, 1)],
)
def test_threads_are_the_cores_but_one_within_the_quota(
    monkeypatch: pytest.MonkeyPatch, cores: int, quota: float | None, threads: int
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(cores)), raising=False)
    monkeypatch.setattr(cgroup, "cpu_quota", lambda: quota)
    assert default_threads() == threads
