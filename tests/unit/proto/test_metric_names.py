"""Metrics under the names that dashboards and autoscalers of other servers read."""

from __future__ import annotations

import pytest
from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from penstock_common.kv_cache_labels import KV_CACHE_LABELS, kv_cache_labels
from penstock_common.metric_aliases import SETS, translate
from penstock_common.shared_flags import METRIC_NAMES

# As those servers' own dashboards and the scalers made for them have them.
VLLM = {
    "vllm:num_requests_running": "gauge",
    "vllm:num_requests_waiting": "gauge",
    "vllm:kv_cache_usage_perc": "gauge",
    "vllm:gpu_cache_usage_perc": "gauge",
    "vllm:num_requests_waiting_by_reason": "gauge",
    "vllm:cache_config_info": "gauge",
    "vllm:admission_rejections_total": "counter",
    "vllm:prompt_tokens_cached_total": "counter",
    "vllm:mm_cache_queries_total": "counter",
    "vllm:mm_cache_hits_total": "counter",
    "vllm:request_num_preemptions": "histogram",
    "vllm:request_params_n": "histogram",
    "vllm:request_params_max_tokens": "histogram",
    "vllm:request_prefill_kv_computed_tokens": "histogram",
    "vllm:num_preemptions_total": "counter",
    "vllm:prompt_tokens_total": "counter",
    "vllm:generation_tokens_total": "counter",
    "vllm:prefix_cache_queries_total": "counter",
    "vllm:prefix_cache_hits_total": "counter",
    "vllm:request_success_total": "counter",
    "vllm:iteration_tokens_total": "histogram",
    "vllm:spec_decode_num_draft_tokens_total": "counter",
    "vllm:spec_decode_num_accepted_tokens_total": "counter",
    "vllm:time_to_first_token_seconds": "histogram",
    "vllm:inter_token_latency_seconds": "histogram",
    "vllm:time_per_output_token_seconds": "histogram",
    "vllm:request_time_per_output_token_seconds": "histogram",
    "vllm:e2e_request_latency_seconds": "histogram",
    "vllm:request_queue_time_seconds": "histogram",
    "vllm:request_prefill_time_seconds": "histogram",
    "vllm:request_decode_time_seconds": "histogram",
    "vllm:request_inference_time_seconds": "histogram",
    "vllm:request_prompt_tokens": "histogram",
    "vllm:request_generation_tokens": "histogram",
}
TGI = {
    "tgi_request_count": "counter",
    "tgi_request_success": "counter",
    "tgi_request_failure": "counter",
    "tgi_request_duration": "histogram",
    "tgi_request_validation_duration": "histogram",
    "tgi_request_queue_duration": "histogram",
    "tgi_request_inference_duration": "histogram",
    "tgi_request_mean_time_per_token_duration": "histogram",
    "tgi_request_generated_tokens": "histogram",
    "tgi_request_input_length": "histogram",
    "tgi_queue_size": "gauge",
    "tgi_batch_current_size": "gauge",
}


def one(families: list[Metric], name: str) -> Metric:
    (found,) = (family for family in families if family.name == name)
    return found


def values(family: Metric) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for sample in family.samples
    }


@pytest.mark.parametrize(("names", "wanted"), [("vllm", VLLM), ("tgi", TGI)])
def test_the_names_are_those_of_the_other_server(names: str, wanted: dict[str, str]) -> None:
    assert {name.theirs for name in SETS[names]} == set(wanted)


def test_the_flags_know_the_sets_there_are() -> None:
    assert set(METRIC_NAMES) == set(SETS)


def test_what_has_a_label_that_they_lack_is_summed_over_it() -> None:
    ours = CounterMetricFamily(
        "penstock_router_requests", "Ended.", labels=("route", "status", "outcome", "model")
    )
    ours.add_metric(["/v1/completions", "200", "stop", "m"], 2)
    ours.add_metric(["/v1/chat/completions", "200", "stop", "m"], 3)
    ours.add_metric(["/v1/chat/completions", "200", "disconnect", "m"], 5)
    ours.add_metric(["/v1/chat/completions", "499", "timeout", "m"], 7)
    ours.add_metric(["/v1/chat/completions", "400", "refused", ""], 11)
    ours.add_metric(["/health", "200", "probe", ""], 13)
    ours.add_metric(["/", "200", "probe", ""], 17)
    families = list(translate([ours], ["vllm", "tgi"]))
    name = "vllm:request_success_total"
    assert values(one(families, "vllm:request_success")) == {
        (name, (("finished_reason", "stop"), ("model_name", "m"))): 5,
        (name, (("finished_reason", "abort"), ("model_name", "m"))): 12,
    }
    assert values(one(families, "tgi_request_count")) == {("tgi_request_count", ()): 28}
    assert values(one(families, "tgi_request_success")) == {("tgi_request_success", ()): 5}
    assert values(one(families, "tgi_request_failure")) == {
        ("tgi_request_failure", (("err", "dropped"),)): 7,
        ("tgi_request_failure", (("err", "validation"),)): 11,
    }


def test_a_histogram_stays_one() -> None:
    registry = CollectorRegistry()
    ours = Histogram(
        "penstock_router_first_token_seconds", "…", ("model",), buckets=(1, 2), registry=registry
    )
    for model, seconds in (("a", 0.5), ("a", 1.5), ("b", 9.0)):
        ours.labels(model).observe(seconds)
    families = list(translate(registry.collect(), ["vllm"]))
    theirs = one(families, "vllm:time_to_first_token_seconds")
    assert theirs.type == "histogram"
    of_a = {
        (sample.name.rpartition("_")[2], sample.labels.get("le")): sample.value
        for sample in theirs.samples
        if sample.labels["model_name"] == "a"
    }
    assert of_a == {
        ("bucket", "1.0"): 1,
        ("bucket", "2.0"): 2,
        ("bucket", "+Inf"): 2,
        ("count", None): 2,
        ("sum", None): 2.0,
    }


def test_sums_are_of_all_families_that_are_there() -> None:
    ours = [
        GaugeMetricFamily("penstock_router_sequences_queued", "…", value=3),
        GaugeMetricFamily("penstock_router_shard_waiting", "…", labels=("shard", "model")),
    ]
    ours[1].add_metric(["s0", "m"], 4)
    ours[1].add_metric(["s1", "m"], 5)
    families = list(translate(ours, ["tgi", "vllm"]))
    assert values(one(families, "tgi_queue_size")) == {("tgi_queue_size", ()): 12}
    name = "vllm:num_requests_waiting"
    assert values(one(families, name)) == {
        (name, (("engine", "s0"), ("model_name", "m"))): 4,
        (name, (("engine", "s1"), ("model_name", "m"))): 5,
    }


def test_labels_that_all_samples_have_are_put_in_and_ours_come_out_as_they_are() -> None:
    registry = CollectorRegistry()
    Counter("penstock_shard_prompt_tokens", "…", registry=registry).inc(7)
    ours, *theirs = translate(registry.collect(), ["vllm"], model="m")
    assert ours.samples == next(iter(registry.collect())).samples
    assert values(one(theirs, "vllm:prompt_tokens")) == {
        ("vllm:prompt_tokens_total", (("model_name", "m"),)): 7
    }


def test_without_a_set_nothing_is_added() -> None:
    ours = GaugeMetricFamily("penstock_router_sequences_queued", "…", value=3)
    assert list(translate([ours], [])) == [ours]


def test_refusals_of_a_full_queue_are_rejections_by_whichever_bound_it_was() -> None:
    ours = CounterMetricFamily("penstock_router_refused", "Refused.", labels=("reason",))
    for value, reason in enumerate(("queue_full", "key_queue_full", "queued_tokens", "images"), 1):
        ours.add_metric([reason], value)
    name = "vllm:admission_rejections_total"
    assert values(one(list(translate([ours], ["vllm"])), "vllm:admission_rejections")) == {
        (name, (("reason", "max_num_queued_reqs"),)): 3,
        (name, (("reason", "max_num_queued_tokens"),)): 3,
    }


def test_images_that_were_known_are_hits_and_those_that_were_refused_are_not_asked_for() -> None:
    ours = CounterMetricFamily("penstock_router_images", "Images.", labels=("outcome",))
    for outcome, value in (("decoded", 2), ("known", 3), ("refused", 4)):
        ours.add_metric([outcome], value)
    families = list(translate([ours], ["vllm"]))
    queries, hits = "vllm:mm_cache_queries", "vllm:mm_cache_hits"
    assert values(one(families, queries)) == {(f"{queries}_total", ()): 5}
    assert values(one(families, hits)) == {(f"{hits}_total", ()): 3}


def test_the_size_of_the_cache_has_the_labels_that_schedulers_read() -> None:
    ours = GaugeMetricFamily(
        "penstock_router_shard_kv_cache_info", "…", labels=("shard", "model", *KV_CACHE_LABELS)
    )
    ours.add_metric(["s0", "m", *kv_cache_labels(16, 100, 0, "float32")], 1)
    (sample,) = one(list(translate([ours], ["vllm"])), "vllm:cache_config_info").samples
    assert (sample.value, sample.labels) == (
        1,
        {
            "engine": "s0",
            "model_name": "m",
            "block_size": "16",
            "num_gpu_blocks": "100",
            "kv_cache_size_tokens": "1600",
            "kv_cache_max_concurrency": "",
            "cache_dtype": "float32",
        },
    )
