"""The budget of a step: what is left while the step is filled."""

from __future__ import annotations

import pytest
from support.engines import make_sequence

from penstock_proto.types import Objective
from penstock_shard.kv_cache.block_manager import BlockManager
from penstock_shard.scheduler.priority_policy import TimedBudget
from penstock_shard.scheduler.rows import Row, Rows
from penstock_shard.scheduler.speculation import Speculation
from penstock_shard.scheduler.step_budget import StepBudget
from penstock_shard.scheduler.step_time import StepSize, StepTime
from penstock_shard.sequence import Sequence
from penstock_shard.spec_decode.prompt_lookup import Drafter

LONGEST = 64


def _learned() -> StepTime:
    """Return learned times: a millisecond for each prompt token, each decode row and each step."""
    time = StepTime()
    for decodes in range(8):
        for tokens in (0, 16, 64):
            size = StepSize(decodes, tokens, 0)
            time.learn(size, 1e-3 * (1 + decodes + tokens))
    return time


def _limit(budget: StepBudget, *, is_long: bool = False) -> int:
    return budget.chunk_limit(_waiting(), is_long=is_long, probes=False)


def _waiting() -> Sequence:
    return make_sequence("r", [1] * 500)


def _row(count: int) -> Row:
    return Row(make_sequence("r", [1] * 500), 0, count, samples=False)


def test_prompts_have_a_whole_step_where_nothing_decodes() -> None:
    budget = StepBudget(256, StepTime())
    budget.bound_prompts(StepSize(0, 0, 0), LONGEST)
    assert (_limit(budget), _limit(budget, is_long=True)) == (256, 256)


def test_prompts_beside_decodes_have_less_and_long_ones_the_time_of_the_decodes() -> None:
    budget = StepBudget(256, _learned())
    budget.bound_prompts(StepSize(19, 0, 0), LONGEST)
    assert _limit(budget) == LONGEST
    # 80 % of 20 ms.
    assert 14 <= _limit(budget, is_long=True) <= 16
    budget.take_chunk(_row(10), is_long=True)
    assert _limit(budget) == LONGEST - 10
    assert _limit(budget, is_long=True) <= 6


def _budgets_by_class() -> list[StepBudget]:
    """Budgets of 19 decodes, which take 20 ms, in which prompts of class 0 are first."""
    budgets = [
        StepBudget(256, _learned()),
        TimedBudget(256, _learned(), time_s=60.0, is_aged=lambda sequence: False),
    ]
    for budget in budgets:
        budget.first_class = 0
        budget.bound_prompts(StepSize(19, 0, 0), LONGEST)
    return budgets


def _lower_limit(budget: StepBudget) -> int:
    lower = make_sequence("low", [1] * 20, objective=Objective(priority=1))
    return budget.chunk_limit(lower, is_long=False, probes=False)


def test_prompts_of_a_lower_class_take_half_of_the_time_of_the_rest_of_a_step() -> None:
    for budget in _budgets_by_class():
        # At a millisecond a token.
        assert 9 <= _lower_limit(budget) <= 10
        short = make_sequence("short", [1] * 20)
        assert budget.chunk_limit(short, is_long=False, probes=False) == LONGEST
        budget.take_chunk(Row(short, 0, 20, samples=True), is_long=False)
        after = _lower_limit(budget)
        assert 19 <= after <= 20
        lower = make_sequence("low", [1] * 20, objective=Objective(priority=1))
        budget.take_chunk(Row(lower, 0, after, samples=False), is_long=False)
        assert _lower_limit(budget) <= 1


def test_prompts_of_a_lower_class_wait_while_one_takes_more_than_the_step() -> None:
    for budget in _budgets_by_class():
        assert _limit(budget) == LONGEST < _waiting().num_uncomputed
        assert _lower_limit(budget) == 0
        # Of its own class none waits.
        assert _limit(budget) == LONGEST


def test_without_classes_every_prompt_has_what_is_left() -> None:
    lower = make_sequence("low", [1] * 20, objective=Objective(priority=1))
    budget = StepBudget(256, _learned())
    budget.bound_prompts(StepSize(0, 0, 0), LONGEST)
    budget.take_chunk(_row(10), is_long=False)
    assert budget.chunk_limit(lower, is_long=False, probes=False) == 246


def test_short_prompts_get_past_a_long_one() -> None:
    budget = StepBudget(256, StepTime())
    budget.bound_prompts(StepSize(0, 0, 0), LONGEST)
    budget.leave_half_to_short()
    budget.take_chunk(_row(_limit(budget, is_long=True)), is_long=True)
    assert (_limit(budget), _limit(budget, is_long=True)) == (128, 0)


def test_long_prompts_have_a_token_where_there_is_no_half() -> None:
    budget = StepBudget(3, StepTime())
    budget.bound_prompts(StepSize(0, 0, 0), LONGEST)
    budget.leave_half_to_short()
    assert _limit(budget, is_long=True) == 1


def test_a_long_prompt_that_probes_gets_an_eighth_more_than_is_predicted_to_fit() -> None:
    budget = StepBudget(1024, _learned())
    budget.bound_prompts(StepSize(124, 0, 0), 512)
    # 80 % of 125 ms, of which an eighth and a ninth are not the same.
    fits = budget.step_time.prompt_tokens_in(budget.long_s, 0)
    assert 98 <= fits <= 100
    assert budget.chunk_limit(_waiting(), is_long=True, probes=False) == fits
    assert budget.chunk_limit(_waiting(), is_long=True, probes=True) == fits + 12


@pytest.mark.parametrize(("num_computed", "limit"), [(48, 50), (49, 256)])
def test_a_chunk_that_scores_all_that_is_left_ends_with_tokens_that_are_not_scored(
    num_computed: int, limit: int
) -> None:
    scored = make_sequence("r", [1] * 100, prompt_logprobs=0)
    scored.num_computed = num_computed
    budget = StepBudget(256, StepTime(), scored_tokens=50)
    budget.bound_prompts(StepSize(0, 0, 0), LONGEST)
    # The last token of a prompt is scored by none.
    assert budget.chunk_limit(scored, is_long=False, probes=False) == limit


def test_tokens_of_which_a_whole_vocabulary_is_scored_are_few_in_a_step() -> None:
    wide = make_sequence("r", [1] * 400, prompt_logprobs=150_000)
    narrow = make_sequence("s", [1] * 400, prompt_logprobs=20)
    budget = StepBudget(256, StepTime(), scored_tokens=111)
    budget.bound_prompts(StepSize(0, 0, 0), LONGEST)
    assert budget.chunk_limit(narrow, is_long=False, probes=False) == 111
    assert budget.chunk_limit(wide, is_long=False, probes=False) == 11
    assert not budget.has_room(wide, 12, 300)
    budget.take_chunk(Row(wide, 0, 11, samples=False, scored=11), is_long=False)
    assert (budget.scorable(narrow), budget.scorable(wide)) == (1, 0)
    # None is so wide that it would never have a turn.
    widest = make_sequence("t", [1] * 400, prompt_logprobs=2_000_000)
    assert StepBudget(256, StepTime(), scored_tokens=16).scorable(widest) == 1


@pytest.mark.parametrize("aged", [True, False])
def test_whoever_has_waited_for_too_long_has_some_tokens_whatever_the_time(aged: bool) -> None:
    budget = TimedBudget(256, _learned(), time_s=0.0, is_aged=lambda sequence: aged)
    budget.bound_prompts(StepSize(0, 0, 0), LONGEST)
    assert _limit(budget) == (16 if aged else 0)
    budget.take_chunk(_row(16), is_long=False)
    assert _limit(budget) == 0


def test_time_to_spare_gives_prompts_beside_decodes_no_more_tokens() -> None:
    plain = StepBudget(256, _learned())
    timed = TimedBudget(256, _learned(), time_s=60.0, is_aged=lambda sequence: False)
    for budget in (plain, timed):
        budget.bound_prompts(StepSize(19, 0, 0), LONGEST)
        assert _limit(budget) == LONGEST
        budget.take_chunk(_row(10), is_long=True)
        assert _limit(budget) == LONGEST - 10
    assert _limit(timed, is_long=True) == _limit(plain, is_long=True) <= 6


def test_decodes_have_rows_as_long_as_the_time_that_is_left_is_just_enough() -> None:
    # Nothing is learned yet: no row takes time, and none is left.
    budget = TimedBudget(256, StepTime(), time_s=0.0, is_aged=lambda sequence: False)
    sequences = [_waiting(), _waiting()]
    assert budget.take_decodes(sequences) == sequences


def test_drafts_take_half_of_what_decodes_leave() -> None:
    blocks = BlockManager([64], 16)
    sequences = [make_sequence(str(i), [1, 2, 3, 4] * 8) for i in range(3)]
    for sequence in sequences:
        blocks.grow(sequence, sequence.num_tokens)
    budget = StepBudget(20, _learned(), time_s=0.5)
    rows = Rows.of_decodes(sequences, [31] * 3)
    rows, size = Speculation(Drafter(4), blocks, 64).add_drafts(rows, budget)
    # Ten tokens, for which there are 250 ms.
    assert [len(drafts) for drafts in rows.drafts] == [4, 4, 2]
    assert (size.num_decodes, size.num_drafts, budget.tokens) == (3, 10, 10)
    assert budget.time_s == pytest.approx(0.49)
    budget = StepBudget(20, _learned(), time_s=0.0071)
    rows, _ = Speculation(Drafter(4), blocks, 64).add_drafts(
        Rows.of_decodes(sequences, [31] * 3), budget
    )
    assert sum(map(len, rows.drafts)) == 3
