"""The runner that computes tokens with a model: steps in, sampled tokens out.

Ties the model and the sampler together. Knows nothing of queues, block accounting, the wire, or
how the model was loaded.
"""

from __future__ import annotations

from collections import abc, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from penstock_shard.constraints.state import MaskFiller
from penstock_shard.models.base import CausalModel
from penstock_shard.models.cuda_graphs import Graphs
from penstock_shard.models.device_memory import empty_caches
from penstock_shard.models.errors import first_line, is_out_of_memory
from penstock_shard.request import CONSTRAINT_KINDS
from penstock_shard.runner.base import (
    AdapterStore,
    Logprobs,
    RowResult,
    RunnerInfo,
    StepOutOfMemory,
    StepPlan,
)
from penstock_shard.runner.batch import BatchBuilder, Gaps, Piece, StepBatch
from penstock_shard.runner.device import mark, to_device, to_host
from penstock_shard.runner.pooling import Pooler
from penstock_shard.runner.request_numbers import RequestNumbers
from penstock_shard.runner.sampler import Enqueued, Sampler, SampleRows, TokenScores, score_tokens
from penstock_shard.runner.token_state import needs_state
from penstock_shard.runner.verification import Draft, Verification
from penstock_shard.sequence import Sequence

CAPABILITIES = frozenset(
    {
        "temperature",
        "top_k",
        "top_p",
        "min_p",
        "typical_p",
        "repetition_penalty",
        "presence_penalty",
        "frequency_penalty",
        "seed",
        "logit_bias",
        "bad_words",
        "allowed_token_ids",
        "min_tokens",
        "logprobs",
        "prompt_logprobs",
        "logprob_token_ids",
        "priority",
        "time_to_first_token_s",
        "seconds_between_tokens",
        "latency_sensitive",
        "thinking_budget",
        *CONSTRAINT_KINDS,
    }
)
# Logits kept for prompt log-probabilities in one forward pass.
_PROMPT_LOGITS_BYTES = 64 * 2**20


@dataclass(frozen=True, slots=True)
class _PromptScores:
    """Log-probabilities of a piece's prompt tokens, on their way to the host."""

    piece: Piece
    is_finite: Tensor
    scores: TokenScores


@dataclass(slots=True)
class _Pass:
    """A launched forward pass, and its results."""

    batch: StepBatch
    # Logits to sample from, until they are sampled; all logits of the pass, if it has drafts.
    logits: Tensor | None = None
    all_logits: Tensor | None = None
    enqueued: Enqueued | None = None
    verification: Verification | None = None
    prompt_scores: list[_PromptScores] = field(default_factory=list)

    @property
    def must_be_sampled(self) -> bool:
        return self.batch.sampled is not None and self.enqueued is None

    def gives_all_and_nothing_else(self, num_rows: int) -> bool:
        """Whether the sampled tokens are the results of all rows of the plan, in order."""
        sampled = self.batch.sampled
        if sampled is None or len(sampled.rows) < num_rows:
            return False
        return not (self.prompt_scores or self.batch.pooled)


@dataclass(slots=True)
class _Step:
    """A launched step: its passes until it is finished, then its results."""

    num_rows: int
    passes: list[_Pass] = field(default_factory=list)
    # Results of all rows with those of pooled ones filled in; None if none is pooled.
    pooled: list[RowResult] | None = None
    # Waits until the device has finished the step.
    wait: Callable[[], None] | None = None
    results: list[RowResult] | None = None
    # Why the step is void: it ran out of memory, as the error says. Empty if it did not.
    failure: str = ""


class ModelRunner:
    """A `Runner`: see `penstock_shard.runner.base`.

    `launch` gives all work of a step to the device and waits for none of it: input tokens that the
    step before samples are read from a table on the device. If a row's sampling state (penalties,
    constraints) needs that token on the host, only the forward pass is launched; sampling follows
    as soon as the step before is finished, while the pass runs.
    """

    def __init__(
        self,
        model: CausalModel,
        info: RunnerInfo,
        *,
        mask_threads: int = 1,
        graphs: Graphs | None = None,
        adapters: AdapterStore | None = None,
    ) -> None:
        """`mask_threads` fill the masks of constraints while a forward pass runs. `graphs` and
        `adapters` are the model's CUDA graphs and LoRA adapters, if it has any.
        """
        self.model = model
        self._adapters = adapters
        self._has_graphs = graphs is not None
        self._info = info
        self._launched: deque[_Step] = deque()
        self._numbers = RequestNumbers()
        self._batches = BatchBuilder(info.block_size, model.device, self._numbers, graphs)
        self._sampler = Sampler(MaskFiller(info.vocab_size, mask_threads), self._numbers)
        self._pooler = Pooler()
        # The last sampled token of each sequence, by sequence number; the host may not know it yet.
        self._last_tokens = torch.zeros(0, dtype=torch.int64, device=model.device)
        row_bytes = 4 * info.vocab_size
        self._max_prompt_logprobs = max(16, _PROMPT_LOGITS_BYTES // row_bytes)

    @property
    def info(self) -> RunnerInfo:
        return self._info

    @property
    def adapters(self) -> AdapterStore | None:
        return self._adapters

    def launch(self, plan: StepPlan) -> None:
        step = _Step(len(plan.rows))
        # This step reads the tokens that deferred steps sample, so they are sampled now.
        self._sample_deferred(len(self._launched))
        failure = next((earlier.failure for earlier in self._launched if earlier.failure), "")
        if failure:
            # Tokens that this step needs were never sampled.
            step.failure = failure
        else:
            self._guarded(step, partial(self._launch, step, plan))
        # Only now: a launch that raises leaves nothing to collect.
        self._launched.append(step)

    def collect(self) -> abc.Sequence[RowResult]:
        step = self._launched[0]
        self._finish(step)
        self._launched.popleft()
        if step.failure:
            # Later steps may need tokens that were never sampled.
            for later in self._launched:
                later.failure, later.passes = later.failure or step.failure, []
            raise StepOutOfMemory(step.failure)
        self._sample_deferred(1)
        assert step.results is not None
        return step.results

    def release(self, sequence: Sequence) -> None:
        self._sampler.forget(sequence)
        self._pooler.forget(sequence)
        self._numbers.forget(sequence)

    # ---- the device's part of a step ----

    @torch.inference_mode()
    def _guarded(self, step: _Step, work: Callable[[], None]) -> None:
        """Do the work; if it runs out of memory the step is void, and its memory is freed."""
        try:
            work()
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            step.failure = first_line(error)
        if step.failure:
            # Outside `except`: there the error's traceback still holds tensors of the step.
            step.passes = []
            self._sampler.abandon()
            empty_caches(self.model.device)

    def _launch(self, step: _Step, plan: StepPlan) -> None:
        batches = self._batches.build(plan, self._max_prompt_logprobs)
        for batch in batches:
            one = _Pass(batch)
            step.passes.append(one)
            defers = self._defers(batch)
            if defers and len(batches) > 1:
                # Rare: not worth deferring each of several passes.
                self._finish_before(step)
                defers = False
            self._forward(step, one, prepares=not defers)
            if not defers:
                self._sample(one)
            if batch.drafted:
                self._verify(one)
        step.wait = mark(self.model.device)

    def _defers(self, batch: StepBatch) -> bool:
        """Whether a row's sampling depends on tokens that are not on the host yet."""
        if batch.sampled is None or all(step.results is not None for step in self._launched):
            return False
        return self._sampler.needs_tokens(_sample_rows(batch))

    def _forward(self, step: _Step, one: _Pass, *, prepares: bool) -> None:
        batch = one.batch
        if batch.gaps is not None:
            self._fill(batch, batch.gaps)
        if prepares and batch.sampled is not None:
            self._sampler.prepare(_sample_rows(batch))
        logits, hidden = self.model.forward(
            batch.input_ids,
            batch.positions,
            batch.attention,
            batch.logit_rows,
            batch.hidden_rows,
            batch.adapters,
        )
        if batch.pooled:
            if step.pooled is None:
                step.pooled = [RowResult() for _ in range(step.num_rows)]
            self._pooler.pool(hidden, batch.pooled, step.pooled)
        for piece, place in batch.scored:
            part = logits[place : place + piece.num_prompt_logprobs]
            one.prompt_scores.append(_score_prompt(part, piece))
        if batch.drafted:
            one.all_logits = logits
        if batch.sampled_logits is not None:
            logits = logits.index_select(0, to_device(batch.sampled_logits, logits.device))
        one.logits = logits

    def _fill(self, batch: StepBatch, gaps: Gaps) -> None:
        """Fill in the input tokens that the step before samples."""
        if gaps.places is None:
            ids = batch.input_ids[: len(gaps.numbers)]
            torch.index_select(self._last_tokens, 0, gaps.numbers, out=ids)
        else:
            last = self._last_tokens.index_select(0, gaps.numbers)
            batch.input_ids.index_copy_(0, gaps.places, last)

    def _sample(self, one: _Pass) -> None:
        sampled, logits = one.batch.sampled, one.logits
        one.logits = None
        if sampled is None:
            return
        assert logits is not None
        one.enqueued = self._sampler.enqueue(logits, _sample_rows(one.batch))
        missing = self._numbers.capacity - len(self._last_tokens)
        if missing > 0:
            self._last_tokens = torch.cat([self._last_tokens, self._last_tokens.new_zeros(missing)])
        self._last_tokens.index_copy_(0, sampled.device_numbers, one.enqueued.tokens)

    def _verify(self, one: _Pass) -> None:
        """Begin to verify drafts: all tokens before them are known, see `ScheduledSequence`."""
        assert one.all_logits is not None
        drafts = [_draft(piece, place) for piece, place in one.batch.drafted]
        logits, one.all_logits = one.all_logits, None
        if self._has_graphs and any(needs_state(draft.sequence) for draft in drafts):
            # Some tokens are drawn later, when a graph may have overwritten its output logits.
            logits = logits.clone()
        one.verification = Verification(self._sampler, logits, drafts)

    def _sample_deferred(self, count: int) -> None:
        """Sample those of the first `count` launched steps that are not sampled yet, in order."""
        for step in list(self._launched)[:count]:
            if step.failure:
                return
            if any(one.must_be_sampled for one in step.passes):
                self._finish_before(step)
                self._guarded(step, partial(self._sample_late, step))

    def _sample_late(self, step: _Step) -> None:
        for one in step.passes:
            if one.must_be_sampled:
                self._sample(one)
        step.wait = mark(self.model.device)

    # ---- the host's part ----

    def _finish_before(self, step: _Step) -> None:
        """Finish all steps launched before it (all there are, while it is being launched)."""
        for earlier in self._launched:
            if earlier is step:
                return
            self._finish(earlier)

    def _finish(self, step: _Step) -> None:
        """Wait for a step and make its results, once."""
        if step.results is not None or step.failure:
            return
        assert step.wait is not None
        step.wait()
        passes, step.passes = step.passes, []
        if len(passes) == 1 and passes[0].gives_all_and_nothing_else(step.num_rows):
            assert passes[0].enqueued is not None
            step.results = passes[0].enqueued.finish()
            return
        step.results = step.pooled or [RowResult() for _ in range(step.num_rows)]
        for one in passes:
            _add_results(one, step.results)
        if any(one.verification is not None for one in passes):
            # Verification may still draw tokens on the device.
            self._guarded(step, partial(_add_verified, passes, step.results))


def _add_results(one: _Pass, results: list[RowResult]) -> None:
    """Add the results of a pass to those of its rows."""
    for prompt in one.prompt_scores:
        _add_prompt_logprobs(results[prompt.piece.row], prompt)
    if one.enqueued is None:
        return
    assert one.batch.sampled is not None
    for row, result in zip(one.batch.sampled.rows.tolist(), one.enqueued.finish(), strict=True):
        result.prompt_logprobs = results[row].prompt_logprobs
        result.error = results[row].error or result.error
        results[row] = result


def _add_verified(passes: abc.Sequence[_Pass], results: list[RowResult]) -> None:
    """Set the results of rows with drafts."""
    for one in passes:
        if one.verification is None:
            continue
        found = one.verification.finish()
        for (piece, _), result in zip(one.batch.drafted, found, strict=True):
            results[piece.row] = result


def _draft(piece: Piece, place: int) -> Draft:
    row = piece.scheduled
    # The first token to be sampled follows the last known one, which is at `start`.
    position = row.start + 1 - row.sequence.num_prompt_tokens
    return Draft(row.sequence, row.drafts, position, place)


def _sample_rows(batch: StepBatch) -> SampleRows:
    sampled = batch.sampled
    assert sampled is not None
    return SampleRows(sampled.sequences, sampled.positions, sampled.numbers)


def _score_prompt(logits: Tensor, piece: Piece) -> _PromptScores:
    """Score the n prompt tokens that logits [n, V] of the piece's first n tokens predict."""
    sequence = piece.scheduled.sequence
    count = piece.num_prompt_logprobs
    first = piece.start + 1
    tokens = torch.tensor(sequence.token_ids[first : first + count]).numpy()
    is_finite = torch.isfinite(logits.amax(dim=-1)).all()
    top_n = sequence.request.prompt_logprobs or 0
    scores = score_tokens(logits, to_device(tokens, logits.device), [top_n] * count)
    return _PromptScores(piece, to_host(is_finite), scores)


def _add_prompt_logprobs(result: RowResult, prompt: _PromptScores) -> None:
    if not bool(prompt.is_finite):
        result.error = "the model gave no finite logits for the prompt"
        return
    found = prompt.scores.finish()
    merged = result.prompt_logprobs or Logprobs(top_n=found[0].top_n)
    for row in found:
        merged.extend(row)
    result.prompt_logprobs = merged
