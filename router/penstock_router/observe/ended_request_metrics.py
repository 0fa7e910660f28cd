"""Metrics of ended requests, from their records."""

from __future__ import annotations

from collections.abc import Sequence

from prometheus_client import CollectorRegistry, Counter, Histogram

from penstock_router.observe.metrics import BETWEEN_BUCKETS_S, WAIT_BUCKETS_S
from penstock_router.observe.request_record import RequestRecord, Usage

_REQUEST_BUCKETS_S = (0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 40.0, 80.0, 160.0, 320.0, 640.0)
_TOKEN_BUCKETS = tuple(float(2**power) for power in range(18))

_CHOICES_BUCKETS = tuple(float(2**power) for power in range(8))

_FINISHED = ("stop", "length")


class RequestMetrics:
    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry
        self._add_requests()
        self._add_times()
        self._add_tokens()

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(f"penstock_router_{name}", text, labels, registry=self._registry)

    def _histogram(
        self,
        name: str,
        text: str,
        buckets: Sequence[float] = WAIT_BUCKETS_S,
        label: str = "model",
    ) -> Histogram:
        name = f"penstock_router_{name}"
        return Histogram(name, text, (label,), buckets=buckets, registry=self._registry)

    def _add_requests(self) -> None:
        self._requests = self._counter(
            "requests",
            "HTTP requests that have ended, by outcome: stop, length; disconnect, slow_reader, "
            "timeout, shutdown, abandoned; refused, error; ok for routes that generate nothing, "
            "probe for those that need no key. The model is empty for requests that ended before "
            "it was known; of a 503 because no shard serves it, it is the one that was asked for, "
            "if it is expected or was ever served.",
            *("route", "status", "outcome", "model"),
        )
        self._request_seconds = self._histogram(
            "request_seconds", "From a request's arrival to its end.", _REQUEST_BUCKETS_S, "route"
        )
        self._generation_seconds = self._histogram(
            "generation_seconds",
            "From the arrival to the end of each request that finished by stop or length.",
            _REQUEST_BUCKETS_S,
        )

    def _add_times(self) -> None:
        add = self._histogram
        self._prepare_seconds = add(
            "prepare_seconds",
            "From a request's arrival until its text is read, rendered and tokenized.",
        )
        self._queue_seconds = add(
            "queue_seconds",
            "How long a request waited: for places in the router, then for its first step.",
        )
        self._prefill_seconds = add(
            "prefill_seconds",
            "From a request's first step in the shard to its first token at the router.",
        )
        self._decode_seconds = add(
            "decode_seconds", "From a request's first token to its end.", _REQUEST_BUCKETS_S
        )
        self._inference_seconds = add(
            "inference_seconds",
            "From a request's first step in the shard to its end.",
            _REQUEST_BUCKETS_S,
        )
        self._mean_between_tokens_seconds = add(
            "mean_between_tokens_seconds",
            "For each request: from its first token to its end, divided by the tokens after that.",
            BETWEEN_BUCKETS_S,
        )
        self._failover_gap_seconds = add(
            "failover_gap_seconds",
            "For sequences continued on another shard: from the last token of one to the first "
            "token of the next. Counted when the request ends.",
        )

    def _add_tokens(self) -> None:
        self._cached_tokens = self._counter(
            "cached_tokens",
            "Prompt tokens that shards found in their prefix caches.",
            "model",
        )
        self._request_prompt_tokens = self._histogram(
            "request_prompt_tokens", "Prompt tokens of each request.", _TOKEN_BUCKETS
        )
        self._request_output_tokens = self._histogram(
            "request_output_tokens", "Output tokens of each request.", _TOKEN_BUCKETS
        )
        self._request_computed_prompt_tokens = self._histogram(
            "request_computed_prompt_tokens",
            "Prompt tokens of each request that no prefix cache had.",
            _TOKEN_BUCKETS,
        )
        self._request_choices = self._histogram(
            "request_choices",
            "Choices that each request asks for, of each of its prompts.",
            _CHOICES_BUCKETS,
        )
        self._request_max_tokens = self._histogram(
            "request_max_tokens",
            "Output tokens that each choice of a request may have: as it asks, or up to the end of "
            "the context.",
            _TOKEN_BUCKETS,
        )

    def on_request_end(self, record: RequestRecord) -> None:
        ended_s = record.ended_s
        assert ended_s is not None
        status = str(record.status)
        self._requests.labels(record.route, status, record.outcome, record.model).inc()
        self._request_seconds.labels(record.route).observe(ended_s - record.arrived_s)
        if record.model and record.usage is not None:
            self._count_times(record, record.usage, ended_s)
            self._count_tokens(record, record.usage, ended_s)

    def _count_times(self, record: RequestRecord, usage: Usage, ended_s: float) -> None:
        model, prepared_s, placed_s = record.model, record.prepared_s, record.placed_s
        if record.outcome in _FINISHED:
            self._generation_seconds.labels(model).observe(ended_s - record.arrived_s)
        for gap_s in record.failover_gaps_s:
            self._failover_gap_seconds.labels(model).observe(gap_s)
        if prepared_s is None or placed_s is None:
            return
        begun_s = placed_s + (usage.queue_s or 0.0)
        self._prepare_seconds.labels(model).observe(prepared_s - record.arrived_s)
        self._queue_seconds.labels(model).observe(begun_s - prepared_s)
        if record.first_token_s is not None:
            prefill_s = max(0.0, record.first_token_s - begun_s)
            self._prefill_seconds.labels(model).observe(prefill_s)
            self._decode_seconds.labels(model).observe(ended_s - record.first_token_s)
            self._inference_seconds.labels(model).observe(max(0.0, ended_s - begun_s))

    def _count_tokens(self, record: RequestRecord, usage: Usage, ended_s: float) -> None:
        model, num_tokens = record.model, usage.completion_tokens
        self._request_prompt_tokens.labels(model).observe(usage.prompt_tokens)
        if record.choices is not None and record.max_tokens is not None:
            self._request_choices.labels(model).observe(record.choices)
            self._request_max_tokens.labels(model).observe(record.max_tokens)
        if usage.cached_tokens is not None:
            self._cached_tokens.labels(model).inc(usage.cached_tokens)
            computed = usage.prompt_tokens - usage.cached_tokens
            self._request_computed_prompt_tokens.labels(model).observe(computed)
        if record.first_token_s is None:
            return
        self._request_output_tokens.labels(model).observe(num_tokens)
        if num_tokens > 1:
            mean_s = (ended_s - record.first_token_s) / (num_tokens - 1)
            self._mean_between_tokens_seconds.labels(model).observe(mean_s)
