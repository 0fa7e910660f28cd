"""What the router counts, for Prometheus. Knows no requests: callers say what happened.

With several workers each has its own counters; `prometheus_client` then keeps them in files of a
folder that all share (PROMETHEUS_MULTIPROC_DIR, set before this module is first imported), and any
worker answers for all.
"""

from __future__ import annotations

import os
import time
from bisect import bisect_left
from collections.abc import Sequence

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    generate_latest,
    multiprocess,
)

MULTIPROCESS_DIR = "PROMETHEUS_MULTIPROC_DIR"
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

_FIRST_TOKEN_BUCKETS_S = (
    *(0.005, 0.01, 0.02, 0.04, 0.08, 0.15, 0.25, 0.5, 0.75),
    *(1.0, 2.0, 4.0, 8.0, 15.0, 30.0, 60.0, 120.0),
)
_BETWEEN_BUCKETS_S = (
    *(0.002, 0.005, 0.01, 0.015, 0.02, 0.03, 0.04, 0.06, 0.08),
    *(0.12, 0.2, 0.4, 0.8, 2.0, 5.0),
)
_LAG_BUCKETS_S = (
    *(0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05),
    *(0.1, 0.2, 0.5, 1.0, 2.0, 5.0),
)
# Other workers answer for this one too, from what it has written.
_WRITE_EVERY_S = 0.5
_REQUEST_BUCKETS_S = (0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 40.0, 80.0, 160.0, 320.0, 640.0)


class _BatchedHistogram(Histogram):
    """Takes many observations at once: one costs about as much as all else that a token does."""

    def add(self, counts: Sequence[int], total: float) -> None:
        """`counts` has one for each bucket, the last for what is beyond all bounds."""
        self._sum.inc(total)
        for bucket, count in zip(self._buckets, counts, strict=True):
            if count:
                bucket.inc(count)


class Metrics:
    """The router's counters."""

    def __init__(self) -> None:
        # Of tokens, since they were last written to what Prometheus reads.
        self._num_tokens = 0
        self._gaps = [0] * (len(_BETWEEN_BUCKETS_S) + 1)
        self._gaps_s = 0.0
        self._write_at_s = 0.0
        # Of this worker alone.
        self.loop_lag_worst_s = 0.0
        # In multiprocess mode values live in files, not in this registry.
        self._registry = registry = CollectorRegistry()
        self._add_requests(registry)
        self._add_tokens(registry)
        self._add_streams(registry)
        self._add_admission(registry)
        self._add_loop_lag(registry)

    def _add_requests(self, registry: CollectorRegistry) -> None:
        self.requests = Counter(
            "penstock_router_requests",
            "HTTP requests answered.",
            ("route", "status"),
            registry=registry,
        )
        self.request_seconds = Histogram(
            "penstock_router_request_seconds",
            "From a request's arrival to the end of its answer.",
            ("route",),
            buckets=_REQUEST_BUCKETS_S,
            registry=registry,
        )

    def _add_tokens(self, registry: CollectorRegistry) -> None:
        self.first_token_seconds = Histogram(
            "penstock_router_first_token_seconds",
            "From the hand-over to a shard to the first token.",
            buckets=_FIRST_TOKEN_BUCKETS_S,
            registry=registry,
        )
        self.between_tokens_seconds = _BatchedHistogram(
            "penstock_router_between_tokens_seconds",
            "From one arrival of tokens to the next, divided by its tokens; one value an arrival. "
            "Of answers that are shown whole many tokens count as one arrival.",
            buckets=_BETWEEN_BUCKETS_S,
            registry=registry,
        )
        self.prompt_tokens = Counter(
            "penstock_router_prompt_tokens", "Prompt tokens sent to shards.", registry=registry
        )
        self.output_tokens = Counter(
            "penstock_router_output_tokens", "Tokens received from shards.", registry=registry
        )

    def _add_streams(self, registry: CollectorRegistry) -> None:
        self.in_flight = Gauge(
            "penstock_router_sequences_in_flight",
            "Sequences handed to shards and not finished.",
            registry=registry,
            multiprocess_mode="livesum",
        )
        self.aborts = Counter(
            "penstock_router_aborts",
            "Sequences ended by the router before the shard ended them.",
            ("cause",),
            registry=registry,
        )
        self.resumed_streams = Counter(
            "penstock_router_resumed_streams",
            "Streams that a client took up again: live (it still ran here), again (made again).",
            ("how",),
            registry=registry,
        )
        self.fleet_events = Counter(
            "penstock_router_fleet_events",
            "What happened to sequences between shards: sent (the policy's reason), continued (why "
            "the shard before failed), moved, approximate, refused, given_up, verified (what came "
            "of it).",
            ("event", "reason"),
            registry=registry,
        )

    def _add_loop_lag(self, registry: CollectorRegistry) -> None:
        self.loop_lag_seconds = Histogram(
            "penstock_router_loop_lag_seconds",
            "How late the event loop came to a timer, twenty times a second.",
            buckets=_LAG_BUCKETS_S,
            registry=registry,
        )
        self.loop_lag_worst_seconds = Gauge(
            "penstock_router_loop_lag_worst_seconds",
            "The worst of that in the last ten seconds, of all workers.",
            registry=registry,
            multiprocess_mode="livemax",
        )

    def _add_admission(self, registry: CollectorRegistry) -> None:
        self.sequences_queued = Gauge(
            "penstock_router_sequences_queued",
            "Sequences whose requests are being prepared or wait for places.",
            registry=registry,
            multiprocess_mode="livesum",
        )
        self.prompt_tokens_queued = Gauge(
            "penstock_router_prompt_tokens_queued",
            "Prompt tokens of requests that wait for places.",
            registry=registry,
            multiprocess_mode="livesum",
        )
        self.requests_held = Gauge(
            "penstock_router_requests_held",
            "Requests that wait for a shard of their model, of which none serves; \"\" for a model "
            "that was never served (--shard-wait-s).",
            ("model",),
            registry=registry,
            multiprocess_mode="livesum",
        )
        self.queue_seconds = Histogram(
            "penstock_router_queue_seconds",
            "How long requests that got their places had waited for them.",
            buckets=_FIRST_TOKEN_BUCKETS_S,
            registry=registry,
        )
        self.refused = Counter(
            "penstock_router_refused",
            "Requests answered 429 by the router itself: queue_full, queued_tokens, key_queue_full "
            "and key_queued_tokens at once, queue_timeout after waiting, pushed_out by another "
            "key's, long_bodies where too many of them are here.",
            ("reason",),
            registry=registry,
        )

    def held(self, model: str, change: int) -> None:
        """So many requests more wait for a shard of this model."""
        self.requests_held.labels(model).inc(change)

    def loop_was_late(self, lag_s: float, worst_s: float) -> None:
        """Of one timer, and the worst of the last ones."""
        self.loop_lag_seconds.observe(lag_s)
        self.loop_lag_worst_seconds.set(worst_s)
        self.loop_lag_worst_s = worst_s

    def fleet_event(self, event: str, reason: str) -> None:
        """Told by the fleet of each one."""
        self.fleet_events.labels(event, reason).inc()

    def observe_tokens(self, num_tokens: int, gap_s: float, now_s: float) -> None:
        """Tokens of a sequence, `gap_s` a token after those before; `now_s` is `perf_counter`'s."""
        self._num_tokens += num_tokens
        self._gaps[bisect_left(_BETWEEN_BUCKETS_S, gap_s)] += 1
        self._gaps_s += gap_s
        if now_s >= self._write_at_s:
            self.write_out(now_s)

    def write_out(self, now_s: float) -> None:
        """Let Prometheus see all that came."""
        self._write_at_s = now_s + _WRITE_EVERY_S
        if self._num_tokens:
            self.output_tokens.inc(self._num_tokens)
            self.between_tokens_seconds.add(self._gaps, self._gaps_s)
            self._num_tokens, self._gaps_s = 0, 0.0
            self._gaps = [0] * len(self._gaps)

    def exposition(self) -> bytes:
        """All values in Prometheus' text format."""
        self.write_out(time.perf_counter())
        if MULTIPROCESS_DIR not in os.environ:
            return generate_latest(self._registry)
        collected = CollectorRegistry()
        multiprocess.MultiProcessCollector(collected)  # type: ignore[no-untyped-call]
        return generate_latest(collected)
