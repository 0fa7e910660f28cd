"""Requests that are refused after engines died of them, and for how long."""

from __future__ import annotations

import dataclasses

import pytest

from penstock_client import (
    GenerationRequest,
    InvalidRequest,
    Objective,
    PoisonousRequest,
    SamplingParams,
)
from penstock_client.fleet.poison_requests import RefusedRequests, fingerprint

REQUEST = GenerationRequest([1, 2, 3], SamplingParams(temperature=0.5, seed=1), label="x")


def test_the_seed_the_label_and_the_objective_make_no_difference() -> None:
    like = dataclasses.replace(
        REQUEST,
        sampling=SamplingParams(temperature=0.5, seed=2),
        label="y",
        objective=Objective(priority=3),
    )
    assert fingerprint(like) == fingerprint(REQUEST)
    for other in (
        dataclasses.replace(REQUEST, prompt_token_ids=[1, 2, 4]),
        dataclasses.replace(REQUEST, sampling=SamplingParams(temperature=0.6)),
        dataclasses.replace(REQUEST, prompt_logprobs=0),
    ):
        assert fingerprint(other) != fingerprint(REQUEST)


def test_what_is_refused_is_forgotten_in_time_and_costs_nothing_then(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    refused = RefusedRequests(10.0)
    refused.add(fingerprint(REQUEST), 0.0)
    with pytest.raises(PoisonousRequest, match="refused for another 4 s"):
        refused.check(REQUEST, 6.0)
    # Once more: from then on.
    refused.add(fingerprint(REQUEST), 8.0)
    with pytest.raises(PoisonousRequest):
        refused.check(REQUEST, 17.0)
    refused.check(REQUEST, 18.0)
    monkeypatch.setattr("penstock_client.fleet.poison_requests.fingerprint", None)
    refused.check(REQUEST, 19.0)


def test_ids_that_are_none_are_said_to_be() -> None:
    refused = RefusedRequests(10.0)
    refused.add(fingerprint(REQUEST), 0.0)
    with pytest.raises(InvalidRequest, match="prompt_token_ids"):
        refused.check(GenerationRequest([2**40]), 1.0)
