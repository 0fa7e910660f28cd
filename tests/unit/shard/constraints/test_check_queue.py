"""In which order constraints are checked, and how many may wait."""

from __future__ import annotations

from collections.abc import Hashable

import pytest

from penstock_shard.ipc.request import Constraint
from penstock_shard.structured_output.check_queue import MAX_PENDING, CheckQueue, Pending, QueueFull


def _join(queue: CheckQueue, name: str, caller: Hashable) -> Pending:
    return queue.join(name.encode(), Constraint("regex", name), caller)


def _order(queue: CheckQueue, *, slow: bool = False) -> list[str]:
    taken = iter(lambda: queue.take(slow=slow), None)
    return [pending.constraint.value for pending in taken]


async def test_callers_take_turns_and_each_has_its_own_in_order() -> None:
    queue = CheckQueue()
    for name in ("a1", "a2", "a3"):
        _join(queue, name, "a")
    for name in ("b1", "b2"):
        _join(queue, name, "b")
    _join(queue, "c1", "c")
    assert _order(queue) == ["a1", "b1", "c1", "a2", "b2", "a3"]


async def test_equal_ones_share_an_entry_whoever_asks() -> None:
    queue = CheckQueue()
    assert _join(queue, "x", "a") is _join(queue, "x", "b")
    assert len(queue) == 1


async def test_slow_ones_wait_apart_and_go_first_where_they_may() -> None:
    queue = CheckQueue()
    slow = _join(queue, "slow", "a")
    assert queue.take(slow=False) is slow
    queue.put_back(slow)
    quick = _join(queue, "quick", "a")
    assert queue.take(slow=False) is quick
    assert queue.take(slow=False) is None
    assert queue.take(slow=True) is slow


async def test_a_caller_may_have_as_many_waiting_as_are_free() -> None:
    queue = CheckQueue()
    for number in range(MAX_PENDING // 2):
        _join(queue, f"a{number}", "a")
    with pytest.raises(QueueFull, match="256 constraints wait to be checked, 256 of them"):
        _join(queue, "one more", "a")
    # Those of others.
    for number in range(MAX_PENDING // 4):
        _join(queue, f"b{number}", "b")
    with pytest.raises(QueueFull):
        _join(queue, "one more", "b")
    _join(queue, "c", "c")
    assert len(queue) < MAX_PENDING


async def test_what_is_removed_leaves_room_and_nothing_else() -> None:
    queue = CheckQueue()
    waits, is_checked, is_slow = (_join(queue, name, "a") for name in ("1", "2", "3"))
    queue.remove(waits)
    assert queue.take(slow=False) is is_checked
    assert queue.take(slow=False) is is_slow
    queue.put_back(is_slow)
    for pending in (is_checked, is_slow, is_slow):
        queue.remove(pending)
    assert len(queue) == 0
    assert (queue._counts, queue._quick._callers, queue._slow._callers) == ({}, {}, {})
