"""Norms and activations that round to fp8 in their own launch, in Triton's interpreter: the bits of
those that do not, and of the rounding that would follow.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from model_maker import make_model
from support.budget import budget
from torch import Tensor

from penstock_shard.ops.quantized import RoundedTensor, round_activations, round_in_torch

pytest.importorskip("triton")
if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("Triton compiles for a device here", allow_module_level=True)

from models.test_triton_decoder import VOCABULARY, generated, make_decoder

from penstock_shard.attention.triton import TritonBackend
from penstock_shard.kernels import triton_layers
from penstock_shard.kernels.triton_quantize import Fp8Rows, empty_fp8_rows, round_rows
from penstock_shard.ops.triton_ops import TritonOps

CPU = torch.device("cpu")
BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
DTYPES = (BF16, F32, F16)[: budget(1, 3)]
# Those that change norms of theirs in place, or have experts or states; the interpreter takes
# seconds for each.
FAMILIES = ("gemma2", "mixtral", "llama", "deepseek_v3", "qwen3_next")[: budget(2, 5)]


class RoundsApart(TritonOps):
    """Ops whose norms and activations leave rounding to the products."""

    def _fp8_rows(self, tokens: int, columns: int, out: Tensor | None) -> None:
        return None


def fp8_ops(kind: type[TritonOps] = TritonOps, dtype: torch.dtype = BF16) -> TritonOps:
    return kind(CPU, dtype, "fp8", TritonBackend())


def bits(x: Tensor) -> Tensor:
    return x.view({1: torch.uint8, 2: torch.int16, 4: torch.int32}[x.itemsize])


def same(found: Tensor, expected: Tensor) -> None:
    assert found.dtype == expected.dtype
    assert torch.equal(bits(found), bits(expected))


def rows(size: int, dtype: torch.dtype, seed: int) -> Tensor:
    """Return 12 rows of all magnitudes: among them one of zeros, one of a single value, and some
    with infinities or NaN.
    """
    generator = torch.Generator().manual_seed(seed)
    wide = torch.randn(12, size, generator=generator)
    wide *= torch.logspace(-44, 38, 12).unsqueeze(1)
    wide[5] = torch.randn(size, generator=generator)
    wide[6] = 0
    wide[7] = -3.25
    wide[8, size // 2] = torch.inf
    wide[9, -1], wide[9, 0] = -torch.inf, torch.inf
    wide[10, size // 3] = torch.nan
    return wide.to(dtype)


def same_as_rounded_apart(found: Tensor, rounded: Fp8Rows, expected: Tensor) -> None:
    same(found, expected)
    for part, apart in zip(rounded, round_rows(expected), strict=True):
        same(part, apart)
    values, scales = round_in_torch(expected)
    assert torch.equal(rounded[1].isnan(), scales.isnan())
    # Under a scale that is no number no value is one.
    finite = scales.isfinite().flatten()
    same(rounded[0][finite], values[finite])
    same(rounded[1][finite], scales[finite])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [1, 33, 272, 1000, 4096])
@pytest.mark.parametrize("with_stream", [False, True])
def test_a_norm_rounds_as_a_launch_after_it(
    with_stream: bool, size: int, dtype: torch.dtype
) -> None:
    x, weight = rows(size, dtype, 1), torch.randn(size, generator=torch.Generator().manual_seed(2))
    for eps, offset in ((1e-6, 0.0), (0.0, 1.0)):
        streams = [rows(size, dtype, 3).flip(0) if with_stream else None for _ in range(2)]
        want = triton_layers.add_rms_norm(x, streams[0], weight, eps, offset)
        rounded = empty_fp8_rows(len(x), size, CPU)
        got = triton_layers.add_rms_norm(x, streams[1], weight, eps, offset, rounded=rounded)
        same_as_rounded_apart(got, rounded, want)
        if streams[0] is not None and streams[1] is not None:
            same(streams[1], streams[0])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("size", "block"), [(1, 8192), (33, 8192), (512, 256), (1000, 256)])
@pytest.mark.parametrize("gelu", [False, True])
def test_an_activation_rounds_as_a_launch_after_it(
    gelu: bool, size: int, block: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A row is computed in one piece, or in several."""
    monkeypatch.setattr(triton_layers, "_ROUNDED_BLOCK", block)
    gate_up = rows(2 * size, dtype, 1)
    want = triton_layers.gated_activation(gate_up, gelu=gelu)
    rounded = empty_fp8_rows(len(gate_up), size, CPU)
    got = triton_layers.gated_activation(gate_up, gelu=gelu, rounded=rounded)
    same_as_rounded_apart(got, rounded, want)


def test_any_value_of_bfloat16_is_rounded_as_plain_torch_does() -> None:
    every = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int16).view(BF16)
    finite = every[every.isfinite()]
    # Rows of few magnitudes, so that no value is rounded to 0 for its neighbours' sake.
    x = finite[finite.abs().float().argsort()].view(-1, 256)
    for found, expected in zip(round_rows(x), round_in_torch(x), strict=True):
        same(found, expected)


def test_no_tokens_are_no_work() -> None:
    ops = fp8_ops()
    for found in (
        ops.add_rms_norm(torch.empty(0, 32, dtype=BF16), None, torch.ones(32), 1e-5, 0.0),
        ops.gated_activation(torch.empty(0, 64, dtype=BF16), "silu"),
    ):
        values, scales = round_activations(found)
        assert (found.shape, values.shape, scales.shape) == ((0, 32), (0, 32), (0, 1))


def test_a_product_takes_what_its_input_carries(monkeypatch: pytest.MonkeyPatch) -> None:
    ops, x = fp8_ops(), rows(64, BF16, 1)[4:8]
    matrix = ops.pack([torch.randn(32, 64)])
    normed = ops.add_rms_norm(x, None, torch.ones(64), 1e-5, 0.0)
    active = ops.gated_activation(torch.cat([x, x], dim=1), "gelu_tanh")
    apart = [matrix.linear(each.clone()) for each in (normed, active)]

    def round_again(x: Tensor) -> Fp8Rows:
        raise AssertionError("rounded again")

    monkeypatch.setattr("penstock_shard.ops.quantized.round_in_torch", round_again)
    for each, expected in zip((normed, active), apart, strict=True):
        same(matrix.linear(each), expected)


def test_what_torch_computes_carries_nothing() -> None:
    ops = fp8_ops()
    normed = ops.add_rms_norm(rows(32, BF16, 1), None, torch.ones(32), 1e-5, 0.0)
    assert isinstance(normed, RoundedTensor)
    assert normed.contiguous() is normed
    for made in (normed[2:], normed[[1, 0]], normed * 1, normed.view(-1, 32), normed.clone()):
        assert type(made) is Tensor


@pytest.mark.parametrize("kind", ["float32", "bfloat16", "int4"])
def test_only_fp8_is_carried(kind: Any) -> None:
    ops = TritonOps(CPU, BF16, kind, TritonBackend())
    x = rows(32, BF16, 1)
    assert type(ops.add_rms_norm(x, None, torch.ones(32), 1e-5, 0.0)) is Tensor
    assert type(ops.gated_activation(x, "silu")) is Tensor


def test_nothing_is_carried_that_no_product_takes_or_that_may_be_changed() -> None:
    ops, x = fp8_ops(), rows(32, BF16, 1)
    assert type(ops.add_rms_norm(x, None, torch.ones(32), 1e-5, 0.0, x)) is Tensor
    assert type(ops.add_rms_norm(x[:, :24], None, torch.ones(24), 1e-5, 0.0)) is Tensor
    assert type(ops.gated_activation(x[:, :24], "silu")) is Tensor
    assert type(ops.gated_activation(x, "sigmoid")) is Tensor


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_are_those_of_rounding_apart(family: str, tmp_path: Path) -> None:
    """Equal logits show that no tensor that carries its rounding is changed before products."""
    layers = 4 if family == "qwen3_next" else 1
    directory = make_model(tmp_path, family, num_hidden_layers=layers, vocab_size=VOCABULARY)
    tokens, logits = generated(make_decoder(directory, fp8_ops(dtype=F32)), 5)
    apart, expected = generated(make_decoder(directory, fp8_ops(RoundsApart, F32)), 5)
    assert tokens == apart
    same(logits, expected)
