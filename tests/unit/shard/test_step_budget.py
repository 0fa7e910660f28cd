"""What is left of a step while it is filled."""

from __future__ import annotations

from support.engines import make_sequence

from penstock_shard.rows import Row
from penstock_shard.step_budget import UNBOUNDED_S, StepBudget
from penstock_shard.step_time import StepSize, StepTime

LONGEST = 64


def _learned() -> StepTime:
    """A millisecond a prompt token, a decode row and a step."""
    time = StepTime()
    for decodes in range(8):
        for tokens in (0, 16, 64):
            size = StepSize(decodes, tokens, 0)
            time.learn(size, 1e-3 * (1 + decodes + tokens))
    return time


def _limit(budget: StepBudget, *, is_long: bool = False, aged: bool = False) -> int:
    return budget.chunk_limit(0, is_long=is_long, is_aged=lambda: aged, probes=False)


def _row(count: int) -> Row:
    return Row(make_sequence("r", [1] * 500), 0, count, samples=False)


def test_prompts_have_a_whole_step_where_nothing_decodes() -> None:
    budget = StepBudget(256, UNBOUNDED_S, StepTime())
    budget.bound_prompts(StepSize(0, 0, 0), LONGEST)
    assert (_limit(budget), _limit(budget, is_long=True)) == (256, 256)


def test_prompts_beside_decodes_have_less_and_long_ones_the_time_of_the_decodes() -> None:
    budget = StepBudget(256, UNBOUNDED_S, _learned())
    budget.bound_prompts(StepSize(19, 0, 0), LONGEST)
    assert _limit(budget) == LONGEST
    # 80 % of 20 ms.
    assert 14 <= _limit(budget, is_long=True) <= 16
    budget.take_chunk(_row(10), is_long=True)
    assert _limit(budget) == LONGEST - 10
    assert _limit(budget, is_long=True) <= 6


def test_short_prompts_get_past_a_long_one() -> None:
    budget = StepBudget(256, UNBOUNDED_S, StepTime())
    budget.bound_prompts(StepSize(0, 0, 0), LONGEST)
    budget.leave_half_to_short()
    budget.take_chunk(_row(_limit(budget, is_long=True)), is_long=True)
    assert (_limit(budget), _limit(budget, is_long=True)) == (128, 0)


def test_whoever_has_waited_for_too_long_has_some_tokens_whatever_the_time() -> None:
    budget = StepBudget(256, 0.0, _learned())
    budget.bound_prompts(StepSize(0, 0, 0), LONGEST)
    assert _limit(budget) == 0
    assert _limit(budget, aged=True) == 16
    budget.take_chunk(_row(16), is_long=False)
    assert _limit(budget, aged=True) == 0


def test_drafts_take_half_of_what_decodes_leave() -> None:
    assert StepBudget(100, 0.5, StepTime()).for_drafts() == (50, 0.25)
