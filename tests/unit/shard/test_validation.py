"""Checking a request and filling in the model's defaults."""

from __future__ import annotations

import dataclasses
import math
import random
from collections.abc import Callable
from typing import Any

import pytest
from support.budget import budget, seeded
from support.engines import EOS_ID, VOCAB_SIZE, runner_info
from support.submissions import submission

from penstock_proto.engine_request import EngineRequest
from penstock_proto.types import (
    Constraint,
    EngineSampling,
    Objective,
    PromptImage,
    Submission,
    ThinkingBudget,
)
from penstock_shard.config import ShardConfig
from penstock_shard.ipc.messages import Ready
from penstock_shard.ipc.runner_info import CacheGroup
from penstock_shard.model_loader.generation_config import usable_defaults
from penstock_shard.server.shard_info import shard_info
from penstock_shard.server.validation import Refusal, check

CONFIG = ShardConfig(served_model_names=("main", "alias"), max_logprobs=5, max_constraint_bytes=100)


def _check(asked: Submission, **defaults: float) -> EngineRequest:
    info = dataclasses.replace(runner_info(max_model_len=100), default_sampling=defaults)
    return check(asked, info, CONFIG)


def test_absent_parameters_take_the_models_defaults_and_given_ones_do_not() -> None:
    submit = _check(submission(top_p=0.5, seed=9), temperature=0.7, top_p=0.9, top_k=20.0)
    sampling = submit.sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k) == (0.7, 0.5, 20)
    assert isinstance(sampling.top_k, int)
    assert sampling.seed == 9


def test_a_given_zero_is_not_an_absent_value() -> None:
    assert _check(submission(temperature=0.0), temperature=0.7).sampling.temperature == 0.0
    assert _check(submission(top_k=0), top_k=20.0).sampling.top_k == 0


def test_without_a_seed_every_attempt_of_a_request_draws_alike_and_other_requests_do_not() -> None:
    def seed(request_id: str, **fields: Any) -> int:
        return _check(submission(request_id=request_id, **fields)).sampling.seed

    seeds = {seed(f"request {number}") for number in range(100)}
    assert len(seeds) == 100
    assert max(seeds) > 2**60
    assert seed("request 7", number=3, output_token_ids=[4, 5]) in seeds
    # Not 0, which is a seed like any other.
    assert seed("request 7", seed=0) == 0
    # Known from release to release: shards of both may have attempts of the same request.
    assert seed("request 7") == 16_216_788_450_268_746_418


def test_greedy_forgets_what_would_only_matter_for_drawing() -> None:
    first = _check(submission(temperature=1e-6, seed=1, top_p=0.5, min_p=0.1)).sampling
    assert first == _check(submission(temperature=0.0, seed=2, top_k=4, typical_p=0.3)).sampling
    assert first == EngineSampling(temperature=0.0)


def test_greedy_keeps_what_changes_the_most_likely_token() -> None:
    sampling = _check(
        submission(
            temperature=0.0,
            repetition_penalty=1.5,
            presence_penalty=0.5,
            frequency_penalty=-0.5,
            logit_bias={7: 1.0},
            bad_words=[[1, 2]],
            allowed_token_ids=[4, 5],
        )
    ).sampling
    assert sampling == EngineSampling(
        temperature=0.0,
        repetition_penalty=1.5,
        presence_penalty=0.5,
        frequency_penalty=-0.5,
        logit_bias=((7, 1.0),),
        bad_words=((1, 2),),
        allowed_token_ids=(4, 5),
    )


def test_a_models_repetition_penalty_and_typical_p_are_defaults() -> None:
    sampling = _check(submission(), repetition_penalty=1.2, typical_p=0.9).sampling
    assert (sampling.repetition_penalty, sampling.typical_p) == (1.2, 0.9)
    sampling = _check(submission(repetition_penalty=1.0), repetition_penalty=1.2).sampling
    assert sampling.repetition_penalty == 1.0


def test_logit_bias_has_one_order() -> None:
    first = _check(submission(logit_bias={9: 1.0, 3: -2.0})).sampling
    assert first.logit_bias == ((3, -2.0), (9, 1.0))
    assert first == _check(submission(logit_bias={3: -2.0, 9: 1.0})).sampling


def test_an_objective_is_carried_whole_and_none_is_none() -> None:
    wish = submission(
        priority=-3, deadline_s=1.5, time_to_first_token_s=0.5, seconds_between_tokens=0.1,
        latency_sensitive=True,
    )  # fmt: skip
    assert _check(wish).objective == Objective(-3, 1.5, 0.5, 0.1, True)
    assert _check(submission()).objective is None


def test_requested_ids_bring_the_chosen_tokens_logprob_with_them() -> None:
    submit = _check(submission(logprob_token_ids=[8, 3]))
    assert (submit.logprobs, submit.logprob_token_ids) == (0, (8, 3))
    assert _check(submission(logprob_token_ids=[8], logprobs=2)).logprobs == 2


def test_min_tokens_may_be_as_many_as_max_tokens() -> None:
    assert _check(submission(min_tokens=5, max_tokens=5)).min_tokens == 5


def test_without_max_tokens_the_context_is_the_bound() -> None:
    assert _check(submission(prompt_token_ids=range(30))).max_tokens == 70


def test_eos_ids_stop_unless_they_are_ignored() -> None:
    assert _check(submission(stop_token_ids=(5,))).stop_token_ids == {5, 999}
    assert _check(submission(stop_token_ids=(5,), ignore_eos=True)).stop_token_ids == {5}


def test_prompt_logprobs_are_not_computed_again_for_a_continued_request() -> None:
    assert _check(submission(prompt_logprobs=0)).prompt_logprobs == 0
    assert _check(submission(prompt_logprobs=0, output_token_ids=[7])).prompt_logprobs is None


def test_both_names_of_the_model_are_served() -> None:
    for name in ("", "main", "alias"):
        _check(submission(model=name))


@pytest.mark.parametrize(
    ("fields", "field", "code", "bound"),
    [
        ({"model": "x"}, "model", 5, ""),
        ({"prompt_token_ids": []}, "prompt_token_ids", 3, "1..99"),
        ({"prompt_token_ids": range(100)}, "prompt_token_ids", 3, "1..99"),
        ({"prompt_token_ids": [1000]}, "prompt_token_ids", 3, "0..999"),
        ({"output_token_ids": [1000], "max_tokens": 5}, "output_token_ids", 3, "0..999"),
        ({"output_token_ids": [1, 2], "max_tokens": 2}, "output_token_ids", 3, "max_tokens"),
        ({"max_tokens": 0}, "max_tokens", 3, "1..98"),
        ({"max_tokens": 99}, "max_tokens", 3, "1..98"),
        ({"temperature": -0.1}, "temperature", 3, "0..100"),
        ({"temperature": float("inf")}, "temperature", 3, "0..100"),
        ({"temperature": float("nan")}, "temperature", 3, "0..100"),
        ({"top_p": 0.0}, "top_p", 3, "above 0"),
        ({"top_p": 1.1}, "top_p", 3, "at most 1"),
        ({"top_p": float("nan")}, "top_p", 3, "above 0"),
        ({"min_p": -0.1}, "min_p", 3, "0..1"),
        ({"min_p": float("nan")}, "min_p", 3, "0..1"),
        ({"top_k": -2}, "top_k", 3, "-1"),
        ({"logprobs": 6}, "logprobs", 3, "0..5"),
        ({"prompt_logprobs": 6}, "prompt_logprobs", 3, "0..5"),
        ({"stop_token_ids": (1000,)}, "stop_token_ids", 3, "0..999"),
        ({"stop_token_ids": (1,) * 1025}, "stop_token_ids", 3, "1024"),
        ({"allowed_token_ids": (1000,)}, "allowed_token_ids", 3, "0..999"),
        (
            {"allowed_token_ids": (5, 6), "bad_words": ([5], [6], [1, 2])},
            "allowed_token_ids",
            3,
            "neither bad_words nor min_tokens",
        ),
        (
            {"allowed_token_ids": (EOS_ID, 6), "min_tokens": 2, "stop_token_ids": (6,)},
            "allowed_token_ids",
            3,
            "neither bad_words nor min_tokens",
        ),
        ({"adapter": "lora"}, "adapter", 9, ""),
        ({"constraint": Constraint("regex", "x" * 101)}, "regex", 3, "100 bytes (--max-constr"),
        # Of bytes, not of characters.
        ({"constraint": Constraint("grammar", "\u00e9" * 51)}, "grammar", 3, "at most 100 bytes"),
        ({"constraint": Constraint("choice", options=("x" * 51,) * 2)}, "choice", 3, "100 bytes"),
        ({"constraint": Constraint("choice")}, "choice", 3, "1..1024 options"),
        ({"constraint": Constraint("choice", options=("",) * 1025)}, "choice", 3, "1..1024"),
        (
            {"thinking_budget": ThinkingBudget(5, 1000, 1)},
            "thinking_budget.begin_token_id",
            3,
            "0..999",
        ),
        ({"thinking_budget": ThinkingBudget(5, 1, 1000)}, "thinking_budget.end_token_id", 3, "999"),
    ],
)
def test_what_is_out_of_bounds_names_field_value_and_bound(
    fields: dict[str, Any], field: str, code: int, bound: str
) -> None:
    with pytest.raises(Refusal) as caught:
        _check(submission(**fields))
    error = caught.value.error
    assert (error.field, error.code) == (field, code)
    assert bound in error.bound
    assert error.value
    assert field in error.message or field == "model"


def test_a_constraint_as_long_as_may_be_is_taken() -> None:
    for constraint in (
        Constraint("regex", "x" * 100),
        Constraint("choice", options=("x" * 50,) * 2),
    ):
        assert _check(submission(constraint=constraint)).constraint == constraint


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("json_schema", Constraint("json_schema", "{}")),
        ("thinking_budget", ThinkingBudget(5, 1, 2)),
    ],
)
def test_a_shard_that_lacks_the_language_or_budgets_says_so(name: str, value: Any) -> None:
    info = runner_info()
    info = dataclasses.replace(info, capabilities=info.capabilities - {name})
    field = "thinking_budget" if name == "thinking_budget" else "constraint"
    with pytest.raises(Refusal) as caught:
        check(submission(**{field: value}), info, CONFIG)
    assert (caught.value.error.code, caught.value.error.field) == (9, name)
    assert f"{name} is not served" in caught.value.error.message


def test_what_ends_a_sequence_may_do_so_although_ignored_where_there_is_a_constraint() -> None:
    constraint = Constraint("regex", "a")
    assert _check(submission(constraint=constraint)).reluctant_stop_ids == set()
    assert _check(submission(ignore_eos=True)).reluctant_stop_ids == set()
    both = _check(submission(constraint=constraint, ignore_eos=True))
    assert (both.stop_token_ids, both.reluctant_stop_ids) == (frozenset(), frozenset({EOS_ID}))


def test_what_min_tokens_rules_out_may_come_once_they_are_there() -> None:
    fields: dict[str, Any] = {"allowed_token_ids": (6,), "stop_token_ids": (6,), "min_tokens": 1}
    assert _check(submission(output_token_ids=[3], **fields)).min_tokens == 1


# Of each field: values that are allowed, and values that are not with a part of the bound.
Make = Callable[[random.Random], Any]
_NOT_NUMBERS = (math.nan, math.inf, -math.inf)


def _outside(low: float, high: float, *more: float) -> Make:
    def make(rng: random.Random) -> float:
        distance = rng.choice([1e-6, 1.0, 1e6, 1e30])
        return rng.choice([low - distance, high + distance, *_NOT_NUMBERS, *more])

    return make


def _ids(most: int) -> Make:
    return lambda rng: rng.choices(range(VOCAB_SIZE), k=rng.randint(1, most))


def _with_strange_id(most: int) -> Make:
    return lambda rng: [
        *rng.choices(range(VOCAB_SIZE), k=rng.randrange(most)),
        rng.randint(VOCAB_SIZE, 2**32 - 1),
    ]


FIELDS: dict[str, tuple[Make, Make, str]] = {
    "temperature": (lambda r: r.uniform(0, 100), _outside(0, 100), "0..100"),
    "top_p": (lambda r: 1 - r.random(), _outside(0, 1, 0.0), "above 0, at most 1"),
    "min_p": (lambda r: r.random(), _outside(0, 1), "0..1"),
    "typical_p": (lambda r: 1 - r.random(), _outside(0, 1, 0.0), "above 0, at most 1"),
    "repetition_penalty": (
        lambda r: r.choice([1e-30, 0.5, 1.3, 1e30]),
        _outside(0, math.inf, 0.0),
        "above 0, finite",
    ),
    "presence_penalty": (lambda r: r.uniform(-2, 2), _outside(-2, 2), "-2..2"),
    "frequency_penalty": (lambda r: r.uniform(-2, 2), _outside(-2, 2), "-2..2"),
    "top_k": (lambda r: r.randint(-1, 10**9), lambda r: -r.randint(2, 10**9), "at least -1"),
    "logit_bias": (
        lambda r: {i: r.uniform(-100, 100) for i in range(r.randrange(9))},
        lambda r: r.choice([{5: _outside(-100, 100)(r)}, {VOCAB_SIZE + r.randrange(9): 1.0}]),
        "",
    ),
    "bad_words": (
        lambda r: [_ids(64)(r) for _ in range(r.randint(0, 9))],
        lambda r: r.choice([[[1], []], [[1] * 65], [[1]] * 1025, [[2], _with_strange_id(9)(r)]]),
        "",
    ),
    "stop_token_ids": (
        _ids(1024), lambda r: r.choice([[1] * 1025, _with_strange_id(9)(r)]), ""
    ),
    "logprob_token_ids": (
        _ids(1024), lambda r: r.choice([[1] * 1025, _with_strange_id(9)(r)]), ""
    ),
    "allowed_token_ids": (
        lambda r: range(VOCAB_SIZE), lambda r: r.choice([[1] * 1001, _with_strange_id(9)(r)]), ""
    ),
    "min_tokens": (lambda r: r.randint(0, 90), lambda r: r.randint(91, 2**32 - 1), "0..90"),
    "priority": (
        lambda r: r.randint(-1000, 1000),
        lambda r: r.choice([-1, 1]) * r.randint(1001, 2**31 - 1),
        "-1000..1000",
    ),
    "time_to_first_token_s": (
        lambda r: r.uniform(1e-3, 1e6), _outside(0, math.inf, 0.0), "above 0, finite"
    ),
    "seconds_between_tokens": (
        lambda r: r.uniform(1e-3, 1e6), _outside(0, math.inf, 0.0), "above 0, finite"
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", FIELDS)
def test_any_value_out_of_bounds_is_refused_beside_any_that_are_not(name: str) -> None:
    rng = seeded(name)
    for _ in range(budget(50, 2000)):
        others = rng.sample(sorted(FIELDS.keys() - {name}), k=rng.randint(0, 6))
        fields = {other: FIELDS[other][0](rng) for other in others}
        fields["max_tokens"] = 90
        good = FIELDS[name][0](rng)
        _check(submission(**fields, **{name: good}))
        bad = FIELDS[name][1](rng)
        with pytest.raises(Refusal) as caught:
            _check(submission(**fields, **{name: bad}))
        error = caught.value.error
        assert (error.code, error.field) == (3, name)
        assert error.value
        assert error.bound
        assert FIELDS[name][2] in error.bound
        assert all(part in error.message for part in (name, error.value, error.bound))


def test_a_penalty_window_of_0_turns_the_penalties_off_those_of_the_model_too() -> None:
    asked = submission(presence_penalty=0.5, frequency_penalty=-1.0, penalty_window_tokens=0)
    sampling = _check(asked, repetition_penalty=1.2).sampling
    assert sampling == _check(submission(seed=asked.request.sampling.seed)).sampling
    kept = _check(submission(penalty_window_tokens=9), repetition_penalty=1.2).sampling
    assert (kept.repetition_penalty, kept.penalty_window_tokens) == (1.2, 9)


def test_a_penalty_window_without_a_penalty_is_no_other_request() -> None:
    assert _check(submission(penalty_window_tokens=9)).sampling.penalty_window_tokens is None


def test_a_shard_without_a_bound_gives_as_many_log_probabilities_as_it_has_tokens() -> None:
    config, info = ShardConfig(max_logprobs=-1), runner_info()
    assert shard_info(Ready(info, {}, "", ""), config, "i").limits.max_logprobs == VOCAB_SIZE
    asked = check(submission(logprobs=VOCAB_SIZE, prompt_logprobs=VOCAB_SIZE), info, config)
    assert (asked.logprobs, asked.prompt_logprobs) == (VOCAB_SIZE, VOCAB_SIZE)
    with pytest.raises(Refusal, match=f"^logprobs: 1001 .* 0..{VOCAB_SIZE} \\(--max-logprobs"):
        check(submission(logprobs=VOCAB_SIZE + 1), info, config)


def test_a_huge_value_is_not_echoed_whole() -> None:
    with pytest.raises(Refusal) as caught:
        _check(submission(model="x" * 100_000))
    assert len(caught.value.error.message) < 300


def test_a_capability_that_is_missing_is_named() -> None:
    asked: dict[str, Any] = {
        "logprobs": 0,
        "prompt_logprobs": 0,
        "typical_p": 0.5,
        "repetition_penalty": 1.1,
        "presence_penalty": 0.1,
        "frequency_penalty": math.nan,
        "penalty_window_tokens": 0,
        "logit_bias": {1: 0.0},
        "bad_words": [[1]],
        "allowed_token_ids": [1],
        "min_tokens": 1,
        "logprob_token_ids": [1],
        "priority": 1,
        "time_to_first_token_s": 1.0,
        "seconds_between_tokens": 1.0,
        "latency_sensitive": True,
    }
    info = runner_info()
    assert asked.keys() <= info.capabilities
    for name, value in asked.items():
        without = dataclasses.replace(info, capabilities=info.capabilities - {name})
        with pytest.raises(Refusal, match=f"^{name} is not served by this shard$") as caught:
            check(submission(**{name: value}), without, CONFIG)
        assert (caught.value.error.code, caught.value.error.field) == (9, name)


def test_images_that_a_step_cannot_compute_whole_are_refused_where_they_have_to_be_whole() -> None:
    info = runner_info(max_model_len=300)
    info = dataclasses.replace(info, capabilities=info.capabilities | {"images"})
    whole = dataclasses.replace(info, cache_groups=(CacheGroup(bidirectional_images=True),))
    config = ShardConfig(max_num_batched_tokens=100, max_num_seqs=20)

    def asked(num_tokens: int, **fields: Any) -> Submission:
        images = [PromptImage("00" * 32, 8, 8, 5, num_tokens)]
        return submission(prompt_token_ids=range(200), images=images, **fields)

    assert check(asked(80), whole, config).images[0].num_tokens == 80
    assert check(asked(81, prompt_logprobs=0), info, config).images[0].num_tokens == 81
    with pytest.raises(Refusal, match=r"^images\[0\]\.num_tokens: 81 .* at most 80, as many as"):
        check(asked(81), whole, config)
    assert check(asked(80, prompt_logprobs=0), whole, config).prompt_logprobs == 0
    few = dataclasses.replace(whole, max_scored_tokens=70)
    with pytest.raises(Refusal, match=r"^images\[0\]\.num_tokens: 71 .* one with prompt_logprobs$"):
        check(asked(71, prompt_logprobs=0), few, config)
    assert check(asked(71), few, config).prompt_logprobs is None


def test_neutral_values_need_no_capability() -> None:
    without = dataclasses.replace(runner_info(), capabilities=frozenset())
    neutral = submission(
        typical_p=1.0, repetition_penalty=1.0, presence_penalty=0.0, frequency_penalty=0.0,
        min_tokens=0, priority=0, latency_sensitive=False, seed=0,
    )  # fmt: skip
    assert check(neutral, without, CONFIG).sampling == EngineSampling()


def test_defaults_that_no_request_could_be_served_with_are_left_out() -> None:
    stated = {"temperature": 0.7, "top_p": 0, "top_k": 50, "repetition_penalty": "much"}
    usable, unusable = usable_defaults(stated)
    assert usable == {"temperature": 0.7, "top_k": 50}
    assert [line.split(":")[0] for line in unusable] == ["top_p", "repetition_penalty"]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("top_k", 2**31),
        ("top_k", 1e30),
        pytest.param("top_k", 10**400, id="top_k-huge"),
        ("top_k", float("nan")),
        pytest.param("repetition_penalty", 10**400, id="repetition_penalty-huge"),
        ("repetition_penalty", 1e300),
        ("repetition_penalty", float("inf")),
        ("temperature", False),
        ("temperature", float("nan")),
    ],
)
def test_a_default_that_no_field_can_hold_is_left_out(name: str, value: float) -> None:
    usable, unusable = usable_defaults({name: value})
    assert (usable, len(unusable)) == ({}, 1)


def test_a_request_that_leaves_nothing_of_the_vocabulary_to_draw_is_refused() -> None:
    with pytest.raises(Refusal, match="1000 ids is out of bounds"):
        _check(submission(stop_token_ids=range(1000), min_tokens=1, max_tokens=5))
    _check(submission(stop_token_ids=range(999), min_tokens=1, max_tokens=5, ignore_eos=True))
