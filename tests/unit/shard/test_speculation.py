"""Drafted tokens in the engine: the same tokens in fewer steps, and never at anybody's cost."""

from __future__ import annotations

import dataclasses
from collections import abc
from typing import Any

import msgspec
import pytest
from support.budget import budget, seeded
from support.constrained_engines import ConstrainedEngine, constrained
from support.drafters import FickleOracle, Oracle, always, named
from support.engines import EOS_ID, EngineUnderTest, make_engine, make_request
from support.plans import Plan, plan_step

from penstock_proto.engine_request import EngineRequest
from penstock_proto.types import (
    Constraint,
    EngineSampling,
    FinishReason,
    Logprobs,
    Objective,
    RequestOutput,
    ThinkingBudget,
)
from penstock_shard.sequence import Sequence
from penstock_shard.spec_decode.prompt_lookup import Drafter

# Sixteen ids, so that drafts from a request's own tokens are right now and then.
FEW = tuple(range(100, 116))


def _request(name: str = "r", **changes: Any) -> EngineRequest:
    request = make_request(name, range(100, 116), max_tokens=40, allowed_token_ids=FEW)
    sampling = changes.pop("sampling", {})
    if sampling:
        changes["sampling"] = dataclasses.replace(request.sampling, **sampling)
    return msgspec.structs.replace(request, **changes)


def _run(request: EngineRequest, drafter: Drafter | None, ahead: int = 1) -> EngineUnderTest:
    under_test = make_engine(drafter=drafter, max_steps_ahead=ahead)
    under_test.engine.submit(request)
    under_test.run()
    return under_test


def _tokens(outputs: abc.Sequence[RequestOutput]) -> list[int]:
    return [token_id for output in outputs for token_id in output.token_ids]


def _logprobs(outputs: abc.Sequence[RequestOutput]) -> Logprobs:
    merged = Logprobs()
    for output in outputs:
        assert output.logprobs is not None
        assert len(output.logprobs.chosen) == len(output.token_ids)
        merged.extend(output.logprobs)
    return merged


CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "greedy": {"sampling": {"temperature": 0.0}},
    "penalties": {"sampling": {"repetition_penalty": 1.3, "presence_penalty": 0.5}},
    "bad_words": {"sampling": {"bad_words": ((101, 102), (103,), (104, 105, 106))}},
    "logprobs": {"logprobs": 3, "logprob_token_ids": (100, 7)},
    "stop": {"stop_token_ids": frozenset({107})},
    "min_tokens": {"stop_token_ids": frozenset({107, 108}), "min_tokens": 25},
    "reluctant": {"reluctant_stop_ids": frozenset({109})},
    "short": {"max_tokens": 3},
    "thinking": {"thinking_budget": ThinkingBudget(6, 105, 106)},
}


@pytest.mark.parametrize("ahead", [0, 1, 2])
@pytest.mark.parametrize("name", CASES)
def test_what_is_given_is_what_is_given_without_drafts(name: str, ahead: int) -> None:
    rng = seeded(f"drafts, {name}")
    for seed in range(budget(2, 100)):
        case = _seeded(CASES[name], seed)
        plain = _run(_request(**case), None)
        whole = plain.tokens("r")
        foresee = always(whole)
        drafters = [Drafter(4), Oracle(4, foresee), FickleOracle(4, foresee, rng)]
        for drafter in drafters:
            drafted = _run(_request(**case), drafter, ahead)
            assert drafted.tokens("r") == whole
            assert [o.finish_reason for o in drafted.endings("r")] == [
                o.finish_reason for o in plain.endings("r")
            ]
            assert drafted.outputs[-1].stop_token_id == plain.outputs[-1].stop_token_id
            if name == "logprobs":
                assert _logprobs(drafted.outputs) == _logprobs(plain.outputs)
            assert drafted.blocks.num_referenced == 0


def _seeded(case: dict[str, Any], seed: int) -> dict[str, Any]:
    return {**case, "sampling": {**case.get("sampling", {}), "seed": seed}}


def test_right_drafts_come_out_together_and_take_fewer_steps() -> None:
    whole = _run(_request(), None).tokens("r")
    drafter = Oracle(4, always(whole))
    under_test = _run(_request(), drafter, 0)
    assert [len(output.token_ids) for output in under_test.outputs] == [1, 5, 5, 5, 5, 5, 5, 5, 4]
    positions = [output.first_position for output in under_test.outputs]
    assert positions == [0, 1, 6, 11, 16, 21, 26, 31, 36]
    (ending,) = under_test.endings("r")
    assert ending.work is not None
    assert ending.work.steps == 9
    load = under_test.engine.load()
    assert (load.draft_tokens_total, load.accepted_tokens_total) == (31, 31)
    assert load.decode_tokens_total == 39
    assert load.prompt_tokens_total == 16


def test_a_drafter_learns_from_drafts_alone() -> None:
    learned: list[int] = []

    class Noting(Drafter):
        def learn(self, sequence: Sequence, num_proposed: int, num_accepted: int) -> None:
            learned.append(num_proposed)
            super().learn(sequence, num_proposed, num_accepted)

    under_test = _run(_request(), Noting(4))
    assert 0 < len(learned) < len(under_test.outputs)
    assert all(learned)


def test_wrong_drafts_cost_no_step() -> None:
    drafter = Oracle(4, always([EOS_ID] * 99))
    under_test = _run(_request(), drafter, 0)
    assert under_test.engine.load().accepted_tokens_total == 0
    assert under_test.engine.steps_total == 40
    (ending,) = under_test.endings("r")
    assert ending.work is not None
    assert ending.work.steps == 40


def test_a_stop_within_a_draft_ends_the_request_there() -> None:
    whole = _run(_request(logprobs=0), None).tokens("r")
    stop = whole[8]
    drafter = Oracle(16, always(whole))
    under_test = _run(_request(stop_token_ids=frozenset({stop}), logprobs=0), drafter)
    given = whole[: whole.index(stop) + 1]
    assert under_test.tokens("r") == given
    (ending,) = under_test.endings("r")
    assert (ending.finish_reason, ending.stop_token_id) == (FinishReason.STOP, stop)
    assert ending.work is not None
    assert ending.work.steps == len(under_test.outputs)
    assert len(_logprobs(under_test.outputs).chosen) == len(given)


@pytest.mark.parametrize("kind", ["regex", "choice", "json_object"])
def test_constrained_outputs_are_those_without_drafts(kind: str) -> None:
    rng = seeded("constrained drafts")
    constraint = {
        "regex": Constraint("regex", "[a-f]{3,9}-[0-9]{2}(ab|cd){4,12}"),
        "choice": Constraint("choice", options=("left " * 9, "left left right", "neither")),
        "json_object": Constraint("json_object"),
    }[kind]
    names = [f"r{seed}" for seed in range(4)]

    def run(drafter: Drafter | None) -> dict[str, list[int]]:
        requests = [constrained(n, constraint, seed=i, max_tokens=60) for i, n in enumerate(names)]
        said = ConstrainedEngine(drafter=drafter).run(*requests)
        return {name: _tokens(outputs) for name, outputs in said.items()}

    plain = run(None)
    foresee = named(plain)
    for drafter in (Drafter(4), Oracle(4, foresee), FickleOracle(4, foresee, rng)):
        assert run(drafter) == plain
    assert drafter.proposed_total > 0


def test_an_error_after_right_drafts_comes_after_their_tokens() -> None:
    sampling = EngineSampling(temperature=1.0, allowed_token_ids=(7,), bad_words=((7, 7, 7, 7),))
    request = msgspec.structs.replace(make_request(max_tokens=9), sampling=sampling)
    under_test = _run(request, Oracle(8, always([7] * 9)))
    assert under_test.tokens("r") == [7, 7, 7]
    (ending,) = under_test.endings("r")
    assert ending.error is not None
    assert "at position 3" in ending.error.message


# ---- which rows draft, and how much ----


def _decoding(under_test: EngineUnderTest, count: int, **options: Any) -> Plan:
    """Return the plan of the first step in which all of these requests decode."""
    for number in range(count):
        prompt = range(number * 20, number * 20 + 10)
        under_test.engine.submit(make_request(str(number), prompt, **options))
    under_test.step()
    return plan_step(under_test.scheduler, 1.0, 1.0)


class _Always(Drafter):
    """Drafts as many as it may."""

    def expects(self, sequence: Sequence) -> bool:
        return True

    def propose(self, sequence: Sequence, most: int) -> list[int]:
        return [5] * most


def _counts(plan: Plan) -> list[int]:
    return [row.count for row in plan.rows]


def test_drafts_take_half_of_what_decodes_leave() -> None:
    engine = make_engine(
        drafter=_Always(8), max_steps_ahead=0, max_num_batched_tokens=40, max_num_seqs=20
    )
    plan = _decoding(engine, 4, max_tokens=30)
    assert _counts(plan) == [1, 9, 9, 3]
    assert [len(row.drafts) for row in plan.rows] == [0, 8, 8, 2]


def test_prompts_get_what_drafts_leave_of_the_budget() -> None:
    engine = make_engine(
        drafter=_Always(8), max_steps_ahead=0, max_num_batched_tokens=40, max_num_seqs=20
    )
    engine.engine.submit(make_request("decodes", range(10), max_tokens=30))
    engine.step()
    engine.engine.submit(make_request("prompt", range(100, 200)))
    assert _counts(plan_step(engine.scheduler, 1.0, 1.0)) == [9, 31]


def test_a_step_has_no_more_drafts_than_sequences_may_run() -> None:
    engine = make_engine(
        drafter=_Always(4), max_steps_ahead=0, max_num_batched_tokens=512, max_num_seqs=5
    )
    assert _counts(_decoding(engine, 5, max_tokens=30)) == [1, 1, 1, 5, 2]


def test_nothing_is_drafted_beyond_the_last_token_a_request_may_give() -> None:
    engine = make_engine(drafter=_Always(8), max_steps_ahead=0)
    assert _counts(_decoding(engine, 1, max_tokens=4)) == [3]


def test_nobody_is_preempted_for_a_draft() -> None:
    # Two blocks each, of which the second is full but for one token: there is no third.
    engine = make_engine(
        num_blocks=4, max_model_len=64, drafter=_Always(8), max_steps_ahead=0, prefix_caching=False
    )
    for name in ("a", "b"):
        engine.engine.submit(make_request(name, range(30), max_tokens=20))
    engine.step()
    plan = plan_step(engine.scheduler, 1.0, 1.0)
    assert _counts(plan) == [2, 2]
    assert engine.scheduler.preemptions_total == 0


def test_whoever_said_how_far_apart_tokens_may_be_is_not_held_up_by_drafts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine = make_engine(drafter=_Always(8), max_steps_ahead=0, max_num_batched_tokens=512)
    wish = Objective(seconds_between_tokens=1e-6)
    engine.engine.submit(make_request("hurried", range(10), max_tokens=90, objective=wish))
    (hurried,) = engine.scheduler.sequences
    for number in range(3):
        engine.engine.submit(make_request(str(number), range(10), max_tokens=90))
    engine.scheduler._step_time._seconds = [0.001, 0.001, 0.001, 0.0]
    monkeypatch.setattr(engine.scheduler._step_time, "learn", lambda size, seconds: None)
    for _ in range(4):
        engine.step()
    now_s = hurried.last_token_s
    plan = plan_step(engine.scheduler, now_s, now_s)
    # What is planned for is its own row and as much again.
    assert plan.rows[0].sequence is hurried
    assert max(_counts(plan)) == 1


def test_drafts_leave_prompts_half_of_the_time_that_objectives_leave() -> None:
    engine = make_engine(drafter=_Always(32), max_steps_ahead=0, max_num_batched_tokens=512)
    wish = Objective(seconds_between_tokens=0.03)
    engine.engine.submit(make_request("hurried", range(10), max_tokens=90, objective=wish))
    (hurried,) = engine.scheduler.sequences
    engine.step()
    engine.scheduler._step_time._seconds = [0.0, 0.001, 0.001, 0.0]
    engine.engine.submit(make_request("prompt", range(100, 200)))
    now_s = hurried.last_token_s
    plan = plan_step(engine.scheduler, now_s, now_s)
    # Of 28.5 ms its own row takes one.
    assert _counts(plan) == [1 + 13, 14]


def test_a_row_without_drafts_takes_no_block_for_them() -> None:
    class Silent(_Always):
        def propose(self, sequence: Sequence, most: int) -> list[int]:
            return []

    engine = make_engine(drafter=Silent(8), max_steps_ahead=0)
    (row,) = _decoding(engine, 1, max_tokens=30).rows
    assert len(engine.blocks.blocks_of(row.sequence)) == 1


def test_whoever_said_how_far_apart_tokens_may_be_is_not_left_out_for_a_draft() -> None:
    class Picky(_Always):
        def expects(self, sequence: Sequence) -> bool:
            return sequence.request.request_id == "0"

    for objective, rows in ((None, 7), (Objective(seconds_between_tokens=1.0), 0)):
        under_test = make_engine(drafter=Picky(2), max_num_batched_tokens=512)
        for number in range(8):
            wish = None if number else objective
            request = make_request(str(number), range(10), max_tokens=30, objective=wish)
            under_test.engine.submit(request)
        under_test.step()
        assert len(plan_step(under_test.scheduler, 1.0, 1.0).rows) == rows


def test_few_that_wait_for_a_draft_hold_nobody_up_and_many_hold_all() -> None:
    class Picky(_Always):
        def __init__(self, waiting: int) -> None:
            super().__init__(2)
            self.waiting = waiting

        def expects(self, sequence: Sequence) -> bool:
            return int(sequence.request.request_id) < self.waiting

    for waiting, rows in ((1, 7), (2, 0)):
        drafter = Picky(waiting)
        under_test = make_engine(drafter=drafter, max_num_batched_tokens=512)
        for number in range(8):
            under_test.engine.submit(make_request(str(number), range(10), max_tokens=30))
        scheduler = under_test.scheduler
        under_test.step()
        plan = plan_step(scheduler, 1.0, 1.0)
        assert len(plan.rows) == rows


def test_a_request_is_in_one_step_while_its_drafts_are_verified() -> None:
    """`ShadowRunner` looks at each launch; here both kinds of rows must have been there."""
    outputs = {str(i): _run(_request(str(i)), None).tokens(str(i)) for i in range(6)}
    rng = seeded("one step at a time")
    drafter = FickleOracle(4, named(outputs), rng)
    under_test = make_engine(drafter=drafter, max_steps_ahead=2)
    for name in outputs:
        under_test.engine.submit(_request(name))
    under_test.run()
    assert {name: under_test.tokens(name) for name in outputs} == outputs
    assert 0 < drafter.accepted_total < drafter.proposed_total
