"""The lateness of the event loop: how it is measured, and that it is counted."""

from __future__ import annotations

import asyncio
import random
import re
import time

from support.router_doubles import FakeFleet, MemoryRouter, memory_router

from penstock_router.observe.loop_lag import RecentMaximum, watch_loop


def test_the_worst_is_that_of_the_window_and_falls_when_it_leaves() -> None:
    worst = RecentMaximum(10.0)
    assert worst.add(0.5, now_s=100.0) == 0.5
    assert worst.add(0.1, now_s=105.0) == 0.5
    assert worst.add(0.2, now_s=109.9) == 0.5
    assert worst.add(0.0, now_s=110.1) == 0.2
    assert worst.add(0.0, now_s=200.0) == 0.0


def test_the_worst_is_the_largest_of_all_in_the_window() -> None:
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    rng = random.Random(seed)
    worst, came, now_s = RecentMaximum(10.0), [], 0.0
    for _ in range(500):
        now_s += rng.random()
        came.append((now_s, float(rng.randrange(20))))
        expected = max(value for at_s, value in came if at_s >= now_s - 10.0)
        assert worst.add(came[-1][1], now_s) == expected


def block(seconds: float) -> None:
    time.sleep(seconds)


async def test_a_loop_that_is_blocked_is_late_by_that() -> None:
    seen: list[tuple[float, float]] = []
    watching = asyncio.create_task(watch_loop(lambda lag_s, worst_s: seen.append((lag_s, worst_s))))
    await asyncio.sleep(0.12)
    assert seen
    assert all(lag_s >= 0 for lag_s, _ in seen)
    # Long enough for a timer to become due at its beginning and wait for the rest.
    block(0.15)
    await asyncio.sleep(0.12)
    watching.cancel()
    lags = [lag_s for lag_s, _ in seen]
    assert max(lags) >= 0.1
    assert seen[-1][1] == max(lags)


async def read_metrics(router: MemoryRouter) -> dict[str, float]:
    text = (await router.get("/metrics")).body.decode()
    lines = re.findall(r"^penstock_router_loop_lag_(\S+) (\S+)$", text, re.MULTILINE)
    return {name: float(value) for name, value in lines}


async def test_metrics_move_when_something_blocks_the_router() -> None:
    async with memory_router(FakeFleet({})) as router:
        await asyncio.sleep(0.06)
        before = await read_metrics(router)
        block(0.15)
        await asyncio.sleep(0.06)
        after = await read_metrics(router)
    assert before["seconds_count"] >= 1
    assert after["worst_seconds"] >= 0.1
    late = {name: after[name] - after['seconds_bucket{le="0.05"}'] for name in after}
    assert late["seconds_count"] >= 1
    names = [task.get_name() for task in asyncio.all_tasks() if "watch_loop" in repr(task)]
    assert names == []
