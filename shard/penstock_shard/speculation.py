"""Which rows of a step compute drafts, and what came of them. Knows counts, and whom to ask for
drafts; knows neither how they are made nor how they are checked.

How many drafts were right is known when their step is collected. Until then its request has no
part in another step, so where many wait for theirs nobody runs ahead.
"""

from __future__ import annotations

from collections.abc import Sequence

from penstock_shard.drafts import Drafter
from penstock_shard.kv_blocks import BlockManager
from penstock_shard.request import Request, RequestState
from penstock_shard.runner.base import ScheduledRequest, StepPlan
from penstock_shard.step_time import StepTime
from penstock_shard.urgency import seconds_between_tokens

# Of requests that decode, one in so many that wait for a draft: the others wait with them.
_WAITING_SHARE = 4


class Speculation:
    """The scheduler's part for drafts. Of `blocks` they take what is free: nobody is preempted for
    a draft. A step has `most_drafts` at most, which bounds its logits.
    """

    def __init__(
        self, drafter: Drafter, blocks: BlockManager, step_time: StepTime, most_drafts: int
    ) -> None:
        self.drafter = drafter
        self._blocks = blocks
        self._step_time = step_time
        self._most_drafts = max(most_drafts, drafter.most)
        # Those whose drafts are being computed.
        self._drafted: set[Request] = set()

    def ready(self, decodes: list[Request]) -> list[Request] | None:
        """Those that may have a row now; None: all wait for the launched steps, as many must know
        what these give, or had better.
        """
        drafter, drafted = self.drafter, self._drafted
        waiting = {
            request
            for request in decodes
            if request in drafted or (request.num_pending and drafter.expects(request))
        }
        if not waiting:
            return decodes
        # Whoever is left out gets its next token two steps later, not one.
        hurried = any(seconds_between_tokens(request.objective) is not None for request in waiting)
        if hurried or _WAITING_SHARE * len(waiting) >= len(decodes):
            return None
        return [request for request in decodes if request not in waiting]

    def add_drafts(
        self, rows: Sequence[ScheduledRequest], tokens: int, time_s: float
    ) -> list[ScheduledRequest]:
        """The same rows, some with drafts and behind the others; these add `tokens` and `time_s`
        at most.
        """
        plain, with_drafts = [], []
        tokens = min(tokens, self._most_drafts)
        for row in rows:
            most = self._most(row, tokens, time_s)
            found = self.drafter.propose(row.request, most) if most > 0 else []
            if found:
                found = found[: self._held(row, len(found))]
            if not found:
                plain.append(row)
                continue
            row.drafts, row.count = found, 1 + len(found)
            tokens -= len(found)
            time_s -= self._step_time.prompt_s(row.start, len(found))
            self._drafted.add(row.request)
            with_drafts.append(row)
        return plain + with_drafts

    def learn(self, plan: StepPlan) -> None:
        """That step was collected: drafts that were right are computed tokens."""
        if not self._drafted:
            return
        for row in plan.rows:
            if not row.drafts:
                continue
            request = row.request
            self._drafted.discard(request)
            accepted = max(0, len(request.token_ids) - row.start - 2)
            self.drafter.learn(request, len(row.drafts), accepted)
            if request.state is RequestState.RUNNING:
                request.num_computed += accepted

    def drop(self) -> None:
        """No launched step counts."""
        self._drafted.clear()

    def _most(self, row: ScheduledRequest, tokens: int, time_s: float) -> int:
        """How many drafts the row may have: by the step, and its request's end."""
        request = row.request
        # Whoever runs ahead of its own tokens has none to draft from.
        if tokens <= 0 or request.num_pending:
            return 0
        most = min(tokens, self.drafter.most, request.max_tokens - request.num_output_tokens - 1)
        if time_s != float("inf"):
            most = min(most, self._step_time.prompt_tokens_in(time_s, row.start))
        return most

    def _held(self, row: ScheduledRequest, count: int) -> int:
        """How many of so many drafts there are blocks for."""
        request = row.request
        if self._blocks.grow(request, row.start + 1 + count):
            return count
        return len(request.block_ids) * self._blocks.block_size - row.start - 1
