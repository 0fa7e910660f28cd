"""Steps in which each row has one token, recorded once and replayed: the device then waits for no
launch of a kernel.

A graph computes a fixed number of rows over tables of a fixed width, on memory that stays where it
is. Steps that are smaller have rows of nobody besides, which see one token, in a block that no
request has. All graphs share one pool, in which the logits of one lie where the next will write:
they are good until the next forward. Knows nothing of requests or of sampling.

Tables come in several widths because backends launch work for each run of keys that a table could
have: for many rows a table for the longest sequence would cost more than the attention itself.
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

from penstock_shard.models.attention.base import AttentionBatch, LayerSpec
from penstock_shard.models.base import CausalModel, Forwarded
from penstock_shard.models.step_inputs import InputLayout, StepInputs

# Up to the first bound rows are padded to a multiple of the first step, and so on.
_STEPS = ((256, 8), (1024, 64))
# The narrowest table of so many rows has this many tokens over all of them, or this many a row.
_NARROW_TOKENS = 2**18
_NARROW_ROW_TOKENS = 1024
# Each wider one is so much wider than the one before; only powers of two of rows, and the most
# rows, have these.
_WIDER = 4
# Numbers that come along for each row: its request's, that of a gap, and the place of that gap.
_EXTRA_PER_ROW = 3


class GraphShape(NamedTuple):
    """Rows, and the blocks that each may have."""

    num_rows: int
    num_blocks: int


@dataclass(frozen=True, slots=True)
class StaticInputs:
    """Where the inputs of a graph lie: the whole memory, how it is laid out, and its parts as a
    forward takes them. `rows` int64 are the tokens whose logits are given: all.
    """

    memory: Tensor
    layout: InputLayout
    inputs: StepInputs[Tensor]
    attention: AttentionBatch
    rows: Tensor


class Graphs(CausalModel, Protocol):
    """A model whose decodes may be recorded, on one device or on many; see `GraphedModel`."""

    def shapes(self, block_size: int) -> list[GraphShape]: ...

    def capture(self, shapes: Sequence[GraphShape], block_size: int, pad_block: int) -> None: ...

    def drop(self) -> None: ...

    @property
    def num_graphs(self) -> int: ...

    def inputs(self, num_rows: int, num_blocks: int) -> StaticInputs | None: ...

    def pad(self, arrays: StepInputs[NDArray[Any]], num_rows: int) -> None: ...


class Graph(Protocol):
    """Records work of a device."""

    def capture(self, work: Callable[[], Tensor]) -> Tensor:
        """Do the work once, then record it; where its result will be."""

    def replay(self) -> None:
        """Do it again, on the same memory."""


class CudaGraph:
    """A `Graph` of CUDA. What one of a pool computes is good until another of them is replayed."""

    def __init__(self, pool: Any, stream: torch.cuda.Stream) -> None:
        self._graph = torch.cuda.CUDAGraph()
        self._pool = pool
        self._stream = stream

    def capture(self, work: Callable[[], Tensor]) -> Tensor:
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            # Kernels are compiled and workspaces made now: neither can be recorded.
            work()
            self._stream.synchronize()
            # Not `torch.cuda.graph`, which collects garbage each time.
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
        """End a recording that failed."""
        try:
            self._graph.capture_end()
        except RuntimeError:
            # torch gives up before its allocator knows: it would keep back memory ever after, as
            # one does while something is recorded.
            device = torch.cuda.current_device()
            torch._C._cuda_endAllocateToPool(device, self._pool)
            torch._C._cuda_releasePool(device, self._pool)


class GraphPool:
    """Makes graphs that share their memory."""

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
    """A `CausalModel` that replays steps of decodes from graphs, once there are any; see
    `penstock_shard.models.base`. All else the model that it wraps computes as ever.
    """

    def __init__(
        self,
        model: CausalModel,
        max_rows: int,
        max_model_len: int,
        make_pool: Callable[[], Callable[[], Graph]] = GraphPool,
    ) -> None:
        """For steps of at most `max_rows` rows."""
        self.device = model.device
        self._model = model
        self._max_rows = max_rows
        self._max_model_len = max_model_len
        self._make_pool = make_pool
        self._make_graph: Callable[[], Graph] | None = None
        self._memory = torch.empty(0, dtype=torch.uint8)
        self._pad_block = 0
        self._block_size = 1
        self._captured: dict[GraphShape, _Captured] = {}
        # Those that are captured, the smallest first.
        self._shapes: list[GraphShape] = []

    @property
    def layers(self) -> tuple[LayerSpec, ...]:
        return self._model.layers

    @property
    def hidden_size(self) -> int:
        return self._model.hidden_size

    def allocate(self, num_blocks: int, block_size: int, dtype: torch.dtype) -> None:
        self.drop()
        self._model.allocate(num_blocks, block_size, dtype)

    def free(self) -> None:
        self.drop()
        self._model.free()

    @contextmanager
    def shortened(self) -> Iterator[None]:
        with self._model.shortened():
            yield

    # ---- graphs ----

    def shapes(self, block_size: int) -> list[GraphShape]:
        """Those that steps want, the largest first."""
        most_blocks = -(-self._max_model_len // block_size)
        shapes = set()
        counts = _row_counts(self._max_rows)
        for rows in counts:
            in_all_widths = rows.bit_count() == 1 or rows == counts[-1]
            tokens = max(_NARROW_ROW_TOKENS, _NARROW_TOKENS // rows)
            shapes.add(GraphShape(rows, min(most_blocks, -(-tokens // block_size))))
            while in_all_widths and tokens < self._max_model_len:
                tokens *= _WIDER
                shapes.add(GraphShape(rows, min(most_blocks, -(-tokens // block_size))))
        return sorted(shapes, reverse=True)

    @torch.inference_mode()
    def capture(self, shapes: Sequence[GraphShape], block_size: int, pad_block: int) -> None:
        """Record steps of these shapes, besides those that are recorded, over the cache there is.
        Rows of nobody use `pad_block`. Raises RuntimeError for work that cannot be recorded.
        """
        if self._make_graph is None:
            self._make_graph = self._make_pool()
            all_bytes = [self._layout(shape).num_bytes for shape in self.shapes(block_size)]
            self._memory = torch.zeros(max(all_bytes), dtype=torch.uint8, device=self.device)
        self._block_size, self._pad_block = block_size, pad_block
        for shape in shapes:
            self._captured[shape] = self._capture(shape, self._make_graph())
        self._shapes = sorted(self._captured)

    def drop(self) -> None:
        """Forget all graphs, and give back their memory."""
        self._captured, self._shapes, self._make_graph = {}, [], None
        self._memory = torch.empty(0, dtype=torch.uint8)

    @property
    def num_graphs(self) -> int:
        return len(self._captured)

    def inputs(self, num_rows: int, num_blocks: int) -> StaticInputs | None:
        """The smallest inputs that hold such a step, if there are any. What is written there must
        be complete: rows beyond its own are filled by `pad`.
        """
        for index in range(bisect_left(self._shapes, (num_rows, 0)), len(self._shapes)):
            if self._shapes[index].num_blocks >= num_blocks:
                return self._captured[self._shapes[index]].static
        return None

    def pad(self, arrays: StepInputs[NDArray[Any]], num_rows: int) -> None:
        """Make all rows after the first `num_rows` those of nobody."""
        arrays.input_ids[num_rows:] = 0
        arrays.positions[num_rows:] = 0
        arrays.slots[num_rows:] = self._pad_block * self._block_size
        arrays.cu_queries[num_rows:] = np.arange(num_rows, len(arrays.cu_queries))
        arrays.seq_lens[num_rows:] = 1
        arrays.block_table[num_rows:] = self._pad_block

    def forward(
        self,
        input_ids: Tensor,
        positions: Tensor,
        batch: AttentionBatch,
        logit_rows: Tensor,
        hidden_rows: Tensor | None = None,
        adapters: Tensor | None = None,
    ) -> Forwarded:
        shape = (len(input_ids), batch.block_table.shape[1])
        is_plain = hidden_rows is None and adapters is None
        captured = self._captured.get(GraphShape(*shape)) if is_plain else None
        if captured is None or batch.num_decodes != shape[0]:
            return self._model.forward(
                input_ids, positions, batch, logit_rows, hidden_rows, adapters
            )
        if batch is not captured.static.attention:
            _copy_inputs(captured.static.inputs, input_ids, positions, batch)
        captured.graph.replay()
        logits = captured.logits
        if batch is captured.static.attention:
            # Those of nobody are the last.
            logits = logits[: len(logit_rows)]
        elif len(logit_rows) < len(logits):
            logits = logits.index_select(0, logit_rows)
        return Forwarded(logits, captured.no_hidden)

    def _capture(self, shape: GraphShape, graph: Graph) -> _Captured:
        static = self._static_inputs(shape)

        def work() -> Tensor:
            inputs = static.inputs
            forwarded = self._model.forward(
                inputs.input_ids, inputs.positions, static.attention, static.rows
            )
            return forwarded.logits.contiguous()

        logits = graph.capture(work)
        return _Captured(graph, static, logits, logits.new_empty(0, self.hidden_size))

    def _static_inputs(self, shape: GraphShape) -> StaticInputs:
        """Of rows of nobody, until others are written there."""
        count, num_blocks = shape
        layout = self._layout(shape)
        memory = self._memory[: layout.num_bytes]
        nobody = torch.zeros(layout.num_bytes, dtype=torch.uint8)
        arrays = layout.arrays(nobody.numpy())
        self.pad(arrays, 0)
        arrays.cu_keys[:] = np.arange(count + 1)
        memory.copy_(nobody)
        inputs = layout.tensors(memory)
        attention = AttentionBatch(
            query_lens=[1] * count,
            # What the host knows of any step: no row has more.
            seq_lens=[num_blocks * self._block_size] * count,
            num_decodes=count,
            block_size=self._block_size,
            slots=inputs.slots,
            cu_queries=inputs.cu_queries,
            cu_keys=inputs.cu_keys,
            seq_lens_tensor=inputs.seq_lens,
            block_table=inputs.block_table,
        )
        return StaticInputs(
            memory, layout, inputs, attention, torch.arange(count, device=self.device)
        )

    def _layout(self, shape: GraphShape) -> InputLayout:
        rows, blocks = shape
        return InputLayout(rows, rows, blocks, _EXTRA_PER_ROW * rows)


def _copy_inputs(
    static: StepInputs[Tensor], input_ids: Tensor, positions: Tensor, batch: AttentionBatch
) -> None:
    static.input_ids.copy_(input_ids)
    static.positions.copy_(positions)
    static.slots.copy_(batch.slots)
    static.cu_queries.copy_(batch.cu_queries)
    static.cu_keys.copy_(batch.cu_keys)
    static.seq_lens.copy_(batch.seq_lens_tensor)
    static.block_table.copy_(batch.block_table)


def _row_counts(most: int) -> list[int]:
    """Of graphs for steps of up to so many rows, as far as there are graphs."""
    counts = [1, 2, 4]
    for bound, step in _STEPS:
        counts += range(counts[-1] // step * step + step, bound + 1, step)
    enough = bisect_left(counts, most)
    return counts[: enough + 1]


class _Memory:
    """Memory of the device that a tensor shows and does not keep."""

    def __init__(self, tensor: Tensor, typestr: str) -> None:
        self.__cuda_array_interface__ = {
            "shape": tuple(tensor.shape),
            "typestr": typestr,
            "data": (tensor.data_ptr(), False),
            "version": 2,
        }


def _borrowed(tensor: Tensor) -> Tensor:
    """The same contiguous tensor, which does not keep its memory from being used again: there it
    is anew each time that its graph was replayed.
    """
    memory = _Memory(tensor, f"<i{tensor.dtype.itemsize}")
    return torch.as_tensor(memory, device=tensor.device).view(tensor.dtype)
