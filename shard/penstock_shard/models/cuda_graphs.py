"""Steps whose rows have one token each, recorded once and replayed: the device then waits for no
launch of a kernel.

A graph computes a fixed number of rows over tables of a fixed width, on memory that stays where it
is. Steps that are smaller have rows of nobody besides, which see one token, in a block that no
request has. All graphs share one pool, in which the logits of one lie where the next will write:
they are good until the next forward. Knows nothing of requests or of sampling.

Tables come in several widths because backends launch work for each run of keys that a table could
have: for many rows a table for the longest sequence would cost more than the attention itself.

Several rows may be of one sequence, one for each of its last tokens. Either kind of model has all
keys and values of a layer written to the cache before any row of it attends, and the backends that
are `capturable` (triton, flash_attn, torch_varlen) read them there alone: each row sees those
before it.
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

# Up to the first bound rows are padded to a multiple of the first step, and so on. Steps of more
# rows than the last bound, as those with drafts may have, are launched kernel by kernel: what a
# graph would save is little beside what they compute.
_STEPS = ((256, 8), (1024, 64))
# The narrowest table of so many rows has this many tokens over all of them, or this many a row. Our
# own attention, where it is exact, launches a program for each 256 of them and each KV head.
_NARROW_TOKENS = 2**16
_NARROW_ROW_TOKENS = 1024
# Each wider one is so much wider than the one before; only powers of two of rows, and the most
# rows, have these. Only they have graphs with adapters too, which are as many again as they would
# be otherwise: rows of nobody cost such a step little, as its products read all adapters anyway.
_WIDER = 4
# Numbers that come along for each row: its request's, that of a gap, and the place of that gap.
_EXTRA_PER_ROW = 3


class GraphShape(NamedTuple):
    """Rows, the blocks that each may have, and whether rows may have adapters."""

    num_rows: int
    num_blocks: int
    has_adapters: bool = False


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

    def inputs(
        self, num_rows: int, num_blocks: int, has_adapters: bool = False
    ) -> StaticInputs | None: ...

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
        *,
        serves_adapters: bool = False,
    ) -> None:
        """For steps of at most `max_rows` rows; where the model has places for adapters, also of
        rows that have some.
        """
        self.device = model.device
        self._model = model
        self._max_rows = max_rows
        self._max_model_len = max_model_len
        self._make_pool = make_pool
        self._serves_adapters = serves_adapters
        self._make_graph: Callable[[], Graph] | None = None
        self._memory = torch.empty(0, dtype=torch.uint8)
        self._pad_block = 0
        self._block_size = 1
        self._captured: dict[GraphShape, _Captured] = {}
        # Those that are captured, without adapters and with them, the smallest first.
        self._shapes: tuple[list[GraphShape], list[GraphShape]] = ([], [])

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
        self._shapes = ([], [])
        for shape in sorted(self._captured):
            self._shapes[shape.has_adapters].append(shape)

    def drop(self) -> None:
        """Forget all graphs, and give back their memory."""
        self._captured, self._shapes, self._make_graph = {}, ([], []), None
        self._memory = torch.empty(0, dtype=torch.uint8)

    @property
    def num_graphs(self) -> int:
        return len(self._captured)

    def inputs(
        self, num_rows: int, num_blocks: int, has_adapters: bool = False
    ) -> StaticInputs | None:
        """The smallest inputs that hold such a step, if there are any. What is written there must
        be complete: rows beyond its own are filled by `pad`.
        """
        shapes = self._shapes[has_adapters]
        for index in range(bisect_left(shapes, (num_rows, 0)), len(shapes)):
            if shapes[index].num_blocks >= num_blocks:
                return self._captured[shapes[index]].static
        return None

    def pad(self, arrays: StepInputs[NDArray[Any]], num_rows: int) -> None:
        """Make all rows after the first `num_rows` those of nobody."""
        arrays.input_ids[num_rows:] = 0
        arrays.positions[num_rows:] = 0
        arrays.slots[num_rows:] = self._pad_block * self._block_size
        arrays.adapters[num_rows:] = 0
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
        shape = GraphShape(len(input_ids), batch.block_table.shape[1], adapters is not None)
        captured = self._captured.get(shape) if hidden_rows is None else None
        if captured is None or batch.num_decodes != shape.num_rows:
            return self._model.forward(
                input_ids, positions, batch, logit_rows, hidden_rows, adapters
            )
        if batch is not captured.static.attention:
            _copy_inputs(captured.static.inputs, input_ids, positions, batch, adapters)
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
        """Of rows of nobody, until others are written there."""
        count, num_blocks, _ = shape
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
        rows, blocks, has_adapters = shape
        return InputLayout(rows, rows, blocks, _EXTRA_PER_ROW * rows, has_adapters)


def _copy_inputs(
    static: StepInputs[Tensor],
    input_ids: Tensor,
    positions: Tensor,
    batch: AttentionBatch,
    adapters: Tensor | None,
) -> None:
    static.input_ids.copy_(input_ids)
    static.positions.copy_(positions)
    static.slots.copy_(batch.slots)
    static.cu_queries.copy_(batch.cu_queries)
    static.cu_keys.copy_(batch.cu_keys)
    static.seq_lens.copy_(batch.seq_lens_tensor)
    static.block_table.copy_(batch.block_table)
    if adapters is not None:
        static.adapters.copy_(adapters)


def _row_counts(most: int) -> list[int]:
    """Of graphs for steps of up to so many rows, as far as there are graphs."""
    counts = [1, 2, 4]
    for bound, step in _STEPS:
        counts += range(counts[-1] // step * step + step, bound + 1, step)
    enough = bisect_left(counts, most)
    return counts[: enough + 1]


class _BorrowedTensor:
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
    memory = _BorrowedTensor(tensor, f"<i{tensor.dtype.itemsize}")
    return torch.as_tensor(memory, device=tensor.device).view(tensor.dtype)
