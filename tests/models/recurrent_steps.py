"""Layers with a state, driven in steps of several sequences without a model around them."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from penstock_shard.attention.base import AttentionBatch
from penstock_shard.attention.sdpa import SdpaBackend
from penstock_shard.kernels.cpu import load_kernels
from penstock_shard.ops.cpu_ops import CpuOps
from penstock_shard.ops.torch_ops import TorchOps

SLOTS = 12


def run_in_steps(
    lengths: Sequence[int],
    cuts: Sequence[int],
    compute: Callable[[list[int], AttentionBatch], Tensor],
) -> list[Tensor]:
    """The output of each sequence, all at once in steps of so many tokens each; `compute` gets the
    tokens of a step, counted over all sequences.
    """
    starts = list(itertools.accumulate(lengths, initial=0))
    done = [0] * len(lengths)
    outputs: list[list[Tensor]] = [[] for _ in lengths]
    for step in itertools.count():
        counts = [
            min(cuts[(step + i) % len(cuts)], length - done[i]) for i, length in enumerate(lengths)
        ]
        rows = [i for i, count in enumerate(counts) if count]
        if not rows:
            return [torch.cat(each) for each in outputs]
        places = [starts[i] + done[i] + t for i in rows for t in range(counts[i])]
        for i in rows:
            done[i] += counts[i]
        found = compute(places, batch_of([counts[i] for i in rows], [done[i] for i in rows], rows))
        for i, part in zip(rows, found.split([counts[i] for i in rows]), strict=True):
            outputs[i].append(part)
    raise AssertionError


def batch_of(counts: list[int], lengths: list[int], rows: list[int]) -> AttentionBatch:
    cu_queries = torch.tensor([0, *itertools.accumulate(counts)], dtype=torch.int32)
    # The first column has the slots; the second is not looked at.
    table = torch.tensor([[SLOTS - 1 - row, 99] for row in rows], dtype=torch.int32)
    seq_lens = torch.tensor(lengths, dtype=torch.int32)
    none = torch.empty(0, dtype=torch.int64)
    return AttentionBatch(counts, lengths, 0, 16, none, cu_queries, cu_queries, seq_lens, table)


def plain_ops() -> TorchOps:
    return TorchOps(torch.device("cpu"), torch.float32, "float32", SdpaBackend())


def cpu_ops() -> CpuOps:
    return CpuOps(load_kernels(), "float32")
