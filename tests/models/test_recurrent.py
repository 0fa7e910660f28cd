"""Short convolutions and the delta rule: the kernels against plain torch and against transformers,
and the same bits however a prompt is cut.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import pytest
import torch
from models.recurrent_steps import SLOTS, batch_of, cpu_ops, plain_ops, run_in_steps
from support.budget import budget, seeded
from torch import Tensor
from torch.nn import functional
from transformers.models.qwen3_next.modeling_qwen3_next import torch_recurrent_gated_delta_rule

from penstock_shard.attention.base import AttentionBatch
from penstock_shard.ops.base import Ops


@dataclass
class Layer:
    """Random weights and inputs of a layer, for sequences of these lengths."""

    lengths: Sequence[int]
    key_heads: int
    heads: int
    dim: int
    dim_v: int
    taps: int
    by_channel: bool

    def __post_init__(self) -> None:
        total, self.channels = sum(self.lengths), 2 * self.key_heads * self.dim
        self.channels += self.heads * self.dim_v
        self.x = torch.randn(total, self.channels)
        self.weight, self.bias = torch.randn(self.taps, self.channels), torch.randn(self.channels)
        shape = (self.heads, self.dim) if self.by_channel else (self.heads,)
        self.decay_input, self.decay_bias = torch.randn(total, *shape), torch.randn(shape)
        self.rate, self.beta = torch.rand(self.heads) * 2, torch.rand(total, self.heads)

    def run(self, ops: Ops, cuts: Sequence[int]) -> list[Tensor]:
        """The output of each sequence, all at once in steps of so many tokens each."""
        inputs = torch.full((SLOTS, self.taps - 1, self.channels), 9.0)
        matrices = torch.full((SLOTS, self.heads, self.dim, self.dim_v), 7.0)

        def compute(places: list[int], batch: AttentionBatch) -> Tensor:
            mixed = ops.short_conv(self.x[places], self.weight, self.bias, inputs, batch, silu=True)
            decay = ops.decay(self.decay_input[places], self.rate, self.decay_bias)
            return ops.delta_rule(mixed, decay, self.beta[places], matrices, batch)

        return run_in_steps(self.lengths, cuts, compute)

    def expected(self) -> list[Tensor]:
        """Return what transformers computes, sequence by sequence."""
        outputs, start = [], 0
        for length in self.lengths:
            own = slice(start, start + length)
            padded = torch.cat((torch.zeros(self.taps - 1, self.channels), self.x[own]))
            summed = sum(self.weight[j] * padded[j : j + length] for j in range(self.taps))
            mixed = functional.silu(summed + self.bias)
            keys = self.key_heads * self.dim
            query, key, value = mixed.split([keys, keys, self.heads * self.dim_v], dim=-1)
            decay = -self.rate * functional.softplus(self.decay_input[own] + self.decay_bias)
            attended, _ = torch_recurrent_gated_delta_rule(
                query.view(1, length, -1, self.dim),
                key.view(1, length, -1, self.dim),
                value.view(1, length, -1, self.dim_v),
                g=decay[None],
                beta=self.beta[own][None],
                use_qk_l2norm_in_kernel=True,
            )
            outputs.append(attended[0])
            start += length
        return outputs


def random_layer(name: str, *, by_channel: bool = False) -> Layer:
    rng = seeded(name)
    torch.manual_seed(rng.randrange(1 << 30))
    key_heads = rng.randint(1, 3)
    return Layer(
        [rng.randint(1, 60) for _ in range(rng.randint(1, 6))],
        key_heads,
        key_heads * rng.randint(1, 3),
        rng.randint(2, 40),
        rng.randint(2, 40),
        rng.randint(2, 5),
        by_channel,
    )


def test_the_kernels_compute_what_transformers_computes() -> None:
    for _ in range(budget(5, 200)):
        layer = random_layer("delta rule against transformers")
        for found, expected in zip(layer.run(cpu_ops(), [64]), layer.expected(), strict=True):
            assert torch.allclose(found, expected, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("by_channel", [False, True])
def test_plain_torch_computes_what_the_kernels_compute(by_channel: bool) -> None:
    for _ in range(budget(3, 50)):
        layer = random_layer("delta rule in torch", by_channel=by_channel)
        pairs = zip(layer.run(plain_ops(), [7, 13]), layer.run(cpu_ops(), [64]), strict=True)
        assert all(torch.allclose(one, other, atol=1e-5, rtol=1e-4) for one, other in pairs)


@pytest.mark.parametrize("by_channel", [False, True])
def test_bits_do_not_depend_on_cuts_others_or_threads(by_channel: bool) -> None:
    ops = cpu_ops()
    for _ in range(budget(5, 200)):
        layer = random_layer("bits of the delta rule", by_channel=by_channel)
        ops.set_threads(1)
        whole = layer.run(ops, [64])
        for threads, cuts in ((1, [1]), (2, [16, 3]), (3, [5, 1, 17])):
            ops.set_threads(threads)
            found = layer.run(ops, cuts)
            assert all(torch.equal(one, other) for one, other in zip(found, whole, strict=True))
    ops.set_threads(1)


def test_a_slot_that_does_not_exist_is_refused() -> None:
    layer = random_layer("slots")
    state = torch.zeros(2, layer.taps - 1, layer.channels)
    batch = batch_of([1], [1], [0])
    with pytest.raises(IndexError, match="a slot is outside the cache"):
        cpu_ops().short_conv(layer.x[:1], layer.weight, None, state, batch, silu=False)
