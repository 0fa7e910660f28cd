"""The runner that computes tokens with a model: steps in, sampled tokens out.

Ties the model and the sampler together. Knows nothing of queues, block accounting, the wire, or
how the model was loaded.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import torch
from torch import Tensor

from penstock_shard.constraints.state import MaskFiller
from penstock_shard.models.base import CausalModel
from penstock_shard.request import CONSTRAINT_KINDS, Request
from penstock_shard.runner.base import Logprobs, RowResult, RunnerInfo, StepPlan
from penstock_shard.runner.batch import Piece, StepBatch, build_batches
from penstock_shard.runner.pooling import Pooler
from penstock_shard.runner.sampler import Sampler, SampleRow, token_logprobs

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


class ModelRunner:
    """A `Runner`: see `penstock_shard.runner.base`.

    Steps run one after the other in a thread of their own where they may be launched ahead, and in
    `collect` where they may not.
    """

    def __init__(self, model: CausalModel, info: RunnerInfo, *, mask_threads: int = 1) -> None:
        """`mask_threads` fill the masks of constraints while a forward pass runs."""
        self.model = model
        self._info = info
        self._launched: deque[Callable[[], list[RowResult]]] = deque()
        self._device_thread: ThreadPoolExecutor | None = None
        if info.max_steps_ahead:
            self._device_thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="device")
        # The token each request sampled last, which may not have come back to the engine yet.
        self._last_token: dict[Request, int] = {}
        self._sampler = Sampler(MaskFiller(info.vocab_size, mask_threads))
        self._pooler = Pooler()
        row_bytes = 4 * info.vocab_size
        self._max_prompt_logprobs = max(16, _PROMPT_LOGITS_BYTES // row_bytes)

    @property
    def info(self) -> RunnerInfo:
        return self._info

    def launch(self, plan: StepPlan) -> None:
        batches = build_batches(
            plan, self._info.block_size, self.model.device, self._max_prompt_logprobs
        )
        step = partial(self._run_step, len(plan.rows), batches)
        if self._device_thread is None:
            self._launched.append(step)
        else:
            self._launched.append(self._device_thread.submit(step).result)

    def collect(self) -> Sequence[RowResult]:
        return self._launched.popleft()()

    def release(self, request: Request) -> None:
        self._last_token.pop(request, None)
        self._sampler.forget(request)
        self._pooler.forget(request)

    # ---- one step ----

    @torch.inference_mode()
    def _run_step(self, num_rows: int, batches: Sequence[StepBatch]) -> list[RowResult]:
        results = [RowResult() for _ in range(num_rows)]
        for batch in batches:
            if batch.gap_pieces:
                last = [self._last_token[piece.scheduled.request] for piece in batch.gap_pieces]
                batch.input_ids[batch.gaps] = torch.tensor(last, device=self.model.device)
            self._run(batch, results)
        return results

    def _run(self, batch: StepBatch, results: list[RowResult]) -> None:
        """One forward pass; puts what its pieces give into the results of their rows."""
        sampling = [piece for piece in batch.pieces if piece.samples]
        sample_rows = [_sample_row(piece) for piece in sampling]
        self._sampler.prepare(sample_rows)
        logits, hidden = self.model.forward(
            batch.input_ids, batch.positions, batch.attention, batch.logit_rows, batch.hidden_rows
        )
        if batch.hidden_rows is not None:
            self._pooler.pool(hidden, batch.pieces, results)
        offset = 0
        sampled: list[int] = []
        for piece in batch.pieces:
            if piece.num_prompt_logprobs:
                part = logits[offset : offset + piece.num_prompt_logprobs]
                _add_prompt_logprobs(results[piece.row], part, piece)
                offset += piece.num_prompt_logprobs
            if piece.samples:
                sampled.append(offset)
                offset += 1
        if not sampling:
            return
        if len(sampled) < len(logits):
            logits = logits[torch.tensor(sampled, device=logits.device)]
        drawn = self._sampler.sample(logits, sample_rows)
        for piece, result in zip(sampling, drawn, strict=True):
            result.prompt_logprobs = results[piece.row].prompt_logprobs
            result.error = result.error or results[piece.row].error
            results[piece.row] = result
            # A row without a token ends its request; what is in flight for it runs on any token.
            self._last_token[piece.scheduled.request] = result.token_id or 0


def _sample_row(piece: Piece) -> SampleRow:
    request = piece.scheduled.request
    # From the piece, not from the request: tokens may have been added to that meanwhile.
    position = piece.start + piece.count - request.num_prompt_tokens
    return SampleRow(request, position)


def _add_prompt_logprobs(result: RowResult, logits: Tensor, piece: Piece) -> None:
    """logits [n, V] of the piece's first n tokens, which predict the prompt's next n."""
    request = piece.scheduled.request
    count = piece.num_prompt_logprobs
    if not bool(torch.isfinite(logits.amax(dim=-1)).all()):
        result.error = "the model gave no finite logits for the prompt"
        return
    first = piece.start + 1
    tokens = torch.tensor(request.token_ids[first : first + count], device=logits.device)
    top_n = request.prompt_logprobs or 0
    merged = result.prompt_logprobs or Logprobs(top_n=min(top_n, logits.shape[1]))
    for row in token_logprobs(logits, tokens, [top_n] * count):
        merged.chosen += row.chosen
        merged.ranks += row.ranks
        merged.top_token_ids += row.top_token_ids
        merged.top_logprobs += row.top_logprobs
    result.prompt_logprobs = merged
