"""The engine: requests in, steps, outputs out. Knows no sockets, no processes and no torch.

Every request that is submitted ends with exactly one output that is last: a finish or an error.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from penstock_shard.kv_blocks import BlockManager
from penstock_shard.link import Error, Load, Output
from penstock_shard.request import FinishReason, Request
from penstock_shard.runner.base import Logprobs, RowResult, Runner, ScheduledRequest, StepPlan
from penstock_shard.scheduler import Scheduler

# google.rpc.Code
_INTERNAL = 13


class Engine:
    """Owns the requests; the scheduler decides, the runner computes."""

    def __init__(
        self,
        runner: Runner,
        scheduler: Scheduler,
        blocks: BlockManager,
    ) -> None:
        self._runner = runner
        self._scheduler = scheduler
        self._blocks = blocks
        self._requests: dict[str, Request] = {}
        self._outputs: list[Output] = []
        self.steps_total = 0
        # When the step in progress began, by the monotonic clock; None between steps.
        self.step_started_s: float | None = None

    @property
    def has_work(self) -> bool:
        return bool(self._requests)

    def submit(self, request: Request) -> None:
        """Take a request. A higher attempt of an id in use ends the lower one and takes over."""
        present = self._requests.get(request.request_id)
        if present is not None:
            if present.attempt >= request.attempt:
                self._outputs.append(_ending(request, finish=FinishReason.ABORTED))
                return
            self._end(present, finish=FinishReason.ABORTED)
        self._scheduler.add(request)
        self._requests[request.request_id] = request

    def abort(self, request_id: str, attempt: int) -> None:
        """End this attempt of a request before the next step, if it has not ended."""
        request = self._requests.get(request_id)
        if request is not None and request.attempt == attempt:
            self._end(request, finish=FinishReason.ABORTED)

    def step(self) -> list[Output]:
        """Run one step, if there is anything to run; all outputs since the last call."""
        plan = self._scheduler.schedule()
        if plan.rows:
            self.step_started_s = time.monotonic()
            self._runner.launch(plan)
            results = self._runner.collect()
            self.step_started_s = None
            self.steps_total += 1
            self._scheduler.computed(plan)
            self._take(plan, results)
        outputs, self._outputs = self._outputs, []
        return outputs

    def load(self) -> Load:
        return Load(
            running=self._scheduler.num_running,
            waiting=self._scheduler.num_waiting,
            queued_tokens=self._scheduler.num_queued_tokens,
            running_tokens=self._scheduler.num_running_tokens,
            referenced_blocks=self._blocks.num_referenced,
            steps_total=self.steps_total,
            preemptions_total=self._scheduler.preemptions_total,
        )

    def check_integrity(self) -> None:
        """Raises `AssertionError` when the accounts of requests and blocks disagree."""
        requests = self._scheduler.requests
        assert {request.request_id for request in requests} == set(self._requests), (
            f"{len(requests)} requests are scheduled, {len(self._requests)} are known"
        )
        self._blocks.check_integrity(requests)

    # ---- internals ----

    def _take(self, plan: StepPlan, results: Sequence[RowResult]) -> None:
        for row, result in zip(plan.rows, results, strict=True):
            request = row.request
            if result.error is not None:
                self._end(request, error=Error(_INTERNAL, result.error))
                continue
            output = _output(request)
            self._add_prompt_logprobs(output, row, result.prompt_logprobs)
            if result.token_id is not None:
                self._add_token(output, request, result.token_id)
                output.logprobs = result.logprobs
            if output.token_ids or output.prompt_logprobs is not None:
                self._outputs.append(output)
            if output.is_last:
                self._forget(request)

    def _add_prompt_logprobs(
        self, output: Output, row: ScheduledRequest, logprobs: Logprobs | None
    ) -> None:
        """Report what was not reported before the request was put down and computed again."""
        request = row.request
        if logprobs is None or not request.needs_prompt_logprobs:
            return
        known = request.num_prompt_logprobs_sent - row.start
        if known > 0:
            logprobs = logprobs.without_first(known)
        if not logprobs.chosen:
            return
        output.prompt_logprobs = logprobs
        output.prompt_logprobs_start = request.num_prompt_logprobs_sent + 1
        request.num_prompt_logprobs_sent += len(logprobs.chosen)

    def _add_token(self, output: Output, request: Request, token_id: int) -> None:
        if request.num_output_tokens == request.num_delivered:
            output.cached_tokens = request.cached_tokens
        request.token_ids.append(token_id)
        output.token_ids.append(token_id)
        if token_id in request.stop_token_ids:
            output.finish = FinishReason.STOP
            output.stop_token_id = token_id
        elif request.num_output_tokens >= request.max_tokens:
            output.finish = FinishReason.LENGTH

    def _end(
        self, request: Request, *, finish: FinishReason | None = None, error: Error | None = None
    ) -> None:
        self._outputs.append(_ending(request, finish=finish, error=error))
        self._forget(request)

    def _forget(self, request: Request) -> None:
        del self._requests[request.request_id]
        self._scheduler.remove(request)
        self._runner.release(request)


def _output(request: Request) -> Output:
    return Output(request.request_id, request.attempt, request.num_output_tokens, [])


def _ending(
    request: Request, *, finish: FinishReason | None = None, error: Error | None = None
) -> Output:
    output = _output(request)
    output.finish = finish
    output.error = error
    return output
