"""A StepPlan -> the tensors of one or more forward passes.

Knows how rows are packed, where their keys and values go, and which logits are wanted. Knows
nothing of models or of how tokens are drawn.

A prompt token's log-probability needs a whole row of logits, so a long prompt that asks for them
is computed in pieces, one forward pass each, to keep the logits in memory few.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from penstock_shard.models.attention.base import AttentionBatch
from penstock_shard.request import Pooling
from penstock_shard.runner.base import ScheduledRequest, StepPlan


@dataclass(frozen=True, slots=True)
class Piece:
    """Tokens [start, start + count) of a row of the plan, computed in one forward pass."""

    row: int
    scheduled: ScheduledRequest
    start: int
    count: int
    # Whether its last token's logits give the row's next token.
    samples: bool
    # The first this many of its tokens predict prompt tokens whose log-probabilities are wanted.
    num_prompt_logprobs: int
    # The last this many of its tokens have final hidden states that are pooled.
    num_pooled: int = 0

    @property
    def ends_prompt(self) -> bool:
        return self.start + self.count == self.scheduled.request.num_prompt_tokens


@dataclass(frozen=True, slots=True)
class StepBatch:
    """The inputs of one forward pass.

    `logit_rows` int64 [N] holds, piece by piece, the rows of its prompt log-probabilities and then
    the row it samples from; `hidden_rows` int64 [M] those that are pooled, None where none are.
    Where the step before this one is still to sample a token, `input_ids` has a gap: `gaps` names
    those places, int64 [G], and `gap_pieces` the pieces they belong to.
    """

    pieces: tuple[Piece, ...]
    gaps: Tensor
    gap_pieces: tuple[Piece, ...]
    input_ids: Tensor
    positions: Tensor
    attention: AttentionBatch
    logit_rows: Tensor
    hidden_rows: Tensor | None


def build_batches(
    plan: StepPlan, block_size: int, device: torch.device, max_prompt_logprobs: int
) -> list[StepBatch]:
    """All forward passes of a step, in order; one unless prompt log-probabilities are many."""
    return [_build(pieces, block_size, device) for pieces in split_plan(plan, max_prompt_logprobs)]


def split_plan(plan: StepPlan, max_prompt_logprobs: int) -> list[tuple[Piece, ...]]:
    """Cut rows so that no pass computes more than `max_prompt_logprobs` prompt log-probabilities.

    Rows that want none are computed whole, in the first pass.
    """
    passes = []
    progress = [row.start for row in plan.rows]
    ends = [row.start + row.count for row in plan.rows]
    while progress != ends:
        room = max_prompt_logprobs
        pieces = []
        for index, row in enumerate(plan.rows):
            start, end = progress[index], ends[index]
            wanted = max(0, row.start + row.num_prompt_logprobs - start)
            taken = min(wanted, room)
            count = end - start if taken == wanted else taken
            if count == 0:
                continue
            pieces.append(_piece(index, row, start, count, taken))
            progress[index] += count
            room -= taken
        passes.append(tuple(pieces))
    return passes


def _piece(index: int, row: ScheduledRequest, start: int, count: int, logprobs: int) -> Piece:
    is_last = row.samples and start + count == row.start + row.count
    pooling = row.request.pooling
    if pooling is None:
        return Piece(index, row, start, count, is_last, logprobs)
    pooled = count if pooling is Pooling.MEAN else int(is_last)
    return Piece(index, row, start, count, False, logprobs, pooled)


def _build(pieces: Sequence[Piece], block_size: int, device: torch.device) -> StepBatch:
    starts = np.array([piece.start for piece in pieces], dtype=np.int64)
    counts = np.array([piece.count for piece in pieces], dtype=np.int64)
    lengths = starts + counts
    offsets = np.concatenate(([0], np.cumsum(counts)))
    table = _block_table(pieces, lengths, block_size)
    rows = np.repeat(np.arange(len(pieces)), counts)
    positions = np.arange(offsets[-1]) - offsets[rows] + starts[rows]
    slots = table[rows, positions // block_size].astype(np.int64) * block_size
    slots += positions % block_size

    def tensor(array: NDArray[np.generic]) -> Tensor:
        return torch.from_numpy(array).to(device, non_blocking=True)

    attention = AttentionBatch(
        query_lens=counts.tolist(),
        seq_lens=lengths.tolist(),
        num_decodes=_num_decodes(counts),
        block_size=block_size,
        slots=tensor(slots),
        cu_queries=tensor(offsets.astype(np.int32)),
        cu_keys=tensor(np.concatenate(([0], np.cumsum(lengths))).astype(np.int32)),
        seq_lens_tensor=tensor(lengths.astype(np.int32)),
        block_table=tensor(table),
    )
    input_ids, gaps, gap_pieces = _token_ids(pieces, offsets.tolist())
    hidden_rows = _hidden_rows(pieces, offsets)
    return StepBatch(
        pieces=tuple(pieces),
        gaps=tensor(gaps),
        gap_pieces=gap_pieces,
        input_ids=tensor(input_ids),
        positions=tensor(positions),
        attention=attention,
        logit_rows=tensor(_logit_rows(pieces, offsets)),
        hidden_rows=tensor(hidden_rows) if len(hidden_rows) else None,
    )


def _token_ids(
    pieces: Sequence[Piece], offsets: Sequence[int]
) -> tuple[NDArray[np.int64], NDArray[np.int64], tuple[Piece, ...]]:
    """The tokens of all pieces, int64 [T], with 0 in the gaps; the gaps, and whose they are."""
    ids: list[int] = []
    gaps: list[int] = []
    gap_pieces: list[Piece] = []
    for piece, end in zip(pieces, offsets[1:], strict=True):
        ids += piece.scheduled.request.token_ids[piece.start : piece.start + piece.count]
        if len(ids) < end:
            gaps.append(len(ids))
            gap_pieces.append(piece)
            ids.append(0)
    return np.array(ids, dtype=np.int64), np.array(gaps, dtype=np.int64), tuple(gap_pieces)


def _block_table(
    pieces: Sequence[Piece], lengths: NDArray[np.int64], block_size: int
) -> NDArray[np.int32]:
    """int32 [B, most blocks of a row]: the blocks of the tokens computed so far, then zeros."""
    widths = (-(-lengths // block_size)).tolist()
    table = np.zeros((len(pieces), max(widths)), dtype=np.int32)
    for i, (piece, width) in enumerate(zip(pieces, widths, strict=True)):
        table[i, :width] = piece.scheduled.request.block_ids[:width]
    return table


def _num_decodes(counts: NDArray[np.int64]) -> int:
    """How many rows at the front have one token."""
    longer = np.flatnonzero(counts != 1)
    return int(longer[0]) if longer.size else len(counts)


def _logit_rows(pieces: Sequence[Piece], offsets: NDArray[np.int64]) -> NDArray[np.int64]:
    rows: list[int] = []
    for piece, offset in zip(pieces, offsets.tolist(), strict=False):
        rows.extend(range(offset, offset + piece.num_prompt_logprobs))
        if piece.samples:
            rows.append(offset + piece.count - 1)
    return np.array(rows, dtype=np.int64)


def _hidden_rows(pieces: Sequence[Piece], offsets: NDArray[np.int64]) -> NDArray[np.int64]:
    rows: list[int] = []
    for piece, end in zip(pieces, offsets[1:].tolist(), strict=True):
        rows.extend(range(end - piece.num_pooled, end))
    return np.array(rows, dtype=np.int64)
