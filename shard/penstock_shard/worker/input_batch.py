"""A batch -> the tensors of a forward pass.

This runs between steps, for hundreds of rows. So Python loops only over rows with new blocks,
chunks of prompts or drafts.

In a CUDA graph, each token is an attention row. So a draft token has its own row, which attends to
the tokens before it as a decode does.
"""

from __future__ import annotations

from collections import abc
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Protocol, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from penstock_shard.attention.base import AttentionBatch
from penstock_shard.device.async_copy import host_buffer
from penstock_shard.ipc.runner_info import CacheGroup
from penstock_shard.models.cuda_graphs import Graphs, StaticInputs
from penstock_shard.models.step_inputs import InputLayout, StepInputs, attention_batches
from penstock_shard.worker.base import Batch
from penstock_shard.worker.slot_state import MEAN, Integers, Slots

Array: TypeAlias = NDArray[Any]

# In a graph, each draft token is an attention row and reads all earlier keys again. If it reads
# more extra keys than this, the step's kernels are launched one by one. This is an estimate: a
# layer has about ten launches of a few microseconds each, and an H200 reads 1,000 keys of 4 kB (8
# heads of 128 in bfloat16, and their values) in one microsecond.
_MOST_KEYS_AGAIN = 2**15
_NONE: Integers = np.zeros(0, dtype=np.int64)


@dataclass(frozen=True, slots=True)
class SamplingInputs:
    """The rows that sample: their slots, on the host and on the device (int64), output positions,
    and indices in the batch.
    """

    slots: Integers
    device_slots: Tensor
    positions: Integers
    rows: Integers


@dataclass(frozen=True, slots=True)
class PendingTokens:
    """Input tokens that the previous step has not sampled yet: their slots, int64 [G] on the
    device, and their `places` in `input_ids`, int64 [G], or None if they are the first G.
    """

    slots: Tensor
    places: Tensor | None


@dataclass(frozen=True, slots=True)
class Inputs:
    """The inputs of a forward pass.

    - `logit_rows`, int64 [N]: the tokens whose logits are wanted, row by row, for prompt
      log-probabilities, to verify drafts, or to sample.
    - `hidden_rows`, int64 [M]: the tokens whose hidden states are pooled, or None.
    - `sampled_logits`: the indices in `logit_rows` to sample from, or None for all.
    - `places`: the index of each row's first logits in `logit_rows`; not set if `is_plain`.
    - `is_plain`: the batch only samples tokens.
    """

    input_ids: Tensor
    positions: Tensor
    # One for each cache group.
    attention: tuple[AttentionBatch, ...]
    batch: Batch
    logit_rows: Tensor
    hidden_rows: Tensor | None
    pending: PendingTokens | None
    sampled: SamplingInputs | None
    sampled_logits: Integers | None
    places: Integers
    is_plain: bool
    # Each token's adapter index, int64 [T]; None if no row has an adapter.
    adapters: Tensor | None = None
    # True if the next step may overwrite the model's outputs.
    is_static: bool = False


@dataclass(frozen=True, slots=True)
class _Columns:
    slots: Integers
    starts: Integers
    counts: Integers
    samples: NDArray[np.bool_]
    # The number of tokens with logits for prompt log-probabilities, with logits that verify drafts,
    # and with hidden states to pool.
    scored: Integers
    verified: Integers
    pooled: Integers
    is_plain: bool

    @classmethod
    def of(cls, batch: Batch, slots: Slots) -> _Columns:
        own, starts, counts = (
            np.array(column) for column in (batch.slots, batch.starts, batch.counts)
        )
        samples, pooling = np.array(batch.samples), slots.pooling[own]
        if not (any(batch.drafts) or any(batch.scored) or pooling.any()):
            none = np.zeros(len(own), dtype=np.int64)
            return cls(own, starts, counts, samples, none, none, none, True)
        drafts = np.fromiter(map(len, batch.drafts), np.int64, len(own))
        return cls(
            slots=own,
            starts=starts,
            counts=counts,
            samples=samples & (drafts == 0) & (pooling == 0),
            scored=np.array(batch.scored),
            verified=np.where(drafts > 0, counts, 0),
            pooled=np.where(pooling == MEAN, counts, np.where(samples, pooling, 0)),
            is_plain=False,
        )


class ImagePlaces(Protocol):
    """The facts about images that an input builder needs."""

    def shifts(self, slots: Integers) -> Integers | None:
        """Return, for tokens after a slot's images, position minus index; None if that is 0 in all
        slots.
        """

    def spans(self, batch: Batch) -> abc.Sequence[tuple[int, int]]:
        """Return the runs of image tokens in a batch, in order, as (first, end). Images that are
        only partly in the batch are left out.
        """

    def are_in(self, batch: Batch) -> bool:
        """Tell whether a batch has tokens of an image or before one. It then needs more inputs than
        ids.
        """


class InputBuilder:
    def __init__(
        self,
        block_size: int,
        device: torch.device,
        groups: abc.Sequence[CacheGroup],
        slots: Slots | None = None,
        graphs: Graphs | None = None,
        images: ImagePlaces | None = None,
    ) -> None:
        """`graphs` gives static inputs for steps with only decodes and drafts."""
        self._images = images
        self._sees_ahead = any(group.bidirectional_images for group in groups)
        self._block_size = block_size
        self._device = device
        self._groups = groups
        self._slots = slots or Slots(len(groups))
        self._graphs = graphs

    def build(self, batch: Batch) -> Inputs:
        for sequence in batch.admitted:
            self._slots.admit(sequence)
        for table, new_blocks in zip(self._slots.tables, batch.new_blocks, strict=True):
            for slot, block_ids in zip(batch.slots, new_blocks, strict=True):
                if block_ids:
                    table.append(slot, block_ids)
        columns = _Columns.of(batch, self._slots)
        lengths = columns.starts + columns.counts
        tokens = _Tokens.of(columns)
        wanted = _output_rows(columns, tokens.offsets)
        pending = _pending_tokens(columns, lengths, self._slots)
        adapters = _adapters(columns, tokens, self._slots)
        rows = _AttentionRows(columns.slots, columns.counts, tokens.offsets, lengths)
        static = None
        if self._images is None or not self._images.are_in(batch):
            static = self._static(columns, tokens, wanted, lengths, bool(len(adapters)))
        if not tokens.is_decode:
            rows = self._cut(rows, batch) if static is None else rows.of_tokens(tokens)
        extra = [
            columns.slots[columns.samples],
            columns.slots[pending],
            # If every token of the pass is pending, no places are needed.
            tokens.offsets[1:][pending] - 1 if len(pending) < tokens.total else _NONE,
            wanted.logit_rows if static is None else _NONE,
            wanted.hidden_rows,
        ]
        sizes = [len(part) for part in extra]
        layout = static.layout if static else self._layout(tokens, rows, sum(sizes), adapters)
        buffer = host_buffer(layout.num_bytes, self._device)
        arrays = layout.arrays(buffer.numpy())
        arrays.input_ids[: tokens.total] = _token_ids(batch, columns, tokens, self._slots)
        own_slots = columns.slots if tokens.is_decode else columns.slots[tokens.rows]
        self._fill(arrays, own_slots, tokens, rows)
        if len(adapters):
            arrays.adapters[: tokens.total] = adapters
        np.concatenate(extra, out=arrays.extra[: sum(sizes)])
        if static is None:
            inputs = layout.tensors(buffer.to(self._device, non_blocking=True))
            attention = self._attention(inputs, rows)
        else:
            static.memory.copy_(buffer, non_blocking=True)
            inputs, attention = static.inputs, static.attention
        parts = torch.split(inputs.extra[: sum(sizes)], sizes)
        device_slots, pending_slots, places, logit_rows, hidden_rows = parts
        return Inputs(
            input_ids=inputs.input_ids,
            positions=inputs.positions,
            attention=attention,
            batch=batch,
            logit_rows=logit_rows if static is None else static.rows[: tokens.total],
            hidden_rows=hidden_rows if len(wanted.hidden_rows) else None,
            pending=PendingTokens(pending_slots, places if len(places) else None)
            if len(pending)
            else None,
            sampled=_sampled(columns, lengths, device_slots, self._slots),
            sampled_logits=wanted.sampled_logits,
            places=wanted.places,
            is_plain=columns.is_plain,
            adapters=inputs.adapters if len(adapters) else None,
            is_static=static is not None,
        )

    def _static(
        self,
        columns: _Columns,
        tokens: _Tokens,
        wanted: _OutputRows,
        lengths: Integers,
        has_adapters: bool,
    ) -> StaticInputs | None:
        """Return the static inputs of the graph for these tokens, or None. A graph computes the
        logits of every token, so each token must be sampled or verify a draft.
        """
        if self._graphs is None or len(wanted.logit_rows) != tokens.total:
            return None
        if columns.scored.any() or columns.pooled.any():
            return None
        if tokens.keys_again(lengths) > _MOST_KEYS_AGAIN:
            return None
        return self._graphs.inputs(tokens.total, self._width(lengths), has_adapters)

    def _layout(
        self, tokens: _Tokens, rows: _AttentionRows, num_extra: int, adapters: Integers
    ) -> InputLayout:
        num_rows, width = len(rows.slots), self._width(rows.lengths)
        has_adapters = bool(len(adapters))
        num_groups = len(self._groups)
        return _layout(tokens.total, num_rows, width, num_extra, has_adapters, num_groups)

    def _cut(self, rows: _AttentionRows, batch: Batch) -> _AttentionRows:
        for group in self._groups:
            if group.chunk is not None:
                rows = rows.cut(group.chunk)
        if self._sees_ahead and self._images is not None:
            rows = rows.cut_spans(self._images.spans(batch))
        return rows

    def _width(self, lengths: Integers) -> int:
        return -(-int(lengths.max()) // self._block_size)

    def _fill(
        self,
        arrays: StepInputs[Array],
        own_slots: Integers,
        tokens: _Tokens,
        rows: _AttentionRows,
    ) -> None:
        """Fill the inputs of attention. If a graph has more rows, add padding rows."""
        count, total, size = len(rows.slots), tokens.total, self._block_size
        arrays.positions[:total] = tokens.positions
        if self._images is not None and (shifts := self._images.shifts(own_slots)) is not None:
            arrays.positions[:total] += shifts
        arrays.cu_queries[: count + 1] = rows.offsets
        block_index, offset = np.divmod(tokens.positions, size)
        for i, (group, table) in enumerate(zip(self._groups, self._slots.tables, strict=True)):
            blocks, visible = table.blocks, _num_visible(group, rows.lengths)
            if not group.has_state:
                own = blocks[own_slots, block_index].astype(np.int64)
                arrays.kv_indices[i][:total] = own * size + offset
            arrays.seq_lens[i][:count] = visible
            first_blocks = None if group.chunk is None else (rows.lengths - visible) // size
            _fill_table(arrays.block_table[i][:count], blocks, rows.slots, first_blocks)
        if count < len(arrays.seq_lens[0]):
            assert self._graphs is not None
            self._graphs.pad(arrays, count)
        for seq_lens, cu_keys in zip(arrays.seq_lens, arrays.cu_keys, strict=True):
            cu_keys[0] = 0
            seq_lens.cumsum(out=cu_keys[1:])

    def _attention(
        self, inputs: StepInputs[Tensor], rows: _AttentionRows
    ) -> tuple[AttentionBatch, ...]:
        seq_lens = [_num_visible(group, rows.lengths).tolist() for group in self._groups]
        counts, num_decodes = rows.counts.tolist(), _num_decodes(rows.counts)
        bidirectional = [
            rows.bidirectional if group.bidirectional_images else frozenset()
            for group in self._groups
        ]
        return attention_batches(
            inputs, counts, seq_lens, num_decodes, self._block_size, bidirectional
        )


# Decode steps reuse the same layouts, and making one takes microseconds.
_layout = lru_cache(maxsize=256)(InputLayout)


def _num_visible(group: CacheGroup, lengths: Integers) -> Integers:
    """Return the number of keys that each row sees: those in the row's attention chunk."""
    return lengths if group.chunk is None else (lengths - 1) % group.chunk + 1


def _fill_table(
    table: Array, blocks: NDArray[np.int32], slots: Integers, first_blocks: Integers | None
) -> None:
    """Fill table [rows, width] with the blocks of the rows' slots, from `first_blocks` on."""
    width = min(table.shape[1], blocks.shape[1])
    table[:, width:] = 0
    if first_blocks is None:
        table[:, :width] = blocks[slots, :width]
        return
    columns = first_blocks[:, None] + np.arange(width)
    table[:, :width] = blocks[slots[:, None], np.minimum(columns, blocks.shape[1] - 1)]


@dataclass(frozen=True, slots=True)
class _Tokens:
    """Return each token's row and position, and each row's first token."""

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
        """Return how many more keys attention reads if each token is a row of its own."""
        if self.is_decode:
            return 0
        return int(self.positions.sum()) + self.total - int(lengths.sum())


@dataclass(frozen=True, slots=True)
class _AttentionRows:
    """For each attention row: its slot, number of tokens, first token, and number of keys,
    including the last token's.
    """

    slots: Integers
    counts: Integers
    offsets: Integers
    lengths: Integers
    # Rows that are exactly one image, whose tokens may see all of the image.
    bidirectional: frozenset[int] = frozenset()

    def of_tokens(self, tokens: _Tokens) -> _AttentionRows:
        slots, offsets = self.slots[tokens.rows], np.arange(tokens.total + 1)
        return _AttentionRows(slots, np.ones_like(slots), offsets, tokens.positions + 1)

    def cut(self, chunk: int) -> _AttentionRows:
        """Split rows at the borders of attention chunks."""
        starts = self.lengths - self.counts
        first = starts // chunk
        counts = (self.lengths - 1) // chunk - first + 1
        if counts.max() == 1:
            return self
        rows = np.repeat(np.arange(len(counts)), counts)
        ends = (_runs(first, counts) + 1) * chunk
        lengths = np.minimum(ends, self.lengths[rows])
        sizes = lengths - np.maximum(ends - chunk, starts[rows])
        offsets = np.append(0, np.cumsum(sizes))
        return _AttentionRows(self.slots[rows], sizes, offsets, lengths)

    def cut_spans(self, spans: abc.Sequence[tuple[int, int]]) -> _AttentionRows:
        """Split rows so that each span is a row of its own."""
        if not spans:
            return self
        firsts = [first for first, _ in spans]
        edges = [*self.offsets.tolist(), *firsts, *(end for _, end in spans)]
        offsets = np.unique(edges)
        rows = np.searchsorted(self.offsets, offsets[:-1], side="right") - 1
        lengths = self.lengths[rows] - (self.offsets[rows + 1] - offsets[1:])
        alone = frozenset(np.searchsorted(offsets, firsts).tolist())
        return _AttentionRows(self.slots[rows], np.diff(offsets), offsets, lengths, alone)


@dataclass(frozen=True, slots=True)
class _OutputRows:
    """The wanted outputs of a pass, as in `Inputs`."""

    logit_rows: Integers
    sampled_logits: Integers | None
    hidden_rows: Integers
    places: Integers


def _output_rows(columns: _Columns, offsets: Integers) -> _OutputRows:
    last = offsets[1:] - 1
    if columns.is_plain:
        return _OutputRows(last[columns.samples], None, _NONE, _NONE)
    # A row has logits for its first `first` tokens, and for its last if it samples.
    first = columns.scored + columns.verified
    counts = first + columns.samples
    places = np.cumsum(counts) - counts
    logit_rows = _runs(offsets[:-1], counts)
    logit_rows[(places + first)[columns.samples]] = last[columns.samples]
    return _OutputRows(
        logit_rows=logit_rows,
        sampled_logits=(places + first)[columns.samples] if first.any() else None,
        hidden_rows=_runs(offsets[1:] - columns.pooled, columns.pooled),
        places=places,
    )


def _runs(starts: Integers, counts: Integers) -> Integers:
    """Concatenate the ranges [start, start + count) of all pairs."""
    begins = np.cumsum(counts) - counts
    numbers: Integers = np.repeat(starts - begins, counts)
    return numbers + np.arange(len(numbers))


def _adapters(columns: _Columns, tokens: _Tokens, slots: Slots) -> Integers:
    index = slots.adapter_index[columns.slots]
    return index[tokens.rows] if index.any() else _NONE


def _pending_tokens(columns: _Columns, lengths: Integers, slots: Slots) -> Integers:
    """Return the rows whose last token is not sampled yet. In a row with drafts the host knows all
    tokens before the drafts.
    """
    is_missing = lengths > slots.num_known[columns.slots]
    return np.flatnonzero(is_missing & (columns.verified == 0))


def _token_ids(batch: Batch, columns: _Columns, tokens: _Tokens, slots: Slots) -> Integers:
    """Return the tokens of all rows, with arbitrary ids for tokens that are not sampled yet."""
    own, starts = columns.slots, columns.starts
    ids: Integers = slots.last_token[own][tokens.rows]
    for i in np.flatnonzero(starts < slots.num_admitted[own]).tolist():
        start, offset = int(starts[i]), int(tokens.offsets[i])
        known = slots.token_ids[int(own[i])][start : start + int(columns.counts[i])]
        ids[offset : offset + len(known)] = known
    for i in () if columns.is_plain else np.flatnonzero(columns.verified).tolist():
        ids[tokens.offsets[i] + 1 : tokens.offsets[i + 1]] = batch.drafts[i]
    return ids


def _sampled(
    columns: _Columns, lengths: Integers, device_slots: Tensor, slots: Slots
) -> SamplingInputs | None:
    if not len(device_slots):
        return None
    positions = lengths - slots.num_prompt_tokens[columns.slots]
    chosen = np.flatnonzero(columns.samples)
    if len(chosen) == len(lengths):
        return SamplingInputs(columns.slots, device_slots, positions, chosen)
    return SamplingInputs(columns.slots[chosen], device_slots, positions[chosen], chosen)


def _num_decodes(counts: Integers) -> int:
    longer = np.flatnonzero(counts != 1)
    return int(longer[0]) if longer.size else len(counts)
