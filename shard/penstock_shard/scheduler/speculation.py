"""Gives draft tokens to rows of a step. This part of a scheduler is optional.

Only when a step is collected is it known which of its drafts are accepted. Until then, a sequence
with drafts is in no other step. If many sequences wait for a step, the next step is planned only
after it, so that all stay in the same steps.
"""

from __future__ import annotations

from collections import abc

from penstock_shard.kv_cache.block_manager import BlockManager
from penstock_shard.scheduler.rows import Row, Rows
from penstock_shard.scheduler.step_budget import UNBOUNDED_S, StepBudget
from penstock_shard.scheduler.step_time import StepSize, step_size
from penstock_shard.scheduler.urgency import seconds_between_tokens
from penstock_shard.sequence import Sequence, SequenceState
from penstock_shard.spec_decode.prompt_lookup import Drafter

# Drafts may take 1/_DRAFTS_SHARE of the tokens and the time that decodes leave.
_DRAFTS_SHARE = 2
# If at least 1/_WAITING_SHARE of the decoding sequences wait for launched steps, all wait.
_WAITING_SHARE = 4


class Speculation:
    """The scheduler's part for drafts. Drafts use only free blocks: nothing is preempted for them.
    A step has at most `most_drafts`, which bounds its logits.
    """

    def __init__(self, drafter: Drafter, blocks: BlockManager, most_drafts: int) -> None:
        self.drafter = drafter
        self._blocks = blocks
        self._most_drafts = max(most_drafts, drafter.most)
        # Sequences with drafts in an uncollected step.
        self._drafted: set[Sequence] = set()

    def ready(self, decodes: list[Sequence]) -> list[Sequence] | None:
        """Return the sequences that may have a row now; None if many need tokens of launched steps,
        so that all wait.
        """
        drafter, drafted = self.drafter, self._drafted
        waiting = {
            sequence
            for sequence in decodes
            if sequence in drafted or (sequence.num_pending and drafter.expects(sequence))
        }
        if not waiting:
            return decodes
        # A sequence that is left out gets its next token one step later.
        hurried = any(
            seconds_between_tokens(sequence.request.objective) is not None for sequence in waiting
        )
        if hurried or _WAITING_SHARE * len(waiting) >= len(decodes):
            return None
        return [sequence for sequence in decodes if sequence not in waiting]

    def add_drafts(self, decodes: Rows, budget: StepBudget) -> tuple[Rows, StepSize]:
        """Give drafts to rows, within the drafts' part of the budget. Returns the rows, those with
        drafts last, and the total size.
        """
        plain, with_drafts = [], []
        tokens = min(budget.tokens // _DRAFTS_SHARE, self._most_drafts)
        time_s = budget.time_s / _DRAFTS_SHARE
        for sequence, start in zip(decodes.sequences, decodes.starts, strict=True):
            row = Row(sequence, start, 1, samples=True)
            most = self._most(row, tokens, time_s, budget)
            found = self.drafter.propose(row.sequence, most) if most > 0 else []
            if found:
                found = found[: self._held(row, len(found))]
            if not found:
                plain.append(row)
                continue
            row.drafts, row.count = found, 1 + len(found)
            seconds = budget.step_time.prompt_s(row.start, len(found))
            tokens, budget.tokens = tokens - len(found), budget.tokens - len(found)
            time_s, budget.time_s = time_s - seconds, budget.time_s - seconds
            self._drafted.add(row.sequence)
            with_drafts.append(row)
        rows = plain + with_drafts
        return Rows.of(rows), step_size(rows)

    def take(self, sequence: Sequence, num_drafts: int, more_token_ids: abc.Sequence[int]) -> None:
        """Append `more_token_ids`, one for each accepted draft of a row, unless the sequence has
        ended. The accepted drafts are computed already.
        """
        has_ended = sequence.state is SequenceState.ENDED
        num_accepted = 0 if has_ended else len(more_token_ids)
        sequence.token_ids.extend(more_token_ids[:num_accepted])
        if sequence.state is SequenceState.RUNNING:
            sequence.num_computed += num_accepted
        sequence.num_accepted_drafts += num_accepted
        self._drafted.discard(sequence)
        self.drafter.learn(sequence, num_drafts, num_accepted)

    def forget(self, sequence: Sequence) -> None:
        self.drafter.forget(sequence)

    def drop(self) -> None:
        """Forget the launched steps, which are undone."""
        self._drafted.clear()

    def _most(self, row: Row, tokens: int, time_s: float, budget: StepBudget) -> int:
        """Return the largest number of drafts for a row, within the budget and `max_tokens`."""
        sequence = row.sequence
        # The draft needs all earlier tokens, but some are pending.
        if tokens <= 0 or sequence.num_pending:
            return 0
        if sequence.constraint is not None and sequence.constraint.pace.is_slow:
            # The step would wait for a mask at each draft.
            return 0
        left = sequence.request.max_tokens - sequence.num_output_tokens
        most = min(tokens, self.drafter.most, left - 1)
        if time_s != UNBOUNDED_S:
            most = min(most, budget.step_time.prompt_tokens_in(time_s, row.start))
        return most

    def _held(self, row: Row, count: int) -> int:
        """Return the number of drafts, at most `count`, for which there are blocks."""
        sequence = row.sequence
        if self._blocks.slides:
            self._blocks.slide(sequence, row.start)
        if self._blocks.grow(sequence, row.start + 1 + count):
            return count
        return self._blocks.num_tokens_held(sequence) - row.start - 1
