"""Which tokens the next step computes. Plain Python on integers: no torch, no clock, no wire.

There is no prefill phase and no decode phase. A request has tokens that are known and tokens that
are computed, and each step gives out a budget of tokens to let the second catch up with the first:
requests that lack one token first, then chunks of longer ones, in order of arrival. When blocks run
out, the request that arrived last is put down, its blocks are freed, and it is computed again
later from its prompt and its output so far.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

from penstock_shard.kv_blocks import BlockManager
from penstock_shard.request import Request
from penstock_shard.runner.base import ScheduledRequest, StepPlan


@dataclass(frozen=True, slots=True)
class SchedulerLimits:
    """Bounds of a step."""

    max_num_seqs: int
    max_num_batched_tokens: int


class Scheduler:
    """Owns the waiting and the running requests, and through the block manager their blocks."""

    def __init__(self, limits: SchedulerLimits, blocks: BlockManager) -> None:
        self._limits = limits
        self._blocks = blocks
        # In order of arrival; a request that was put down stands before those that never ran.
        self._waiting: OrderedDict[Request, None] = OrderedDict()
        self._running: dict[Request, None] = {}
        self._queued_tokens = 0
        self._arrivals = 0
        # The request that found too few free blocks, and how many there were.
        self._turned_away: tuple[Request, int] | None = None
        self.preemptions_total = 0

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_queued_tokens(self) -> int:
        """Tokens of waiting requests."""
        return self._queued_tokens

    @property
    def num_running_tokens(self) -> int:
        return sum(request.num_tokens for request in self._running)

    @property
    def requests(self) -> list[Request]:
        """All requests, running ones first."""
        return [*self._running, *self._waiting]

    def add(self, request: Request) -> None:
        """Queue a request. Whoever submits bounds the queue."""
        request.arrival = self._arrivals
        self._arrivals += 1
        self._waiting[request] = None
        self._queued_tokens += request.num_tokens

    def remove(self, request: Request) -> None:
        """Forget a request, finished or aborted, wherever it is; its blocks are freed."""
        if request in self._running:
            del self._running[request]
        else:
            del self._waiting[request]
            self._queued_tokens -= request.num_tokens
        self._blocks.release(request)

    def schedule(self) -> StepPlan:
        """The next step. Empty when there is nothing to do."""
        budget = self._limits.max_num_batched_tokens
        preemptions_before = self.preemptions_total
        decodes: list[ScheduledRequest] = []
        chunks: list[ScheduledRequest] = []
        for request in sorted(self._running, key=_is_behind):
            # Preemption takes requests out of `_running` while this walks its copy.
            if budget == 0 or request not in self._running:
                continue
            count = min(request.num_uncomputed, budget)
            if self._make_room(request, count):
                (chunks if _is_behind(request) else decodes).append(_row(request, count))
                budget -= count
        # Whoever was put down would only come back in the same step to be put down again.
        while budget > 0 and self.preemptions_total == preemptions_before:
            row = self._admit(budget)
            if row is None:
                break
            (decodes if row.count == 1 and row.samples else chunks).append(row)
            budget -= row.count
        rows = (row for row in decodes + chunks if row.request in self._running)
        return StepPlan(tuple(rows))

    def computed(self, plan: StepPlan) -> None:
        """The step is over: its tokens are in the cache, and full blocks become findable."""
        for row in plan.rows:
            row.request.num_computed = row.start + row.count
            self._blocks.publish(row.request)

    # ---- internals ----

    def _make_room(self, request: Request, count: int) -> bool:
        """Blocks for `count` more tokens, putting down later arrivals; False: put down itself."""
        while not self._blocks.grow(request, request.num_computed + count):
            victim = max(self._running, key=lambda running: running.arrival)
            self._put_down(victim)
            if victim is request:
                return False
        return True

    def _put_down(self, request: Request) -> None:
        del self._running[request]
        self._blocks.release(request)
        request.preemptions += 1
        self.preemptions_total += 1
        self._waiting[request] = None
        self._waiting.move_to_end(request, last=False)
        self._queued_tokens += request.num_tokens

    def _admit(self, budget: int) -> ScheduledRequest | None:
        """Start the oldest waiting request with a first chunk; None when there is no room.

        It gets blocks for all it knows at once: one that was let in with less would be put down
        again half-way.
        """
        if not self._waiting or len(self._running) >= self._limits.max_num_seqs:
            return None
        request = next(iter(self._waiting))
        if self._turned_away == (request, self._blocks.num_free):
            return None
        if not request.needs_prompt_logprobs:
            self._blocks.acquire_prefix(request)
        if not self._blocks.grow(request, request.num_tokens):
            self._blocks.release(request)
            self._turned_away = (request, self._blocks.num_free)
            return None
        if request.cached_tokens is None:
            request.cached_tokens = min(request.num_computed, request.num_prompt_tokens)
        del self._waiting[request]
        self._queued_tokens -= request.num_tokens
        self._running[request] = None
        return _row(request, min(request.num_uncomputed, budget))


def _is_behind(request: Request) -> bool:
    """More than one token to compute: a prompt, or a request that was put down."""
    return request.num_uncomputed > 1


def _row(request: Request, count: int) -> ScheduledRequest:
    start = request.num_computed
    return ScheduledRequest(request, start, count, samples=start + count == request.num_tokens)
