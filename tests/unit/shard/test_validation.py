"""Checking a request and filling in the model's defaults."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
from support.engines import runner_info

from penstock_shard.config import ShardConfig
from penstock_shard.validation import IncomingRequest, Refusal, check

CONFIG = ShardConfig(served_model_names=("main", "alias"), max_logprobs=5)


def _incoming(**fields: Any) -> IncomingRequest:
    prompt = np.array(fields.pop("prompt", [1, 2]), dtype="<u4")
    output = np.array(fields.pop("output", []), dtype="<u4")
    for name in ("stop_token_ids", "allowed_token_ids"):
        if name in fields:
            fields[name] = np.array(fields[name], dtype="<u4")
    return IncomingRequest("id", 0, prompt, output, **fields)


def _check(incoming: IncomingRequest, **defaults: float):
    info = dataclasses.replace(runner_info(max_model_len=100), default_sampling=defaults)
    return check(incoming, info, CONFIG)


def test_absent_parameters_take_the_models_defaults_and_given_ones_do_not() -> None:
    submit = _check(_incoming(top_p=0.5, seed=9), temperature=0.7, top_p=0.9, top_k=20.0)
    sampling = submit.sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k) == (0.7, 0.5, 20)
    assert isinstance(sampling.top_k, int)
    assert sampling.seed == 9


def test_a_given_zero_is_not_an_absent_value() -> None:
    assert _check(_incoming(temperature=0.0), temperature=0.7).sampling.is_greedy
    assert _check(_incoming(top_k=0), top_k=20.0).sampling.top_k == 0


def test_greedy_forgets_what_would_only_matter_for_drawing() -> None:
    first = _check(_incoming(temperature=1e-6, seed=1, top_p=0.5)).sampling
    assert first == _check(_incoming(temperature=0.0, seed=2, top_k=4)).sampling


def test_without_max_tokens_the_context_is_the_bound() -> None:
    assert _check(_incoming(prompt=range(30))).max_tokens == 70


def test_eos_ids_stop_unless_they_are_ignored() -> None:
    assert _check(_incoming(stop_token_ids=(5,))).stop_token_ids == [5, 999]
    assert _check(_incoming(stop_token_ids=(5,), ignore_eos=True)).stop_token_ids == [5]


def test_prompt_logprobs_are_not_computed_again_for_a_continued_request() -> None:
    assert _check(_incoming(prompt_logprobs=0)).prompt_logprobs == 0
    assert _check(_incoming(prompt_logprobs=0, output=[7])).prompt_logprobs is None


def test_both_names_of_the_model_are_served() -> None:
    for name in ("", "main", "alias"):
        _check(_incoming(model=name))


@pytest.mark.parametrize(
    ("fields", "field", "code", "bound"),
    [
        ({"model": "x"}, "model", 5, ""),
        ({"prompt": []}, "prompt_token_ids", 3, "1..99"),
        ({"prompt": range(100)}, "prompt_token_ids", 3, "1..99"),
        ({"prompt": [1000]}, "prompt_token_ids", 3, "0..999"),
        ({"output": [1000], "max_tokens": 5}, "output_token_ids", 3, "0..999"),
        ({"output": [1, 2], "max_tokens": 2}, "output_token_ids", 3, "max_tokens"),
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
        ({"features": {"logit_bias": "1 ids"}}, "logit_bias", 9, ""),
    ],
)
def test_what_is_out_of_bounds_names_field_value_and_bound(
    fields: dict[str, Any], field: str, code: int, bound: str
) -> None:
    with pytest.raises(Refusal) as caught:
        _check(_incoming(**fields))
    error = caught.value.error
    assert (error.field, error.code) == (field, code)
    assert bound in error.bound
    assert error.value
    assert field in error.message or field == "model"


def test_a_huge_value_is_not_echoed_whole() -> None:
    with pytest.raises(Refusal) as caught:
        _check(_incoming(model="x" * 100_000))
    assert len(caught.value.error.message) < 300


def test_a_capability_that_is_missing_is_named() -> None:
    info = dataclasses.replace(runner_info(), capabilities=frozenset())
    with pytest.raises(Refusal, match="logprobs is not served"):
        check(_incoming(logprobs=0), info, CONFIG)
