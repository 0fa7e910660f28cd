"""Other servers' names for metrics of routers and shards, for existing dashboards and scalers.

Metric families are repeated under names of vLLM or text-generation-inference. Labels are renamed,
and values summed over labels that the other server lacks. Metrics without a true counterpart are
left out: a number that is always 0 is worse than none.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from prometheus_client.core import Metric
from prometheus_client.samples import Sample

_Labels = tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class Name:
    """Another server's name for a metric, and our families that are summed under it."""

    theirs: str
    ours: tuple[str, ...]
    # Our label -> their label. Samples are summed over our other labels.
    labels: Mapping[str, str] = field(default_factory=dict)
    # Our label -> our values -> their values. A sample with another value is left out.
    values: Mapping[str, Mapping[str, str]] = field(default_factory=dict)

    def labels_of(self, sample: Mapping[str, str]) -> _Labels | None:
        """Return the other server's labels for our sample; None to leave the sample out."""
        named = []
        for ours, values in self.values.items():
            if sample.get(ours, "") not in values:
                return None
        for ours, theirs in self.labels.items():
            if ours in sample:
                value = self.values.get(ours, {}).get(sample[ours], sample[ours])
                named.append((theirs, value))
        if "le" in sample:
            named.append(("le", sample["le"]))
        return tuple(named)


_MODEL = {"model": "model_name"}
_SHARD = {**_MODEL, "shard": "engine"}
_CACHE = {
    **_SHARD,
    "block_size": "block_size",
    "blocks": "num_gpu_blocks",
    "tokens": "kv_cache_size_tokens",
    "sequences": "kv_cache_max_concurrency",
    "dtype": "cache_dtype",
}
# Our reasons for refusals by a full queue -> vLLM's.
_QUEUE_BOUNDS = {
    **dict.fromkeys(("queue_full", "key_queue_full", "pushed_out"), "max_num_queued_reqs"),
    **dict.fromkeys(("queued_tokens", "key_queued_tokens"), "max_num_queued_tokens"),
}
_CUT_SHORT = ("disconnect", "slow_reader", "timeout", "shutdown", "abandoned", "aborted")
_FINISHED = {"stop": "stop", "length": "length", **dict.fromkeys(_CUT_SHORT, "abort")}
# Outcomes that count as requests; pages and probes have other outcomes.
_ASKED = dict.fromkeys((*_FINISHED, "refused", "error"), "")
_SUCCESS = {"outcome": {"stop": "", "length": ""}}
_FAILURES = {
    **dict.fromkeys(("400", "413", "422"), "validation"),
    **dict.fromkeys(("429",), "overloaded"),
    **dict.fromkeys(("424", "500", "502", "503", "504"), "generation"),
    "499": "dropped",
}
# Routes that generate. Others, such as probes, do not count as requests.
_GENERATE_ROUTES = dict.fromkeys(
    (
        *("/", "/generate", "/generate_stream", "/invocations"),
        *("/v1/chat/completions", "/v1/completions", "/v1/messages", "/v1/responses"),
    ),
    "",
)


def _router(name: str) -> tuple[str, ...]:
    return (f"penstock_router_{name}",)


def _either(router: str, shard: str) -> tuple[str, ...]:
    return (f"penstock_router_{router}", f"penstock_shard_{shard}")


VLLM = (
    Name("vllm:num_requests_running", _either("shard_running", "running"), _SHARD),
    Name("vllm:num_requests_waiting", _either("shard_waiting", "waiting"), _SHARD),
    Name("vllm:kv_cache_usage_perc", _either("shard_kv_used_ratio", "kv_used_ratio"), _SHARD),
    Name("vllm:gpu_cache_usage_perc", _either("shard_kv_used_ratio", "kv_used_ratio"), _SHARD),
    Name(
        "vllm:num_requests_waiting_by_reason",
        ("penstock_shard_waiting_by_reason",),
        {**_SHARD, "reason": "reason"},
    ),
    Name("vllm:cache_config_info", _either("shard_kv_cache_info", "kv_cache_info"), _CACHE),
    Name("vllm:num_preemptions_total", _either("shard_preemptions", "preemptions"), _SHARD),
    Name("vllm:prompt_tokens_total", _either("prompt_tokens", "prompt_tokens"), _MODEL),
    Name("vllm:generation_tokens_total", _either("output_tokens", "output_tokens"), _MODEL),
    Name("vllm:prefix_cache_queries_total", _either("prompt_tokens", "prompt_tokens"), _MODEL),
    Name("vllm:prefix_cache_hits_total", _either("cached_tokens", "cached_tokens"), _MODEL),
    Name("vllm:prompt_tokens_cached_total", _either("cached_tokens", "cached_tokens"), _MODEL),
    Name(
        "vllm:mm_cache_queries_total",
        _router("images"),
        values={"outcome": {"decoded": "", "known": ""}},
    ),
    Name("vllm:mm_cache_hits_total", _router("images"), values={"outcome": {"known": ""}}),
    Name("vllm:iteration_tokens_total", ("penstock_shard_step_tokens",), _MODEL),
    Name("vllm:spec_decode_num_draft_tokens_total", ("penstock_shard_draft_tokens",), _MODEL),
    Name("vllm:spec_decode_num_accepted_tokens_total", ("penstock_shard_accepted_tokens",), _MODEL),
    Name("vllm:time_to_first_token_seconds", _router("first_token_seconds"), _MODEL),
    Name("vllm:inter_token_latency_seconds", _router("between_tokens_seconds"), _MODEL),
    Name("vllm:time_per_output_token_seconds", _router("between_tokens_seconds"), _MODEL),
    Name(
        "vllm:request_time_per_output_token_seconds",
        _router("mean_between_tokens_seconds"),
        _MODEL,
    ),
    Name(
        "vllm:e2e_request_latency_seconds",
        _either("generation_seconds", "request_seconds"),
        _MODEL,
    ),
    Name("vllm:request_queue_time_seconds", _either("queue_seconds", "queue_seconds"), _MODEL),
    Name(
        "vllm:request_prefill_time_seconds", _either("prefill_seconds", "prefill_seconds"), _MODEL
    ),
    Name("vllm:request_decode_time_seconds", _router("decode_seconds"), _MODEL),
    Name("vllm:request_inference_time_seconds", _router("inference_seconds"), _MODEL),
    Name("vllm:request_prompt_tokens", _router("request_prompt_tokens"), _MODEL),
    Name("vllm:request_generation_tokens", _router("request_output_tokens"), _MODEL),
    Name("vllm:request_params_n", _router("request_choices"), _MODEL),
    Name("vllm:request_params_max_tokens", _router("request_max_tokens"), _MODEL),
    Name(
        "vllm:request_prefill_kv_computed_tokens",
        _router("request_computed_prompt_tokens"),
        _MODEL,
    ),
    Name("vllm:request_num_preemptions", ("penstock_shard_request_preemptions",), _MODEL),
    Name(
        "vllm:admission_rejections_total",
        _router("refused"),
        {"reason": "reason"},
        {"reason": _QUEUE_BOUNDS},
    ),
    Name(
        "vllm:request_success_total",
        _either("requests", "requests"),
        {**_MODEL, "outcome": "finished_reason"},
        {"outcome": _FINISHED},
    ),
)

TGI = (
    Name(
        "tgi_request_count",
        _router("requests"),
        values={"route": _GENERATE_ROUTES, "outcome": _ASKED},
    ),
    Name("tgi_request_success", _router("requests"), values=_SUCCESS),
    Name(
        "tgi_request_failure",
        _router("requests"),
        {"status": "err"},
        {"status": _FAILURES, "route": _GENERATE_ROUTES, "outcome": _ASKED},
    ),
    Name("tgi_request_duration", _either("generation_seconds", "request_seconds")),
    Name("tgi_request_validation_duration", _router("prepare_seconds")),
    Name("tgi_request_queue_duration", _either("queue_seconds", "queue_seconds")),
    Name("tgi_request_inference_duration", _router("inference_seconds")),
    Name("tgi_request_mean_time_per_token_duration", _router("mean_between_tokens_seconds")),
    Name("tgi_request_generated_tokens", _router("request_output_tokens")),
    Name("tgi_request_input_length", _router("request_prompt_tokens")),
    Name(
        "tgi_queue_size",
        (*_either("shard_waiting", "waiting"), "penstock_router_sequences_queued"),
    ),
    Name("tgi_batch_current_size", _either("shard_running", "running")),
)

SETS: Mapping[str, tuple[Name, ...]] = {"vllm": VLLM, "tgi": TGI}


def translate(families: Iterable[Metric], names: Iterable[str], **labels: str) -> Iterator[Metric]:
    """Yield the families, then repeat them under other servers' names. `names` are keys of `SETS`.
    `labels` are added to all samples that lack them.
    """
    known: dict[str, Metric] = {}
    for family in families:
        known[family.name] = family
        yield family
    for name in itertools.chain.from_iterable(SETS[each] for each in names):
        found = [known[ours] for ours in name.ours if ours in known]
        if found:
            yield _translated(name, found, labels)


def _translated(name: Name, families: list[Metric], labels: Mapping[str, str]) -> Metric:
    sums: dict[tuple[str, _Labels], float] = {}
    for family in families:
        for sample in family.samples:
            suffix = sample.name.removeprefix(family.name)
            key = name.labels_of({**labels, **sample.labels})
            if key is not None and suffix != "_created":
                sums[suffix, key] = sums.get((suffix, key), 0.0) + sample.value
    metric = _family(name.theirs, families[0])
    for (suffix, key), value in sums.items():
        ending = "" if suffix == "_total" else suffix
        metric.samples.append(Sample(name.theirs + ending, dict(key), value))
    return metric


def _family(theirs: str, ours: Metric) -> Metric:
    """Make an empty metric. A counter's name must end with _total."""
    kind, base = ours.type, theirs
    if kind == "counter":
        base = theirs.removesuffix("_total")
        kind = "counter" if base != theirs else "unknown"
    return Metric(base, f"{ours.documentation} In penstock: {ours.name}.", kind)
