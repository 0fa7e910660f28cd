"""The engine: takes sequences, runs steps, returns outputs.

Every sequence ends with exactly one last output: a finish or an error.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections import deque
from collections.abc import Callable, Iterable
from itertools import chain
from typing import TYPE_CHECKING

from penstock_proto.engine_request import EngineRequest
from penstock_proto.errors import Code
from penstock_proto.types import Error, FinishReason, RequestOutput
from penstock_shard.engine.finish import (
    add_prompt_logprobs,
    empty_output,
    error_of,
    last_output,
    token_output,
    work_of,
)
from penstock_shard.engine.next_turns import NextTurns
from penstock_shard.ipc.messages import Inbox, Load
from penstock_shard.kv_cache.block_manager import BlockManager
from penstock_shard.scheduler.scheduler import Scheduler
from penstock_shard.sequence import Sequence, SequenceState
from penstock_shard.worker.base import Batch, RowResult, Runner, StepOutOfMemory

if TYPE_CHECKING:
    from penstock_shard.engine.block_moves import BlockMoves
    from penstock_shard.engine.matchers import PendingMatchers
from penstock_shard.engine.pending_images import PendingImages

logger = logging.getLogger(__name__)


class Engine:
    """Owns the sequences; the scheduler decides, the runner computes."""

    def __init__(
        self,
        runner: Runner,
        scheduler: Scheduler,
        blocks: BlockManager,
        clock: Callable[[], float] = time.monotonic,
        tell_started: Callable[[list[str]], None] = lambda request_ids: None,
        matchers: PendingMatchers | None = None,
        moves: BlockMoves | None = None,
        images: PendingImages | None = None,
    ) -> None:
        """`tell_started` gets the ids of requests before the launch of their first step."""
        self._runner = runner
        self._scheduler = scheduler
        self._blocks = blocks
        self._clock = clock
        self._tell_started = tell_started
        self._matchers = matchers
        self._moves = moves
        self._images = images
        self._next_turns = NextTurns(blocks, moves)
        self._live: dict[str, Sequence] = {}
        self._outputs: list[RequestOutput] = []
        # Launched steps that were not collected, oldest first.
        self._in_flight: deque[Batch] = deque()
        # True if the oldest must be collected before another launch.
        self._is_due = False
        # True if the shard will end after its last request.
        self._drains = False
        self.steps_total = 0
        self._steps_seconds_total = 0.0
        self._sequences_total = 0
        # The clock time at the running step's begin; None between steps.
        self.step_started_s: float | None = None
        # Upper bound of the running step's duration; 0 if unknown.
        self.step_expected_s = runner.info.worst_step_s

    @property
    def has_work(self) -> bool:
        """True if there is a step to launch or to collect, or blocks to copy."""
        num_held = self._num_held_back + len(self._scheduler.masks or ())
        if len(self._live) > num_held or self._in_flight or self._next_turns.has_work:
            return True
        if self._images is not None and self._images.has_work:
            return True
        if self._moves is None:
            return False
        return self._moves.has_work or (self._is_ending and self._moves.has_unsaved)

    @property
    def _num_held_back(self) -> int:
        """The number of sequences that wait for a matcher, blocks or images before they are
        queued.
        """
        num_moving = 0 if self._moves is None else self._moves.num_held_back
        return self._num_compiling + num_moving + len(self._images or ())

    @property
    def _num_compiling(self) -> int:
        return 0 if self._matchers is None else len(self._matchers)

    @property
    def due_s(self) -> float | None:
        """Seconds until there is work even if no message comes; None if there will be none."""
        parts = [part.due_s for part in (self._moves, self._images) if part is not None]
        if self._next_turns.due_at_s is not None:
            parts.append(max(0.0, self._next_turns.due_at_s - self._clock()))
        return min((due_s for due_s in parts if due_s is not None), default=None)

    def submit(self, request: EngineRequest, adapter_index: int = 0) -> None:
        """Take a request. If its id is in use, the higher attempt ends the lower one.

        `adapter_index` is 0 without an adapter.
        """
        sequence = Sequence.of(request, adapter_index)
        present = self._live.get(request.request_id)
        if present is not None:
            if present.request.attempt >= request.attempt:
                self._outputs.append(last_output(sequence, finish=FinishReason.ABORTED))
                return
            self._end(present, finish=FinishReason.ABORTED)
        self._live[request.request_id] = sequence
        if request.constraint is None:
            self._queue(sequence)
        else:
            assert self._matchers is not None
            self._matchers.add(sequence)

    def take_images(self, message: Inbox) -> None:
        if self._images is not None:
            self._images.take(message)

    def take_blocks(self, message: Inbox) -> None:
        """Handle messages about other shards' blocks, hints, and draining."""
        if message.drains:
            self._drains = True
            self._next_turns.close()
            for sequence in [s for s in self._live.values() if s.request.only_fetches]:
                self._end(sequence, finish=FinishReason.ABORTED)
        self._next_turns.take(message.retentions, self._clock())
        if self._moves is not None:
            self._moves.take(message)

    def abort(self, request_id: str, attempt: int) -> None:
        """End this attempt of a request before the next step."""
        sequence = self.find(request_id)
        if sequence is not None and sequence.request.attempt == attempt:
            self._end(sequence, finish=FinishReason.ABORTED)

    def find(self, request_id: str) -> Sequence | None:
        return self._live.get(request_id)

    def step(self) -> list[RequestOutput]:
        """Launch a step and collect the one before it. Returns outputs since the last call."""
        self.launch()
        return self.collect()

    def launch(self) -> bool:
        """Launch the next step; true if `collect` will wait for a step.

        Launch a step while another runs, so that the device never waits for Python. If the runner
        does not overlap steps, `collect` waits for each right after its launch.
        """
        if self._num_compiling:
            self._add_compiled()
        if self._moves is not None:
            for sequence in self._moves.take_ready():
                self._begin(sequence)
        if self._images is not None:
            self._encode(self._images)
        launched = self._launch()
        waiting = len(self._in_flight)
        self._is_due = waiting > (self._runner.info.max_steps_ahead if launched else 0)
        return self._is_due

    def collect(self) -> list[RequestOutput]:
        """Collect the oldest step if it is due. Returns outputs since the last call."""
        if self._is_due:
            self._is_due = False
            self._collect()
        outputs, self._outputs = self._outputs, []
        return outputs

    @property
    def has_changed_pieces(self) -> bool:
        """True if `take_changed_pieces` has something to return without another step."""
        return self._blocks.prefixes.held.has_changes

    def take_changed_pieces(self) -> dict[int, int]:
        """Take the prefix pieces that changed since the last call: tiers by name."""
        held = self._blocks.prefixes.held
        return held.take(self._scheduler.num_computed_insertions) if held.has_untold else {}

    def adapter_indices(self) -> set[int]:
        """The adapter indices of sequences that are live or in a launched step."""
        sequences = chain(self._live.values(), self._scheduler.slots.holders)
        return {sequence.adapter_index for sequence in sequences}

    def load(self) -> Load:
        counts = self._scheduler.counts() | self._blocks.counts()
        for part in (self._moves, self._images):
            if part is not None:
                counts |= part.counts()
        return Load(
            running=self._scheduler.num_running,
            waiting=self._scheduler.num_waiting,
            queued_tokens=self._scheduler.num_queued_tokens,
            prefill_tokens_left=self._scheduler.num_prefill_tokens_left,
            running_tokens=self._scheduler.num_running_tokens,
            referenced_blocks=self._blocks.num_referenced,
            steps_total=self.steps_total,
            steps_seconds_total=self._steps_seconds_total,
            sequences_total=self._sequences_total,
            prompt_tokens_total=self._scheduler.prompt_tokens_total,
            decode_tokens_total=self._scheduler.decode_tokens_total,
            draft_tokens_total=self._scheduler.num_draft_tokens,
            accepted_tokens_total=self._scheduler.num_accepted_tokens,
            is_saved=self._is_ending and self._moves is not None and self._moves.is_saved,
            counts=counts,
        )

    def check_integrity(self) -> None:
        """Raises AssertionError if the records of sequences and blocks disagree."""
        sequences = self._scheduler.sequences
        assert len(sequences) + self._num_held_back == len(self._live), (
            f"{len(sequences)} sequences are scheduled, {len(self._live)} are known"
        )
        assert {sequence.request.request_id for sequence in sequences} <= set(self._live)
        self._blocks.check_integrity()

    # ---- internals ----

    def _queue(self, sequence: Sequence) -> None:
        """Queue a sequence, once its blocks have come from disk or another shard."""
        if self._moves is None or not self._moves.hold(sequence):
            self._begin(sequence)

    def _begin(self, sequence: Sequence) -> None:
        """Queue a sequence once its images are encoded. A sequence that only fetches begins its
        loads.
        """
        if not sequence.request.only_fetches:
            if self._images is None or not self._images.hold(sequence):
                self._scheduler.add(sequence, self._clock())
            return
        self._scheduler.load(sequence)
        if self._moves is None:
            self._end_fetch(sequence)

    def _end_fetch(self, sequence: Sequence) -> None:
        """End a request that only fetches, once it has all blocks."""
        if self._next_turns.finish(sequence.request.request_id):
            self._forget(sequence)
            return
        output = last_output(sequence, finish=FinishReason.FETCHED)
        output.cached_tokens = self._blocks.count_cached(sequence)
        self._outputs.append(output)
        self._forget(sequence)

    def _encode(self, images: PendingImages) -> None:
        """Queue sequences with encoded images."""
        images.advance()
        for sequence, why in images.take_ready():
            if why:
                # No other part of the engine has the sequence now.
                del self._live[sequence.request.request_id]
                self._blocks.forget(sequence)
                error = Error(Code.INVALID_ARGUMENT, why, field="images")
                self._outputs.append(last_output(sequence, error=error))
            else:
                self._scheduler.add(sequence, self._clock())

    def _add_compiled(self) -> None:
        assert self._matchers is not None
        for sequence, error in self._matchers.take():
            if error is None:
                self._queue(sequence)
                continue
            self._outputs.append(last_output(sequence, error=error))
            del self._live[sequence.request.request_id]

    def _launch(self) -> bool:
        now_s = starts_s = self._clock()
        if self.step_started_s is not None:
            ends_s = self.step_started_s + self._scheduler.predict_s()
            starts_s = max(now_s, ends_s)
        if self._moves is not None:
            self._moves.load()
            for sequence in self._moves.take_fetched():
                self._end_fetch(sequence)
        may_load = not (self._drains or self._scheduler.num_waiting)
        for request in self._next_turns.advance(now_s, may_load=may_load):
            self.submit(request)
        batch = self._scheduler.schedule(now_s, starts_s)
        self._give_back()
        self._release()
        if self._moves is not None:
            self._moves.save()
        if not batch.num_rows:
            if not self._in_flight:
                self._copy_between_steps()
            return False
        if started := self._scheduler.take_started():
            self._tell_started([sequence.request.request_id for sequence in started])
        if self.step_started_s is None:
            self._expect(now_s)
        self._runner.launch(batch)
        self._in_flight.append(batch)
        return True

    def _copy_between_steps(self) -> None:
        """Make copies that otherwise go with a step, because no step runs."""
        if self._blocks.has_state_copies:
            # Copy states before loading blocks.
            self._runner.copy_states(self._blocks.take_state_copies())
        if self._moves is not None and self._is_ending:
            self._moves.save_all()

    @property
    def _is_ending(self) -> bool:
        return self._drains and not self._live

    def _expect(self, now_s: float) -> None:
        """Note that the oldest launched step begins now."""
        self.step_started_s = now_s
        worst_s = self._runner.info.worst_step_s
        self.step_expected_s = max(worst_s, self._scheduler.predict_s()) if worst_s else 0.0

    def _give_back(self) -> None:
        """End preempted sequences whose requests ask for it, so that another shard continues
        them.
        """
        for sequence, reason in self._scheduler.take_preempted():
            if sequence.request.hand_back and sequence.state is SequenceState.WAITING:
                message = f"{reason}; the request is given back"
                self._end(sequence, error=Error(Code.UNAVAILABLE, message))

    def _collect(self) -> None:
        try:
            results = self._runner.collect()
        except StepOutOfMemory as error:
            self._lose_steps(error)
            return
        batch = self._in_flight.popleft()
        now_s = self._clock()
        seconds = now_s - (self.step_started_s or now_s)
        self.step_started_s = None
        self.steps_total += 1
        self._steps_seconds_total += seconds
        if self._moves is not None:
            self._moves.step_s = seconds
        self._sequences_total += batch.num_rows
        self._report(self._scheduler.update(batch, results, now_s, seconds))
        self._release()
        if self._in_flight:
            self._expect(now_s)

    def _lose_steps(self, error: StepOutOfMemory) -> None:
        """Preempt all sequences in launched steps, because the oldest step ran out of device
        memory. They are computed again in smaller steps.
        """
        batches = list(self._in_flight)
        self._in_flight.clear()
        self.step_started_s = None
        for _ in batches[1:]:
            with contextlib.suppress(StepOutOfMemory):
                self._runner.collect()
        failed, bounds = batches[0], self._scheduler.bounds
        hopeless = self._scheduler.find_hopeless(failed)
        if hopeless is not None:
            message = f"the device has too little memory for it: {error}"
            self._end(hopeless, error=Error(Code.RESOURCE_EXHAUSTED, message))
        self._scheduler.lose(batches)
        self._release()
        self._give_back()
        logger.warning(
            "out of memory in a step of %d tokens of %d requests, which are preempted: %s; steps "
            "have at most %d of %d for a while",
            failed.num_tokens,
            failed.num_rows,
            error,
            bounds.tokens,
            bounds.sequences,
        )

    def _report(self, news: Iterable[tuple[Sequence, RowResult]]) -> None:
        """Make outputs of a step's results. Runs for every token, so keep it cheap."""
        for sequence, result in news:
            if result.token_id is not None:
                output = token_output(sequence, result)
            elif result.error is not None:
                self._end(sequence, error=error_of(sequence, result))
                continue
            elif result.embedding is not None:
                output = empty_output(sequence)
                output.embedding = result.embedding
                output.finish_reason = FinishReason.STOP
            elif result.prompt_logprobs is not None:
                output = empty_output(sequence)
            else:
                # The row was a chunk in the middle of a prompt.
                continue
            if result.prompt_logprobs is not None:
                add_prompt_logprobs(output, sequence, result.prompt_logprobs)
            self._outputs.append(output)
            if output.finish_reason is not None:
                output.work = work_of(sequence)
                self._forget(sequence)

    def _release(self) -> None:
        for slot in self._scheduler.slots.take_freed():
            self._runner.release(slot)

    def _end(
        self, sequence: Sequence, *, finish: FinishReason | None = None, error: Error | None = None
    ) -> None:
        self._outputs.append(last_output(sequence, finish=finish, error=error))
        self._forget(sequence)

    def _forget(self, sequence: Sequence) -> None:
        del self._live[sequence.request.request_id]
        if self._matchers is not None and self._matchers.discard(sequence):
            return
        if self._moves is not None and self._moves.discard(sequence):
            return
        if self._images is not None and self._images.discard(sequence):
            return
        self._scheduler.remove(sequence)
