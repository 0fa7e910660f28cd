"""The policy for requests with objectives: priorities, deadlines, seconds between tokens.

Sequences are served by `urgency.py`. A step is bounded by the time left to sequences that limit
the seconds between their tokens, and a waiting sequence of a higher class may preempt a running one
of a lower. While no live request has an objective it is the order of arrival, at that cost.
"""

from __future__ import annotations

from collections import abc, deque
from dataclasses import dataclass

from penstock_shard.kv_cache.block_manager import BlockManager
from penstock_shard.scheduler.fcfs_policy import FcfsPolicy
from penstock_shard.scheduler.preemption import preemption_key
from penstock_shard.scheduler.rows import Row
from penstock_shard.scheduler.step_budget import UNBOUNDED_S, StepBudget
from penstock_shard.scheduler.step_time import StepTime
from penstock_shard.scheduler.urgency import Urgency, seconds_between_tokens, urgency
from penstock_shard.sequence import Sequence, SequenceState

# The share of the time left to an objective that a step is planned to take: step times vary.
_MARGIN = 0.95
# Tokens of a step that prompts which have waited too long get at least, whatever time is left.
_AGED_TOKENS = 16


class PriorityPolicy(FcfsPolicy):
    """Serves whoever has the least time left, within classes of priority."""

    def __init__(self, blocks: BlockManager, step_time: StepTime, aging_s: float) -> None:
        """A sequence that has waited `aging_s` for its next token goes before all others."""
        self._blocks = blocks
        self._step_time = step_time
        self._aging_s = aging_s
        # Live sequences with an objective.
        self._num_objectives = 0
        # Whether the next sequence is admitted by age; admissions alternate.
        self._by_age = True

    def add(self, sequence: Sequence) -> None:
        self._num_objectives += sequence.request.objective is not None

    def remove(self, sequence: Sequence) -> None:
        self._num_objectives -= sequence.request.objective is not None

    def order(self, running: abc.Collection[Sequence], now_s: float) -> list[Sequence]:
        if not self._have_objectives(running):
            return list(running)
        return sorted(running, key=lambda sequence: self._urgency(sequence, now_s))

    def bound(
        self, budget: StepBudget, decodes: abc.Sequence[Sequence], now_s: float, starts_s: float
    ) -> StepBudget:
        time_s = self._time_s(decodes, starts_s) if self._num_objectives else UNBOUNDED_S
        if time_s == UNBOUNDED_S:
            return budget
        return TimedBudget(
            budget.tokens,
            budget.step_time,
            budget.scored_tokens,
            time_s=time_s,
            is_aged=lambda sequence: self._is_aged(sequence, now_s),
        )

    def queue(
        self, waiting: abc.Collection[Sequence], budget: StepBudget, now_s: float
    ) -> abc.Iterator[Sequence]:
        """Every other one is admitted by age."""
        by_age, in_order = self._queues(waiting, now_s)
        while by_age or in_order:
            aged = bool(by_age) and (self._by_age or not in_order)
            queue = by_age if aged else in_order
            sequence = queue.popleft()
            if budget.most_prompt_tokens(sequence) == 0:
                queue.clear()
                continue
            yield sequence
            if sequence.state is SequenceState.RUNNING:
                self._by_age = not aged

    def find_outranked(
        self,
        running: abc.Collection[Sequence],
        waiting: abc.Collection[Sequence],
        now_s: float,
        *,
        has_free_slot: bool,
    ) -> Sequence | None:
        if not self._num_objectives:
            return None
        best = min(sequence.request.priority for sequence in waiting)
        # Aged sequences are spared: admitted by age, they would be preempted at once, for ever.
        lower = [
            sequence
            for sequence in running
            if sequence.request.priority > best and not self._is_aged(sequence, now_s)
        ]
        if not lower:
            return None
        its_class = (other for other in waiting if other.request.priority == best)
        first = min(its_class, key=lambda sequence: self._place(sequence, now_s))
        if has_free_slot and self._blocks.suffices(first, ()):
            return None
        # Only if preempting all of them would free enough blocks.
        if not self._blocks.suffices(first, lower):
            return None
        return max(lower, key=preemption_key)

    def choose_victim(self, running: abc.Collection[Sequence]) -> Sequence:
        return max(running, key=preemption_key)

    # ---- order ----

    def _have_objectives(self, sequences: abc.Iterable[Sequence]) -> bool:
        if not self._num_objectives:
            return False
        return any(sequence.request.objective is not None for sequence in sequences)

    def _urgency(self, sequence: Sequence, now_s: float) -> Urgency:
        token_s = 0.0
        objective = sequence.request.objective
        if objective is not None and objective.deadline_s is not None:
            token_s = self._step_time.fixed_s + self._step_time.decode_s(sequence.num_tokens)
        return urgency(sequence, now_s, self._aging_s, token_s)

    def _place(self, sequence: Sequence, now_s: float) -> tuple[bool, int, bool, float, int]:
        """Its rank among waiting sequences: by urgency, but within a class preempted ones first."""
        not_aged, priority, due_s, arrival = self._urgency(sequence, now_s)
        return not_aged, priority, sequence.preemptions == 0, due_s, arrival

    def _is_aged(self, sequence: Sequence, now_s: float) -> bool:
        return not self._urgency(sequence, now_s)[0]

    def _queues(
        self, waiting: abc.Collection[Sequence], now_s: float
    ) -> tuple[deque[Sequence], deque[Sequence]]:
        """Waiting sequences that are aged, and the others."""
        if not self._have_objectives(waiting):
            return deque(), deque(waiting)
        ranked = sorted((self._place(sequence, now_s), sequence) for sequence in waiting)
        by_age = deque(sequence for key, sequence in ranked if not key[0])
        return by_age, deque(sequence for key, sequence in ranked if key[0])

    # ---- time ----

    def _time_s(self, decodes: abc.Sequence[Sequence], starts_s: float) -> float:
        """Seconds that the step's rows may take so that every sequence that limits the seconds
        between its tokens is in time.

        Never less than twice what the rows of those sequences take: objectives that cannot be met
        still leave half of the device to the others.
        """
        fixed_s = self._step_time.fixed_s
        time_s = UNBOUNDED_S
        own_s = 0.0
        for sequence in decodes:
            between_s = seconds_between_tokens(sequence.request.objective)
            if between_s is not None:
                own_s += self._step_time.decode_s(sequence.num_tokens)
                last_s = starts_s if sequence.num_pending else sequence.last_token_s
                time_s = min(time_s, (last_s + between_s - starts_s) * _MARGIN - fixed_s)
        return max(time_s, 2 * own_s + fixed_s)


@dataclass(slots=True, kw_only=True)
class TimedBudget(StepBudget):
    """A budget of bounded seconds. Aged sequences get something, however few are left."""

    is_aged: abc.Callable[[Sequence], bool]
    # Tokens for prompts that have waited too long, whatever `time_s` is.
    aged_tokens: int = _AGED_TOKENS

    def take_decodes(self, sequences: list[Sequence]) -> list[Sequence]:
        """Those for which the time allows a row, and all that it was set for."""
        taken = []
        for sequence in sequences:
            seconds = self.step_time.decode_s(sequence.num_tokens)
            must = seconds_between_tokens(sequence.request.objective) is not None
            if must or seconds <= self.time_s or self.is_aged(sequence):
                self.time_s -= seconds
                taken.append(sequence)
        return taken

    def most_prompt_tokens(self, sequence: Sequence) -> int:
        most = self.step_time.prompt_tokens_in(self.time_s, sequence.num_computed)
        if self.aged_tokens > most and self.is_aged(sequence):
            most = self.aged_tokens
        return min(self.prompt_tokens, most)

    def take_chunk(self, row: Row, *, is_long: bool) -> None:
        StepBudget.take_chunk(self, row, is_long=is_long)
        self.aged_tokens -= row.count
        self.time_s -= self.step_time.prompt_s(row.start, row.count)
