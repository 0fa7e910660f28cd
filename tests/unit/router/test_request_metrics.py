"""The numbers that are counted when a request has ended."""

from __future__ import annotations

from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from penstock_router.observe.ended_request_metrics import RequestMetrics
from penstock_router.observe.request_record import RequestRecord, Usage

MODEL = {"model": "m"}


def record(**fields: Any) -> RequestRecord:
    given = {
        "request_id": "r",
        "method": "POST",
        "route": "/v1/completions",
        "arrived_s": 100.0,
        "model": "m",
        "prepared_s": 100.1,
        "placed_s": 100.3,
        "first_token_s": 101.0,
        "ended_s": 103.0,
        "usage": Usage(50, 5, cached_tokens=32, queue_s=0.2),
        "status": 200,
        "outcome": "stop",
    }
    return RequestRecord(**{**given, **fields})


def counted(*records: RequestRecord) -> CollectorRegistry:
    registry = CollectorRegistry()
    metrics = RequestMetrics(registry)
    for each in records:
        metrics.on_request_end(each)
    return registry


@pytest.mark.parametrize(
    ("name", "seconds"),
    [
        ("generation_seconds", 3.0),
        ("prepare_seconds", 0.1),
        # For places here, and in the shard.
        ("queue_seconds", 0.4),
        ("prefill_seconds", 0.5),
        ("decode_seconds", 2.0),
        ("inference_seconds", 2.5),
        ("mean_between_tokens_seconds", 0.5),
    ],
)
def test_a_requests_time_is_told_by_its_parts(name: str, seconds: float) -> None:
    registry = counted(record())
    name = f"penstock_router_{name}"
    assert registry.get_sample_value(f"{name}_count", MODEL) == 1
    assert registry.get_sample_value(f"{name}_sum", MODEL) == pytest.approx(seconds)


def test_each_wait_between_two_shards_is_counted_whatever_the_request_ended_in() -> None:
    registry = counted(
        record(failover_gaps_s=[0.2, 0.3]),
        record(),
        record(failover_gaps_s=[0.5], outcome="disconnect", status=499),
    )
    name = "penstock_router_failover_gap_seconds"
    assert registry.get_sample_value(f"{name}_count", MODEL) == 3
    assert registry.get_sample_value(f"{name}_sum", MODEL) == pytest.approx(1.0)


def test_requests_are_counted_by_route_status_outcome_and_model() -> None:
    probe = record(route="/health", outcome="probe", model="", usage=None)
    registry = counted(record(), record(), record(outcome="length"), probe)
    name = "penstock_router_requests_total"
    labels = {"route": "/v1/completions", "status": "200", "outcome": "stop", "model": "m"}
    assert registry.get_sample_value(name, labels) == 2
    assert registry.get_sample_value(name, {**labels, "outcome": "length"}) == 1
    labels = {"route": "/health", "status": "200", "outcome": "probe", "model": ""}
    assert registry.get_sample_value(name, labels) == 1
    name = "penstock_router_request_seconds_count"
    assert registry.get_sample_value(name, {"route": "/v1/completions"}) == 3


def test_tokens_are_counted_and_those_that_were_cached() -> None:
    registry = counted(record(), record(outcome="disconnect", status=499))
    assert registry.get_sample_value("penstock_router_cached_tokens_total", MODEL) == 64
    assert registry.get_sample_value("penstock_router_request_prompt_tokens_sum", MODEL) == 100
    assert registry.get_sample_value("penstock_router_request_output_tokens_sum", MODEL) == 10
    assert registry.get_sample_value("penstock_router_generation_seconds_count", MODEL) == 1


def test_what_requests_ask_for_and_what_no_cache_had_is_counted() -> None:
    registry = counted(
        record(choices=4, max_tokens=300),
        record(choices=1, max_tokens=20, usage=Usage(50, 5, cached_tokens=0)),
        # Of one that no shard took up it is not known; an embedding has no output.
        record(usage=Usage(50)),
    )

    def of(name: str) -> tuple[float | None, float | None]:
        sample = registry.get_sample_value
        name = f"penstock_router_request_{name}"
        return sample(f"{name}_count", MODEL), sample(f"{name}_sum", MODEL)

    assert of("choices") == (2, 5)
    assert of("max_tokens") == (2, 320)
    assert of("computed_prompt_tokens") == (2, 18 + 50)


def test_a_request_that_got_no_token_has_neither_prefill_nor_decode() -> None:
    cut = record(first_token_s=None, outcome="disconnect", usage=Usage(50))
    registry = counted(cut)
    assert registry.get_sample_value("penstock_router_queue_seconds_count", MODEL) == 1
    assert registry.get_sample_value("penstock_router_prefill_seconds_count", MODEL) is None
    assert registry.get_sample_value("penstock_router_request_output_tokens_count", MODEL) is None


def test_a_request_that_was_refused_is_of_no_model() -> None:
    refused = record(model="", usage=None, outcome="refused", status=422)
    registry = counted(refused)
    names = {sample.name for family in registry.collect() for sample in family.samples}
    assert not any(name.endswith("queue_seconds_count") for name in names)
