"""A StepPlan -> the tensors of one or more forward passes.

Knows how rows are packed, where their keys and values go, and which logits are wanted. Knows
nothing of models or of how tokens are drawn.

This runs between steps of the device, for hundreds of rows: per row only attributes are read, all
else is done for all rows at once. A row's blocks are read only when it has new ones.

A prompt token's log-probability needs a whole row of logits, so a long prompt that asks for them is
computed in pieces, one forward pass each, to bound the memory for logits.

A step computed by a CUDA graph has an attention row for each token: a draft token is a row of its
own, which attends to the tokens before it as a decode does.
"""

from __future__ import annotations

from collections import abc
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from penstock_shard.models.attention.base import AttentionBatch
from penstock_shard.models.cuda_graphs import Graphs, StaticInputs
from penstock_shard.models.step_inputs import InputLayout, StepInputs
from penstock_shard.request import Pooling
from penstock_shard.runner.base import ScheduledSequence, StepPlan
from penstock_shard.runner.device import host_buffer
from penstock_shard.runner.request_numbers import Integers, RequestNumbers, grown
from penstock_shard.sequence import Sequence

Array: TypeAlias = NDArray[Any]

_FIRST_WIDTH = 16
# In a graph each draft token is an attention row of its own and reads all keys before it again. A
# step that would read more keys again than this is launched kernel by kernel instead: a layer has
# some ten launches of some microseconds, and by its data sheet an H200 reads a thousand keys of
# 4 kB (8 heads of 128 in bfloat16, and their values) in one microsecond. An estimate, not measured.
_MOST_KEYS_AGAIN = 2**15
_NONE: Integers = np.zeros(0, dtype=np.int64)


@dataclass(frozen=True, slots=True)
class Piece:
    """Tokens [start, start + count) of a row of the plan, computed in one forward pass."""

    row: int
    scheduled: ScheduledSequence
    start: int
    count: int
    # Whether its last token's logits give the row's next token.
    samples: bool
    # The first this many of its tokens predict prompt tokens whose log-probabilities are wanted.
    num_prompt_logprobs: int
    # The last this many of its tokens have final hidden states that are pooled.
    num_pooled: int = 0
    # If it has drafts: `count`, as the logits of all its tokens verify them; `samples` is False.
    num_verified: int = 0

    @property
    def ends_prompt(self) -> bool:
        return self.start + self.count == self.scheduled.sequence.num_prompt_tokens


@dataclass(frozen=True, slots=True)
class Sampled:
    """The rows of a pass that sample, in columns: their sequences, the output positions, and the
    sequence numbers, on the host and on the device (int64).
    """

    sequences: abc.Sequence[Sequence]
    positions: Integers
    numbers: Integers
    device_numbers: Tensor
    # Row indices in the plan.
    rows: Integers


@dataclass(frozen=True, slots=True)
class Gaps:
    """Input tokens that the step before is still to sample, by the numbers of their sequences,
    int64 [G] on the device. Their places in `input_ids` are `places` int64 [G], or the first G if
    None.
    """

    numbers: Tensor
    places: Tensor | None


@dataclass(frozen=True, slots=True)
class StepBatch:
    """The inputs of one forward pass.

    `logit_rows` int64 [N] are the tokens whose logits are wanted, piece by piece: for its prompt
    log-probabilities, to verify its drafts, or to sample from. `hidden_rows` int64 [M] are the
    tokens whose hidden states are pooled, None without any. `scored` (log-probabilities) and
    `drafted` (drafts) list the pieces, each with the index in `logit_rows` of its first token.
    `sampled_logits` are the indices in `logit_rows` to sample from, None if that is all of them.
    """

    input_ids: Tensor
    positions: Tensor
    attention: AttentionBatch
    logit_rows: Tensor
    hidden_rows: Tensor | None
    gaps: Gaps | None
    sampled: Sampled | None
    sampled_logits: Integers | None
    scored: tuple[tuple[Piece, int], ...] = ()
    drafted: tuple[tuple[Piece, int], ...] = ()
    pooled: tuple[Piece, ...] = ()
    # Each token's adapter index, int64 [T]; None if no row has an adapter.
    adapters: Tensor | None = None


@dataclass(frozen=True, slots=True)
class _Columns:
    """The pieces of a pass, in columns with one value for each piece."""

    pieces: abc.Sequence[Piece | ScheduledSequence]
    sequences: abc.Sequence[Sequence]
    # Row indices in the plan.
    rows: Integers
    starts: Integers
    counts: Integers
    samples: NDArray[np.bool_]
    # How many tokens have logits for prompt log-probabilities, logits that verify drafts, and
    # hidden states that are pooled.
    scores: Integers
    verified: Integers
    pooled: Integers

    @property
    def is_plain(self) -> bool:
        """Whether nothing but sampled tokens is wanted."""
        return not (self.scores.any() or self.verified.any() or self.pooled.any())

    def piece(self, index: int) -> Piece:
        piece = self.pieces[index]
        if isinstance(piece, Piece):
            return piece
        scores = int(self.scores[index])
        return _piece(int(self.rows[index]), piece, piece.start, piece.count, scores)


class BatchBuilder:
    """Turns plans into batches, and keeps the block tables of their sequences in an array."""

    def __init__(
        self,
        block_size: int,
        device: torch.device,
        numbers: RequestNumbers | None = None,
        graphs: Graphs | None = None,
    ) -> None:
        """Steps of only decodes and drafts use the static inputs of `graphs`, if given."""
        self._block_size = block_size
        self._device = device
        self._numbers = numbers or RequestNumbers()
        self._graphs = graphs
        self._tables = _BlockTables(block_size, self._numbers)

    def build(self, plan: StepPlan, max_prompt_logprobs: int) -> list[StepBatch]:
        """All passes of a step, in order: one, unless it has many prompt log-probabilities."""
        columns = _columns(plan)
        if columns.scores.sum() <= max_prompt_logprobs:
            return [self._build(columns)]
        passes = split_plan(plan, max_prompt_logprobs)
        return [self._build(_columns_of_pieces(pieces)) for pieces in passes]

    def _build(self, columns: _Columns) -> StepBatch:
        numbers = self._numbers.of(columns.sequences)
        lengths = columns.starts + columns.counts
        self._tables.update(columns.sequences, numbers, columns.starts, lengths)
        tokens = _Tokens.of(columns)
        wanted = _wanted(columns, tokens.offsets)
        gaps = _gaps(columns, lengths)
        adapters = _adapters(columns, tokens)
        rows = _Rows(numbers, tokens.offsets, lengths)
        static = self._static(tokens, wanted, lengths, bool(len(adapters)))
        if static is not None and not tokens.is_decode:
            rows = _Rows.of_tokens(numbers, tokens)
        extra = [
            numbers[columns.samples],
            numbers[gaps],
            # If every token of the pass is missing, no places are needed.
            tokens.offsets[1:][gaps] - 1 if len(gaps) < tokens.total else _NONE,
            wanted.logit_rows if static is None else _NONE,
            wanted.hidden_rows,
        ]
        sizes = [len(part) for part in extra]
        layout = static.layout if static else self._layout(tokens, lengths, sum(sizes), adapters)
        buffer = host_buffer(layout.num_bytes, self._device)
        arrays = layout.arrays(buffer.numpy())
        self._fill(arrays, columns, tokens, rows)
        if len(adapters):
            arrays.adapters[: tokens.total] = adapters
        np.concatenate(extra, out=arrays.extra[: sum(sizes)])
        if static is None:
            inputs = layout.tensors(buffer.to(self._device, non_blocking=True))
            attention = self._attention(inputs, columns, lengths)
        else:
            static.memory.copy_(buffer, non_blocking=True)
            inputs, attention = static.inputs, static.attention
        parts = torch.split(inputs.extra[: sum(sizes)], sizes)
        device_numbers, gap_numbers, places, logit_rows, hidden_rows = parts
        return StepBatch(
            input_ids=inputs.input_ids,
            positions=inputs.positions,
            attention=attention,
            logit_rows=logit_rows if static is None else static.rows[: tokens.total],
            hidden_rows=hidden_rows if len(wanted.hidden_rows) else None,
            gaps=Gaps(gap_numbers, places if len(places) else None) if len(gaps) else None,
            sampled=_sampled(columns, numbers, lengths, device_numbers),
            sampled_logits=wanted.sampled_logits,
            scored=wanted.scored,
            drafted=wanted.drafted,
            pooled=wanted.pooled,
            adapters=inputs.adapters if len(adapters) else None,
        )

    def _static(
        self, tokens: _Tokens, wanted: _Wanted, lengths: Integers, has_adapters: bool
    ) -> StaticInputs | None:
        """The static inputs of the graph for these tokens; None without one. A graph needs the
        logits of every token, to sample from or to verify a draft.
        """
        if self._graphs is None or len(wanted.logit_rows) != tokens.total:
            return None
        if wanted.scored or wanted.pooled or tokens.keys_again(lengths) > _MOST_KEYS_AGAIN:
            return None
        return self._graphs.inputs(tokens.total, self._width(lengths), has_adapters)

    def _layout(
        self, tokens: _Tokens, lengths: Integers, num_extra: int, adapters: Integers
    ) -> InputLayout:
        width = self._width(lengths)
        return InputLayout(tokens.total, len(lengths), width, num_extra, bool(len(adapters)))

    def _width(self, lengths: Integers) -> int:
        """Width of the block table: the most blocks that a row has."""
        return -(-int(lengths.max()) // self._block_size)

    def _fill(
        self,
        arrays: StepInputs[Array],
        columns: _Columns,
        tokens: _Tokens,
        rows: _Rows,
    ) -> None:
        """Fill all but `adapters` and `extra`. Rows of a graph beyond these are padding."""
        count, total, size = len(rows.numbers), tokens.total, self._block_size
        blocks = self._tables.blocks
        own_numbers = rows.numbers if count == total else rows.numbers[tokens.rows]
        arrays.input_ids[:total] = _token_ids(columns, tokens)
        arrays.positions[:total] = tokens.positions
        block_index, offset = np.divmod(tokens.positions, size)
        arrays.slots[:total] = blocks[own_numbers, block_index].astype(np.int64) * size + offset
        arrays.cu_queries[: count + 1] = rows.offsets
        arrays.seq_lens[:count] = rows.lengths
        width = min(arrays.block_table.shape[1], blocks.shape[1])
        arrays.block_table[:count, :width] = blocks[rows.numbers, :width]
        arrays.block_table[:count, width:] = 0
        if count < len(arrays.seq_lens):
            assert self._graphs is not None
            self._graphs.pad(arrays, count)
        arrays.cu_keys[0] = 0
        np.cumsum(arrays.seq_lens, out=arrays.cu_keys[1:])

    def _attention(
        self, inputs: StepInputs[Tensor], columns: _Columns, lengths: Integers
    ) -> AttentionBatch:
        return AttentionBatch(
            query_lens=columns.counts.tolist(),
            seq_lens=lengths.tolist(),
            num_decodes=_num_decodes(columns.counts),
            block_size=self._block_size,
            slots=inputs.slots,
            cu_queries=inputs.cu_queries,
            cu_keys=inputs.cu_keys,
            seq_lens_tensor=inputs.seq_lens,
            block_table=inputs.block_table,
        )


class _BlockTables:
    """Block tables of sequences, in arrays indexed by sequence number."""

    def __init__(self, block_size: int, numbers: RequestNumbers) -> None:
        self._block_size = block_size
        self._numbers = numbers
        # int32 [numbers, most blocks of a sequence]: blocks, then zeros.
        self.blocks: NDArray[np.int32] = np.zeros((0, _FIRST_WIDTH), dtype=np.int32)
        # For each number: how many blocks were read, the sequence length that steps have reached,
        # the serial of the sequence, and how often it had been preempted.
        self._known: Integers = np.zeros(0, dtype=np.int64)
        self._reached: Integers = np.zeros(0, dtype=np.int64)
        self._serials: Integers = np.zeros(0, dtype=np.int64)
        self._preemptions: Integers = np.zeros(0, dtype=np.int64)

    def update(
        self,
        sequences: abc.Sequence[Sequence],
        numbers: Integers,
        starts: Integers,
        lengths: Integers,
    ) -> None:
        """Read the sequences' new blocks; the step computes tokens [starts, lengths) of them."""
        self._grow()
        preemptions = _column("preemptions", sequences)
        serials = self._numbers.serials[numbers]
        # A preempted sequence has other blocks; one that computes earlier tokens again may have.
        stale = self._serials[numbers] != serials
        stale |= self._preemptions[numbers] != preemptions
        stale |= starts < self._reached[numbers]
        if stale.any():
            self.blocks[numbers[stale]] = 0
            self._known[numbers[stale]] = 0
            self._serials[numbers] = serials
            self._preemptions[numbers] = preemptions
        self._reached[numbers] = lengths
        needed = -(-lengths // self._block_size)
        for i in np.flatnonzero(self._known[numbers] < needed).tolist():
            self._read(sequences[i].block_ids, int(numbers[i]))

    def _read(self, block_ids: abc.Sequence[int], number: int) -> None:
        known, count = int(self._known[number]), len(block_ids)
        if count > self.blocks.shape[1]:
            wider = max(count, 2 * self.blocks.shape[1])
            self.blocks = np.pad(self.blocks, ((0, 0), (0, wider - self.blocks.shape[1])))
        self.blocks[number, known:count] = block_ids[known:]
        self._known[number] = count

    def _grow(self) -> None:
        capacity = self._numbers.capacity
        if len(self._known) < capacity:
            self.blocks = grown(self.blocks, capacity)
            self._known = grown(self._known, capacity)
            self._reached = grown(self._reached, capacity)
            self._serials = grown(self._serials, capacity)
            self._preemptions = grown(self._preemptions, capacity)


@dataclass(frozen=True, slots=True)
class _Tokens:
    """The tokens of a pass: each one's row and position, and the index of each row's first."""

    rows: Integers
    positions: Integers
    offsets: Integers
    is_decode: bool

    @property
    def total(self) -> int:
        return len(self.rows)

    @classmethod
    def of(cls, columns: _Columns) -> _Tokens:
        starts, counts = columns.starts, columns.counts
        offsets = np.zeros(len(counts) + 1, dtype=np.int64)
        np.cumsum(counts, out=offsets[1:])
        index = np.arange(len(counts))
        if offsets[-1] == len(counts):
            return cls(index, starts, offsets, True)
        rows = np.repeat(index, counts)
        positions = np.arange(offsets[-1]) - offsets[rows] + starts[rows]
        return cls(rows, positions, offsets, False)

    def keys_again(self, lengths: Integers) -> int:
        """How many more keys attention reads if each token is a row of its own."""
        if self.is_decode:
            return 0
        return int(self.positions.sum()) + self.total - int(lengths.sum())


@dataclass(frozen=True, slots=True)
class _Rows:
    """The attention rows: each one's sequence number, the index of its first token, and its number
    of keys, its last token's own included.
    """

    numbers: Integers
    offsets: Integers
    lengths: Integers

    @classmethod
    def of_tokens(cls, numbers: Integers, tokens: _Tokens) -> _Rows:
        """One row for each token; `numbers` are the sequence numbers of the pieces."""
        return cls(numbers[tokens.rows], np.arange(tokens.total + 1), tokens.positions + 1)


@dataclass(frozen=True, slots=True)
class _Wanted:
    """Which outputs of a pass are wanted; see `StepBatch`."""

    logit_rows: Integers
    sampled_logits: Integers | None
    hidden_rows: Integers
    scored: tuple[tuple[Piece, int], ...] = ()
    drafted: tuple[tuple[Piece, int], ...] = ()
    pooled: tuple[Piece, ...] = ()


def _wanted(columns: _Columns, offsets: Integers) -> _Wanted:
    last = offsets[1:] - 1
    if columns.is_plain:
        return _Wanted(last[columns.samples], None, _NONE)
    # In each piece: its first `first` tokens, and then its last one if it samples.
    first = columns.scores + columns.verified
    counts = first + columns.samples
    places = np.cumsum(counts) - counts
    logit_rows = _runs(offsets[:-1], counts)
    logit_rows[(places + first)[columns.samples]] = last[columns.samples]

    def with_places(counts: Integers) -> tuple[tuple[Piece, int], ...]:
        return tuple((columns.piece(i), int(places[i])) for i in np.flatnonzero(counts).tolist())

    return _Wanted(
        logit_rows=logit_rows,
        sampled_logits=(places + first)[columns.samples] if first.any() else None,
        hidden_rows=_runs(offsets[1:] - columns.pooled, columns.pooled),
        scored=with_places(columns.scores),
        drafted=with_places(columns.verified),
        pooled=tuple(columns.piece(i) for i in np.flatnonzero(columns.pooled).tolist()),
    )


def _runs(starts: Integers, counts: Integers) -> Integers:
    """The ranges [start, start + count) of all pairs, concatenated."""
    begins = np.cumsum(counts) - counts
    numbers: Integers = np.repeat(starts - begins, counts)
    return numbers + np.arange(len(numbers))


def _adapters(columns: _Columns, tokens: _Tokens) -> Integers:
    """Each token's adapter index; empty if no row has an adapter."""
    index = _column("adapter_index", columns.sequences)
    return index[tokens.rows] if index.any() else _NONE


def _gaps(columns: _Columns, lengths: Integers) -> Integers:
    """The rows whose last token is still to be sampled. Rows with drafts never lack one: their last
    tokens are drafts, which are not in `token_ids` either.
    """
    known = np.fromiter(
        map(len, map(attrgetter("token_ids"), columns.sequences)), np.int64, len(lengths)
    )
    return np.flatnonzero((lengths > known) & (columns.verified == 0))


def _token_ids(columns: _Columns, tokens: _Tokens) -> Integers | list[int]:
    """The tokens of all pieces, with 0 for those still to be sampled."""
    sequences, starts = columns.sequences, columns.starts.tolist()
    if tokens.is_decode:
        return [
            ids[start] if start < len(ids) else 0
            for ids, start in zip(map(attrgetter("token_ids"), sequences), starts, strict=True)
        ]
    ids: list[int] = []
    for i, (start, end) in enumerate(zip(starts, tokens.offsets[1:].tolist(), strict=True)):
        ids += sequences[i].token_ids[start : start + end - len(ids)]
        if columns.verified[i]:
            piece = columns.pieces[i]
            ids += (piece.scheduled if isinstance(piece, Piece) else piece).drafts
        elif len(ids) < end:
            ids.append(0)
    return ids


def _sampled(
    columns: _Columns, numbers: Integers, lengths: Integers, device_numbers: Tensor
) -> Sampled | None:
    if not len(device_numbers):
        return None
    positions = lengths - _column("num_prompt_tokens", columns.sequences)
    if len(device_numbers) == len(numbers):
        return Sampled(columns.sequences, positions, numbers, device_numbers, columns.rows)
    chosen = np.flatnonzero(columns.samples)
    sequences = [columns.sequences[i] for i in chosen.tolist()]
    return Sampled(
        sequences, positions[chosen], numbers[chosen], device_numbers, columns.rows[chosen]
    )


def _columns(plan: StepPlan) -> _Columns:
    rows = plan.rows
    sequences = [row.sequence for row in rows]
    counts = _column("count", rows)
    samples = np.fromiter(map(attrgetter("samples"), rows), np.bool_, len(rows))
    drafts = np.fromiter(map(len, map(attrgetter("drafts"), rows)), np.int64, len(rows))
    verified = np.where(drafts > 0, counts, 0)
    pooled = np.zeros(len(rows), dtype=np.int64)
    for i, sequence in enumerate(sequences):
        if sequence.request.pooling is not None:
            pooled[i] = _piece(i, rows[i], rows[i].start, rows[i].count, 0).num_pooled
            samples[i] = False
    return _Columns(
        pieces=rows,
        sequences=sequences,
        rows=np.arange(len(rows)),
        starts=_column("start", rows),
        counts=counts,
        samples=samples & (drafts == 0),
        scores=_column("num_prompt_logprobs", rows),
        verified=verified,
        pooled=pooled,
    )


def _columns_of_pieces(pieces: abc.Sequence[Piece]) -> _Columns:
    return _Columns(
        pieces=pieces,
        sequences=[piece.scheduled.sequence for piece in pieces],
        rows=_column("row", pieces),
        starts=_column("start", pieces),
        counts=_column("count", pieces),
        samples=np.fromiter(map(attrgetter("samples"), pieces), np.bool_, len(pieces)),
        scores=_column("num_prompt_logprobs", pieces),
        verified=_column("num_verified", pieces),
        pooled=_column("num_pooled", pieces),
    )


def _column(name: str, rows: abc.Sequence[object]) -> Integers:
    """The attribute `name` of all rows, int64."""
    return np.fromiter(map(attrgetter(name), rows), np.int64, len(rows))


def split_plan(plan: StepPlan, max_prompt_logprobs: int) -> list[tuple[Piece, ...]]:
    """Cut rows so that no pass computes more than `max_prompt_logprobs` prompt log-probabilities.

    Rows without any are computed whole, in the first pass.
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


def _piece(index: int, row: ScheduledSequence, start: int, count: int, logprobs: int) -> Piece:
    is_last = row.samples and start + count == row.start + row.count
    pooling = row.sequence.request.pooling
    if row.drafts:
        return Piece(index, row, start, count, False, num_prompt_logprobs=0, num_verified=count)
    if pooling is None:
        return Piece(index, row, start, count, is_last, logprobs)
    pooled = count if pooling is Pooling.MEAN else int(is_last)
    return Piece(index, row, start, count, False, logprobs, pooled)


def _num_decodes(counts: Integers) -> int:
    """How many rows at the front have a single token."""
    longer = np.flatnonzero(counts != 1)
    return int(longer[0]) if longer.size else len(counts)
