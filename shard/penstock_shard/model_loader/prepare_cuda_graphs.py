"""Graphs of a loaded model: measures their memory, records them and checks their replays.

If the model cannot be recorded, or a replay's logits differ from the model's, steps are launched
kernel by kernel, and a log line says so.
"""

from __future__ import annotations

import time
from collections import abc
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from penstock_shard.device.gpu_memory import empty_caches, used_bytes
from penstock_shard.errors import ModelError, first_line, is_out_of_memory
from penstock_shard.ipc.runner_info import blocks_each, pools_for
from penstock_shard.models.cuda_graphs import Graphs, GraphShape
from penstock_shard.selfcheck.random_steps import RandomSequence, RandomSteps

# The smallest size assumed for a graph, because the driver cannot report graphs of small models.
_LEAST_GRAPH_BYTES = 2 * 2**20
# The lengths of test sequences. The first is longer than what one program of our decode attention
# reads.
_CHECK_LENGTHS = (300, 40, 7, 23)
# Short ones suffice, because CPU kernels read any length in one way.
_CHECK_LENGTHS_ON_DEMAND = (20, 17, 7, 3)
# The largest difference of a replay's logits from the model's, in standard deviations. They differ
# because other kernels multiply the padded rows of a graph.
_TOLERANCE = {torch.float32: 1e-2, torch.float16: 0.15, torch.bfloat16: 0.5}


@dataclass(frozen=True, slots=True)
class _Decodes:
    """Sequences, and the logits of their last tokens: without an adapter, and then with one if
    adapters are served.
    """

    sequences: list[RandomSequence]
    logits: list[Tensor]


@dataclass(frozen=True, slots=True)
class GraphPreparation:
    graphs: Graphs
    kv_dtype: torch.dtype
    vocab_size: int
    max_model_len: int
    progress: Callable[[str], None]
    # True if a row's bits are the same in any step. Then a replay must give the same bits.
    is_exact: bool = False
    # True if each graph is recorded when a step first needs it.
    on_demand: bool = False

    @property
    def what(self) -> str:
        return "recorded decode steps" if self.on_demand else "CUDA graphs"

    def measure(self, block_size: int) -> int | None:
        """Estimate the bytes of all graphs; None if the model cannot be recorded. Allocates a cache
        and frees it again.

        Raises ModelError if there is too little memory for one graph.
        """
        shapes = self.graphs.shapes(block_size)
        pools = pools_for(1, self.graphs.cache_layout.groups)
        self.graphs.allocate(pools, block_size, self.kv_dtype)
        try:
            total = self._taken_bytes(shapes[0], block_size)
            # Measure both separately, because graphs with adapters have more kernels.
            for has_adapters in (False, True):
                others = [shape for shape in shapes[1:] if shape.has_adapters is has_adapters]
                if others:
                    another = self._taken_bytes(others[0], block_size)
                    total += max(_LEAST_GRAPH_BYTES, another) * len(others)
        except RuntimeError as error:
            if is_out_of_memory(error):
                raise ModelError(
                    f"CUDA graphs: one of {shapes[0].num_rows} tokens does not fit into memory "
                    "beside the weights; lower --max-num-seqs, or give --enforce-eager"
                ) from error
            self.progress(f"{self.what}: none, the model cannot be recorded: {_line(error)}")
            return None
        finally:
            self.graphs.free()
            empty_caches(self.graphs.device)
        return total

    def _taken_bytes(self, shape: GraphShape, block_size: int) -> int:
        before = used_bytes(self.graphs.device)
        self.graphs.capture([shape], block_size, [0] * len(self.graphs.cache_layout.groups))
        return used_bytes(self.graphs.device) - before

    def capture(self, block_size: int, pools: abc.Sequence[int]) -> bool:
        """Record all graphs. True if that succeeded. Besides `pools`, the cache has one block of
        each pool for padding.
        """
        num_blocks = blocks_each(pools, self.graphs.cache_layout.groups)
        shapes = self.graphs.shapes(block_size)
        # Compute these before recording, because afterwards the same calls replay graphs.
        has_adapters = any(shape.has_adapters for shape in shapes)
        expected = self._expected(block_size, num_blocks, has_adapters)
        started_s, before = time.perf_counter(), used_bytes(self.graphs.device)
        try:
            pad_blocks = [pools[group.pool] for group in self.graphs.cache_layout.groups]
            self.graphs.capture(shapes, block_size, pad_blocks)
        except RuntimeError as error:
            return self._give_up(f"recording failed: {_line(error)}")
        worst, bound = 0.0, 0.0
        if expected is not None:
            worst, bound = self._difference(expected, block_size, num_blocks)
        # `worst > bound` would let a NaN pass.
        if not worst <= bound:
            return self._give_up(f"logits differ from the model's by {worst:.2g} ({bound:.2g})")
        took = f"{time.perf_counter() - started_s:.1f} s"
        mebibytes = (used_bytes(self.graphs.device) - before) >> 20
        if not self.on_demand:
            self.progress(
                f"{self.what}: {len(shapes)} for steps of up to {shapes[0].num_rows} tokens, "
                f"{mebibytes} MiB, recorded in {took}"
            )
        return True

    def _give_up(self, reason: str) -> bool:
        self.graphs.drop()
        empty_caches(self.graphs.device)
        self.progress(f"{self.what}: none, {reason}")
        return False

    def _expected(self, block_size: int, num_blocks: int, has_adapters: bool) -> _Decodes | None:
        """Compute decodes by the model itself; None if the cache has no room for any."""
        assert self.graphs.num_graphs == 0, "what is to be compared with would be a replay"
        steps = RandomSteps(self.graphs, self.vocab_size, block_size, num_blocks)
        wanted = _CHECK_LENGTHS_ON_DEMAND if self.on_demand else _CHECK_LENGTHS
        lengths = [length for length in wanted if length <= self.max_model_len]
        while sum(-(-length // block_size) for length in lengths) > num_blocks:
            lengths.pop(0)
        if not lengths:
            return None
        sequences = [steps.sequence(length) for length in lengths]
        # No logits are wanted, but `run` needs at least one row.
        steps.run([(sequence, 0, len(sequence.token_ids) - 1) for sequence in sequences], [0])
        return _Decodes(sequences, _decoded(steps, sequences, 1 + has_adapters))

    def _difference(
        self, decodes: _Decodes, block_size: int, num_blocks: int
    ) -> tuple[float, float]:
        """Return the largest difference between logits of replayed decodes and of the model, and
        the largest difference that rounding explains. The cache already has the keys and values of
        earlier tokens.
        """
        args = (self.vocab_size, block_size, num_blocks)
        replayed = RandomSteps(self.graphs, *args, graphs=self.graphs)
        found = torch.stack(_decoded(replayed, decodes.sequences, len(decodes.logits)))
        expected = torch.stack(decodes.logits)
        tolerance = _TOLERANCE.get(expected.dtype, _TOLERANCE[torch.bfloat16])
        if self.is_exact:
            tolerance = 0.0
        expected = expected.float()
        worst = (found.float() - expected).abs().max()
        return float(worst), tolerance * float(expected.std())


def _decoded(
    steps: RandomSteps, sequences: abc.Sequence[RandomSequence], num_adapters: int
) -> list[Tensor]:
    """Return the logits of last tokens: a tensor for each adapter index below `num_adapters` (0 is
    no adapter).
    """
    logits = []
    for index in range(num_adapters):
        for sequence in sequences:
            sequence.adapter_index = index
        logits.append(steps.decode(sequences))
    return logits


def _line(error: RuntimeError) -> str:
    return first_line(error)[:200]
