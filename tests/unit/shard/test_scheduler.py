"""The scheduler: which tokens a step computes, and who is preempted when blocks run out."""

from __future__ import annotations

import pytest
from support.engines import make_engine, make_request

from penstock_shard.request import Objective


def _rows(plan) -> list[tuple[str, int, int, bool]]:
    return [(row.request.request_id, row.start, row.count, row.samples) for row in plan.rows]


def _collect(scheduler, plan, token_id: int = 1) -> None:
    """What the engine does when a step is over: the same token for whoever sampled."""
    for row in plan.rows:
        if row.samples:
            row.request.num_pending -= 1
            row.request.token_ids.append(token_id)
    scheduler.collected(plan)


def test_a_long_prompt_is_computed_in_chunks_of_the_budget() -> None:
    under_test = make_engine(max_num_batched_tokens=64, max_model_len=512)
    scheduler = under_test.scheduler
    scheduler.add(make_request("a", range(150)))
    seen = []
    for _ in range(3):
        plan = scheduler.schedule()
        seen += _rows(plan)
        _collect(scheduler, plan)
    assert seen == [("a", 0, 64, False), ("a", 64, 64, False), ("a", 128, 22, True)]


def test_decodes_come_before_chunks_of_prompts() -> None:
    scheduler = make_engine(max_num_batched_tokens=64).scheduler
    decoding = make_request("decoding", range(10))
    scheduler.add(decoding)
    _collect(scheduler, scheduler.schedule())
    scheduler.add(make_request("prompt", range(200)))
    plan = scheduler.schedule()
    assert _rows(plan) == [("decoding", 10, 1, True), ("prompt", 0, 63, False)]
    _collect(scheduler, plan)
    assert _rows(scheduler.schedule()) == [("decoding", 11, 1, True), ("prompt", 63, 63, False)]


def test_no_more_requests_run_than_max_num_seqs() -> None:
    scheduler = make_engine(max_num_seqs=3).scheduler
    for number in range(5):
        scheduler.add(make_request(str(number)))
    assert len(scheduler.schedule().rows) == 3
    assert (scheduler.num_running, scheduler.num_waiting) == (3, 2)


def test_the_latest_arrival_is_preempted_when_blocks_run_out() -> None:
    under_test = make_engine(num_blocks=4, max_model_len=64)
    scheduler = under_test.scheduler
    requests = [make_request(name, range(start, start + 31), max_tokens=30)
                for name, start in (("old", 0), ("new", 100))]  # fmt: skip
    for request in requests:
        scheduler.add(request)
    _collect(scheduler, scheduler.schedule())
    old, new = requests
    for _ in range(2):
        plan = scheduler.schedule()
        if scheduler.preemptions_total:
            break
        _collect(scheduler, plan)
    assert _rows(plan) == [("old", 32, 1, True)]
    assert new.block_ids == []
    assert new.num_computed == 0
    assert (new.preemptions, old.preemptions) == (1, 0)
    assert scheduler.num_waiting == 1
    under_test.blocks.check_integrity(scheduler.block_holders)


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
    old = make_request("old", range(20))
    scheduler.add(old, now_s=1.0)
    _collect(scheduler, scheduler.schedule(now_s=1.0))
    old.last_token_s = 2.0
    hurried = make_request("hurried", range(100, 120))
    hurried.objective = Objective(time_to_first_token_s=0.1)
    for request in (make_request("plain", range(100, 120)), hurried):
        scheduler.add(request, now_s=1.5)
    scheduler._preempt(old, "a reason")
    assert [row[0] for row in _rows(scheduler.schedule(now_s=2.0))] == ["old"]


def test_a_prompt_that_lacks_blocks_is_not_looked_up_in_every_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    under_test = make_engine(num_blocks=32)
    scheduler = under_test.scheduler
    for number in range(4):
        scheduler.add(make_request(str(number), range(number, number + 8 + number), max_tokens=90))
    _collect(scheduler, scheduler.schedule())
    scheduler.add(make_request("large", range(500, 960)))
    lookups = []
    acquire = under_test.blocks.acquire_prefix

    def note(request) -> int:
        lookups.append(request)
        return acquire(request)

    monkeypatch.setattr(under_test.blocks, "acquire_prefix", note)
    free = set()
    for _ in range(64):
        free.add(under_test.blocks.num_free)
        _collect(scheduler, scheduler.schedule())
    assert len(free) > 8
    assert 2 <= len(lookups) <= 5


def test_a_request_is_let_in_only_with_blocks_for_all_it_knows() -> None:
    scheduler = make_engine(num_blocks=4, max_model_len=64, max_num_batched_tokens=32).scheduler
    scheduler.add(make_request("a", range(40)))
    scheduler.add(make_request("b", range(100, 140)))
    _collect(scheduler, scheduler.schedule())
    plan = scheduler.schedule()
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
    first, second = make_request("first", range(70)), make_request("second", range(70))
    for request in (first, second):
        under_test.scheduler.add(request)
    plan = under_test.scheduler.schedule()
    assert _rows(plan) == [("first", 0, 70, True), ("second", 64, 6, True)]
    assert second.block_ids[:4] == first.block_ids[:4]
    assert second.cached_tokens == 64


def test_prompts_scored_in_several_passes_are_shared_only_once_they_are_computed() -> None:
    under_test = make_engine(max_num_batched_tokens=256)
    scheduler = under_test.scheduler
    scored = make_request("scored", range(70), prompt_logprobs=0)
    for request in (scored, make_request("plain", range(70))):
        scheduler.add(request)
    assert _rows(scheduler.schedule())[1] == ("plain", 0, 70, True)


def test_the_next_step_is_scheduled_before_the_token_of_the_last_has_come_back() -> None:
    under_test = make_engine()
    scheduler = under_test.scheduler
    request = make_request("a", range(10), max_tokens=3)
    scheduler.add(request)
    plans = [scheduler.schedule() for _ in range(4)]
    assert [_rows(plan) for plan in plans] == [
        [("a", 0, 10, True)],
        [("a", 10, 1, True)],
        [("a", 11, 1, True)],
        [],
    ]
    assert (request.num_pending, request.num_output_tokens) == (3, 0)
    for plan in plans[:3]:
        _collect(scheduler, plan)
    assert (request.num_pending, request.num_output_tokens) == (0, 3)


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
