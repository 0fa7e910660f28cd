"""Chooses the tokens that the next step computes. Plain numbers: no torch, no clock, no wire.

Prefill and decode are not separate phases. A sequence has known tokens, some of them computed. Each
step divides a budget of tokens, in the order of the policy: first among sequences that lack one
token, then among chunks of the others. Scheduling needs counts, not values, so a step is planned
before the last one's results are known.

A step has bounds on tokens and sequences; while sequences decode, also on prompt tokens and the
share of long prompts. When blocks run out, a sequence is preempted: its blocks are freed once no
launched step uses them, and it is computed again later. If host memory has copies of a sequence's
prefix, the sequence gets blocks at once, and runs when the copies are in them.

Optional parts: another policy (`priority_policy.py`), drafts in decode rows (`speculation.py`), and
waiting for slow masks (`slow_masks.py`).
"""

from __future__ import annotations

from collections import OrderedDict, abc, deque
from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from typing import TYPE_CHECKING, NamedTuple

from penstock_shard.kv_cache.block_manager import BlockManager
from penstock_shard.scheduler.fcfs_policy import FcfsPolicy
from penstock_shard.scheduler.oom_backoff import StepBounds
from penstock_shard.scheduler.rows import Row, Rows, next_row, num_left, split
from penstock_shard.scheduler.slot_pool import SlotPool
from penstock_shard.scheduler.step_budget import EVERY_CLASS, SchedulerLimits, StepBudget
from penstock_shard.scheduler.step_time import StepSize, StepTime, step_size
from penstock_shard.sequence import Sequence, SequenceState
from penstock_shard.worker.base import Batch, RowResult

if TYPE_CHECKING:
    from penstock_shard.scheduler.slow_masks import SlowMasks
    from penstock_shard.scheduler.speculation import Speculation

# These are constants, because looking up an enumeration's member takes as long as counting a token.
_ENDED = SequenceState.ENDED
_RUNNING = SequenceState.RUNNING
# In one of `_PROBE_STEPS` steps, a long prompt's chunk is a little larger than predicted to fit.
# Chunks of one size would never correct a wrong prediction of `StepTime`.
_PROBE_STEPS = 8
# After this many steps, a sequence that lacked blocks looks in the prefix cache again: others may
# have cached more of its prompt.
_LOOK_AGAIN_STEPS = 16


class _Launched(NamedTuple):
    """A launched step: size, `BlockManager.num_insertions` before its planning, and number."""

    size: StepSize
    num_insertions: int
    number: int


class Scheduler:
    """Owns the waiting and running sequences, their slots and, through the block manager, their
    blocks. Only the scheduler changes sequences.
    """

    def __init__(
        self,
        limits: SchedulerLimits,
        blocks: BlockManager,
        step_time: StepTime | None = None,
        policy: FcfsPolicy | None = None,
        speculation: Speculation | None = None,
        masks: SlowMasks | None = None,
    ) -> None:
        """By default, sequences run in order of arrival, with one token in a decode row. Policy and
        speculation predict with `step_time`. Without `masks`, steps wait for constraints' masks,
        however slow.
        """
        self._limits = limits
        self._blocks = blocks
        self._step_time = StepTime() if step_time is None else step_time
        self._policy = FcfsPolicy() if policy is None else policy
        self._speculation = speculation
        self.masks = masks
        self.bounds = StepBounds(limits.max_num_batched_tokens, limits.max_num_seqs)
        self.slots = SlotPool()
        # Waiting sequences in the order to run, with their number of tokens when they joined.
        # Preempted sequences come first.
        self._waiting: OrderedDict[Sequence, int] = OrderedDict()
        # Running sequences in the order they joined (an ordered set).
        self._running: dict[Sequence, None] = {}
        # Sequences that have blocks and wait for copies into them, each with the number of the step
        # in whose planning it got the blocks.
        self._loading: dict[Sequence, int] = {}
        # Sequences that have their blocks and copies, and wait for room in a step (an ordered set).
        self._loaded: dict[Sequence, None] = {}
        # Ended or preempted sequences. Their blocks and slots are freed once the launched steps
        # that use them are collected.
        self._leaving: set[Sequence] = set()
        # Sequences that got a slot for the step being planned.
        self._admitted: list[Sequence] = []
        # Uncollected steps, oldest first.
        self._launched: deque[_Launched] = deque()
        self._arrivals = 0
        self._steps = 0
        # Returned by the next `take_started` and `take_preempted`.
        self._started: list[Sequence] = []
        self._preempted: list[tuple[Sequence, str]] = []
        # The last sequence that lacked blocks: its `arrival`, the pool, the free blocks it needs.
        self._turned_away = (-1, 0, 0)
        # Tokens of waiting sequences, counted when they joined the queue.
        self.num_queued_tokens = 0
        self.preemptions_total = 0
        # Tokens computed by collected steps.
        self.prompt_tokens_total = 0
        self.decode_tokens_total = 0
        # Tokens that running sequences' prompts lack after the last step, without each prompt's
        # last token.
        self.num_prefill_tokens_left = 0

    def counts(self) -> dict[str, float]:
        return {"preemptions_total": self.preemptions_total}

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_running_tokens(self) -> int:
        return sum(sequence.num_tokens for sequence in self._running)

    @property
    def num_draft_tokens(self) -> int:
        return 0 if self._speculation is None else self._speculation.drafter.proposed_total

    @property
    def num_accepted_tokens(self) -> int:
        return 0 if self._speculation is None else self._speculation.drafter.accepted_total

    @property
    def sequences(self) -> list[Sequence]:
        """Return the sequences that have not ended, running ones first."""
        return [*self._running, *self._loaded, *self._loading, *self._waiting]

    @property
    def loading(self) -> list[Sequence]:
        """Sequences that wait for loads (`BlockManager.loads_of`) into blocks that no launched step
        uses. Empty while states wait to be copied, because a load could overwrite such a state.
        """
        if self._blocks.has_state_copies:
            return []
        over = self._launched[0].number if self._launched else self._steps + 1
        return [sequence for sequence, number in self._loading.items() if number < over]

    @property
    def num_computed_insertions(self) -> int:
        """Blocks with an insertion up to this number were computed by collected steps."""
        if self._launched:
            return self._launched[0].num_insertions
        return self._blocks.num_insertions

    def add(self, sequence: Sequence, now_s: float = 0.0) -> None:
        """Queue a sequence. The caller bounds the queue."""
        sequence.arrival = self._arrivals
        sequence.arrived_s = now_s
        self._arrivals += 1
        self._policy.add(sequence)
        self._enqueue(sequence)

    def load(self, sequence: Sequence) -> None:
        """Load copies of a prefix for a sequence that will not run. Call `remove` afterwards."""
        self._policy.add(sequence)
        self._blocks.acquire_copies(sequence)
        sequence.state = SequenceState.LOADING
        self._loading[sequence] = self._steps

    def remove(self, sequence: Sequence) -> None:
        """Forget an ended sequence; free its blocks and slot once no launched step uses them."""
        if sequence.state is _RUNNING:
            del self._running[sequence]
        elif sequence.state is SequenceState.LOADING:
            (self._loading if sequence in self._loading else self._loaded).pop(sequence)
        else:
            self._dequeue(sequence)
        self._policy.remove(sequence)
        if self._speculation is not None:
            self._speculation.forget(sequence)
        if self.masks is not None:
            self.masks.discard(sequence)
        self._leave(sequence, _ENDED)

    def schedule(self, now_s: float = 0.0, starts_s: float = 0.0) -> Batch:
        """Plan the next step, which will start at `starts_s`. The batch is empty if nothing is to
        do.
        """
        self._steps += 1
        self._make_room(now_s)
        preemptions_before = self.preemptions_total
        decodes, prefilling = split(self._policy.order(self._running, now_s))
        if self.masks is not None:
            decodes = self.masks.ready(decodes)
        # No drafts while out-of-memory steps reduce the bounds.
        speculation = None if self.bounds.reduced else self._speculation
        if speculation is not None:
            ready = speculation.ready(decodes)
            if ready is None:
                return Batch()
            decodes = ready
        num_insertions = self._blocks.num_insertions
        budget = StepBudget(self.bounds.tokens, self._step_time, self._limits.max_scored_tokens)
        budget = self._policy.bound(budget, decodes, now_s, starts_s)
        rows, size = self._decode_rows(budget.take_decodes(decodes), budget)
        if speculation is not None:
            rows, size = speculation.add_drafts(rows, budget)
        decoded = StepSize(0, 0, 0) if self._limits.prompts_first else size
        budget.bound_prompts(decoded, self._limits.max_prefill_tokens)
        # A sequence that this step preempted would be admitted only to be preempted again.
        admits = self.preemptions_total == preemptions_before
        prompt_rows = list(self._prompt_rows(prefilling, budget, now_s, admits=admits))
        if not (rows.starts or prompt_rows or self._launched):
            # The first class may lack blocks that begun prompts of lower classes hold.
            budget.first_class = EVERY_CLASS
            prompt_rows = list(self._begun_rows(prefilling, budget))
        self.num_prefill_tokens_left = num_left(prefilling, prompt_rows)
        for row in prompt_rows:
            # A prompt of which all tokens but the last are cached is a decode row too.
            rows.insert(0 if row.count == 1 and row.samples else len(rows.starts), row)
        if not rows.starts:
            return Batch()
        size = size.plus(step_size(prompt_rows))
        self._launched.append(_Launched(size, num_insertions, self._steps))
        return self._batch(rows)

    def update(
        self,
        batch: Batch,
        results: abc.Sequence[RowResult],
        now_s: float = 0.0,
        seconds: float | None = None,
    ) -> Iterable[tuple[Sequence, RowResult]]:
        """Append the results of the oldest step, which took `seconds` if known.

        Returns each sequence that has not ended, with its new result, in the batch's order.
        """
        size = self._launched.popleft().size
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
        """Undo `batches`, all launched steps, because the oldest ran out of memory. Their running
        sequences are preempted, loading sequences start again, and the next steps are smaller.
        """
        # Blocks cached since the failed step's planning have no valid keys.
        self._blocks.prefixes.uncache_since(self._launched[0].num_insertions)
        self._launched.clear()
        for sequence in list(self._loading):
            if not sequence.request.only_fetches:
                # The lost steps would have copied the sequence's states.
                self.lose_loads(sequence)
        if self._speculation is not None:
            self._speculation.drop()
        self.bounds.shrink(batches[0], *self._first_of(batches[0]))
        parts: dict[Sequence, None] = {}
        for batch in batches:
            for slot, samples in zip(batch.slots, batch.samples, strict=True):
                sequence = self.slots[slot]
                sequence.num_steps_in_flight -= 1
                sequence.num_pending -= samples
                parts[sequence] = None
        # Each preempted sequence goes to the front of the queue, so reverse order keeps their
        # order.
        for sequence in [sequence for sequence in self._running if sequence in parts][::-1]:
            self._preempt(sequence, "the shard is out of memory")
        for sequence in parts:
            self._free_if_left(sequence)

    def find_hopeless(self, failed: Batch) -> Sequence | None:
        """Return a live sequence that was alone in a failed step and can never fit into memory."""
        first, least = self._first_of(failed)
        hopeless = self.bounds.is_hopeless(failed, first, least) and first.state is not _ENDED
        return first if hopeless else None

    def _first_of(self, batch: Batch) -> tuple[Sequence, int]:
        """Return the first row's sequence, and the fewest tokens that the row could have."""
        first = self.slots[batch.slots[0]]
        return first, self._blocks.least_chunk(first, batch.starts[0])

    def finish_loads(self, sequence: Sequence) -> None:
        """Let a sequence run, because its blocks have their copies now."""
        del self._loading[sequence]
        self._blocks.finish_loads(sequence)
        self._loaded[sequence] = None

    def lose_loads(self, sequence: Sequence) -> None:
        """Put a sequence first in the queue, because the copies that it waited for are gone."""
        (self._loading if sequence in self._loading else self._loaded).pop(sequence)
        self._leave(sequence, SequenceState.WAITING)
        self._enqueue(sequence)
        self._waiting.move_to_end(sequence, last=False)

    def predict_s(self) -> float:
        """Predict the seconds of the oldest uncollected step."""
        return self._step_time.predict(self._launched[0].size)

    def preempt_those(self, is_meant: Callable[[Sequence], bool], reason: str) -> None:
        """Preempt the sequences for which `is_meant` is true. Their tokens are computed again."""
        for sequence in [each for each in self._running if is_meant(each)][::-1]:
            self._preempt(sequence, reason)
        for sequence in [each for each in (*self._loaded, *self._loading) if is_meant(each)]:
            if not sequence.request.only_fetches:
                self.lose_loads(sequence)

    def compute_s(self, start: int, count: int) -> float:
        """Predict the seconds of steps that compute only `count` tokens of a prompt, from `start`
        on; 0 before any step was seen.
        """
        num_steps = -(-count // self.bounds.tokens)
        return num_steps * self._step_time.fixed_s + self._step_time.prompt_s(start, count)

    def take_started(self) -> list[Sequence]:
        started, self._started = self._started, []
        return started

    def take_preempted(self) -> list[tuple[Sequence, str]]:
        """Return the sequences preempted since the last call, with reasons."""
        put_down, self._preempted = self._preempted, []
        return put_down

    def _decode_rows(
        self, decodes: abc.Sequence[Sequence], budget: StepBudget
    ) -> tuple[Rows, StepSize]:
        """Make a row for each decoding sequence; fewer if tokens or blocks run out."""
        sequences: list[Sequence] = []
        starts: list[int] = []
        block_size = self._blocks.block_size
        preemptions_before = self.preemptions_total
        for sequence in decodes:
            if len(starts) == budget.tokens:
                break
            start = sequence.num_computed
            # Computed tokens fill whole blocks, so only a block's first token needs a new block.
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

    def _grow_or_preempt(self, sequence: Sequence) -> bool:
        """Get a block for one more token, by preemption if necessary. Return False if there is
        none.
        """
        # An earlier sequence of this step may have preempted this one.
        if sequence.state is not _RUNNING:
            return False
        if self._blocks.slides:
            self._blocks.slide(sequence, sequence.num_computed)
        while not self._blocks.grow(sequence, sequence.num_computed + 1):
            # Blocks of preempted sequences will be freed when a launched step is collected.
            if self._leaving:
                return False
            victim = self._policy.choose_victim(self._running)
            self._preempt(victim, "the shard is out of KV blocks")
            if victim is sequence:
                return False
        return True

    def _prompt_rows(
        self, prefilling: list[Sequence], budget: StepBudget, now_s: float, *, admits: bool
    ) -> Iterator[Row]:
        """Yield chunks of running, then loaded, then newly admitted sequences.

        No other sequence is preempted here: a sequence got blocks for its whole prompt at
        admission, or gets as many new blocks as it gives back.
        """
        num_loading = sum(1 for _ in self._loads_waited_for())
        num_admitted = len(self._running) + num_loading + len(self._loaded)
        free_seqs = max(0, self.bounds.sequences - num_admitted)
        waiting = self._waiting if free_seqs else ()
        budget.first_class = self._policy.first_class(chain(prefilling, self._loaded, waiting))
        first = (
            each
            for each in chain(prefilling, waiting)
            if each.request.priority <= budget.first_class
        )
        if not all(map(self._is_long, first)):
            budget.leave_half_to_short()
        yield from self._begun_rows(prefilling, budget)
        if admits and budget.prompt_tokens:
            yield from self._admitted_rows(free_seqs, budget, now_s)

    def _begun_rows(self, prefilling: list[Sequence], budget: StepBudget) -> Iterator[Row]:
        for sequence in prefilling:
            limit = self._chunk_limit(sequence, budget)
            # A decode of this step may have preempted this sequence.
            if limit and sequence.state is _RUNNING and self._slide_or_preempt(sequence):
                yield self._prompt_row(sequence, limit, budget)
        for sequence in list(self._loaded):
            limit = self._chunk_limit(sequence, budget)
            if limit:
                del self._loaded[sequence]
                self._start(sequence)
                yield self._prompt_row(sequence, limit, budget)

    def _slide_or_preempt(self, sequence: Sequence) -> bool:
        """Give back blocks that the prompt no longer sees, and take new ones. If too few are free,
        because other sequences share the old ones, preempt the sequence and return False.
        """
        if not self._blocks.slides:
            return True
        self._blocks.slide(sequence, sequence.num_computed)
        if not self._blocks.grow(sequence, sequence.num_tokens):
            self._preempt(sequence, "the shard is out of KV blocks")
        return sequence.state is _RUNNING

    def _admitted_rows(self, free_seqs: int, budget: StepBudget, now_s: float) -> Iterator[Row]:
        """Admit waiting sequences until one lacks blocks. Short prompts overtake long ones once the
        step's share for long ones is used up.
        """
        if not free_seqs or not self._waiting:
            return
        for sequence in self._policy.queue(self._waiting, budget, now_s):
            if self._is_long(sequence) and budget.long_tokens == 0:
                continue
            if sequence.needs_prompt_logprobs and not budget.scorable(sequence):
                continue
            if not free_seqs or not self._chunk_limit(sequence, budget):
                return
            if self._loading and self._blocks.awaits_loads(sequence, self._loads_waited_for()):
                continue
            if not self._admit(sequence):
                return
            free_seqs -= 1
            # A cached prefix changes the chunk's start and keys, so compute the limit again.
            limit = self._chunk_limit(sequence, budget) or self._blocks.chunk_limit(sequence, 1)
            if limit and sequence in self._loaded:
                del self._loaded[sequence]
                self._start(sequence)
                yield self._prompt_row(sequence, limit, budget)

    def _loads_waited_for(self) -> Iterator[Sequence]:
        return (each for each in self._loading if not each.request.only_fetches)

    def _chunk_limit(self, sequence: Sequence, budget: StepBudget) -> int:
        """Return the largest size of the next chunk. An image that cannot be divided may take all
        tokens of the step, even if prompts may take fewer.
        """
        probes = self._steps % _PROBE_STEPS == 0
        limit = budget.chunk_limit(sequence, is_long=self._is_long(sequence), probes=probes)
        if not limit:
            return 0
        fitting = self._blocks.chunk_limit(sequence, limit)
        if fitting:
            return fitting
        least = self._blocks.least_chunk(sequence, sequence.num_computed)
        return least if budget.has_room(sequence, least, self.bounds.tokens) else 0

    def _prompt_row(self, sequence: Sequence, limit: int, budget: StepBudget) -> Row:
        row = next_row(sequence, min(sequence.num_uncomputed, limit))
        budget.take_chunk(row, is_long=self._is_long(sequence))
        self._blocks.cache_full_blocks((sequence,))
        return row

    def _is_long(self, sequence: Sequence) -> bool:
        return sequence.num_tokens > self._limits.max_prefill_tokens

    def _admit(self, sequence: Sequence) -> bool:
        """Give a waiting sequence its blocks, to run or to wait for copies. False if it cannot be
        admitted.

        It gets blocks for all its known tokens, so that it is not preempted in the middle of its
        prompt. In groups with a window, it gets as many blocks as it ever has at once.
        """
        if sequence.num_steps_in_flight or (self.masks is not None and sequence in self.masks):
            return False
        arrival, pool, enough_blocks = self._turned_away
        hopeless = arrival == sequence.arrival and self._blocks.free_in(pool) < enough_blocks
        # Looking up a long prompt in the prefix cache takes milliseconds.
        if hopeless and self._steps % _LOOK_AGAIN_STEPS:
            return False
        found = 0 if sequence.needs_whole_prompt else self._blocks.acquire_prefix(sequence)
        if not self._blocks.grow(sequence, sequence.num_tokens):
            pool, missing = self._blocks.shortage(sequence, sequence.num_tokens)
            self._blocks.release(sequence)
            self._turned_away = (sequence.arrival, pool, self._blocks.free_in(pool) + missing)
            return False
        sequence.num_computed = found
        self._dequeue(sequence)
        sequence.state = SequenceState.LOADING
        if self._blocks.loads_of(sequence):
            self._loading[sequence] = self._steps
        else:
            self._loaded[sequence] = None
        return True

    def _start(self, sequence: Sequence) -> None:
        """Let a sequence run. Its first row is in this step."""
        if sequence.cached_tokens is None:
            self._started.append(sequence)
            sequence.cached_tokens = min(sequence.num_computed, sequence.num_prompt_tokens)
        sequence.state = _RUNNING
        self._running[sequence] = None
        self.slots.give(sequence)
        self._admitted.append(sequence)

    def _enqueue(self, sequence: Sequence) -> None:
        self._waiting[sequence] = sequence.num_tokens
        self.num_queued_tokens += sequence.num_tokens

    def _dequeue(self, sequence: Sequence) -> None:
        # Subtract what was added: pending tokens may have been dropped meanwhile.
        self.num_queued_tokens -= self._waiting.pop(sequence)

    def _make_room(self, now_s: float) -> None:
        """Preempt one sequence if the policy prefers a waiting one that cannot be admitted."""
        if not self._waiting or self._leaving:
            return
        has_free_slot = len(self._running) < self.bounds.sequences
        outranked = self._policy.find_outranked(
            self._running, self._waiting, now_s, has_free_slot=has_free_slot
        )
        if outranked is not None:
            self._preempt(outranked, "a request of a higher priority took its place")

    def _preempt(self, sequence: Sequence, reason: str) -> None:
        del self._running[sequence]
        sequence.preemptions += 1
        self.preemptions_total += 1
        self._preempted.append((sequence, reason))
        self._blocks.use_prefix(sequence)
        self._leave(sequence, SequenceState.WAITING)
        self._enqueue(sequence)
        self._waiting.move_to_end(sequence, last=False)

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
        sequence.num_computed = 0
        if sequence.state is _ENDED:
            self._blocks.forget(sequence)
        else:
            self._blocks.release(sequence)
        self.slots.free(sequence)

    def _batch(self, rows: Rows) -> Batch:
        """Make the runner's batch. From now on, the step counts as launched."""
        for sequence, samples in zip(rows.sequences, rows.samples, strict=True):
            sequence.num_steps_in_flight += 1
            sequence.num_pending += samples
        admitted, self._admitted = self._admitted, []
        new_blocks, copies = self._blocks.take_new(rows.sequences), self._blocks.take_state_copies()
        return rows.batch(new_blocks, admitted, copies)
