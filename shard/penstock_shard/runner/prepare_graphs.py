"""Graphs of a loaded model: what memory they take, recorded, and checked against what they replay.

Where a model cannot be recorded, or a replay does not give what the model gives, steps are launched
kernel by kernel as ever, and a line says so. Knows nothing of how graphs work.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from penstock_shard.models.cuda_graphs import Graphs, GraphShape
from penstock_shard.models.device_memory import empty_caches, used_bytes
from penstock_shard.models.errors import ModelError, first_line, is_out_of_memory
from penstock_shard.request import Request
from penstock_shard.runner.trial import TrialSteps

# Graphs of a small model take little each, and less than a driver tells apart.
_LEAST_GRAPH_BYTES = 2 * 2**20
# The first is longer than what one program of our decode attention sees of a sequence.
_CHECK_LENGTHS = (300, 40, 7, 23)
# How far a replay may be from the model, in standard deviations of its logits: other numbers of
# rows are multiplied by other kernels.
_TOLERANCE = {torch.float32: 1e-2, torch.float16: 0.15, torch.bfloat16: 0.5}


@dataclass(frozen=True, slots=True)
class _Decodes:
    """Sequences whose last tokens were computed, and what came of these: of all without adapters,
    and then, where some are served, of all with one.
    """

    sequences: list[Request]
    logits: list[Tensor]


@dataclass(frozen=True, slots=True)
class GraphPreparation:
    """Records the graphs of a model over its cache."""

    graphs: Graphs
    kv_dtype: torch.dtype
    vocab_size: int
    max_model_len: int
    progress: Callable[[str], None]
    # A row's bits are its own in any step: a replay must give the same.
    is_exact: bool = False

    def measure(self, block_size: int) -> int | None:
        """About how many bytes all graphs will take; None if the model cannot be recorded. There is
        no cache before and after it.

        Raises ModelError where there is too little memory for one.
        """
        shapes = self.graphs.shapes(block_size)
        self.graphs.allocate(1, block_size, self.kv_dtype)
        try:
            total = self._taken_bytes(shapes[0], block_size)
            # With adapters there are more kernels in each.
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
            self.progress(f"CUDA graphs: none, the model cannot be recorded: {_line(error)}")
            return None
        finally:
            self.graphs.free()
            empty_caches(self.graphs.device)
        return total

    def _taken_bytes(self, shape: GraphShape, block_size: int) -> int:
        """What one graph more takes."""
        before = used_bytes(self.graphs.device)
        self.graphs.capture([shape], block_size, pad_block=0)
        return used_bytes(self.graphs.device) - before

    def capture(self, block_size: int, num_blocks: int) -> bool:
        """Record all of them over a cache of one block more than `num_blocks`, the last of which is
        nobody's; whether there are any then.
        """
        shapes = self.graphs.shapes(block_size)
        # Before anything is recorded: what launches steps now replays them then.
        has_adapters = any(shape.has_adapters for shape in shapes)
        expected = self._expected(block_size, num_blocks, has_adapters)
        started_s, before = time.perf_counter(), used_bytes(self.graphs.device)
        try:
            self.graphs.capture(shapes, block_size, pad_block=num_blocks)
        except RuntimeError as error:
            return self._give_up(f"recording failed: {_line(error)}")
        worst, bound = 0.0, 0.0
        if expected is not None:
            worst, bound = self._difference(expected, block_size, num_blocks)
        # Not `worst > bound`: a NaN must not pass.
        if not worst <= bound:
            return self._give_up(f"logits differ from the model's by {worst:.2g} ({bound:.2g})")
        took = f"{time.perf_counter() - started_s:.1f} s"
        mebibytes = (used_bytes(self.graphs.device) - before) >> 20
        self.progress(
            f"CUDA graphs: {len(shapes)} for steps of up to {shapes[0].num_rows} tokens, "
            f"{mebibytes} MiB, recorded in {took}"
        )
        return True

    def _give_up(self, reason: str) -> bool:
        self.graphs.drop()
        empty_caches(self.graphs.device)
        self.progress(f"CUDA graphs: none, {reason}")
        return False

    def _expected(self, block_size: int, num_blocks: int, has_adapters: bool) -> _Decodes | None:
        """Decodes as the model launches them; None where there is no room for any."""
        assert self.graphs.num_graphs == 0, "what is to be compared with would be a replay"
        steps = TrialSteps(self.graphs, self.vocab_size, block_size, num_blocks)
        lengths = [length for length in _CHECK_LENGTHS if length <= self.max_model_len]
        while sum(-(-length // block_size) for length in lengths) > num_blocks:
            lengths.pop(0)
        if not lengths:
            return None
        sequences = [steps.sequence(length) for length in lengths]
        # No logits are wanted, and one row is the least.
        steps.run([(sequence, 0, len(sequence.token_ids) - 1) for sequence in sequences], [0])
        return _Decodes(sequences, _decoded(steps, sequences, 1 + has_adapters))

    def _difference(
        self, decodes: _Decodes, block_size: int, num_blocks: int
    ) -> tuple[float, float]:
        """The largest difference between logits of replayed decodes and those of the model, and
        what rounding explains. Keys and values of what came before are in the cache already.
        """
        args = (self.vocab_size, block_size, num_blocks)
        replayed = TrialSteps(self.graphs, *args, graphs=self.graphs)
        found = torch.stack(_decoded(replayed, decodes.sequences, len(decodes.logits)))
        expected = torch.stack(decodes.logits)
        tolerance = _TOLERANCE.get(expected.dtype, _TOLERANCE[torch.bfloat16])
        if self.is_exact:
            tolerance = 0.0
        expected = expected.float()
        worst = (found.float() - expected).abs().max()
        return float(worst), tolerance * float(expected.std())


def _decoded(steps: TrialSteps, sequences: Sequence[Request], num_adapters: int) -> list[Tensor]:
    """Logits of the last tokens, with each of so many adapters in turn; the first is none."""
    logits = []
    for index in range(num_adapters):
        for sequence in sequences:
            sequence.adapter_index = index
        logits.append(steps.decode(sequences))
    return logits


def _line(error: RuntimeError) -> str:
    return first_line(error)[:200]
