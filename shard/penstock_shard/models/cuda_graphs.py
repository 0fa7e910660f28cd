"""Decode steps, captured as graphs and replayed. Each row has one token. So a GPU does not wait for
kernel launches, and a CPU (`cpu_graphs`) does not wait for Python.

A graph computes a fixed number of rows over block tables of a fixed width, at fixed addresses.
Smaller steps are padded with rows that see one token, in a block that no request has. All graphs
share one memory pool, where a replay overwrites the previous logits: they are valid until the next
forward.

Block tables have several widths, because backends launch work for all keys that a table has room
for. With many rows, a table for the longest sequence would cost more than the attention.

Several rows may belong to one sequence, one for each of its last tokens (draft tokens). Each row
sees the tokens before it: all models write a layer's keys and values to the cache before any row
attends, and the `capturable` backends (triton, flash_attn, torch_varlen) read them only from the
cache.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from penstock_shard.attention.base import AttentionBatch, LayerSpec
from penstock_shard.attention.cache_groups import CacheLayout
from penstock_shard.models.base import CausalModel, ForwardOutput, ImageInputs
from penstock_shard.models.step_inputs import InputLayout, StepInputs, attention_batches

# (bound, step): up to `bound` rows, pad to a multiple of `step` rows. Steps with drafts may have
# more rows than the last bound. They run without a graph, which would save little.
_STEPS = ((256, 8), (1024, 64))
# The narrowest block tables have room for this many tokens in all rows together, or for
# _NARROW_ROW_TOKENS in each row if that is more. Our exact attention launches a program for every
# 256 tokens and KV head.
_NARROW_TOKENS = 2**16
_NARROW_ROW_TOKENS = 1024
# Each wider table has room for 4 times the tokens of the one before. To save graphs, only the
# largest row count and powers of two get wider tables and adapters. Padding costs a step with
# adapters little, because its products read all adapters anyway.
_WIDER = 4
# Even if graphs are captured lazily, one with this row count is captured and checked at load.
_ROWS_AT_LOAD = 4
# `StepInputs.extra` has for each row its request's slot. For a token id that only the device knows
# yet, it also has that slot again and the token's index in the step.
_EXTRA_PER_ROW = 3


class GraphShape(NamedTuple):
    """A graph's rows, the blocks in each row's table, and true if rows may have adapters."""

    num_rows: int
    num_blocks: int
    has_adapters: bool = False


@dataclass(frozen=True, slots=True)
class StaticInputs:
    """A graph's fixed inputs: the memory, its layout, and its parts as forward takes them. `rows`
    int64 are all tokens, because logits are computed for all.
    """

    memory: Tensor
    layout: InputLayout
    inputs: StepInputs[Tensor]
    attention: tuple[AttentionBatch, ...]
    rows: Tensor


class Graphs(CausalModel, Protocol):
    """A model whose decode steps may be captured, on one device or several. See `GraphedModel`."""

    def shapes(self, block_size: int) -> list[GraphShape]: ...

    def capture(
        self, shapes: Sequence[GraphShape], block_size: int, pad_blocks: Sequence[int]
    ) -> None: ...

    def drop(self) -> None: ...

    @property
    def num_graphs(self) -> int: ...

    def inputs(
        self, num_rows: int, num_blocks: int, has_adapters: bool = False
    ) -> StaticInputs | None: ...

    def pad(self, arrays: StepInputs[NDArray[Any]], num_rows: int) -> None: ...


class Graph(Protocol):
    """Captures and replays work on a device."""

    def capture(self, work: Callable[[], Tensor]) -> Tensor:
        """Run `work`, then capture it. Return the tensor that replays write to."""

    def replay(self) -> None:
        """Run the captured work again on the same memory."""


class CudaGraph:
    """A CUDA `Graph`. Its result is valid until another graph of its pool is replayed."""

    def __init__(self, pool: Any, stream: torch.cuda.Stream) -> None:
        self._graph = torch.cuda.CUDAGraph()
        self._pool = pool
        self._stream = stream

    def capture(self, work: Callable[[], Tensor]) -> Tensor:
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            # Compile kernels and allocate workspaces, which cannot be captured.
            work()
            self._stream.synchronize()
            # `torch.cuda.graph` would also collect garbage.
            self._graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                result = work()
            except RuntimeError:
                self._abandon()
                raise
            self._graph.capture_end()
        torch.cuda.current_stream().wait_stream(self._stream)
        return _borrowed(result)

    def replay(self) -> None:
        self._graph.replay()

    def _abandon(self) -> None:
        try:
            self._graph.capture_end()
        except RuntimeError:
            # torch raises before it tells its allocator that the capture is over. Without these
            # calls the allocator would reserve memory for the pool forever.
            device = torch.cuda.current_device()
            torch._C._cuda_endAllocateToPool(device, self._pool)
            torch._C._cuda_releasePool(device, self._pool)


class GraphPool:
    """Makes graphs that share one memory pool."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]

    def __call__(self) -> Graph:
        return CudaGraph(self._pool, self._stream)


@dataclass(frozen=True, slots=True)
class _Captured:
    graph: Graph
    static: StaticInputs
    logits: Tensor
    no_hidden: Tensor


class GraphedModel:
    """A `CausalModel` (`models.base`) that replays decode steps from captured graphs. The wrapped
    model runs other steps.
    """

    def __init__(
        self,
        model: CausalModel,
        max_rows: int,
        max_model_len: int,
        make_pool: Callable[[], Callable[[], Graph]] = GraphPool,
        *,
        serves_adapters: bool = False,
        exact_rows: bool = False,
    ) -> None:
        """Use graphs for steps of at most `max_rows` rows; with `serves_adapters`, also for rows
        with adapters. With `exact_rows`, the first step with a new number of rows captures a graph
        without padding.
        """
        self.device = model.device
        self._model = model
        self._max_rows = max_rows
        self._max_model_len = max_model_len
        self._make_pool = make_pool
        self._serves_adapters = serves_adapters
        self._exact_rows = exact_rows
        self._make_graph: Callable[[], Graph] | None = None
        self._memory = torch.empty(0, dtype=torch.uint8)
        # One block for each cache group.
        self._pad_blocks: Sequence[int] = ()
        self._block_size = 1
        self._captured: dict[GraphShape, _Captured] = {}
        # Captured shapes without and with adapters, the smallest first.
        self._shapes: tuple[list[GraphShape], list[GraphShape]] = ([], [])

    @property
    def layers(self) -> tuple[LayerSpec, ...]:
        return self._model.layers

    @property
    def hidden_size(self) -> int:
        return self._model.hidden_size

    @property
    def cache_layout(self) -> CacheLayout:
        return self._model.cache_layout

    def allocate(self, pools: Sequence[int], block_size: int, dtype: torch.dtype) -> None:
        self.drop()
        self._model.allocate(pools, block_size, dtype)

    def free(self) -> None:
        self.drop()
        self._model.free()

    def block_parts(self, group: int, block_id: int) -> Sequence[Tensor]:
        return self._model.block_parts(group, block_id)

    def copy_states(self, copies: Sequence[tuple[int, int]]) -> None:
        self._model.copy_states(copies)

    @contextmanager
    def shortened(self) -> Iterator[None]:
        with self._model.shortened():
            yield

    # ---- graphs ----

    def shapes(self, block_size: int) -> list[GraphShape]:
        """The shapes to capture at load, the largest first."""
        most_blocks = -(-self._max_model_len // block_size)
        if self._exact_rows:
            return [GraphShape(min(_ROWS_AT_LOAD, self._max_rows), most_blocks)]
        shapes: set[GraphShape] = set()
        counts = _row_counts(self._max_rows)
        for rows in counts:
            is_coarse = rows.bit_count() == 1 or rows == counts[-1]
            tokens = max(_NARROW_ROW_TOKENS, _NARROW_TOKENS // rows)
            widths = {min(most_blocks, -(-tokens // block_size))}
            while is_coarse and tokens < self._max_model_len:
                tokens *= _WIDER
                widths.add(min(most_blocks, -(-tokens // block_size)))
            shapes.update(GraphShape(rows, width) for width in widths)
            if is_coarse and self._serves_adapters:
                shapes.update(GraphShape(rows, width, True) for width in widths)
        return sorted(shapes, reverse=True)

    @torch.inference_mode()
    def capture(
        self, shapes: Sequence[GraphShape], block_size: int, pad_blocks: Sequence[int]
    ) -> None:
        """Capture more shapes over the present KV cache. Padding rows use `pad_blocks`, one block
        of each cache group. Raises RuntimeError for work that cannot be captured.
        """
        if self._make_graph is None:
            self._make_graph = self._make_pool()
            all_shapes = self.shapes(block_size)
            if self._exact_rows:
                all_shapes = [all_shapes[0]._replace(num_rows=self._max_rows)]
            num_bytes = max(self._layout(shape).num_bytes for shape in all_shapes)
            self._memory = torch.zeros(num_bytes, dtype=torch.uint8, device=self.device)
        self._block_size, self._pad_blocks = block_size, pad_blocks
        for shape in shapes:
            self._captured[shape] = self._capture(shape, self._make_graph())
        self._shapes = ([], [])
        for shape in sorted(self._captured):
            self._shapes[shape.has_adapters].append(shape)

    def drop(self) -> None:
        self._captured, self._shapes, self._make_graph = {}, ([], []), None
        self._memory = torch.empty(0, dtype=torch.uint8)

    @property
    def num_graphs(self) -> int:
        return len(self._captured)

    def inputs(
        self, num_rows: int, num_blocks: int, has_adapters: bool = False
    ) -> StaticInputs | None:
        """Return the inputs of the smallest graph that fits, or None. The caller writes all of
        these inputs; `pad` fills the rows after the step's own.
        """
        if self._exact_rows:
            return self._exact_inputs(num_rows, has_adapters)
        shapes = self._shapes[has_adapters]
        for index in range(bisect_left(shapes, (num_rows, 0)), len(shapes)):
            if shapes[index].num_blocks >= num_blocks:
                return self._captured[shapes[index]].static
        return None

    def _exact_inputs(self, num_rows: int, has_adapters: bool) -> StaticInputs | None:
        if has_adapters or num_rows > self._max_rows:
            return None
        shape = self.shapes(self._block_size)[0]._replace(num_rows=num_rows)
        if shape not in self._captured:
            self.capture([shape], self._block_size, self._pad_blocks)
        return self._captured[shape].static

    def pad(self, arrays: StepInputs[NDArray[Any]], num_rows: int) -> None:
        """Turn all rows after the first `num_rows` into padding rows."""
        arrays.input_ids[num_rows:] = 0
        arrays.positions[num_rows:] = 0
        arrays.adapters[num_rows:] = 0
        arrays.cu_queries[num_rows:] = np.arange(num_rows, len(arrays.cu_queries))
        for group, block_id in enumerate(self._pad_blocks):
            arrays.kv_indices[group][num_rows:] = block_id * self._block_size
            arrays.seq_lens[group][num_rows:] = 1
            arrays.block_table[group][num_rows:] = block_id

    def forward(
        self,
        input_ids: Tensor,
        positions: Tensor,
        batches: Sequence[AttentionBatch],
        logit_rows: Tensor,
        hidden_rows: Tensor | None = None,
        adapters: Tensor | None = None,
        images: ImageInputs | None = None,
    ) -> ForwardOutput:
        width = batches[0].block_table.shape[1]
        shape = GraphShape(len(input_ids), width, adapters is not None)
        is_plain = hidden_rows is None and images is None
        captured = self._captured.get(shape) if is_plain else None
        if captured is None or batches[0].num_decodes != shape.num_rows:
            return self._model.forward(
                input_ids, positions, batches, logit_rows, hidden_rows, adapters, images
            )
        if batches is not captured.static.attention:
            _copy_inputs(captured.static.inputs, input_ids, positions, batches, adapters)
        captured.graph.replay()
        logits = captured.logits
        if batches is captured.static.attention:
            # The padding rows are the last.
            logits = logits[: len(logit_rows)]
        elif len(logit_rows) < len(logits):
            logits = logits.index_select(0, logit_rows)
        return ForwardOutput(logits, captured.no_hidden)

    def _capture(self, shape: GraphShape, graph: Graph) -> _Captured:
        static = self._static_inputs(shape)

        def work() -> Tensor:
            inputs = static.inputs
            forwarded = self._model.forward(
                inputs.input_ids,
                inputs.positions,
                static.attention,
                static.rows,
                adapters=inputs.adapters if shape.has_adapters else None,
            )
            return forwarded.logits.contiguous()

        logits = graph.capture(work)
        return _Captured(graph, static, logits, logits.new_empty(0, self.hidden_size))

    def _static_inputs(self, shape: GraphShape) -> StaticInputs:
        """Make inputs with only padding rows."""
        count, num_blocks, _ = shape
        layout = self._layout(shape)
        memory = self._memory[: layout.num_bytes]
        nobody = torch.zeros(layout.num_bytes, dtype=torch.uint8)
        arrays = layout.arrays(nobody.numpy())
        self.pad(arrays, 0)
        for cu_keys in arrays.cu_keys:
            cu_keys[:] = np.arange(count + 1)
        memory.copy_(nobody)
        inputs = layout.tensors(memory)
        # An upper bound: no row can have more tokens.
        seq_lens = [[num_blocks * self._block_size] * count] * layout.num_groups
        attention = attention_batches(inputs, [1] * count, seq_lens, count, self._block_size)
        return StaticInputs(
            memory, layout, inputs, attention, torch.arange(count, device=self.device)
        )

    def _layout(self, shape: GraphShape) -> InputLayout:
        rows, blocks, has_adapters = shape
        num_groups = len(self.cache_layout.groups)
        return InputLayout(rows, rows, blocks, _EXTRA_PER_ROW * rows, has_adapters, num_groups)


def _copy_inputs(
    static: StepInputs[Tensor],
    input_ids: Tensor,
    positions: Tensor,
    batches: Sequence[AttentionBatch],
    adapters: Tensor | None,
) -> None:
    static.input_ids.copy_(input_ids)
    static.positions.copy_(positions)
    static.cu_queries.copy_(batches[0].cu_queries)
    for group, batch in enumerate(batches):
        static.kv_indices[group].copy_(batch.slots)
        static.cu_keys[group].copy_(batch.cu_keys)
        static.seq_lens[group].copy_(batch.seq_lens_tensor)
        static.block_table[group].copy_(batch.block_table)
    if adapters is not None:
        static.adapters.copy_(adapters)


def _row_counts(most: int) -> list[int]:
    """Return the row counts of graphs for steps of at most `most` rows, up to the last bound."""
    counts = [1, 2, 4]
    for bound, step in _STEPS:
        counts += range(counts[-1] // step * step + step, bound + 1, step)
    enough = bisect_left(counts, most)
    return counts[: enough + 1]


class _BorrowedTensor:
    """A tensor's device memory, exposed without a reference that keeps it allocated."""

    def __init__(self, tensor: Tensor, typestr: str) -> None:
        self.__cuda_array_interface__ = {
            "shape": tuple(tensor.shape),
            "typestr": typestr,
            "data": (tensor.data_ptr(), False),
            "version": 2,
        }


def _borrowed(tensor: Tensor) -> Tensor:
    """View a contiguous tensor without keeping its memory allocated, so that the pool can use it
    for other graphs. Each replay of the tensor's graph writes it again.
    """
    memory = _BorrowedTensor(tensor, f"<i{tensor.dtype.itemsize}")
    return torch.as_tensor(memory, device=tensor.device).view(tensor.dtype)
