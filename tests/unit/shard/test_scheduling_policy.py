"""The order of requests in a scheduler without a policy, where no objective counts."""

from __future__ import annotations

from support.engines import make_sequence

from penstock_proto.types import Objective
from penstock_shard.kv_cache.block_manager import BlockManager
from penstock_shard.scheduler.scheduler import Scheduler
from penstock_shard.scheduler.step_budget import SchedulerLimits
from penstock_shard.worker.base import RowResult


def test_by_itself_a_scheduler_goes_by_the_order_of_arrival_whatever_is_aimed_for() -> None:
    scheduler = Scheduler(SchedulerLimits(2, 64), BlockManager([64], 16))
    hurried = Objective(priority=-5, time_to_first_token_s=0.001)
    sequences = [make_sequence("a", [1] * 20), make_sequence("b", [2] * 20)]
    sequences.append(make_sequence("hurried", [3] * 20, objective=hurried))
    for sequence in sequences:
        scheduler.add(sequence)
    batch = scheduler.schedule()
    assert [scheduler.slots[slot] for slot in batch.slots] == sequences[:2]
    assert (scheduler.num_running, scheduler.num_waiting) == (2, 1)


def test_by_itself_a_scheduler_preempts_whoever_came_last() -> None:
    scheduler = Scheduler(SchedulerLimits(8, 64), BlockManager([4], 16))
    first, last = make_sequence("first", [1] * 31), make_sequence("last", [2] * 31)
    scheduler.add(first)
    scheduler.add(last)
    for token in range(2):
        batch = scheduler.schedule()
        assert len(batch.slots) == 2
        scheduler.update(batch, [RowResult(token_id=token)] * 2)
    batch = scheduler.schedule()
    assert [scheduler.slots[slot] for slot in batch.slots] == [first]
    assert [sequence for sequence, _ in scheduler.take_preempted()] == [last]
