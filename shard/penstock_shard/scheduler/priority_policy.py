"""The policy for requests with objectives: priorities, deadlines, seconds between tokens.

`urgency.py` gives the order. Sequences that limit the seconds between their tokens bound a step's
time. A waiting sequence of a higher class may preempt a running one of a lower class. While no live
request has an objective, this policy equals the order of arrival, at the same cost.
"""

from __future__ import annotations

from collections import abc, deque
from dataclasses import dataclass

from penstock_shard.kv_cache.block_manager import BlockManager
from penstock_shard.scheduler.fcfs_policy import FcfsPolicy
from penstock_shard.scheduler.preemption import preemption_key
from penstock_shard.scheduler.rows import Row
from penstock_shard.scheduler.step_budget import EVERY_CLASS, UNBOUNDED_S, StepBudget
from penstock_shard.scheduler.step_time import StepTime
from penstock_shard.scheduler.urgency import Urgency, seconds_between_tokens, urgency
from penstock_shard.sequence import Sequence, SequenceState

# Step times vary, so plan a step for this share of an objective's remaining time.
_MARGIN = 0.95
# A sequence is preempted for a higher class at most `_MOST_TIMES` times, and not if it has at most
# `_ALMOST_DONE_TOKENS` left.
_MOST_TIMES = 4
_ALMOST_DONE_TOKENS = 16
# An aged sequence has waited too long. Such sequences precede higher classes in one of
# `_AGED_PLACES` admissions, and in steps that compute one of `_AGED_SHARE` tokens.
_AGED_PLACES = 8
_AGED_SHARE = 16
# Tokens of a step for aged prompts, even if no time is left.
_AGED_TOKENS = 16


class PriorityPolicy(FcfsPolicy):
    """Serves the highest class first, and within a class the sequence with the least time left."""

    def __init__(self, blocks: BlockManager, step_time: StepTime, aging_s: float) -> None:
        """A sequence is aged after `aging_s` seconds without a token."""
        self._blocks = blocks
        self._step_time = step_time
        self._aging_s = aging_s
        self._num_objectives = 0
        # The last step's budget, its tokens before any row, and whether it was ordered by age.
        self._budget = StepBudget(0, step_time)
        self._budget_tokens = 0
        self._is_by_age = False
        # Tokens that other steps must compute before the next step by age.
        self._due_in_tokens = 0
        # Admissions since the last one by age.
        self._since_age = _AGED_PLACES

    def add(self, sequence: Sequence) -> None:
        self._num_objectives += sequence.request.objective is not None

    def remove(self, sequence: Sequence) -> None:
        self._num_objectives -= sequence.request.objective is not None

    def order(self, running: abc.Collection[Sequence], now_s: float) -> list[Sequence]:
        """Order sequences by class, in some steps by age."""
        by_age = self._is_by_age = self._is_next_by_age()
        if not self._have_objectives(running):
            return list(running)

        def place(sequence: Sequence) -> tuple[int, Urgency]:
            return 0 if by_age else sequence.request.priority, self._urgency(sequence, now_s)

        return sorted(running, key=place)

    def bound(
        self, budget: StepBudget, decodes: abc.Sequence[Sequence], now_s: float, starts_s: float
    ) -> StepBudget:
        self._budget, self._budget_tokens = budget, budget.tokens
        time_s = self._time_s(decodes, starts_s) if self._num_objectives else UNBOUNDED_S
        if time_s == UNBOUNDED_S:
            return budget
        self._budget = TimedBudget(
            budget.tokens,
            budget.step_time,
            budget.scored_tokens,
            time_s=time_s,
            is_aged=lambda sequence: self._is_aged(sequence, now_s),
        )
        return self._budget

    def first_class(self, sequences: abc.Iterable[Sequence]) -> int:
        if not self._num_objectives or self._is_by_age:
            return EVERY_CLASS
        return min((each.request.priority for each in sequences), default=EVERY_CLASS)

    def queue(
        self, waiting: abc.Collection[Sequence], budget: StepBudget, now_s: float
    ) -> abc.Iterator[Sequence]:
        """Yield sequences by class. Every other sequence is chosen by age; only one in
        `_AGED_PLACES` if the aged sequence has a lower class.
        """
        by_age, in_order = self._queues(waiting, now_s)
        given: set[Sequence] = set()
        while by_age or in_order:
            aged = bool(by_age) and (not in_order or self._is_due(by_age[0], in_order[0]))
            queue = by_age if aged else in_order
            sequence = queue.popleft()
            if sequence in given:
                continue
            if budget.most_prompt_tokens(sequence) == 0:
                queue.clear()
                continue
            given.add(sequence)
            yield sequence
            if sequence.state is not SequenceState.WAITING:
                self._since_age = 0 if aged else self._since_age + 1

    def _is_next_by_age(self) -> bool:
        """Tell whether the next step is ordered by age. Steps by age compute one in `_AGED_SHARE`
        tokens.
        """
        taken = self._budget_tokens - self._budget.tokens
        self._budget_tokens = self._budget.tokens
        self._due_in_tokens += taken * (_AGED_SHARE - 1) if self._is_by_age else -taken
        self._due_in_tokens = max(0, self._due_in_tokens)
        return not self._due_in_tokens

    def _is_due(self, aged: Sequence, other: Sequence) -> bool:
        is_lower = aged.request.priority > other.request.priority
        return self._since_age >= (_AGED_PLACES - 1 if is_lower else 1)

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
        lower = [
            sequence
            for sequence in running
            if sequence.request.priority > best and self._may_be_put_down(sequence, now_s)
        ]
        if not lower:
            return None
        its_class = (other for other in waiting if other.request.priority == best)
        first = min(its_class, key=lambda sequence: self._place(sequence, now_s))
        if has_free_slot and self._blocks.suffices(first, ()):
            return None
        # Preempt only if preempting all of `lower` would free enough blocks.
        if not self._blocks.suffices(first, lower):
            return None
        return max(lower, key=preemption_key)

    def choose_victim(self, running: abc.Collection[Sequence]) -> Sequence:
        return max(running, key=preemption_key)

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
        """Return a waiting sequence's sort key: by urgency, but within a class, preempted sequences
        first.
        """
        not_aged, priority, due_s, arrival = self._urgency(sequence, now_s)
        return not_aged, priority, sequence.preemptions == 0, due_s, arrival

    def _is_aged(self, sequence: Sequence, now_s: float) -> bool:
        return not self._urgency(sequence, now_s)[0]

    def _may_be_put_down(self, sequence: Sequence, now_s: float) -> bool:
        """Tell whether a higher class may preempt this running sequence. Aged sequences may not be
        preempted: they would be admitted by age and preempted at once, again and again.
        """
        left = sequence.request.max_tokens - sequence.num_output_tokens + sequence.num_uncomputed
        is_spared = sequence.preemptions >= _MOST_TIMES or left <= _ALMOST_DONE_TOKENS
        return not is_spared and not self._is_aged(sequence, now_s)

    def _queues(
        self, waiting: abc.Collection[Sequence], now_s: float
    ) -> tuple[deque[Sequence], deque[Sequence]]:
        """Return the aged waiting sequences by age, and all waiting sequences by class."""
        if not self._have_objectives(waiting):
            return deque(), deque(waiting)
        ranked = sorted((self._place(sequence, now_s), sequence) for sequence in waiting)
        by_age = deque(sequence for key, sequence in ranked if not key[0])
        all_ = sorted((sequence for _, sequence in ranked), key=lambda each: each.request.priority)
        return by_age, deque(all_)

    def _time_s(self, decodes: abc.Sequence[Sequence], starts_s: float) -> float:
        """Return the seconds that the step may take to meet every limit on seconds between tokens.

        This is at least twice the time of the rows with such limits, so that unattainable limits
        leave half of the device to other sequences.
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
    """A budget of bounded seconds. Aged sequences get some tokens, even if no time is left."""

    is_aged: abc.Callable[[Sequence], bool]
    aged_tokens: int = _AGED_TOKENS

    def take_decodes(self, sequences: list[Sequence]) -> list[Sequence]:
        """Return the sequences that get a row: aged ones, those that limit the time, and those that
        fit into that time.
        """
        taken = []
        for sequence in sequences:
            seconds = self.step_time.decode_s(sequence.num_tokens)
            must = seconds_between_tokens(sequence.request.objective) is not None
            if must or seconds <= self.time_s or self.is_aged(sequence):
                self.time_s -= seconds
                taken.append(sequence)
        return taken

    def most_prompt_tokens(self, sequence: Sequence) -> int:
        in_time = self.step_time.prompt_tokens_in(self.time_s, sequence.num_computed)
        most = min(StepBudget.most_prompt_tokens(self, sequence), in_time)
        if self.aged_tokens > most and self.is_aged(sequence):
            most = min(self.aged_tokens, self.prompt_tokens)
        return most

    def take_chunk(self, row: Row, *, is_long: bool) -> None:
        StepBudget.take_chunk(self, row, is_long=is_long)
        self.aged_tokens -= row.count
        self.time_s -= self.step_time.prompt_s(row.start, row.count)
