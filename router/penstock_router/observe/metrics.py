"""The router's counters for Prometheus; `ended_request_metrics` has more of them.

Each worker has its own counters. With several workers, `prometheus_client` keeps them in files of a
shared folder (PROMETHEUS_MULTIPROC_DIR, set before this module is first imported), and any worker
answers for all.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    disable_created_metrics,
)

WAIT_BUCKETS_S = (
    *(0.005, 0.01, 0.02, 0.04, 0.08, 0.15, 0.25, 0.5, 0.75),
    *(1.0, 2.0, 4.0, 8.0, 15.0, 30.0, 60.0, 120.0),
)
BETWEEN_BUCKETS_S = (
    *(0.002, 0.005, 0.01, 0.015, 0.02, 0.03, 0.04, 0.06, 0.08),
    *(0.12, 0.2, 0.4, 0.8, 2.0, 5.0),
)
_LAG_BUCKETS_S = (
    *(0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05),
    *(0.1, 0.2, 0.5, 1.0, 2.0, 5.0),
)
# The interval at which this worker writes its counts, which other workers show too.
WRITE_EVERY_S = 0.5


class _BatchedHistogram(Histogram):
    """Takes many observations at once: a single one costs as much as all other work on a token."""

    def add(self, counts: Sequence[int], total: float) -> None:
        """Add observations. `counts` has an entry for each bucket, the last for values above all
        bounds.
        """
        self._sum.inc(total)
        for bucket, count in zip(self._buckets, counts, strict=True):
            if count:
                bucket.inc(count)


class TokenMeter:
    """Counts one model's output tokens, and passes them to Prometheus's counters in batches."""

    def __init__(self, tokens: Counter, between_seconds: _BatchedHistogram) -> None:
        self._tokens = tokens
        self._between_seconds = between_seconds
        # Counts since the last `write_out`.
        self._num_tokens = 0
        self._gaps = [0] * (len(BETWEEN_BUCKETS_S) + 1)
        self._gaps_s = 0.0
        self._write_at_s = 0.0

    def add(self, num_tokens: int) -> None:
        """Count tokens without measuring the gap before them."""
        self._tokens.inc(num_tokens)

    def observe(self, num_tokens: int, gap_s: float, now_s: float) -> None:
        """Count tokens that came `gap_s` after the previous one. `now_s` is
        `perf_counter`'s time.
        """
        self._num_tokens += num_tokens
        self._gaps[bisect_left(BETWEEN_BUCKETS_S, gap_s)] += 1
        self._gaps_s += gap_s
        if now_s >= self._write_at_s:
            self.write_out(now_s)

    def write_out(self, now_s: float) -> None:
        self._write_at_s = now_s + WRITE_EVERY_S
        if self._num_tokens:
            self._tokens.inc(self._num_tokens)
            self._between_seconds.add(self._gaps, self._gaps_s)
            self._num_tokens, self._gaps_s = 0, 0.0
            self._gaps = [0] * len(self._gaps)


class Metrics:
    def __init__(self) -> None:
        # Creation times of counters are useless, but would be a third of all samples.
        disable_created_metrics()  # type: ignore[no-untyped-call]
        # This worker's worst lag, for its console.
        self.loop_lag_worst_s = 0.0
        self._meters: dict[str, TokenMeter] = {}
        # In multiprocess mode, values live in files, not in this registry.
        self.registry = CollectorRegistry()
        self._add_tokens()
        self._add_streams()
        self._add_admission()
        self._add_images()
        self._add_records()
        self._add_secrets()
        self._add_loop_lag()

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(f"penstock_router_{name}", text, labels, registry=self.registry)

    def _gauge(self, name: str, text: str, *labels: str, mode: str = "livesum") -> Gauge:
        name = f"penstock_router_{name}"
        return Gauge(name, text, labels, registry=self.registry, multiprocess_mode=mode)  # type: ignore[arg-type]

    def _histogram(
        self, name: str, text: str, *labels: str, buckets: Sequence[float] = WAIT_BUCKETS_S
    ) -> Histogram:
        name = f"penstock_router_{name}"
        return Histogram(name, text, labels, buckets=buckets, registry=self.registry)

    def _add_tokens(self) -> None:
        self.between_tokens_seconds = _BatchedHistogram(
            "penstock_router_between_tokens_seconds",
            "Time from one arrival of tokens to the next, divided by the tokens that arrived; one "
            "value for each arrival. In answers that are not streamed, many tokens arrive at once.",
            ("model",),
            buckets=BETWEEN_BUCKETS_S,
            registry=self.registry,
        )
        self.prompt_tokens = self._counter(
            "prompt_tokens", "Prompt tokens sent to shards.", "model"
        )
        self._output_tokens = self._counter(
            "output_tokens", "Tokens received from shards.", "model"
        )
        self.wasted_tokens = self._counter(
            "wasted_tokens",
            "Of those, tokens of sequences that were cut short, by cause: disconnect, slow_reader, "
            "timeout, shutdown, abandoned, error; put_down: a resumable stream waits for its "
            "reader.",
            "cause",
        )
        self.first_token_seconds = self._histogram(
            "first_token_seconds", "From a request's arrival to its first token.", "model"
        )

    def _add_streams(self) -> None:
        self.in_flight = self._gauge(
            "sequences_in_flight", "Sequences handed to shards and not finished."
        )
        self.buffered_bytes = self._gauge(
            "buffered_bytes",
            "Bytes of bodies, answers and resumable streams that wait for slow clients.",
        )
        self.aborts = self._counter(
            "aborts", "Sequences ended by the router before the shard ended them.", "cause"
        )
        self.retained = self._counter(
            "retained_sequences",
            "Sequences whose shard was asked to retain their KV blocks for the next turn: "
            "tool_calls (the client runs tools meanwhile), hint (kv_hints of the request).",
            "because",
        )
        self.resumed_streams = self._counter(
            "resumed_streams",
            "Streams that a client resumed: live (still running here), again (generated again).",
            "how",
        )
        self.fleet_events = self._counter(
            "fleet_events",
            "What happened to sequences between shards: sent (reason: the policy's), continued "
            "(why the previous shard failed), moved (drain, role, rebalance), approximate, "
            "refused, given_up, verified (the result), fetched_ahead (a session's KV blocks, "
            "before its next turn: done, failed).",
            *("event", "reason"),
        )
        # Create the series now, so that the first event is an increase.
        self.fleet_events.labels("verified", "different")

    def _add_records(self) -> None:
        self.store_failures = self._counter(
            "store_failures",
            "Calls of the response store that failed: its disk is full or damaged, its file was "
            "removed or replaced, or it is so slow that too many wait.",
        )
        self.audit_dropped = self._counter(
            "audit_dropped", "Records that the audit log could not write (--audit-log)."
        )

    def _add_secrets(self) -> None:
        self._certificate_expires = self._gauge(
            "certificate_expires_timestamp_seconds",
            "When the certificates in use expire (Unix time), by the flag that names their file: "
            "--tls-cert-file and --shard-tls-cert-file, of a chain the first that does; "
            "--shard-tls-ca-file, of several authorities the last.",
            "flag",
            mode="livemin",
        )
        self.keys_refused_reloads = self._counter(
            "keys_refused_reloads",
            "Looks at the file of keys (--api-keys-file), one a second, that found a file which "
            "cannot be used, so that the keys stayed as they were: also those that were taken out.",
        )

    def _add_loop_lag(self) -> None:
        self.loop_lag_seconds = self._histogram(
            "loop_lag_seconds",
            "How late the event loop ran a timer, measured twenty times a second.",
            buckets=_LAG_BUCKETS_S,
        )
        self.loop_lag_worst_seconds = self._gauge(
            "loop_lag_worst_seconds",
            "The worst of these in the last ten seconds, over all workers.",
            mode="livemax",
        )

    def _add_admission(self) -> None:
        self.sequences_queued = self._gauge(
            "sequences_queued",
            "Sequences whose requests are being prepared or wait for places.",
        )
        self.prompt_tokens_queued = self._gauge(
            "prompt_tokens_queued", "Prompt tokens of requests that wait for places."
        )
        self.requests_held = self._gauge(
            "requests_held",
            "Requests that wait for a shard of their model because none serves (--shard-wait-s). "
            "The label is empty for a model that was neither served nor expected.",
            "model",
        )
        self.refused = self._counter(
            "refused",
            "Requests answered with 429 by the router itself: queue_full, queued_tokens, "
            "key_queue_full and key_queued_tokens at once, queue_timeout after waiting, pushed_out "
            "of the queue by another key's, key_requests_per_minute and key_tokens_per_minute, "
            "long_bodies and templates (of requests) when there are too many of them, "
            "unread_answers when a client leaves too many bytes unread, images when those of a "
            "client take too much memory or too many wait.",
            "reason",
        )
        # Create the series now, so that the first refusal is an increase.
        for reason in ("queue_full", "queued_tokens"):
            self.refused.labels(reason)

    def _add_images(self) -> None:
        self.images = self._counter(
            "images",
            "Images of requests: decoded; known, as they are kept from before; refused, as they "
            "cannot be fetched or decoded or are over a bound.",
            "outcome",
        )
        self.image_bytes = self._counter(
            "image_bytes", "Bytes of those that were not refused, as they were sent or fetched."
        )
        self.image_decode_seconds = self._histogram(
            "image_decode_seconds",
            "From an image's last byte to its pixels, with the wait for an image process.",
        )
        self.image_held_bytes = self._gauge(
            "image_held_bytes", "Bytes of images and of their pixels in this router's memory."
        )

    # ---- events ----

    def count_held(self, model: str, change: int) -> None:
        self.requests_held.labels(model).inc(change)

    def observe_loop_lag(self, lag_s: float, worst_s: float) -> None:
        """Record the lag of one timer, and the worst recent lag."""
        self.loop_lag_seconds.observe(lag_s)
        self.loop_lag_worst_seconds.set(worst_s)
        self.loop_lag_worst_s = worst_s

    def set_certificate_expiry(self, flag: str, expires_at: float) -> None:
        """Note when the certificates of this flag's file expire."""
        self._certificate_expires.labels(flag).set(expires_at)

    def count_fleet_event(self, event: str, reason: str) -> None:
        self.fleet_events.labels(event, reason).inc()

    def tokens_of(self, model: str) -> TokenMeter:
        meter = self._meters.get(model)
        if meter is None:
            tokens = self._output_tokens.labels(model)
            meter = TokenMeter(tokens, self.between_tokens_seconds.labels(model))
            self._meters[model] = meter
        return meter

    def write_out(self, now_s: float) -> None:
        for meter in self._meters.values():
            meter.write_out(now_s)
