"""A shard's Prometheus counters, updated by the supervisor."""

from __future__ import annotations

from collections.abc import Iterable

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Histogram,
    disable_created_metrics,
)

from penstock_proto.types import Error, FinishReason, RequestOutput
from penstock_shard.ipc.messages import Load

_STEP_BUCKETS_S = (
    *(0.001, 0.002, 0.005, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075),
    *(0.1, 0.15, 0.25, 0.5, 1.0, 2.5, 5.0),
)
_WAIT_BUCKETS_S = (
    *(0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5),
    *(1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0),
)
_REQUEST_BUCKETS_S = (0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 40.0, 80.0, 160.0, 320.0, 640.0)
_POWERS_OF_TWO = tuple(float(2**power) for power in range(15))
_PREEMPTIONS = (0.0, 1.0, 2.0, 3.0, 5.0, 10.0, 20.0, 50.0)
# Outcomes that may waste tokens. The caller may also have wanted no more.
_CUT_SHORT = ("aborted", "deadline_exceeded")


class ShardMetrics:
    def __init__(self) -> None:
        # Creation times would be a third of the output, and nobody needs them.
        disable_created_metrics()  # type: ignore[no-untyped-call]
        self.registry = CollectorRegistry()
        self._add_requests()
        self._add_tokens()
        self._add_steps()

    def _add_requests(self) -> None:
        self._requests = self._counter(
            "requests",
            "Requests that have ended, by outcome: stop, length, aborted, or the code of an error.",
            "outcome",
        )
        for finish in FinishReason:
            # Create the series with a 0: otherwise a rate misses the first request.
            self._requests.labels(finish.value)
        self._request_seconds = self._histogram(
            "request_seconds", "From a request's arrival to its end.", _REQUEST_BUCKETS_S
        )
        self._queue_seconds = self._histogram(
            "queue_seconds", "From a request's arrival to its first step.", _WAIT_BUCKETS_S
        )
        self._prefill_seconds = self._histogram(
            "prefill_seconds", "From a request's first step to its first token.", _WAIT_BUCKETS_S
        )
        self._request_preemptions = self._histogram(
            "request_preemptions",
            "How often each request that the engine ended was preempted: stopped, to be computed "
            "again.",
            _PREEMPTIONS,
        )
        self._restarts = self._counter(
            "engine_restarts", "Engines that died, were killed or could not start."
        )

    def _add_tokens(self) -> None:
        self._prompt_tokens = self._counter(
            "prompt_tokens",
            "Tokens of requests that started: their prompts and, for continued requests, their "
            "output so far.",
        )
        self._cached_tokens = self._counter(
            "cached_tokens", "Of those, tokens found in the prefix cache."
        )
        self._output_tokens = self._counter("output_tokens", "Tokens sent to callers.")
        self._aborted_tokens = self._counter(
            "aborted_tokens",
            "Of those, tokens of requests that were aborted or missed their deadline: wasted, "
            "unless the caller had all it wanted, as after a stop string.",
        )

    def _add_steps(self) -> None:
        self._step_seconds = self._histogram(
            "step_seconds", "Duration of a step, from its launch to its results.", _STEP_BUCKETS_S
        )
        self._step_sequences = self._histogram(
            "step_sequences", "Sequences in a step (the batch size).", _POWERS_OF_TWO
        )
        self._step_tokens = self._histogram(
            "step_tokens", "Tokens computed in a step, of prompts and outputs.", _POWERS_OF_TWO
        )
        computed = self._counter(
            "computed_tokens", "Tokens computed in steps, by kind: prompt or decode.", "kind"
        )
        self._computed_prompt = computed.labels("prompt")
        self._computed_decode = computed.labels("decode")
        self._draft_tokens = self._counter(
            "draft_tokens", "Draft tokens that were computed (--speculative-tokens)."
        )
        self._accepted_tokens = self._counter(
            "accepted_tokens", "Of those, tokens that were accepted: each saved a step."
        )

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(f"penstock_shard_{name}", text, labels, registry=self.registry)

    def _histogram(self, name: str, text: str, buckets: Iterable[float]) -> Histogram:
        name = f"penstock_shard_{name}"
        return Histogram(name, text, buckets=tuple(buckets), registry=self.registry)

    def on_request_start(self, num_tokens: int, queue_s: float) -> None:
        self._prompt_tokens.inc(num_tokens)
        self._queue_seconds.observe(queue_s)

    def on_first_token(self, seconds: float, cached_tokens: int) -> None:
        self._prefill_seconds.observe(seconds)
        self._cached_tokens.inc(cached_tokens)

    def on_request_end(self, last: RequestOutput, num_tokens: int, seconds: float) -> None:
        outcome = _outcome(last)
        self._requests.labels(outcome).inc()
        self._request_seconds.observe(seconds)
        if last.work is not None:
            self._request_preemptions.observe(last.work.preemptions)
        if outcome in _CUT_SHORT:
            self._aborted_tokens.inc(num_tokens)

    def on_refusal(self, error: Error) -> None:
        self._requests.labels(error.code.name.lower()).inc()

    def on_step(self, before: Load, after: Load, num_tokens: int) -> None:
        """Count a step that gave `num_tokens`. Loads have totals, so add their differences."""
        if num_tokens:
            self._output_tokens.inc(num_tokens)
        if after.steps_total == before.steps_total:
            return
        prompt_tokens = after.prompt_tokens_total - before.prompt_tokens_total
        decode_tokens = after.decode_tokens_total - before.decode_tokens_total
        self._step_seconds.observe(after.steps_seconds_total - before.steps_seconds_total)
        self._step_sequences.observe(after.sequences_total - before.sequences_total)
        self._step_tokens.observe(prompt_tokens + decode_tokens)
        self._computed_prompt.inc(prompt_tokens)
        self._computed_decode.inc(decode_tokens)
        if after.draft_tokens_total != before.draft_tokens_total:
            self._draft_tokens.inc(after.draft_tokens_total - before.draft_tokens_total)
            self._accepted_tokens.inc(after.accepted_tokens_total - before.accepted_tokens_total)

    def on_engine_death(self) -> None:
        self._restarts.inc()


def _outcome(last: RequestOutput) -> str:
    if last.error is not None:
        return last.error.code.name.lower()
    return "" if last.finish_reason is None else last.finish_reason.value
