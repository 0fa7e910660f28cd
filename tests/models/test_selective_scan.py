"""The selective scan of both Mambas: the kernel against plain torch and against transformers, and
the same bits however a prompt is cut.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import pytest
import torch
from models.recurrent_steps import SLOTS, batch_of, cpu_ops, plain_ops, run_in_steps
from support.budget import budget, seeded
from torch import Tensor
from transformers.models.jamba.modeling_jamba import mamba_selective_scan
from transformers.models.mamba2.modeling_mamba2 import mamba2_chunk_scan

from penstock_shard.attention.base import AttentionBatch
from penstock_shard.ops.base import Ops

LOW, HIGH = 0.01, 2.0


@dataclass
class Scan:
    """Random inputs of a layer, for sequences of these lengths."""

    lengths: Sequence[int]
    groups: int
    heads: int
    dim: int
    width: int
    by_column: bool

    def __post_init__(self) -> None:
        total = sum(self.lengths)
        self.x = torch.randn(total, self.heads, self.dim)
        self.b, self.c = torch.randn(2, total, self.groups, self.width)
        self.dt, self.bias = torch.randn(total, self.heads), torch.randn(self.heads)
        self.a = -torch.rand(self.heads, self.width if self.by_column else 1) * 2
        self.d = torch.randn(self.heads)

    def run(self, ops: Ops, cuts: Sequence[int]) -> list[Tensor]:
        """The output of each sequence, all at once in steps of so many tokens each."""
        states = torch.full((SLOTS, self.heads, self.dim, self.width), 7.0)
        a = self.a if self.by_column else self.a[:, 0].contiguous()

        def compute(places: list[int], batch: AttentionBatch) -> Tensor:
            dt = ops.softplus(self.dt[places], self.bias, LOW, HIGH)
            x, b, c = self.x[places], self.b[places], self.c[places]
            return ops.selective_scan(x, dt, a, b, c, self.d, states, batch)

        return run_in_steps(self.lengths, cuts, compute)

    def expected(self) -> list[Tensor]:
        """Return what transformers computes, sequence by sequence."""
        outputs, start = [], 0
        for length in self.lengths:
            own = slice(start, start + length)
            outputs.append(self._as_mamba(own) if self.by_column else self._as_mamba2(own))
            start += length
        return outputs

    def _as_mamba2(self, own: slice) -> Tensor:
        found: Tensor = mamba2_chunk_scan(
            self.x[None, own],
            self.dt[None, own],
            self.a[:, 0],
            self.b[None, own],
            self.c[None, own],
            chunk_size=16,
            D=self.d,
            dt_bias=self.bias,
            dt_softplus=True,
            dt_limit=(LOW, HIGH),
        )
        return found[0]

    def _as_mamba(self, own: slice) -> Tensor:
        dt = torch.nn.functional.softplus(self.dt[own] + self.bias).clamp(LOW, HIGH)
        found: Tensor = mamba_selective_scan(
            self.x[None, own, :, 0].transpose(1, 2),
            dt.T[None],
            self.a,
            self.b[None, own, 0].transpose(1, 2),
            self.c[None, own, 0].transpose(1, 2),
            D=self.d,
        )
        return found[0].T.unsqueeze(-1)


def random_scan(name: str, by_column: bool) -> Scan:
    rng = seeded(name)
    torch.manual_seed(rng.randrange(1 << 30))
    lengths = [rng.randint(1, 60) for _ in range(rng.randint(1, 6))]
    width = rng.randint(2, 40)
    if by_column:
        return Scan(lengths, 1, rng.randint(1, 90), 1, width, by_column)
    groups = rng.randint(1, 3)
    return Scan(lengths, groups, groups * rng.randint(1, 4), rng.randint(2, 80), width, by_column)


@pytest.mark.parametrize("by_column", [False, True])
def test_the_kernel_computes_what_transformers_computes(by_column: bool) -> None:
    for _ in range(budget(5, 200)):
        scan = random_scan("scan against transformers", by_column)
        for found, expected in zip(scan.run(cpu_ops(), [64]), scan.expected(), strict=True):
            assert torch.allclose(found, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("by_column", [False, True])
def test_plain_torch_computes_what_the_kernel_computes(by_column: bool) -> None:
    for _ in range(budget(3, 50)):
        scan = random_scan("scan in torch", by_column)
        pairs = zip(scan.run(plain_ops(), [7, 13]), scan.run(cpu_ops(), [64]), strict=True)
        assert all(torch.allclose(one, other, atol=1e-4, rtol=1e-4) for one, other in pairs)


@pytest.mark.parametrize("by_column", [False, True])
def test_bits_do_not_depend_on_cuts_others_or_threads(by_column: bool) -> None:
    ops = cpu_ops()
    for _ in range(budget(5, 200)):
        scan = random_scan("bits of the scan", by_column)
        ops.set_threads(1)
        whole = scan.run(ops, [64])
        for threads, cuts in ((1, [1]), (2, [16, 3]), (3, [5, 1, 17])):
            ops.set_threads(threads)
            found = scan.run(ops, cuts)
            assert all(torch.equal(one, other) for one, other in zip(found, whole, strict=True))
    ops.set_threads(1)


@pytest.mark.parametrize(
    "changes",
    [
        {"dt": torch.ones(1, 5)},
        {"a": torch.ones(4, 7)},
        {"b": torch.ones(1, 3, 8)},
        {"d": torch.ones(3)},
        {"x": torch.ones(1, 4, 6).half()},
    ],
)
def test_inputs_that_do_not_fit_each_other_are_refused(changes: dict[str, Tensor]) -> None:
    given = {
        "x": torch.ones(1, 4, 6),
        "dt": torch.ones(1, 4),
        "a": torch.ones(4),
        "b": torch.ones(1, 2, 8),
        "c": torch.ones(1, 2, 8),
        "d": torch.ones(4),
    } | changes
    states = torch.zeros(SLOTS, 4, 6, 8)
    with pytest.raises(ValueError, match="selective_scan: float"):
        cpu_ops().selective_scan(state=states, batch=batch_of([1], [1], [0]), **given)
