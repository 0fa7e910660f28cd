"""Steps that memory does not hold: nothing is lost but time, and what never fits ends alone."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Iterable
from typing import Any

import pytest
from support.engines import EngineUnderTest, make_engine, make_request
from support.shadow import Fails, ShadowRunner, ShadowStep

from penstock_proto.errors import Code
from penstock_proto.types import FinishReason, Objective, Pooling
from penstock_shard.sequence import Sequence
from penstock_shard.spec_decode.prompt_lookup import Drafter
from penstock_shard.worker.base import Batch, RowResult


def _fails_at(*steps: int) -> Fails:
    """True at the steps of these numbers, counted from 0 as they are collected."""
    numbers = itertools.count()
    return lambda step: next(numbers) in steps


def _alone(prompt, **options) -> list[int]:
    under_test = make_engine(num_blocks=64, max_num_batched_tokens=512)
    under_test.engine.submit(make_request("r", prompt, **options))
    under_test.run()
    return under_test.tokens("r")


def _released(under_test: EngineUnderTest) -> list[str]:
    runner = under_test.engine._runner
    assert isinstance(runner, ShadowRunner)
    assert not runner.held
    return sorted({request.request_id for request in runner.released})


@pytest.mark.parametrize("ahead", [0, 1, 2])
@pytest.mark.parametrize("failing", [(0,), (3,), (2, 3), (1, 3, 60, 75)])
def test_requests_of_a_step_that_failed_give_the_tokens_they_would_have_given(
    failing: tuple[int, ...], ahead: int
) -> None:
    under_test = make_engine(fails=_fails_at(*failing), max_steps_ahead=ahead)
    for number in range(4):
        prompt = range(number, number + 40)
        under_test.engine.submit(make_request(str(number), prompt, max_tokens=20, seed=number))
    under_test.run()
    for number in range(4):
        name = str(number)
        expected = _alone(range(number, number + 40), max_tokens=20, seed=number)
        assert under_test.tokens(name) == expected
        assert [output.finish_reason for output in under_test.endings(name)] == [
            FinishReason.LENGTH
        ]
    assert under_test.scheduler.preemptions_total > 0
    assert under_test.blocks.num_referenced == 0


def test_prompt_logprobs_arrive_once_in_spite_of_a_step_that_failed() -> None:
    under_test = make_engine(fails=_fails_at(1), max_num_batched_tokens=16)
    prompt = [(7 * i) % 900 for i in range(50)]
    under_test.engine.submit(make_request("r", prompt, prompt_logprobs=1, max_tokens=3))
    under_test.run()
    ids: list[int] = []
    for output in under_test.outputs:
        if output.prompt_logprobs is not None:
            assert output.prompt_logprobs_start == len(ids) + 1
            ids += output.prompt_logprobs.top_token_ids
    assert ids == prompt[1:]


def test_what_a_failed_step_should_have_computed_is_found_by_nobody() -> None:
    under_test = make_engine(fails=_fails_at(0), max_steps_ahead=0)
    under_test.engine.submit(make_request("first", range(60), max_tokens=2))
    under_test.step()
    (first,) = under_test.scheduler.sequences
    under_test.engine.abort("first", 0)
    under_test.engine.submit(make_request("second", range(60), max_tokens=2))
    under_test.run()
    (second,) = under_test.endings("second")
    assert first.preemptions == 1
    assert under_test.tokens("second") == _alone(range(60), max_tokens=2)
    told = next(o for o in under_test.outputs if o.request_id == "second")
    assert told.cached_tokens == 0
    assert second.finish_reason is FinishReason.LENGTH


def test_what_was_computed_before_is_found_again() -> None:
    under_test = make_engine(fails=_fails_at(3), max_steps_ahead=0)
    under_test.engine.submit(make_request("r", range(60), max_tokens=20))
    for _ in range(4):
        under_test.step()
    assert under_test.scheduler.num_waiting == 1
    batch = under_test.scheduler.schedule()
    # Three blocks; the rest of the prompt and two tokens of output are computed again.
    assert list(zip(batch.starts, batch.counts, strict=True)) == [(48, 15)]


def test_requests_keep_their_order_when_they_are_preempted() -> None:
    under_test = make_engine(fails=_fails_at(1))
    for number in range(4):
        under_test.engine.submit(make_request(str(number), range(10 * number, 10 * number + 8)))
    under_test.step()
    under_test.step()
    running = [sequence.request.request_id for sequence in under_test.scheduler.sequences]
    while under_test.scheduler.num_running:
        under_test.step()
    assert [sequence.request.request_id for sequence in under_test.scheduler.sequences] == running


def test_steps_are_half_as_large_and_grow_again(caplog: pytest.LogCaptureFixture) -> None:
    under_test = make_engine(fails=_fails_at(0), max_num_batched_tokens=64, max_model_len=512)
    under_test.engine.submit(make_request("r", range(200), max_tokens=80))
    with caplog.at_level(logging.WARNING):
        while not caplog.records:
            under_test.step()
    (record,) = caplog.records
    assert record.getMessage() == (
        "out of memory in a step of 64 tokens of 1 requests, which are preempted: 256 MiB were "
        "asked for; steps have at most 32 of 1 for a while"
    )
    assert under_test.scheduler.schedule().num_tokens == 32


class _Always(Drafter):
    """Drafts as many as it may."""

    def propose(self, sequence: Sequence, most: int) -> list[int]:
        return [5] * most


def test_nothing_is_drafted_until_the_bounds_are_what_they_were(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    under_test = make_engine(fails=_fails_at(2), drafter=_Always(2), max_steps_ahead=0)
    under_test.engine.submit(make_request("r", range(20), max_tokens=300))
    plans = []
    update = under_test.scheduler.update

    def note(batch: Batch, *args: Any) -> Iterable[tuple[Sequence, RowResult]]:
        plans.append((under_test.scheduler.bounds.reduced, len(batch.drafts[0])))
        return update(batch, *args)

    monkeypatch.setattr(under_test.scheduler, "update", note)
    under_test.run()
    assert {drafts for reduced, drafts in plans if reduced} == {0}
    assert (False, 2) in plans[-9:]


def test_nobody_waits_for_a_draft_while_there_are_none() -> None:
    class Waiting(_Always):
        def expects(self, sequence: Sequence) -> bool:
            return True

    under_test = make_engine(fails=_fails_at(0), drafter=Waiting(2))
    under_test.engine.submit(make_request("r", range(20), max_tokens=300))
    # Lost, and launched anew; then steps overlap as ever.
    for _ in range(5):
        under_test.step()
    assert under_test.scheduler.bounds.reduced
    assert len(under_test.engine._in_flight) == 1


def test_a_long_prompt_that_begins_anew_whenever_a_step_fails_comes_to_its_end() -> None:
    under_test = make_engine(
        num_blocks=256,
        max_model_len=4096,
        max_num_batched_tokens=64,
        prefix_caching=False,
        fails=lambda step: step.num_tokens > 40,
    )
    prompt = [i % 900 for i in range(2500)]
    under_test.engine.submit(make_request("r", prompt, max_tokens=1, pooling=Pooling.MEAN))
    under_test.run(max_steps=1000)
    assert [output.finish_reason for output in under_test.endings("r")] == [FinishReason.STOP]
    assert under_test.scheduler.preemptions_total > 1


def test_two_that_do_not_fit_alone_and_take_turns_both_end() -> None:
    under_test = make_engine(fails=lambda step: True, max_num_seqs=1)
    now_s = 1.0
    under_test.engine._clock = lambda: now_s
    for name in ("aged", "young"):
        under_test.engine.submit(make_request(name, objective=Objective(deadline_s=5.0)))
        now_s += 31.0
    now_s -= 1.5
    under_test.run(max_steps=20)
    for name in ("aged", "young"):
        (ending,) = under_test.endings(name)
        assert ending.error is not None
        assert ending.error.code is Code.RESOURCE_EXHAUSTED


def test_the_whole_budget_comes_back() -> None:
    under_test = make_engine(fails=_fails_at(0), max_num_batched_tokens=64)
    under_test.engine.submit(make_request("r", range(60), max_tokens=200))
    under_test.run()
    bounds = under_test.scheduler.bounds
    assert (bounds.tokens, bounds.sequences, bounds.reduced) == (64, 8, False)


def test_a_request_that_does_not_fit_alone_ends_and_the_others_live() -> None:
    alone: list[str] = []

    def fails(step: ShadowStep) -> bool:
        names = step.names
        if names == ["big"]:
            alone.append("big")
        return "big" in names

    under_test = make_engine(max_num_batched_tokens=64, fails=fails)
    for name in ("a", "big", "b"):
        under_test.engine.submit(make_request(name, range(40), max_tokens=5))
    under_test.run()
    (ending,) = under_test.endings("big")
    assert ending.error is not None
    assert ending.error.code is Code.RESOURCE_EXHAUSTED
    assert ending.error.message == (
        "the device has too little memory for it: 256 MiB were asked for"
    )
    assert alone
    for name in ("a", "b"):
        assert under_test.tokens(name) == _alone(range(40), max_tokens=5)
    assert under_test.blocks.num_referenced == 0
    assert _released(under_test) == ["a", "b", "big"]


def test_a_long_chunk_alone_is_tried_again_in_smaller_ones() -> None:
    under_test = make_engine(max_num_batched_tokens=64, fails=lambda step: step.num_tokens > 20)
    under_test.engine.submit(make_request("r", range(64), max_tokens=5))
    under_test.run()
    assert under_test.tokens("r") == _alone(range(64), max_tokens=5)


def test_who_was_aborted_meanwhile_is_released_once() -> None:
    under_test = make_engine(fails=_fails_at(1), max_steps_ahead=2)
    under_test.engine.submit(make_request("gone", range(20), max_tokens=9))
    under_test.engine.submit(make_request("stays", range(30), max_tokens=9))
    for _ in range(3):
        under_test.step()
    under_test.engine.abort("gone", 0)
    under_test.run()
    assert under_test.tokens("stays") == _alone(range(30), max_tokens=9)
    assert [o.finish_reason for o in under_test.endings("gone")] == [FinishReason.ABORTED]
    assert _released(under_test) == ["gone", "stays"]


def test_who_would_rather_go_elsewhere_is_given_back() -> None:
    under_test: EngineUnderTest = make_engine(fails=_fails_at(1))
    under_test.engine.submit(make_request(max_tokens=9, hand_back=True))
    under_test.run()
    (ending,) = under_test.endings("r")
    assert ending.error is not None
    assert ending.error.code is Code.UNAVAILABLE
    assert ending.error.message == "the shard is out of memory; the request is given back"
