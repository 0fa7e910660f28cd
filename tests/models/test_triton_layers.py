"""Triton's kernels of a layer, in its interpreter, against the same in plain torch."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from torch import Tensor

from penstock_shard.attention.base import LayerSpec, make_paged_pair
from penstock_shard.attention.sdpa import SdpaBackend
from penstock_shard.ops.base import HeadNorm, Rope, RoutingRule
from penstock_shard.ops.experts import route
from penstock_shard.ops.torch_ops import TorchOps

pytest.importorskip("triton")
if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("Triton compiles for a device here", allow_module_level=True)

from penstock_shard.attention.triton import TritonBackend
from penstock_shard.ops.triton_ops import TritonOps

CPU = torch.device("cpu")
F32, BF16, F8 = torch.float32, torch.bfloat16, torch.float8_e4m3fn
TOLERANCE = {F32: 1e-5, BF16: 2e-2}


def both(dtype: torch.dtype) -> tuple[TritonOps, TorchOps]:
    kind: Any = str(dtype).removeprefix("torch.")
    return (
        TritonOps(CPU, dtype, kind, SdpaBackend()),
        TorchOps(CPU, dtype, kind, SdpaBackend()),
    )


def noise(seed: int, *shape: int, dtype: torch.dtype = F32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def close(got: Tensor, want: Tensor, dtype: torch.dtype) -> None:
    assert got.dtype == want.dtype
    bound = TOLERANCE[dtype]
    torch.testing.assert_close(got.float(), want.float(), atol=bound, rtol=bound)


@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize("size", [32, 40])
@pytest.mark.parametrize("with_stream", [False, True])
def test_a_norm_adds_to_the_stream_and_scales(
    with_stream: bool, size: int, dtype: torch.dtype
) -> None:
    ours, plain = both(dtype)
    x, weight = noise(1, 3, size, dtype=dtype), noise(2, size)
    streams = [noise(3, 3, size, dtype=dtype) if with_stream else None for _ in range(2)]
    want = plain.add_rms_norm(x, streams[0], weight, 1e-5, 1.0)
    into = torch.empty_like(x)
    got = ours.add_rms_norm(x, streams[1], weight, 1e-5, 1.0, into)
    assert got is into
    close(got, want, dtype)
    if streams[0] is not None and streams[1] is not None:
        close(streams[1], streams[0], dtype)
    assert torch.equal(ours.add_rms_norm(x, None, weight, 1e-5, 1.0, x), x)


@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize("kind", ["silu", "gelu_tanh"])
def test_a_gate_is_activated_and_multiplied(kind: Any, dtype: torch.dtype) -> None:
    ours, plain = both(dtype)
    gate_up = 4 * noise(1, 2, 2 * 1100, dtype=dtype)
    # Where the exponential of a naive formula overflows.
    gate_up[0, :4] = torch.tensor([200.0, -200.0, 0.0, -90.0])
    close(ours.gated_activation(gate_up, kind), plain.gated_activation(gate_up, kind), dtype)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim", "rotary", "normed", "dtype"),
    [
        (4, 2, 16, 16, False, F32),
        (4, 2, 16, 16, True, F32),
        (3, 1, 20, 8, True, F32),
        (2, 2, 24, 12, False, BF16),
        (4, 1, 16, 16, True, BF16),
    ],
)
def test_heads_are_normed_rotated_and_cached(
    heads: int, kv_heads: int, dim: int, rotary: int, normed: bool, dtype: torch.dtype
) -> None:
    ours, plain = both(dtype)
    layer = LayerSpec(0, heads, kv_heads, dim, dim, 1.0)
    qkv = noise(1, 3, (heads + 2 * kv_heads) * dim, dtype=dtype)
    positions, slots = torch.tensor([0, 9, 30]), torch.tensor([33, 2, 16])
    angles = noise(2, 31, rotary // 2)
    rope = Rope(angles.cos(), angles.sin())
    norm = HeadNorm(noise(3, dim), noise(4, dim), 1e-6, 1.0) if normed else None
    caches = [make_paged_pair(layer, 3, 16, dtype, CPU) for _ in range(2)]
    for part in (*caches[0], *caches[1]):
        part.zero_()
    want = plain.rope_and_cache(qkv, layer, caches[0], positions, slots, rope, norm)
    got = ours.rope_and_cache(qkv, layer, caches[1], positions, slots, rope, norm)
    close(got, want, dtype)
    for theirs, mine in zip(*caches, strict=True):
        close(mine, theirs, dtype)


def test_a_token_without_a_slot_is_written_nowhere() -> None:
    ours, _ = both(F32)
    layer = LayerSpec(0, 2, 1, 8, 8, 1.0)
    cache = make_paged_pair(layer, 2, 16, F32, CPU)
    for part in cache:
        part.zero_()
    rope = Rope(torch.ones(4, 4), torch.zeros(4, 4))
    slots = torch.tensor([-1, 5])
    ours.rope_and_cache(noise(1, 2, 32), layer, cache, torch.tensor([0, 1]), slots, rope)
    TritonBackend().write(cache, noise(2, 1, 1, 8), noise(3, 1, 1, 8), torch.tensor([-1]))
    for part in cache:
        assert part.flatten(0, 1).abs().sum(dim=(1, 2)).nonzero().flatten().tolist() == [5]


def test_values_beyond_an_eight_bit_cache_are_cut() -> None:
    ours, _ = both(F32)
    layer = LayerSpec(0, 1, 1, 8, 8, 1.0)
    rope = Rope(torch.ones(1, 4), torch.zeros(1, 4))
    qkv = torch.cat([torch.zeros(8), 1e4 * noise(1, 8), -1e4 * noise(2, 8)]).view(1, 24)
    one, other = (make_paged_pair(layer, 1, 16, F8, CPU) for _ in range(2))
    slots = torch.tensor([3])
    ours.rope_and_cache(qkv, layer, one, torch.tensor([0]), slots, rope)
    key, value = qkv.view(3, 1, 8)[1:].split(1)
    TritonBackend().write(other, key, value, slots)
    for part in range(2):
        found = one[part][0, 3, 0].float()
        assert torch.equal(found, other[part][0, 3, 0].float())
        assert torch.equal(found, qkv.view(3, 8)[part + 1].clamp(-448, 448).to(F8).float())


@pytest.mark.parametrize("dtype", [F32, BF16])
def test_rows_of_experts_are_summed_in_order(dtype: torch.dtype) -> None:
    ours, plain = both(dtype)
    routing = route(noise(1, 5, 4), RoutingRule(3))
    rows = noise(2, 15, 40, dtype=dtype)
    close(ours.combine(rows, routing), plain.combine(rows, routing), dtype)
    # float32 sums in the same order; on a device they may be fused.
    assert torch.equal(ours.combine(rows.float(), routing), plain.combine(rows.float(), routing))


def test_no_tokens_are_no_work() -> None:
    ours, _ = both(F32)
    assert ours.add_rms_norm(torch.empty(0, 8), None, torch.ones(8), 1e-5, 0.0).shape == (0, 8)
    assert ours.gated_activation(torch.empty(0, 8), "silu").shape == (0, 4)
