"""The shares of each step that prompts of two classes get."""

from __future__ import annotations

from collections import Counter

from support.engines import make_sequence

from penstock_proto.types import Objective
from penstock_shard.kv_cache.block_manager import BlockManager
from penstock_shard.scheduler.priority_policy import PriorityPolicy
from penstock_shard.scheduler.scheduler import Scheduler
from penstock_shard.scheduler.step_budget import SchedulerLimits
from penstock_shard.scheduler.step_time import StepTime
from penstock_shard.sequence import Sequence
from penstock_shard.worker.base import RowResult


class Steps:
    """A scheduler of at most 256 tokens a step. A step takes 10 ms, and 20 us for each token."""

    def __init__(
        self, max_num_seqs: int = 64, max_prefill_tokens: int = 64, num_blocks: int = 4000
    ) -> None:
        blocks, step_time = BlockManager([num_blocks], 16), StepTime()
        policy = PriorityPolicy(blocks, step_time, aging_s=30.0)
        limits = SchedulerLimits(max_num_seqs, 256, max_prefill_tokens)
        self.scheduler = Scheduler(limits, blocks, step_time, policy)
        self.now_s = 0.0
        self._arrivals = 0
        # Learn the times of steps first, so that time bounds chunks from the start.
        for name in ("one", "two"):
            self.add(name, 200, 0, max_tokens=4)
            for _ in range(6):
                self.run()

    def add(self, name: str, num_tokens: int, priority: int, max_tokens: int = 1000) -> Sequence:
        self._arrivals += 1
        prompt = [self._arrivals * 10_000 + place for place in range(num_tokens)]
        aims = Objective(priority)
        sequence = make_sequence(name, prompt, max_tokens=max_tokens, objective=aims)
        sequence.arrival = self._arrivals
        sequence.arrived_s = self.now_s
        self.scheduler.add(sequence)
        return sequence

    def run(self) -> Counter[str]:
        """Run a step. Returns the tokens that each request computed of its prompt."""
        batch = self.scheduler.schedule(self.now_s, self.now_s)
        seconds = 0.01 + 0.00002 * sum(batch.counts)
        self.now_s += seconds
        computed: Counter[str] = Counter()
        for slot, count in zip(batch.slots, batch.counts, strict=True):
            if count > 1:
                computed[self.scheduler.slots[slot].request.request_id] += count
        if batch.slots:
            results = [RowResult(token_id=5 if samples else None) for samples in batch.samples]
            for sequence, _ in list(self.scheduler.update(batch, results, self.now_s, seconds)):
                num_output = sequence.num_tokens - sequence.num_prompt_tokens
                if num_output >= sequence.request.max_tokens:
                    self.scheduler.remove(sequence)
        return computed

    def run_many(self, count: int) -> Counter[str]:
        return sum((self.run() for _ in range(count)), Counter())


def test_many_short_urgent_prompts_leave_most_of_what_is_free_to_others() -> None:
    steps, lower = Steps(), 0
    for number in range(20):
        steps.add(f"low{number}", 250, 1, max_tokens=2)
    for number in range(60):
        steps.add(f"up{number}", 20, 0, max_tokens=2)
        computed = steps.run()
        lower += sum(count for name, count in computed.items() if name.startswith("low"))
    # Prompts get 64 tokens of a step in which others decode.
    assert lower > 0.5 * 60 * (64 - 20)


def test_a_long_prompt_of_a_lower_class_that_runs_does_not_hold_up_an_urgent_one() -> None:
    steps = Steps()
    steps.add("low", 4000, 1)
    assert steps.run()["low"] > 100
    steps.add("up", 4000, 0)
    computed = steps.run_many(4)
    assert computed["up"] > 4 * computed["low"]


def test_short_prompts_of_a_lower_class_do_not_halve_what_an_urgent_long_one_gets() -> None:
    alone, beside = Steps(), Steps()
    for one in (alone, beside):
        one.add("up", 4000, 0)
    beside.add("low", 40, 1)
    assert beside.run_many(4)["up"] >= 0.95 * alone.run_many(4)["up"]


def test_an_urgent_long_prompt_puts_down_no_more_than_it_takes_places() -> None:
    steps = Steps(max_num_seqs=4)
    for number in range(4):
        steps.add(f"low{number}", 1000 if number else 3000, 1)
    while steps.scheduler.num_running < 4:
        steps.run()
    steps.add("up", 3000, 0)
    assert steps.run_many(4)["up"] > 0
    assert steps.scheduler.preemptions_total == 1


def test_a_prompt_of_a_lower_class_goes_on_if_an_urgent_one_lacks_the_blocks_that_it_holds() -> (
    None
):
    steps = Steps(num_blocks=40)
    # After one step it is too close to its end to be put down.
    steps.add("low", 270, 1, max_tokens=2)
    assert steps.run()["low"] < 270
    steps.add("up", 400, 0, max_tokens=2)
    computed = steps.run_many(10)
    assert computed["up"] == 400
