"""The fake runner: a token that changes with everything it may depend on, and with nothing else."""

from __future__ import annotations

import dataclasses
import time
from typing import Any

import pytest
from support.engines import EOS_ID, make_request, runner_info

from penstock_shard.request import Request, SamplingParams
from penstock_shard.runner.base import ScheduledRequest, StepPlan
from penstock_shard.runner.fake import FakeRunner


def _runner(step_s: float = 0.0) -> FakeRunner:
    return FakeRunner(runner_info(), range(EOS_ID), step_s=step_s)


def _row(request: Request, start: int = 0) -> ScheduledRequest:
    return ScheduledRequest(request, start, request.num_tokens - start, samples=True)


def _token(request: Request, runner: FakeRunner | None = None) -> int:
    runner = runner or _runner()
    runner.launch(StepPlan((_row(request),)))
    token_id = runner.collect()[0].token_id
    assert token_id is not None
    return token_id


BASE = SamplingParams(temperature=1.0, seed=1)


@pytest.mark.parametrize(
    "change",
    [
        {"temperature": 0.5},
        {"top_k": 5},
        {"top_p": 0.5},
        {"min_p": 0.5},
        {"seed": 2},
    ],
    ids=lambda change: next(iter(change)),
)
def test_every_sampling_parameter_changes_the_tokens(change: dict[str, Any]) -> None:
    def tokens(sampling: SamplingParams) -> list[int]:
        request = dataclasses.replace(make_request(), sampling=sampling)
        return [_token(request)]

    assert tokens(BASE) == tokens(BASE)
    assert tokens(BASE) != tokens(dataclasses.replace(BASE, **change))


def test_prompt_output_and_their_border_change_the_token() -> None:
    variants = [
        make_request(prompt=[1, 2, 3]),
        make_request(prompt=[1, 2, 4]),
        make_request(prompt=[3, 2, 1]),
        make_request(prompt=[1, 2], output=[3]),
        make_request(prompt=[1, 2, 3], output=[3]),
    ]
    assert len({_token(request) for request in variants}) == len(variants)


def test_a_token_does_not_depend_on_what_the_runner_did_before() -> None:
    runner = _runner()
    request = make_request()
    first = _token(request, runner)
    request.token_ids.append(first)
    second = _token(request, runner)
    assert second == _token(make_request(output=[first]))


def test_only_allowed_ids_come_out() -> None:
    allowed = dataclasses.replace(BASE, allowed_token_ids=(7, 8))
    for seed in range(20):
        sampling = dataclasses.replace(allowed, seed=seed)
        assert _token(dataclasses.replace(make_request(), sampling=sampling)) in (7, 8)


def test_top_logprobs_have_the_size_asked_for_and_start_with_the_chosen_token() -> None:
    request = make_request(logprobs=5)
    runner = _runner()
    runner.launch(StepPlan((_row(request),)))
    (result,) = runner.collect()
    assert result.logprobs is not None
    assert len(set(result.logprobs.top_token_ids)) == 5
    assert result.logprobs.top_token_ids[0] == result.token_id
    assert result.logprobs.top_logprobs[0] == result.logprobs.chosen[0]


def test_a_row_in_the_middle_of_a_prompt_samples_nothing() -> None:
    request = make_request(prompt=range(10))
    runner = _runner()
    runner.launch(StepPlan((ScheduledRequest(request, 0, 5, samples=False),)))
    assert runner.collect()[0].token_id is None


def test_a_step_takes_its_time_from_the_end_of_the_step_before() -> None:
    runner = _runner(step_s=0.05)
    started_s = time.monotonic()
    for _ in range(3):
        runner.launch(StepPlan(()))
    for _ in range(3):
        runner.collect()
    assert 0.15 <= time.monotonic() - started_s < 0.5
