"""The predicted time of a step: learned from steps, robust to disturbed ones, never negative."""

from __future__ import annotations

import random

import pytest
from support.budget import budget, seeded

from penstock_shard.scheduler.step_time import StepSize, StepTime

_TRUE = (0.004, 0.0012, 0.0009, 2e-6)


def _true_s(size: StepSize, seconds: tuple[float, ...] = _TRUE) -> float:
    step_s, decode_s, prompt_token_s, key_s = seconds
    return (
        step_s
        + decode_s * size.num_decodes
        + prompt_token_s * size.num_prompt_tokens
        + key_s * size.num_keys
    )


def _random_size(rng: random.Random) -> StepSize:
    decodes = rng.randint(0, 64)
    prompt_tokens = rng.choice((0, 0, rng.randint(2, 512)))
    return StepSize(decodes, prompt_tokens, (decodes + prompt_tokens) * rng.randint(1, 4000))


def test_it_foresees_what_a_linear_device_takes() -> None:
    rng = seeded("step time")
    for _ in range(budget(5, 100)):
        step_time = StepTime()
        for _ in range(300):
            size = _random_size(rng)
            step_time.learn(size, _true_s(size) * rng.uniform(0.98, 1.02))
        for _ in range(50):
            size = _random_size(rng)
            # Steps take up to five seconds, give or take two in a hundred.
            assert step_time.predict(size) == pytest.approx(_true_s(size), rel=0.1, abs=0.02)


def test_a_pause_of_the_machine_changes_little() -> None:
    step_time = StepTime()
    steady = StepSize(16, 0, 16 * 200)
    for _ in range(60):
        step_time.learn(steady, 0.025)
    step_time.learn(steady, 2.5)
    assert step_time.predict(steady) < 0.032


def test_what_comes_for_the_first_time_is_no_disturbance() -> None:
    step_time = StepTime()
    for _ in range(30):
        step_time.learn(StepSize(1, 0, 1), 0.01)
    prompt = StepSize(0, 512, 512 * 256)
    for _ in range(60):
        step_time.learn(prompt, 0.5)
    assert step_time.predict(prompt) == pytest.approx(0.5, rel=0.1)


def test_it_follows_a_device_that_becomes_slower() -> None:
    step_time = StepTime()
    steady = StepSize(16, 0, 16 * 200)
    for seconds in (0.02, 0.05):
        for _ in range(120):
            step_time.learn(steady, seconds)
        assert step_time.predict(steady) == pytest.approx(seconds, rel=0.1)


def test_nothing_is_foreseen_to_take_less_for_more_work() -> None:
    rng = seeded("step time noise")
    step_time = StepTime()
    for _ in range(budget(200, 5000)):
        step_time.learn(_random_size(rng), rng.expovariate(50))
        size = _random_size(rng)
        more = StepSize(size.num_decodes + 1, size.num_prompt_tokens + 1, size.num_keys + 1)
        assert 0 <= step_time.predict(size) <= step_time.predict(more)


def test_a_chunk_that_fits_is_the_longest_that_does() -> None:
    rng = seeded("chunks")
    step_time = StepTime()
    for _ in range(200):
        size = _random_size(rng)
        step_time.learn(size, _true_s(size))
    for _ in range(200):
        start, seconds = rng.randint(0, 100_000), rng.uniform(0.01, 0.5)
        count = step_time.prompt_tokens_in(seconds, start)
        assert step_time.prompt_s(start, count) <= seconds * 1.001
        assert step_time.prompt_s(start, count + 2) > seconds
    assert step_time.prompt_tokens_in(-0.1, 0) == 0


def test_no_time_is_too_long_to_count_its_tokens() -> None:
    for size in (StepSize(0, 100, 0), StepSize(0, 100, 5000)):
        step_time = StepTime()
        step_time.learn(size, 1e-3)
        assert step_time.prompt_tokens_in(1.7e308, 0) == 2**31


def test_before_the_first_step_nothing_is_foreseen() -> None:
    assert StepTime().predict(StepSize(1, 2, 3)) == 0.0
