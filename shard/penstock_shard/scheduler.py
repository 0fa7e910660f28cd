"""Which tokens the next step computes. Plain Python on numbers: no torch, no clock, no wire.

There is no prefill phase and no decode phase. A sequence has tokens that are known and tokens that
are computed, and each step gives out a budget of tokens to let the second catch up with the first:
sequences that lack one token first, then chunks of longer ones, each in the order of `urgency`.
Scheduling needs counts and no values, so it runs a step ahead of the results.

A step is bounded by tokens and sequences; while sequences decode, also by prompt tokens, by the
share of long prompts, and by the time left to sequences that limit the seconds between their
tokens. When blocks run out, the least urgent sequence is preempted: its blocks are freed once no
launched step refers to them, and it is computed again later from its prompt and its output so
far.

With a drafter, decode rows may also compute draft tokens, out of the budget that the step's decodes
leave; see `speculation`.
"""

from __future__ import annotations

from collections import abc, deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import chain

from penstock_shard.kv_blocks import BlockManager
from penstock_shard.prompt_lookup import Drafter
from penstock_shard.rows import Row, Rows
from penstock_shard.runner.base import Batch, RowResult
from penstock_shard.sequence import Sequence, SequenceState
from penstock_shard.slot_pool import SlotPool
from penstock_shard.speculation import Speculation
from penstock_shard.step_bounds import StepBounds
from penstock_shard.step_budget import UNBOUNDED_S, StepBudget
from penstock_shard.step_time import StepSize, StepTime, step_size
from penstock_shard.urgency import (
    SequenceGroup,
    Urgency,
    expendable,
    seconds_between_tokens,
    urgency,
)

# Looking up a member of an enumeration takes as long as counting a token.
_ENDED = SequenceState.ENDED
_RUNNING = SequenceState.RUNNING
# The share of the time left to an objective that a step is planned to take: step times vary.
_MARGIN = 0.95
# Every this many steps a long prompt's chunk is a little larger than is predicted to fit: chunks
# that are all alike teach `StepTime` nothing, and would never correct a wrong prediction.
_PROBE_STEPS = 8
# Every this many steps a sequence that lacked blocks looks in the prefix cache again, since other
# sequences may have cached more of its prompt.
_LOOK_AGAIN_STEPS = 16


@dataclass(frozen=True, slots=True)
class SchedulerLimits:
    """Bounds of a step, and how long a sequence may wait before it goes first."""

    max_num_seqs: int
    max_num_batched_tokens: int
    # Prompt tokens of a step in which other sequences decode. Prompts longer than this count as
    # long: their chunks take no more time than the decodes beside them.
    max_prefill_tokens: int = 2**31
    # A sequence that has waited this long for its next token goes before all others.
    aging_s: float = 30.0
    # Prompt tokens of a step whose log-probabilities are wanted.
    max_scored_tokens: int = 2**31


class Scheduler:
    """Owns the waiting and the running sequences, their slots, and through the block manager their
    blocks. It alone writes what is known of them.
    """

    def __init__(
        self, limits: SchedulerLimits, blocks: BlockManager, drafter: Drafter | None = None
    ) -> None:
        """Without a drafter every decode row computes one token."""
        self._limits = limits
        self._blocks = blocks
        self.bounds = StepBounds(limits.max_num_batched_tokens, limits.max_num_seqs)
        # A preempted sequence comes before those of its priority class that never ran.
        self._waiting = SequenceGroup()
        self._running = SequenceGroup()
        # Ended or preempted, but launched steps still use their blocks and slots: those are freed
        # when the steps are collected.
        self._leaving: set[Sequence] = set()
        self.slots = SlotPool()
        # Sequences that were given a slot for the step that is planned.
        self._admitted: list[Sequence] = []
        self._step_time = StepTime()
        self._speculation: Speculation | None = None
        if drafter is not None:
            self._speculation = Speculation(drafter, blocks, self._step_time, limits.max_num_seqs)
        # For each launched step that is not collected, the oldest first: its size, and
        # `BlockManager.num_insertions` before it.
        self._sizes: deque[StepSize] = deque()
        self._insertions: deque[int] = deque()
        self._arrivals = 0
        self._steps = 0
        # Whether the next sequence is admitted by age; admissions alternate.
        self._by_age = True
        # What `take_started` and `take_preempted` return next.
        self._started: list[Sequence] = []
        self._preempted: list[tuple[Sequence, str]] = []
        # `arrival` of the sequence that last lacked blocks, and how many free ones it needs.
        self._turned_away = (-1, 0)
        self.preemptions_total = 0
        # Tokens computed by collected steps.
        self.prompt_tokens_total = 0
        self.decode_tokens_total = 0
        # Tokens that running sequences still have to compute, after the last step, before they
        # decode.
        self.num_prefill_tokens_left = 0

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_queued_tokens(self) -> int:
        """Tokens of waiting sequences, as counted when each joined the queue."""
        return self._waiting.num_tokens_joined

    @property
    def num_running_tokens(self) -> int:
        return sum(sequence.num_tokens for sequence in self._running)

    @property
    def may_draft(self) -> bool:
        """Whether rows may have draft tokens."""
        return self._speculation is not None

    @property
    def num_draft_tokens(self) -> int:
        """Draft tokens of collected steps."""
        return 0 if self._speculation is None else self._speculation.drafter.proposed_total

    @property
    def num_accepted_tokens(self) -> int:
        """Draft tokens of collected steps that were accepted."""
        return 0 if self._speculation is None else self._speculation.drafter.accepted_total

    @property
    def sequences(self) -> list[Sequence]:
        """All sequences that have not ended, running ones first."""
        return [*self._running, *self._waiting]

    def add(self, sequence: Sequence, now_s: float = 0.0) -> None:
        """Queue a sequence. The caller bounds the queue."""
        sequence.arrival = self._arrivals
        sequence.arrived_s = now_s
        self._arrivals += 1
        self._waiting.add(sequence)

    def remove(self, sequence: Sequence) -> None:
        """Forget a sequence, finished or aborted, wherever it is. Its blocks and its slot are freed
        as soon as no launched step refers to them.
        """
        running = sequence.state is SequenceState.RUNNING
        (self._running if running else self._waiting).remove(sequence)
        if self._speculation is not None:
            self._speculation.drafter.forget(sequence)
        self._leave(sequence, SequenceState.ENDED)

    def schedule(self, now_s: float = 0.0, starts_s: float = 0.0) -> Batch:
        """Plan the next step, which will start at `starts_s`; empty if there is nothing to do."""
        preemptions_before = self.preemptions_total
        self._steps += 1
        self._preempt_for_priority(now_s)
        decodes, prefilling = [], []
        for sequence in self._ordered(self._running, now_s):
            num_tokens = len(sequence.token_ids) + sequence.num_pending
            if num_tokens - sequence.num_computed > 1:
                prefilling.append(sequence)
            elif num_tokens - sequence.num_prompt_tokens < sequence.request.max_tokens:
                decodes.append(sequence)
        # No drafts while the bounds are reduced after an out-of-memory step.
        speculation = None if self.bounds.reduced else self._speculation
        if speculation is not None:
            ready = speculation.ready(decodes)
            if ready is None:
                return Batch()
            decodes = ready
        filings = self._blocks.num_insertions
        budget = self._budget(decodes, starts_s)
        rows, size = self._decode_rows(decodes, budget, now_s)
        if speculation is not None:
            rows, size = self._with_drafts(speculation, rows, budget)
        # A sequence preempted in this step would only be admitted again to be preempted again.
        admits = self.preemptions_total == preemptions_before
        budget.bound_prompts(size, self._limits.max_prefill_tokens)
        prompt_rows = list(self._prompt_rows(prefilling, admits, budget, now_s))
        self.num_prefill_tokens_left = _num_left(prefilling, prompt_rows)
        for row in prompt_rows:
            # A prompt whose every token but the last is cached is a decode row too.
            rows.insert(0 if row.count == 1 and row.samples else len(rows.starts), row)
        if not rows.starts:
            return Batch()
        self._sizes.append(size.plus(step_size(prompt_rows)))
        self._insertions.append(filings)
        return self._batch(rows)

    def update(
        self,
        batch: Batch,
        results: abc.Sequence[RowResult],
        now_s: float = 0.0,
        seconds: float | None = None,
    ) -> Iterable[tuple[Sequence, RowResult]]:
        """The oldest step is over; it took `seconds`, if that is known. Append what it gave.

        Returns what is new of each sequence that has not ended, in the batch's order.
        """
        size = self._sizes.popleft()
        self._insertions.popleft()
        self.prompt_tokens_total += size.num_prompt_tokens
        self.decode_tokens_total += size.num_decodes + size.num_drafts
        if seconds is not None:
            self._step_time.learn(size, seconds)
        if self.bounds.reduced:
            self.bounds.recover()
        live: list[Sequence] = []
        news: list[RowResult] = []
        leaving = bool(self._leaving)
        sequences = self.slots.holders_of(batch.slots)
        columns = zip(sequences, batch.starts, batch.samples, batch.drafts, results, strict=True)
        for sequence, start, samples, drafts, result in columns:
            if samples:
                sequence.num_pending -= 1
            else:
                sequence.num_partial_steps += 1
            if sequence.state is not _ENDED:
                if result.token_id is not None:
                    sequence.token_ids.append(result.token_id)
                    sequence.last_token_s = now_s
                if result.prompt_logprobs is not None:
                    unsent = sequence.take_unsent(start, result.prompt_logprobs)
                    result.prompt_logprobs = unsent if unsent.chosen else None
                live.append(sequence)
                news.append(result)
            if drafts and self._speculation is not None:
                self._speculation.take(sequence, len(drafts), result.more_token_ids)
            sequence.num_steps_in_flight -= 1
            if leaving and not sequence.num_steps_in_flight:
                self._free_if_left(sequence)
        return zip(live, news, strict=True)

    def lose(self, batches: abc.Sequence[Batch]) -> None:
        """The oldest launched step ran out of device memory. `batches` are all launched ones; none
        counts. Every running sequence in them is preempted, and steps are smaller for a while.
        """
        # Blocks cached since the failed step was planned were never filled with valid keys.
        self._blocks.uncache_since(self._insertions[0])
        self._sizes.clear()
        self._insertions.clear()
        if self._speculation is not None:
            self._speculation.drop()
        self.bounds.shrink(batches[0], self.slots[batches[0].slots[0]])
        parts: dict[Sequence, None] = {}
        for batch in batches:
            for slot, samples in zip(batch.slots, batch.samples, strict=True):
                sequence = self.slots[slot]
                sequence.num_steps_in_flight -= 1
                sequence.num_pending -= samples
                parts[sequence] = None
        # In reverse: each goes to the front of the queue, so they end up in the order they ran in.
        for sequence in [sequence for sequence in self._running if sequence in parts][::-1]:
            self._preempt(sequence, "the shard is out of memory")
        for sequence in parts:
            self._free_if_left(sequence)

    def find_hopeless(self, failed: Batch) -> Sequence | None:
        """The sequence for which memory will never suffice, if this step, which ran out of it, had
        no other, and if it has not ended.
        """
        first = self.slots[failed.slots[0]]
        hopeless = self.bounds.is_hopeless(failed, first) and first.state is not _ENDED
        return first if hopeless else None

    def predict_s(self) -> float:
        """Predicted seconds of the oldest launched step that is not collected."""
        return self._step_time.predict(self._sizes[0])

    def take_started(self) -> list[Sequence]:
        """Sequences that were scheduled for the first time since the last call."""
        started, self._started = self._started, []
        return started

    def take_preempted(self) -> list[tuple[Sequence, str]]:
        """Sequences that were preempted since the last call, and why."""
        put_down, self._preempted = self._preempted, []
        return put_down

    # ---- order ----

    def _urgency(self, sequence: Sequence, now_s: float) -> Urgency:
        token_s = 0.0
        objective = sequence.request.objective
        if objective is not None and objective.deadline_s is not None:
            token_s = self._step_time.fixed_s + self._step_time.decode_s(sequence.num_tokens)
        return urgency(sequence, now_s, self._limits.aging_s, token_s)

    def _ordered(self, sequences: Iterable[Sequence], now_s: float) -> list[Sequence]:
        if not self._running.num_objectives:
            return list(sequences)
        return sorted(sequences, key=lambda sequence: self._urgency(sequence, now_s))

    def _place(self, sequence: Sequence, now_s: float) -> tuple[bool, int, bool, float, int]:
        """Its rank among waiting sequences: by urgency, but within a class preempted ones first."""
        not_aged, priority, due_s, arrival = self._urgency(sequence, now_s)
        return not_aged, priority, sequence.preemptions == 0, due_s, arrival

    def _is_aged(self, sequence: Sequence, now_s: float) -> bool:
        return not self._urgency(sequence, now_s)[0]

    # ---- decodes ----

    def _budget(self, decodes: abc.Sequence[Sequence], starts_s: float) -> StepBudget:
        time_s = self._time_s(decodes, starts_s) if self._running.num_objectives else UNBOUNDED_S
        budget = StepBudget(self.bounds.tokens, time_s, self._step_time)
        budget.scored_tokens = self._limits.max_scored_tokens
        return budget

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

    def _decode_rows(
        self, decodes: abc.Sequence[Sequence], budget: StepBudget, now_s: float
    ) -> tuple[Rows, StepSize]:
        """A row for each decoding sequence; fewer where tokens, blocks or time run out."""
        sequences: list[Sequence] = []
        starts: list[int] = []
        block_size = self._blocks.block_size
        bounded = budget.time_s != UNBOUNDED_S
        preemptions_before = self.preemptions_total
        for sequence in decodes:
            if len(starts) == budget.tokens:
                break
            if bounded and not self._in_time(sequence, budget, now_s):
                continue
            start = sequence.num_computed
            # It has whole blocks for all that is computed.
            if start % block_size == 0 and not self._grow_or_preempt(sequence):
                continue
            sequence.num_computed = start + 1
            sequences.append(sequence)
            starts.append(start)
        if self.preemptions_total != preemptions_before:
            sequences = [sequence for sequence in sequences if sequence.state is _RUNNING]
            starts = [sequence.num_computed - 1 for sequence in sequences]
        budget.tokens -= len(starts)
        self._blocks.cache_full_blocks(sequences)
        return Rows.of_decodes(sequences, starts), StepSize(
            num_decodes=len(starts), num_prompt_tokens=0, num_keys=sum(starts) + len(starts)
        )

    def _with_drafts(
        self, speculation: Speculation, decodes: Rows, budget: StepBudget
    ) -> tuple[Rows, StepSize]:
        rows = speculation.add_drafts(decodes, *budget.for_drafts())
        budget.take_drafts(rows)
        return Rows.of(rows), step_size(rows)

    def _in_time(self, sequence: Sequence, budget: StepBudget, now_s: float) -> bool:
        """Whether the time allows a decode row; always for sequences that the time was set for."""
        seconds = self._step_time.decode_s(sequence.num_tokens)
        must = seconds_between_tokens(sequence.request.objective) is not None
        if not must and seconds > budget.time_s and not self._is_aged(sequence, now_s):
            return False
        budget.time_s -= seconds
        return True

    def _grow_or_preempt(self, sequence: Sequence) -> bool:
        """Get a block for one more token, preempting the least urgent sequences for it.

        False if there is none in this step.
        """
        # A sequence before it in this step may have preempted it.
        if sequence.state is not SequenceState.RUNNING:
            return False
        while not self._blocks.grow(sequence, sequence.num_computed + 1):
            # A preempted sequence's blocks come free when a launched step is collected: wait.
            if self._leaving:
                return False
            victim = max(self._running, key=expendable)
            self._preempt(victim, "the shard is out of KV blocks")
            if victim is sequence:
                return False
        return True

    # ---- prompts ----

    def _prompt_rows(
        self, prefilling: list[Sequence], admits: bool, budget: StepBudget, now_s: float
    ) -> Iterator[Row]:
        """Chunks of running sequences by urgency, then of waiting sequences that are admitted.

        Nothing is preempted here: a sequence got the blocks for its whole prompt when admitted.
        """
        free_seqs = max(0, self.bounds.sequences - len(self._running))
        others = chain(prefilling, self._waiting if free_seqs else ())
        if not all(map(self._is_long, others)):
            budget.leave_half_to_short()
        for sequence in prefilling:
            limit = self._chunk_limit(sequence, budget, now_s)
            # The list still has sequences that were preempted for a decode of this step.
            if limit and sequence.state is SequenceState.RUNNING:
                yield self._prompt_row(sequence, limit, budget)
        if admits and free_seqs and budget.prompt_tokens:
            yield from self._admitted_rows(free_seqs, budget, now_s)

    def _admitted_rows(self, free_seqs: int, budget: StepBudget, now_s: float) -> Iterator[Row]:
        """Admit waiting sequences, every other one by age. When one lacks blocks, none behind it is
        admitted; but short prompts overtake long ones once the step's share of those is used up.
        """
        by_age, in_order = self._queues(now_s)
        while free_seqs and (by_age or in_order):
            aged = bool(by_age) and (self._by_age or not in_order)
            queue = by_age if aged else in_order
            sequence = queue.popleft()
            if self._is_long(sequence) and budget.long_tokens == 0:
                continue
            if sequence.needs_prompt_logprobs and budget.scored_tokens == 0:
                continue
            if self._chunk_limit(sequence, budget, now_s) == 0:
                # The budget has nothing for the sequences behind it either.
                queue.clear()
                continue
            if not self._admit(sequence):
                return
            free_seqs -= 1
            self._by_age = not aged
            # Computed again: with a cached prefix the chunk starts later, and attends to more keys.
            limit = max(1, self._chunk_limit(sequence, budget, now_s))
            yield self._prompt_row(sequence, limit, budget)

    def _queues(self, now_s: float) -> tuple[deque[Sequence], deque[Sequence]]:
        """Waiting sequences that are aged, and the others."""
        if not self._waiting.num_objectives:
            return deque(), deque(self._waiting)
        ranked = sorted((self._place(sequence, now_s), sequence) for sequence in self._waiting)
        by_age = deque(sequence for key, sequence in ranked if not key[0])
        return by_age, deque(sequence for key, sequence in ranked if key[0])

    def _chunk_limit(self, sequence: Sequence, budget: StepBudget, now_s: float) -> int:
        limit = budget.chunk_limit(
            sequence.num_computed,
            is_long=self._is_long(sequence),
            is_aged=lambda: self._is_aged(sequence, now_s),
            probes=self._steps % _PROBE_STEPS == 0,
        )
        if sequence.needs_prompt_logprobs:
            scored = sequence.num_prompt_tokens - 1 - sequence.num_computed
            limit = limit if scored <= budget.scored_tokens else min(limit, budget.scored_tokens)
        return limit

    def _prompt_row(self, sequence: Sequence, limit: int, budget: StepBudget) -> Row:
        row = self._row(sequence, min(sequence.num_uncomputed, limit))
        budget.take_chunk(row, is_long=self._is_long(sequence))
        self._blocks.cache_full_blocks((sequence,))
        return row

    def _is_long(self, sequence: Sequence) -> bool:
        return sequence.num_tokens > self._limits.max_prefill_tokens

    def _admit(self, sequence: Sequence) -> bool:
        """Move a waiting sequence to the running ones; False when blocks are lacking.

        It gets the blocks for all its known tokens at once: with fewer it could be preempted in the
        middle of its prompt.
        """
        if sequence.num_steps_in_flight:
            return False
        arrival, enough_blocks = self._turned_away
        hopeless = arrival == sequence.arrival and self._blocks.num_free < enough_blocks
        # Looking up a long prompt in the prefix cache takes milliseconds.
        if hopeless and self._steps % _LOOK_AGAIN_STEPS:
            return False
        found = 0 if sequence.needs_whole_prompt else self._blocks.acquire_prefix(sequence)
        if not self._blocks.grow(sequence, sequence.num_tokens):
            missing = self._blocks.blocks_for(sequence.num_tokens)
            missing -= len(self._blocks.blocks_of(sequence)) + self._blocks.num_free
            self._blocks.release(sequence)
            self._turned_away = (sequence.arrival, self._blocks.num_free + missing)
            return False
        sequence.num_computed = found
        if sequence.cached_tokens is None:
            self._started.append(sequence)
            sequence.cached_tokens = min(found, sequence.num_prompt_tokens)
        self._waiting.remove(sequence)
        sequence.state = SequenceState.RUNNING
        self._running.add(sequence)
        self.slots.give(sequence)
        self._admitted.append(sequence)
        return True

    def _row(self, sequence: Sequence, count: int) -> Row:
        start = sequence.num_computed
        sequence.num_computed = start + count
        scores = 0
        if sequence.needs_prompt_logprobs:
            scores = max(0, min(start + count, sequence.num_prompt_tokens - 1) - start)
        samples = start + count == sequence.num_tokens
        return Row(sequence, start, count, samples, scores)

    # ---- places ----

    def _preempt_for_priority(self, now_s: float) -> None:
        """Preempt one sequence for a waiting one of a higher class that cannot be admitted."""
        if not self._waiting or not self._running or self._leaving:
            return
        if self._waiting.highest_class >= self._running.lowest_class:
            return
        best = self._waiting.highest_class
        # Aged sequences are spared: admitted by age, they would be preempted at once, for ever.
        lower = [
            sequence
            for sequence in self._running
            if sequence.request.priority > best and not self._is_aged(sequence, now_s)
        ]
        if not lower:
            return
        its_class = (other for other in self._waiting if other.request.priority == best)
        first = min(its_class, key=lambda sequence: self._place(sequence, now_s))
        missing = self._blocks.blocks_for(first.num_tokens) - self._blocks.num_free
        has_free_seq = len(self._running) < self.bounds.sequences
        if has_free_seq and missing <= 0:
            return
        # Preempt only if preempting all of them would free enough blocks.
        if sum(len(self._blocks.blocks_of(sequence)) for sequence in lower) >= missing:
            reason = "a request of a higher priority took its place"
            self._preempt(max(lower, key=expendable), reason)

    def _preempt(self, sequence: Sequence, reason: str) -> None:
        self._running.remove(sequence)
        sequence.preemptions += 1
        self.preemptions_total += 1
        self._preempted.append((sequence, reason))
        self._leave(sequence, SequenceState.WAITING)
        self._waiting.add(sequence, first=True)

    def _leave(self, sequence: Sequence, state: SequenceState) -> None:
        sequence.state = state
        if sequence.num_steps_in_flight:
            self._leaving.add(sequence)
        else:
            self._free(sequence)

    def _free_if_left(self, sequence: Sequence) -> None:
        if sequence.num_steps_in_flight == 0 and sequence in self._leaving:
            self._leaving.remove(sequence)
            self._free(sequence)

    def _free(self, sequence: Sequence) -> None:
        """Free the blocks and the slot of a sequence, if it has any."""
        sequence.num_computed = 0
        if sequence.state is _ENDED:
            self._blocks.forget(sequence)
        else:
            self._blocks.release(sequence)
        self.slots.free(sequence)

    def _batch(self, rows: Rows) -> Batch:
        """The rows as a runner gets them; from now on their step is in flight."""
        for sequence, samples in zip(rows.sequences, rows.samples, strict=True):
            sequence.num_steps_in_flight += 1
            sequence.num_pending += samples
        admitted, self._admitted = self._admitted, []
        return rows.batch(self._blocks.take_new(rows.sequences), admitted)


def _num_left(prefilling: Iterable[Sequence], rows: Iterable[Row]) -> int:
    """Tokens still to be computed of prompts that have begun, without the last one of each."""
    begun = {*prefilling, *(row.sequence for row in rows)}
    return sum(
        max(0, sequence.num_uncomputed - 1)
        for sequence in begun
        if sequence.state is SequenceState.RUNNING
    )
