"""The scheduler: which tokens a step computes, and who is preempted when blocks run out."""

from __future__ import annotations

from typing import Any

import pytest
from support.engines import make_engine, make_request, make_sequence
from support.plans import collect, plan_step

from penstock_proto.types import Objective
from penstock_shard.engine.create_engine import create_scheduler
from penstock_shard.ipc.runner_info import CacheGroup
from penstock_shard.kv_cache.block_manager import BlockManager
from penstock_shard.scheduler.scheduler import Scheduler
from penstock_shard.scheduler.step_budget import SchedulerLimits
from penstock_shard.scheduler.step_time import StepSize, StepTime
from penstock_shard.sequence import Sequence
from penstock_shard.spec_decode.prompt_lookup import Drafter


def _rows(plan) -> list[tuple[str, int, int, bool]]:
    return [
        (row.sequence.request.request_id, row.start, row.count, row.samples) for row in plan.rows
    ]


def test_a_long_prompt_is_computed_in_chunks_of_the_budget() -> None:
    under_test = make_engine(max_num_batched_tokens=64, max_model_len=512)
    scheduler = under_test.scheduler
    scheduler.add(make_sequence("a", range(150)))
    seen = []
    for _ in range(3):
        plan = plan_step(scheduler)
        seen += _rows(plan)
        collect(scheduler, plan)
    assert seen == [("a", 0, 64, False), ("a", 64, 64, False), ("a", 128, 22, True)]


def test_decodes_come_before_chunks_of_prompts() -> None:
    scheduler = make_engine(max_num_batched_tokens=64).scheduler
    decoding = make_sequence("decoding", range(10))
    scheduler.add(decoding)
    collect(scheduler, plan_step(scheduler))
    scheduler.add(make_sequence("prompt", range(200)))
    plan = plan_step(scheduler)
    assert _rows(plan) == [("decoding", 10, 1, True), ("prompt", 0, 63, False)]
    collect(scheduler, plan)
    assert _rows(plan_step(scheduler)) == [("decoding", 11, 1, True), ("prompt", 63, 63, False)]


def test_no_more_requests_run_than_max_num_seqs() -> None:
    scheduler = make_engine(max_num_seqs=3).scheduler
    for number in range(5):
        scheduler.add(make_sequence(str(number)))
    assert len(plan_step(scheduler).rows) == 3
    assert (scheduler.num_running, scheduler.num_waiting) == (3, 2)


def test_the_latest_arrival_is_preempted_when_blocks_run_out() -> None:
    under_test = make_engine(num_blocks=4, max_model_len=64)
    scheduler = under_test.scheduler
    sequences = [make_sequence(name, range(start, start + 31), max_tokens=30)
                for name, start in (("old", 0), ("new", 100))]  # fmt: skip
    for sequence in sequences:
        scheduler.add(sequence)
    collect(scheduler, plan_step(scheduler))
    old, new = sequences
    for _ in range(2):
        plan = plan_step(scheduler)
        if scheduler.preemptions_total:
            break
        collect(scheduler, plan)
    assert _rows(plan) == [("old", 32, 1, True)]
    assert not under_test.blocks.blocks_of(new)
    assert new.num_computed == 0
    assert (new.preemptions, old.preemptions) == (1, 0)
    assert scheduler.num_waiting == 1
    under_test.blocks.check_integrity()


def test_a_prompt_is_preempted_where_the_blocks_that_it_gives_back_stay_with_others() -> None:
    under_test = make_engine(
        num_blocks=8, max_num_batched_tokens=32, cache_groups=(CacheGroup(window=64),)
    )
    scheduler, blocks = under_test.scheduler, under_test.blocks
    first, second = make_sequence("first", range(80)), make_sequence("second", range(400))
    scheduler.add(first)
    for _ in range(3):
        collect(scheduler, plan_step(scheduler))
    scheduler.add(second)
    plan = plan_step(scheduler)
    # The first gave back the block that token 80 no longer sees; of the others that the second
    # found, it would give back two: they stay the first one's.
    assert _rows(plan) == [("first", 80, 1, True), ("second", 80, 31, False)]
    assert blocks.num_free == 0
    collect(scheduler, plan)
    plan = plan_step(scheduler)
    assert _rows(plan) == [("first", 81, 1, True)]
    assert scheduler.take_preempted() == [(second, "the shard is out of KV blocks")]
    assert list(scheduler.sequences) == [first, second]
    blocks.check_integrity()
    collect(scheduler, plan)
    scheduler.remove(first)
    assert [row[0] for row in _rows(plan_step(scheduler))] == ["second"]


def test_whoever_is_preempted_runs_before_those_that_never_ran() -> None:
    under_test = make_engine(num_blocks=4, max_model_len=64, max_num_seqs=2)
    for name, start in (("old", 0), ("new", 100)):
        under_test.engine.submit(make_request(name, range(start, start + 31), max_tokens=20))
    under_test.step()
    under_test.engine.submit(make_request("never ran", range(200, 203), max_tokens=30))
    under_test.run()
    order = [output.request_id for output in under_test.outputs if output.is_last]
    assert under_test.scheduler.preemptions_total >= 1
    assert order.index("new") < order.index("never ran")


def test_whoever_is_preempted_runs_before_new_ones_of_its_class_whatever_these_wish() -> None:
    scheduler = make_engine(max_num_seqs=1).scheduler
    old = make_sequence("old", range(20))
    scheduler.add(old, now_s=1.0)
    collect(scheduler, plan_step(scheduler, now_s=1.0))
    old.last_token_s = 2.0
    hurried = make_sequence(
        "hurried", range(100, 120), objective=Objective(time_to_first_token_s=0.1)
    )
    for sequence in (make_sequence("plain", range(100, 120)), hurried):
        scheduler.add(sequence, now_s=1.5)
    scheduler._preempt(old, "a reason")
    assert [row[0] for row in _rows(plan_step(scheduler, now_s=2.0))] == ["old"]


def test_a_prompt_that_lacks_blocks_is_not_looked_up_in_every_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    under_test = make_engine(num_blocks=32)
    scheduler = under_test.scheduler
    for number in range(4):
        scheduler.add(make_sequence(str(number), range(number, number + 8 + number), max_tokens=90))
    collect(scheduler, plan_step(scheduler))
    scheduler.add(make_sequence("large", range(500, 960)))
    lookups = []
    acquire = under_test.blocks.acquire_prefix

    def note(request) -> int:
        lookups.append(request)
        return acquire(request)

    monkeypatch.setattr(under_test.blocks, "acquire_prefix", note)
    free = set()
    for _ in range(64):
        free.add(under_test.blocks.num_free)
        collect(scheduler, plan_step(scheduler))
    assert len(free) > 8
    assert 2 <= len(lookups) <= 5


def test_a_request_is_let_in_only_with_blocks_for_all_it_knows() -> None:
    scheduler = make_engine(num_blocks=4, max_model_len=64, max_num_batched_tokens=32).scheduler
    scheduler.add(make_sequence("a", range(40)))
    scheduler.add(make_sequence("b", range(100, 140)))
    collect(scheduler, plan_step(scheduler))
    plan = plan_step(scheduler)
    assert _rows(plan) == [("a", 32, 8, True)]


def test_prompt_logprobs_compute_the_whole_prompt_although_it_is_cached() -> None:
    under_test = make_engine()
    under_test.engine.submit(make_request("first", range(40)))
    under_test.run()
    under_test.engine.submit(make_request("cached", range(40)))
    under_test.engine.submit(make_request("scored", range(40), prompt_logprobs=0))
    under_test.run()
    cached = {o.request_id: o.cached_tokens for o in under_test.outputs if o.first_position == 0}
    assert cached == {"first": 0, "cached": 32, "scored": 0}


def test_two_identical_prompts_in_one_step_share_their_blocks() -> None:
    under_test = make_engine(max_num_batched_tokens=256)
    first, second = make_sequence("first", range(70)), make_sequence("second", range(70))
    for sequence in (first, second):
        under_test.scheduler.add(sequence)
    plan = plan_step(under_test.scheduler)
    assert _rows(plan) == [("first", 0, 70, True), ("second", 64, 6, True)]
    blocks = under_test.blocks
    assert blocks.blocks_of(second)[:4] == blocks.blocks_of(first)[:4]
    assert second.cached_tokens == 64


def test_a_prompt_that_is_scored_is_shared_in_its_step_like_any_other() -> None:
    under_test = make_engine(max_num_batched_tokens=256)
    scheduler = under_test.scheduler
    scored = make_sequence("scored", range(70), prompt_logprobs=0)
    for sequence in (scored, make_sequence("plain", range(70))):
        scheduler.add(sequence)
    assert _rows(plan_step(scheduler))[1] == ("plain", 64, 6, True)


def test_a_step_scores_no_more_prompt_tokens_than_the_runner_may() -> None:
    limits = SchedulerLimits(8, 256, max_scored_tokens=20)
    scheduler = create_scheduler(limits, BlockManager([64], 16))
    scheduler.add(make_sequence("a", range(50), prompt_logprobs=0))
    scheduler.add(make_sequence("b", range(100, 130), prompt_logprobs=0))
    scheduler.add(make_sequence("plain", range(200, 240)))
    steps = []
    for _ in range(5):
        plan = plan_step(scheduler)
        rows = {row.sequence.request.request_id: (row.count, row.scored) for row in plan.rows}
        steps.append(rows)
        collect(scheduler, plan)
    assert steps == [
        {"a": (20, 20), "plain": (40, 0)},
        {"a": (20, 20), "plain": (1, 0)},
        {"a": (10, 9), "b": (11, 11), "plain": (1, 0)},
        {"a": (1, 0), "b": (19, 18), "plain": (1, 0)},
        {"a": (1, 0), "b": (1, 0), "plain": (1, 0)},
    ]


def test_the_next_step_is_scheduled_before_the_token_of_the_last_has_come_back() -> None:
    under_test = make_engine()
    scheduler = under_test.scheduler
    sequence = make_sequence("a", range(10), max_tokens=3)
    scheduler.add(sequence)
    plans = [plan_step(scheduler) for _ in range(4)]
    assert [_rows(plan) for plan in plans] == [
        [("a", 0, 10, True)],
        [("a", 10, 1, True)],
        [("a", 11, 1, True)],
        [],
    ]
    assert (sequence.num_pending, sequence.num_output_tokens) == (3, 0)
    for plan in plans[:3]:
        collect(scheduler, plan)
    assert (sequence.num_pending, sequence.num_output_tokens) == (0, 3)


def test_a_step_is_launched_before_the_one_before_it_is_collected(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    under_test = make_engine()
    runner = under_test.engine._runner
    calls: list[str] = []
    launch, collect = runner.launch, runner.collect

    def note_launch(plan) -> None:
        calls.append("launch")
        launch(plan)

    def note_collect():
        calls.append("collect")
        return collect()

    monkeypatch.setattr(runner, "launch", note_launch)
    monkeypatch.setattr(runner, "collect", note_collect)
    under_test.engine.submit(make_request(max_tokens=4))
    under_test.run()
    assert calls == ["launch", *["launch", "collect"] * 3, "collect"]


# ---- steps told exactly ----


def _scheduler(
    num_blocks: int = 64,
    *,
    num_seqs: int = 8,
    num_tokens: int = 64,
    prefill_tokens: int = 2**31,
    prompts_first: bool = False,
    drafter: Drafter | None = None,
) -> Scheduler:
    limits = SchedulerLimits(num_seqs, num_tokens, prefill_tokens, prompts_first=prompts_first)
    return create_scheduler(limits, BlockManager([num_blocks], 16), drafter)


def _of(name: str, num_tokens: int = 10, max_tokens: int = 90, **objective: Any) -> Sequence:
    """A sequence whose prompt nobody shares."""
    start = 1000 * sum(map(ord, name))
    return make_sequence(
        name,
        range(start, start + num_tokens),
        max_tokens=max_tokens,
        objective=Objective(**objective) if objective else None,
    )


def _decode(scheduler: Scheduler, *sequences: Sequence, now_s: float = 1.0) -> None:
    """Have all of them past their prompts, which fit one step."""
    for sequence in sequences:
        scheduler.add(sequence, now_s)
    plan = plan_step(scheduler, now_s)
    assert len(plan.rows) == len(sequences)
    collect(scheduler, plan)
    for sequence in sequences:
        sequence.last_token_s = now_s


def _names(plan) -> list[str]:
    return [row.sequence.request.request_id for row in plan.rows]


# What the steps that a scheduler learns from take.
FIXED_S, DECODE_S, PROMPT_TOKEN_S = 0.002, 0.001, 0.0005


def _teach(scheduler: Scheduler, fixed_s: float = FIXED_S) -> None:
    """Have it learn from steps of one to seven decodes, and prompts of many lengths."""
    for i in range(140):
        sequences = [_of(f"{i} {n}", 16 + (i * 7 + n) % 8, 2) for n in range(1 + i % 7)]
        for sequence in sequences:
            scheduler.add(sequence)
        for _ in range(2):
            plan = plan_step(scheduler)
            num_decodes = sum(row.count == 1 for row in plan.rows)
            num_prompt = sum(row.count for row in plan.rows if row.count > 1)
            seconds = fixed_s + DECODE_S * num_decodes + PROMPT_TOKEN_S * num_prompt
            collect(scheduler, plan, seconds=seconds)
        for sequence in sequences:
            scheduler.remove(sequence)


def test_what_is_left_of_prompts_is_counted_without_the_token_that_samples() -> None:
    scheduler = _scheduler()
    assert scheduler.num_prefill_tokens_left == 0
    scheduler.add(_of("a", 150))
    left = []
    for _ in range(4):
        collect(scheduler, plan_step(scheduler))
        left.append(scheduler.num_prefill_tokens_left)
    assert left == [85, 21, 0, 0]


def test_a_prompt_that_is_cached_but_for_its_last_token_goes_before_other_prompts() -> None:
    scheduler = _scheduler()
    first = _of("first", 33)
    _decode(scheduler, first)
    scheduler.remove(first)
    scheduler.add(_of("other", 40))
    scheduler.add(make_sequence("again", first.token_ids[:33]))
    assert _rows(plan_step(scheduler)) == [("again", 32, 1, True), ("other", 0, 40, True)]


def test_the_tokens_of_all_that_are_queued_are_counted() -> None:
    scheduler = _scheduler(num_seqs=1)
    _decode(scheduler, _of("runs"))
    assert scheduler.num_queued_tokens == 0
    first, second = _of("first", 20), _of("second", 30)
    for sequence in (first, second):
        scheduler.add(sequence)
    assert scheduler.num_queued_tokens == 50
    scheduler.remove(first)
    assert scheduler.num_queued_tokens == 30


def test_what_steps_compute_is_learned_with_the_time_they_took() -> None:
    learned: list[tuple[StepSize, float]] = []

    class Noting(StepTime):
        def learn(self, size: StepSize, seconds: float) -> None:
            learned.append((size, seconds))

    scheduler = Scheduler(SchedulerLimits(8, 64), BlockManager([64], 16), Noting())
    for sequence in (_of("a", 10), _of("b", 20)):
        scheduler.add(sequence)
    for seconds in (0.5, 0.25):
        collect(scheduler, plan_step(scheduler), seconds=seconds)
    # Each token attends to itself and to those before it.
    keys = 10 * 11 // 2 + 20 * 21 // 2
    assert learned == [(StepSize(0, 30, keys), 0.5), (StepSize(2, 0, 11 + 21), 0.25)]


def test_whoever_has_ended_is_forgotten_and_whoever_is_preempted_is_not() -> None:
    forgotten: list[Sequence] = []

    class Noting(BlockManager):
        def forget(self, sequence: Sequence) -> None:
            forgotten.append(sequence)
            super().forget(sequence)

    scheduler = create_scheduler(SchedulerLimits(8, 64), Noting([1], 16))
    alone = _of("alone", 16)
    _decode(scheduler, alone)
    assert _names(plan_step(scheduler)) == []
    # It was preempted, and its hashes are good for when it comes again.
    assert (alone.preemptions, forgotten) == (1, [])
    scheduler.remove(alone)
    assert forgotten == [alone]


def test_the_more_urgent_decode_where_a_step_has_no_room_for_all() -> None:
    scheduler = _scheduler()
    _decode(scheduler, _of("a"), _of("b"))
    scheduler.add(_of("c", priority=-1), now_s=1.0)
    collect(scheduler, plan_step(scheduler, 1.0))
    scheduler.bounds.tokens = 2
    assert _names(plan_step(scheduler, 1.5)) == ["c", "a"]


def test_where_nobody_aims_for_anything_the_order_is_that_of_arrival_whoever_has_waited() -> None:
    scheduler = _scheduler()
    first, waited = _of("first"), _of("waited")
    _decode(scheduler, first, waited)
    first.last_token_s = 100.0
    scheduler.bounds.tokens = 1
    assert _names(plan_step(scheduler, 100.0)) == ["first"]


def test_a_step_of_bounded_seconds_scores_no_more_prompt_tokens_than_the_runner_may() -> None:
    limits = SchedulerLimits(8, 256, max_scored_tokens=20)
    scheduler = create_scheduler(limits, BlockManager([64], 16))
    _decode(scheduler, _of("bounds", seconds_between_tokens=1.0))
    scheduler.add(make_sequence("scored", range(50), prompt_logprobs=0), now_s=1.0)
    plan = plan_step(scheduler, 1.0, starts_s=1.0)
    assert [(row.count, row.scored) for row in plan.rows] == [(1, 0), (20, 20)]


def test_of_two_with_one_deadline_the_longer_goes_first() -> None:
    scheduler = _scheduler(num_seqs=1)
    _teach(scheduler, fixed_s=0.0)
    for sequence in (_of("short", deadline_s=10.0), _of("long", max_tokens=400, deadline_s=10.0)):
        scheduler.add(sequence, now_s=1.0)
    assert _names(plan_step(scheduler, 1.0)) == ["long"]


@pytest.mark.parametrize(
    ("between_s", "since_s", "expected"),
    [
        # It cannot be met: twice what the two take, and a step's fixed part.
        (1e-9, 0.0, {5, 6}),
        # Four fifths of the time between are over, and less is left than that.
        (0.0100, 0.0080, {5, 6}),
        (0.0100, 0.0002, {7}),
        (1.0, 0.0, {10}),
    ],
)
def test_others_decode_as_far_as_those_that_limit_the_time_between_tokens_allow(
    between_s: float, since_s: float, expected: set[int]
) -> None:
    scheduler = _scheduler(num_seqs=16)
    _teach(scheduler)
    others = [_of(f"other {n}", 5) for n in range(10)]
    # In a lower class, so that the others come first, and theirs is left all the same.
    hurried = [
        _of(f"hurried {n}", 5, priority=5, seconds_between_tokens=between_s) for n in range(2)
    ]
    _decode(scheduler, *others, *hurried)
    names = _names(plan_step(scheduler, 1.0 + since_s, starts_s=1.0 + since_s))
    assert names[-2:] == ["hurried 0", "hurried 1"]
    assert len(names) - 2 in expected


def test_who_has_waited_too_long_decodes_whatever_time_is_left() -> None:
    scheduler = _scheduler()
    _teach(scheduler)
    others = [_of(f"other {n}") for n in range(5)]
    _decode(scheduler, *others, _of("hurried", seconds_between_tokens=1e-9))
    scheduler.sequences[-1].last_token_s = 40.0
    assert len(_names(plan_step(scheduler, 40.0, starts_s=40.0))) == 6


def test_prompts_that_have_waited_too_long_get_some_tokens_whatever_time_is_left() -> None:
    scheduler = _scheduler()
    _teach(scheduler)
    _decode(scheduler, _of("hurried", seconds_between_tokens=1e-9), now_s=40.0)
    for name in ("old", "also old"):
        scheduler.add(_of(name), now_s=1.0)
    scheduler.add(_of("new", priority=-1), now_s=40.0)
    plan = plan_step(scheduler, 40.0, starts_s=40.0)
    assert [(row.sequence.request.request_id, row.count) for row in plan.rows] == [
        ("hurried", 1), ("old", 10), ("also old", 6)
    ]  # fmt: skip


def test_of_those_that_wait_the_first_place_goes_by_age() -> None:
    scheduler = _scheduler(num_seqs=1)
    scheduler.add(_of("old", priority=5), now_s=1.0)
    scheduler.add(_of("new", priority=-1), now_s=39.0)
    assert _names(plan_step(scheduler, 40.0)) == ["old"]


def test_one_that_must_wait_for_a_block_does_not_hold_up_the_next() -> None:
    scheduler = _scheduler(num_blocks=4)
    lacks, has, leaves = _of("lacks", 16), _of("has", 10), _of("leaves", 30)
    for sequence in (lacks, has, leaves):
        scheduler.add(sequence)
    assert len(plan_step(scheduler).rows) == 3
    scheduler.remove(leaves)
    # What comes free is still in use.
    assert scheduler._blocks.num_free == 0
    assert _names(plan_step(scheduler)) == ["has"]


def test_one_that_finds_no_block_for_itself_is_put_back_whole() -> None:
    scheduler = _scheduler(num_blocks=1)
    alone = _of("alone", 16)
    _decode(scheduler, alone)
    assert _names(plan_step(scheduler)) == []
    assert (alone.num_computed, scheduler._blocks.num_referenced) == (0, 0)
    assert (scheduler.num_waiting, scheduler.preemptions_total) == (1, 1)


def test_one_that_was_preempted_comes_back_once_its_steps_are_collected() -> None:
    scheduler = _scheduler(num_blocks=3)
    stays, goes = _of("stays", 31), _of("goes", 10)
    _decode(scheduler, stays, goes)
    launched = plan_step(scheduler)
    assert _names(launched) == ["stays", "goes"]
    assert _names(plan_step(scheduler)) == []
    assert goes.preemptions == 1
    scheduler.remove(stays)
    assert _names(plan_step(scheduler)) == []
    collect(scheduler, launched)
    assert _names(plan_step(scheduler)) == ["goes"]


def test_one_that_lacked_blocks_is_looked_at_again_when_just_enough_are_free(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    blocks = BlockManager([6], 16)
    scheduler = create_scheduler(SchedulerLimits(8, 256), blocks)
    shared = _of("shared", 33)
    leaving = [_of("one", 10), _of("two", 10)]
    _decode(scheduler, shared, *leaving)
    looked_at: list[Sequence] = []
    acquire = blocks.acquire_prefix

    def look(sequence: Sequence) -> int:
        looked_at.append(sequence)
        return acquire(sequence)

    monkeypatch.setattr(blocks, "acquire_prefix", look)
    # Of its five blocks two are shared, and one is free.
    large = make_sequence("large", [*shared.token_ids[:32], *range(48)])
    scheduler.add(large)
    for left in (None, *leaving):
        if left is not None:
            scheduler.remove(left)
        plan = plan_step(scheduler)
        collect(scheduler, plan)
    assert looked_at == [large, large]
    assert _rows(plan)[1] == ("large", 32, 48, True)


def test_a_chunk_of_output_alone_scores_nothing_of_the_prompt() -> None:
    scheduler = _scheduler()
    output = range(100, 160)
    scheduler.add(make_sequence("a", range(30), output=output, max_tokens=90, prompt_logprobs=0))
    # The second is launched before the scores of the first have come.
    plans = [plan_step(scheduler) for _ in range(2)]
    assert [(row.count, row.scored) for plan in plans for row in plan.rows] == [
        (64, 29),
        (26, 0),
    ]


@pytest.mark.parametrize(
    ("num_blocks", "num_seqs", "num_tokens", "preempted"),
    [
        (4, 8, 32, []),
        (4, 8, 33, ["second"]),
        (4, 8, 48, ["second"]),
        (4, 8, 64, ["second"]),
        (4, 8, 65, []),
        (8, 2, 10, ["second"]),
    ],
    ids=["enough", "one block", "one block in full", "all", "more than all", "no place"],
)
def test_a_higher_class_takes_places_only_where_it_lacks_them_and_that_helps(
    num_blocks: int, num_seqs: int, num_tokens: int, preempted: list[str]
) -> None:
    scheduler = _scheduler(num_blocks, num_seqs=num_seqs)
    _decode(scheduler, _of("first"), _of("second"))
    scheduler.add(_of("higher", num_tokens, priority=-1), now_s=1.0)
    plan = plan_step(scheduler, 1.0)
    assert [one.request.request_id for one, _ in scheduler.take_preempted()] == preempted
    # It has its place in this step, unless that takes more blocks than one gives back.
    assert ("higher" in _names(plan)) == (num_tokens < 64)
    assert scheduler.preemptions_total == len(preempted)


def test_nobody_else_makes_room_while_what_one_held_is_still_in_use() -> None:
    scheduler = _scheduler(num_blocks=4)
    _decode(scheduler, _of("first"), _of("second"))
    launched = plan_step(scheduler, 1.0)
    scheduler.add(_of("higher", 48, priority=-1), now_s=1.0)
    for _ in range(2):
        assert _names(plan_step(scheduler, 1.0)) == ["first"]
    assert scheduler.preemptions_total == 1
    collect(scheduler, launched)
    assert _names(plan_step(scheduler, 1.0)) == ["first", "higher"]


def test_all_preemptions_are_counted() -> None:
    scheduler = _scheduler(num_blocks=2)
    _decode(scheduler, _of("a"), _of("b"))
    scheduler.add(_of("higher", 32, priority=-1), now_s=1.0)
    collect(scheduler, plan_step(scheduler, 1.0))
    assert _names(plan_step(scheduler, 1.0)) == ["higher"]
    assert scheduler.preemptions_total == 2


def test_a_prompt_of_just_the_length_that_is_long_is_not_long() -> None:
    for num_tokens, chunk in ((32, 32), (33, 1)):
        scheduler = _scheduler(prefill_tokens=32)
        _decode(scheduler, _of("decodes"))
        scheduler.add(_of("prompt", num_tokens))
        assert _rows(plan_step(scheduler))[1][2] == chunk


def test_decodes_do_not_bound_a_prompt_where_prompts_come_first() -> None:
    scheduler = _scheduler(prefill_tokens=32, prompts_first=True)
    _decode(scheduler, _of("decodes"))
    scheduler.add(_of("prompt", 100))
    assert [row.count for row in plan_step(scheduler).rows] == [1, 63]


def test_short_prompts_that_have_begun_get_half_of_what_a_long_one_would_take() -> None:
    scheduler = _scheduler(prefill_tokens=40)
    scheduler.add(_of("long", 200))
    collect(scheduler, plan_step(scheduler))
    scheduler.add(_of("short", 40))
    for counts in ([32, 32], [32, 8]):
        plan = plan_step(scheduler)
        assert [row.count for row in plan.rows] == counts
        collect(scheduler, plan)


def test_a_short_prompt_that_has_no_place_takes_nothing_from_a_long_one() -> None:
    scheduler = _scheduler(num_seqs=1, prefill_tokens=40)
    scheduler.add(_of("long", 200))
    collect(scheduler, plan_step(scheduler))
    scheduler.add(_of("short", 40))
    assert [row.count for row in plan_step(scheduler).rows] == [64]


def test_a_prompt_for_which_no_token_is_left_has_no_row() -> None:
    scheduler = _scheduler(prefill_tokens=40)
    scheduler.add(_of("long", 200))
    collect(scheduler, plan_step(scheduler))
    scheduler.add(_of("short", 40))
    collect(scheduler, plan_step(scheduler))
    scheduler.bounds.tokens = 1
    assert [row.count for row in plan_step(scheduler).rows] == [1]


def test_one_chunk_in_eight_of_a_long_prompt_is_a_little_larger() -> None:
    scheduler = _scheduler(num_blocks=256, prefill_tokens=40)
    _teach(scheduler)
    _decode(scheduler, *(_of(f"decodes {n}") for n in range(6)))
    scheduler.add(_of("long", 600))
    counts = []
    for _ in range(24):
        plan = plan_step(scheduler)
        counts += [row.count for row in plan.rows if row.sequence.request.request_id == "long"]
        collect(scheduler, plan)
    usual = max(set(counts), key=counts.count)
    assert counts.count(usual) >= 20
    assert [count for count in counts if count > usual] == [usual + 1] * 3


def test_a_drafter_forgets_who_has_left() -> None:
    forgotten: list[Sequence] = []

    class Forgetful(Drafter):
        def forget(self, sequence: Sequence) -> None:
            forgotten.append(sequence)

    scheduler = _scheduler(drafter=Forgetful(3))
    sequence = _of("a")
    scheduler.add(sequence)
    scheduler.remove(sequence)
    assert forgotten == [sequence]
