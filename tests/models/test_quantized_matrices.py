"""Matrices in fp8 and int4, keys and values in fp8, and who gets them."""

from __future__ import annotations

import os
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from models.driver import load
from models.model_steps import own_logits
from models.quantized_maker import gptq, make_quantized, scaled
from torch import Tensor, nn
from torch.nn import functional
from torch.torch_version import TorchVersion
from transformers import AutoConfig, AutoModelForCausalLM

from penstock_shard.attention.base import LayerSpec, make_paged_pair, write_paged_pair
from penstock_shard.attention.sdpa import SdpaBackend
from penstock_shard.config import ShardConfig
from penstock_shard.device import triton_support
from penstock_shard.errors import ModelError
from penstock_shard.model_loader.choices import choose_ops as choose
from penstock_shard.model_loader.choices.choose_kv_cache_dtype import choose_kv_cache_dtype
from penstock_shard.model_loader.choices.choose_ops import choose_ops, choose_weights
from penstock_shard.ops import quantized, torch_ops
from penstock_shard.ops.quantized import (
    FP8,
    FP8_MAX,
    Fp8Experts,
    Fp8Matrix,
    Int4Matrix,
    captures_fp8,
    round_activations,
    round_weight,
)
from penstock_shard.ops.torch_ops import DenseMatrix, TorchOps
from penstock_shard.selfcheck.random_steps import random_steps
from penstock_shard.worker.model_runner import ModelRunner

Directory = Callable[[str], Path]
CPU = torch.device("cpu")
CUDA = torch.device("cuda", 0)


@pytest.fixture(autouse=True)
def seeded() -> None:
    seed = int(os.environ.get("PENSTOCK_SEED") or torch.seed() % 2**31)
    print(f"PENSTOCK_SEED={seed}")
    torch.manual_seed(seed)


def fp8_ops(dtype: torch.dtype = torch.float32) -> TorchOps:
    return TorchOps(CPU, dtype, "fp8", SdpaBackend())


def test_an_fp8_product_is_off_by_no_more_than_rounding_explains() -> None:
    x, weight, bias = torch.randn(7, 96), torch.randn(64, 96) * 0.1, torch.randn(64)
    # Scales differ by token and by row.
    x *= torch.logspace(-3, 3, 7).unsqueeze(1)
    weight *= torch.logspace(-2, 2, 64).unsqueeze(1)
    found = fp8_ops().pack([weight[:16], weight[16:]]).linear(x, bias)
    exact = x.double() @ weight.double().T
    # Four bits of each factor, and what is below a 2^-9 of the largest times 448.
    terms = x.double().abs() @ weight.double().abs().T
    low = x.abs().amax(1, keepdim=True).double() * weight.abs().sum(1).double()
    low = low + x.abs().sum(1, keepdim=True).double() * weight.abs().amax(1).double()
    bound = terms * (2 * 2**-4 + 2**-8) + low * 2**-10 / FP8_MAX * 1.1 + 1e-6 * terms
    assert ((found - bias).double() - exact).abs().le(bound + 1e-6 * bias.abs().double()).all()
    # And it is rounded: no product of float32 in disguise.
    assert (found - bias - exact).norm() > 0.01 * exact.norm()


def test_the_product_is_that_of_the_rounded_numbers() -> None:
    x, weight = torch.randn(5, 64), torch.randn(48, 64)
    values, scales = round_activations(x)
    matrix = Fp8Matrix([weight], CPU)
    expected = (values.double() * scales) @ (matrix.values.double() * matrix.scales.T).T
    assert torch.allclose(matrix.linear(x).double(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("stored", [torch.bfloat16, torch.float32])
def test_rows_that_are_fp8_stay_as_they_are(stored: torch.dtype) -> None:
    values = (torch.randn(300, 200) * 100).clamp(-FP8_MAX, FP8_MAX).to(FP8)
    values[:, 3] = FP8_MAX
    scales = (torch.rand(300) * 1e-2 + 1e-6).to(stored).float()
    found, found_scales = round_weight(values.float() * scales.unsqueeze(1))
    assert torch.equal(found.view(torch.uint8), values.view(torch.uint8))
    assert torch.equal(found_scales, scales)


def test_so_do_rows_whose_largest_value_is_any_other() -> None:
    largest = torch.tensor([16.0, 18.0, 10.0, 11.0, 48.0, 13.0, 0.875, 30.0, 2**-8, 0.0])
    values = (torch.rand(10, 150) * 2 - 1) * largest.unsqueeze(1)
    values[:, 0] = largest
    weight = values.to(FP8).float() * (torch.rand(10, 1) + 0.5)
    found, scales = round_weight(weight)
    assert torch.equal(found.float() * scales.unsqueeze(1), weight)


def test_other_rows_use_the_whole_range() -> None:
    weight = torch.randn(40, 100)
    values, scales = round_weight(weight)
    assert (values.float().abs().amax(1) == FP8_MAX).all()
    assert torch.equal(scales, weight.abs().amax(1) / FP8_MAX)


def test_tokens_of_zeros_and_of_huge_values_are_rounded_too() -> None:
    x = torch.stack([torch.zeros(32), torch.full((32,), 3e38), torch.full((32,), 1e-42)])
    values, scales = round_activations(x)
    assert torch.isfinite(values.float()).all()
    found = values.float() * scales
    assert torch.equal(found[0], x[0])
    assert torch.allclose(found[1], x[1], rtol=2**-4)
    assert (found[2] <= x[2]).all()


def test_the_kernel_rounds_as_plain_torch_does(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    if os.environ.get("TRITON_INTERPRET") != "1":
        pytest.skip("TRITON_INTERPRET is not 1")
    from penstock_shard.kernels.triton_quantize import round_rows

    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        # Numbers of fp8 and a factor: the interpreter casts wrongly what it has to round.
        x = (torch.randn(5, 5000) * 50).to(FP8).float().to(dtype)
        x[:, 0] = FP8_MAX
        x *= torch.tensor([[1.0], [0.5], [8.0], [0.25], [0.0]], dtype=dtype)
        found, expected = round_rows(x), round_activations(x)
        assert torch.equal(found[1], expected[1])
        assert torch.equal(found[0].float(), expected[0].float())
    assert round_rows(torch.empty(0, 32))[0].shape == (0, 32)
    # Under a scale that is no number no value is one.
    x = torch.randn(3, 40)
    x[1, 7] = torch.nan
    assert round_rows(x)[1].isnan().flatten().tolist() == [False, True, False]


def test_activations_are_rounded_in_torch_where_kernels_were_found_wrong(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(triton_support, "is_installed", lambda: True)
    monkeypatch.setattr(quantized, "_rounding_kernel", lambda: lambda x: ("a", "kernel"))
    x: Any = types.SimpleNamespace(device=CUDA)
    in_torch: Any = ("plain", "torch")
    monkeypatch.setattr(quantized, "round_in_torch", lambda x: in_torch)
    assert round_activations(x) != in_torch
    try:
        triton_support.remember("cuda", "they are wrong")
        assert round_activations(x) == in_torch
    finally:
        triton_support.remember("cuda", None)


def test_what_has_no_room_for_scales_stays_dense() -> None:
    ops = fp8_ops()
    assert isinstance(ops.pack([torch.randn(32, 48)]), Fp8Matrix)
    assert isinstance(ops.pack([torch.randn(8, 48), torch.randn(8, 48)]), Fp8Matrix)
    for shape in ((24, 48), (32, 40)):
        assert isinstance(ops.pack([torch.randn(shape)]), DenseMatrix)
    assert isinstance(ops.pack([torch.randn(32, 48)], exact=True), DenseMatrix)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_weight_that_is_no_number_is_refused(value: float) -> None:
    weight = torch.randn(32, 32)
    weight[3, 4] = value
    with pytest.raises(ValueError, match="has values that are no numbers"):
        fp8_ops().pack([weight])


def test_the_library_gets_what_it_demands(monkeypatch: pytest.MonkeyPatch) -> None:
    library: Any = torch._scaled_mm
    calls: list[tuple[int, ...]] = []

    def scaled_mm(
        a: Tensor,
        b: Tensor,
        *,
        scale_a: Tensor,
        scale_b: Tensor,
        bias: Tensor | None = None,
        out_dtype: torch.dtype | None = None,
        use_fast_accum: bool = False,
    ) -> Tensor:
        """Compute `torch._scaled_mm` with scales for rows, after its own checks and those of an
        H100.
        """
        library(
            *(part.to("meta") for part in (a, b, scale_a, scale_b)),
            bias=None if bias is None else bias.to("meta"),
            out_dtype=out_dtype,
            use_fast_accum=use_fast_accum,
        )
        assert a.dtype == b.dtype == FP8
        assert a.is_contiguous()
        assert b.stride(0) == 1
        assert a.shape[1] % 16 == b.shape[0] % 16 == b.shape[1] % 16 == 0
        assert scale_a.shape == (len(a), 1)
        assert scale_b.shape == (1, b.shape[1])
        assert scale_a.dtype == scale_b.dtype == torch.float32
        assert scale_a.is_contiguous()
        assert scale_b.is_contiguous()
        assert out_dtype is torch.bfloat16
        assert bias is None or bias.dtype is out_dtype
        assert not use_fast_accum
        calls.append(tuple(a.shape))
        product = (a.float() @ b.float()) * scale_a * scale_b
        return (product if bias is None else product + bias).to(out_dtype)

    weight = torch.randn(48, 32)
    emulated = Fp8Matrix([weight], CPU)
    monkeypatch.setattr(quantized, "multiplies_fp8", lambda device: True)
    monkeypatch.setattr(torch, "_scaled_mm", scaled_mm)
    matrix = Fp8Matrix([weight], CPU)
    for bias in (None, torch.randn(48, dtype=torch.bfloat16)):
        x = torch.randn(3, 32, dtype=torch.bfloat16)
        assert torch.equal(matrix.linear(x, bias), emulated.linear(x, bias))
    # The rows are a view, like those that give logits.
    matrix.linear(torch.randn(6, 32, dtype=torch.bfloat16)[::2])
    assert calls == [(3, 32)] * 3


def test_experts_are_one_product_where_the_library_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    library: Any = torch._scaled_grouped_mm
    calls = []

    def scaled_grouped_mm(
        a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, **settings: Any
    ) -> Tensor:
        """Check the arguments by torch's own description, then multiply expert by expert."""
        shapes = [part.to("meta") for part in (a, b, scale_a, scale_b)]
        offs = settings.pop("offs")
        found = library(*shapes, offs=offs.to("meta"), **settings)
        assert settings == {"out_dtype": torch.bfloat16, "use_fast_accum": False}
        product = torch.zeros(found.shape, dtype=found.dtype)
        start = 0
        for expert, end in enumerate(offs.tolist()):
            rows = slice(start, end)
            part = (a[rows].float() @ b[expert].float()) * scale_a[rows, None] * scale_b[expert]
            product[rows] = part.to(torch.bfloat16)
            start = end
        calls.append(tuple(a.shape))
        return product

    ops = fp8_ops(torch.bfloat16)
    weights = [[torch.randn(16, 48), torch.randn(16, 48)] for _ in range(4)]
    one_by_one = ops.pack_experts(weights, 4)
    monkeypatch.setattr(torch_ops, "multiplies_fp8_groups", lambda device: True)
    monkeypatch.setattr(torch, "_scaled_grouped_mm", scaled_grouped_mm)
    stacked = ops.pack_experts(iter(weights), 4)
    assert isinstance(stacked, Fp8Experts)
    assert (stacked.out_features, stacked.in_features) == (32, 48)
    x = torch.randn(9, 48, dtype=torch.bfloat16)
    # The third expert has no rows.
    offsets = torch.tensor([0, 2, 7, 7, 9], dtype=torch.int32)
    assert torch.equal(stacked.grouped(x, offsets), one_by_one.grouped(x, offsets))
    assert calls == [(9, 48)]
    odd = [[torch.randn(24, 48)] for _ in range(4)]
    assert not isinstance(ops.pack_experts(odd, 4), Fp8Experts)


# The last by its own code, that before with experts. A sum that ends at the middle between two
# numbers of fp8, but for its last bit, may be rounded either way: that shows in all later tokens.
@pytest.mark.parametrize("family", ["llama", "qwen2", "gemma2", "phi3", "mixtral", "opt"])
def test_logits_in_fp8_are_those_of_transformers_with_every_product_rounded(
    family: str, model_dir: Directory
) -> None:
    directory = model_dir(family)
    runner = load(directory, quantization="fp8")
    assert (runner.info.dtype, runner.info.attention_backend.split()[0]) == ("fp8", "sdpa")
    error = root_mean_square_error(runner, directory)
    near = root_mean_square_error(runner, directory, rounded_logits)
    print(f"{error:.3f} from float32, {near:.4f} from the rounded")
    assert near < 0.1 * error


def test_an_fp8_checkpoint_loses_nothing_in_fp8(model_dir: Directory, tmp_path: Path) -> None:
    stored, plain = make_quantized(tmp_path, model_dir("llama"), scaled("channel"))
    matrices = fp8_matrices(load(stored, quantization="fp8"))
    assert len(matrices) == 3 * 4
    with torch.inference_mode():
        wanted = dict(load_plain(plain))
    for index, layer in enumerate(range(3)):
        found = matrices[4 * index]
        parts = [wanted[f"model.layers.{layer}.self_attn.{name}_proj.weight"] for name in "qkv"]
        assert torch.equal(found.values.float() * found.scales.T, torch.cat(parts))


def test_head_and_embedding_stay_dense(model_dir: Directory) -> None:
    model: Any = load(model_dir("llama"), quantization="fp8").model
    assert isinstance(model._weights.head.matrix, DenseMatrix)


def test_the_cpu_kernels_have_no_fp8(model_dir: Directory) -> None:
    with pytest.raises(ModelError, match="--attention-backend cpu"):
        load(model_dir("llama"), quantization="fp8", attention_backend="cpu")


@pytest.mark.parametrize("named", ["int8", "int4"])
def test_integers_on_a_cpu_are_of_the_kernels_alone(named: str, model_dir: Directory) -> None:
    with pytest.raises(ModelError, match=f"--quantization {named}: only the cpu kernels") as caught:
        load(model_dir("llama"), quantization=named, attention_backend="sdpa")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("flags", "capability", "expected"),
    [
        ({}, (9, 0), "fp8"),
        ({}, (8, 9), "fp8"),
        ({}, (8, 6), None),
        ({"dtype": "bfloat16"}, (9, 0), "fp8"),
        ({"dtype": "float16"}, (9, 0), None),
        ({"exact": True}, (9, 0), None),
        ({"quantization": "fp8"}, (8, 9), "fp8"),
        ({"quantization": "fp8"}, (8, 6), "--quantization fp8: needs a GPU of compute capability"),
        ({"quantization": "fp8", "dtype": "float16"}, (9, 0), "bfloat16 with it, not --dtype"),
        ({"quantization": "fp8", "exact": True}, (9, 0), "its products are not exact"),
        (
            {"quantization": "int4"},
            (8, 0),
            "--quantization int4: needs torchao; install penstock with the extra",
        ),
        (
            {"quantization": "int4"},
            (7, 5),
            r"int4: needs a GPU of compute capability 8\.0 or later",
        ),
        ({"quantization": "int4", "exact": True}, (9, 0), "its products are not exact"),
    ],
)
def test_an_fp8_checkpoint_is_computed_in_fp8_where_the_gpu_has_it(
    flags: dict[str, Any],
    capability: tuple[int, int],
    expected: str | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(choose, "has_torchao", lambda: False)
    config = AutoConfig.for_model("llama")
    config.quantization_config = scaled("channel").config
    if expected is not None and " " in expected:
        with pytest.raises(ModelError, match=expected):
            choose_weights(ShardConfig(**flags), config, CUDA)
    else:
        assert choose_weights(ShardConfig(**flags), config, CUDA) == expected


@pytest.mark.parametrize(
    ("capability", "release", "captures"),
    [
        ((8, 9), "2.11.0+cu130", False),
        ((8, 9), "2.12.0+cu130", True),
        ((8, 9), "2.13.0", True),
        ((9, 0), "2.11.0+cu130", True),
        ((12, 0), "2.11.0+cu130", True),
    ],
)
def test_products_in_fp8_are_recorded_where_torch_launches_them_on_any_stream(
    capability: tuple[int, int], release: str, captures: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch, "__version__", TorchVersion(release))
    assert captures_fp8(CUDA) is captures


def test_other_checkpoints_are_not_rounded_unless_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    config = AutoConfig.for_model("llama")
    assert choose_weights(ShardConfig(), config, CUDA) is None
    config.quantization_config = gptq().config
    assert choose_weights(ShardConfig(), config, CUDA) is None
    assert choose_weights(ShardConfig(quantization="fp8"), config, CUDA) == "fp8"
    config.quantization_config = {"quant_method": "quanto"}
    with pytest.raises(ModelError, match="quant_method is 'quanto'; served are compressed-tensors"):
        choose_weights(ShardConfig(), config, CPU)


def test_emulation_is_said() -> None:
    lines: list[str] = []
    config = ShardConfig(device="cpu", quantization="fp8")
    ops = choose_ops(config, AutoConfig.for_model("llama"), CPU, lines.append)
    assert ops.weights == "fp8"
    assert lines == ["products in fp8 are emulated on cpu: for trying out, they are slow"]


class StandInWeight:
    """A stand-in for what torchao puts in the place of a weight: the numbers to which it would
    round.
    """

    def __init__(self, weight: Tensor) -> None:
        groups = weight.float().unflatten(1, (-1, 128))
        low, high = groups.amin(2, keepdim=True), groups.amax(2, keepdim=True)
        step = (high - low) / 15
        self.rounded = (((groups - low) / step).round() * step + low).flatten(1)

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        assert function is nn.functional.linear
        x, weight, *rest = args
        bias = rest[0] if rest else None
        return function(x, weight.rounded.to(x.dtype), bias)


def test_torchao_gets_a_matrix_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    def config(
        *, group_size: int, int4_packing_format: str, set_inductor_config: bool
    ) -> dict[str, object]:
        assert not set_inductor_config
        return {"group": group_size, "packing": int4_packing_format}

    def quantize_(module: nn.Module, config: dict[str, object]) -> None:
        assert config == {"group": 128, "packing": "tile_packed_to_4d"}
        weight: Any = module.weight
        assert weight.dtype is torch.bfloat16
        del module.weight
        object.__setattr__(module, "weight", StandInWeight(weight.data))

    library: Any = types.ModuleType("torchao.quantization")
    library.Int4WeightOnlyConfig, library.quantize_ = config, quantize_
    monkeypatch.setitem(sys.modules, "torchao", types.ModuleType("torchao"))
    monkeypatch.setitem(sys.modules, "torchao.quantization", library)
    ops = TorchOps(CPU, torch.bfloat16, "int4", SdpaBackend())
    weight = torch.randn(40, 256)
    matrix = ops.pack([weight[:24], weight[24:]])
    assert isinstance(matrix, Int4Matrix)
    assert matrix.nbytes == 40 * 256 // 2 + 40 * 2 * 2 * 2
    x = torch.randn(3, 256, dtype=torch.bfloat16)
    exact = x.float() @ weight.T
    error = (matrix.linear(x, None).float() - exact).norm() / exact.norm()
    assert 0.01 < error < 0.15
    # A row of groups of 128 needs that many inputs.
    assert isinstance(ops.pack([torch.randn(40, 192)]), DenseMatrix)


def test_keys_and_values_in_fp8_are_near_those_of_float32(model_dir: Directory) -> None:
    directory = model_dir("llama")
    flags = {"attention_backend": "sdpa", "kv_cache_dtype": "fp8"}
    runner = load(directory, **flags)
    assert runner.info.kv_dtype == "float8_e4m3fn"
    assert 0.001 < root_mean_square_error(runner, directory) < 0.15


def test_what_a_cache_in_fp8_cannot_hold_becomes_its_largest_value() -> None:
    spec = LayerSpec(0, 2, 1, 4, 4, 1.0)
    cache = make_paged_pair(spec, 2, 16, FP8, CPU)
    key, value = torch.full((1, 1, 4), 1e4), torch.tensor([[[-1e4, 447.0, -0.3, 0.0]]])
    write_paged_pair(cache, key, value, torch.tensor([17]))
    assert cache[0][1, 1].float().tolist() == [[448.0] * 4]
    assert cache[1][1, 1].float().tolist() == [[-448.0, 448.0, -0.3125, 0.0]]


def test_backends_that_keep_no_fp8_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    config = ShardConfig(kv_cache_dtype="fp8", attention_backend="flash_attn")
    with pytest.raises(ModelError, match="attention backend flash_attn keeps keys and values as"):
        choose_kv_cache_dtype(config, fp8_ops(torch.bfloat16))
    config = ShardConfig(kv_cache_dtype="fp8")
    assert choose_kv_cache_dtype(config, fp8_ops(torch.bfloat16)) is FP8
    ops = TorchOps(CUDA, torch.bfloat16, "bfloat16", SdpaBackend())
    for capability, served in (((8, 0), False), ((8, 9), True)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device, c=capability: c)
        if served:
            assert choose_kv_cache_dtype(config, ops) is FP8
        else:
            with pytest.raises(ModelError, match=r"fp8: needs a GPU of compute capability 8\.9"):
                choose_kv_cache_dtype(config, ops)


def test_the_cpu_kernels_keep_no_fp8(model_dir: Directory) -> None:
    with pytest.raises(ModelError, match="--kv-cache-dtype fp8: the cpu kernels keep keys and"):
        load(model_dir("llama"), kv_cache_dtype="fp8")


def rounded_logits(directory: Path, sequences: list[list[int]]) -> Tensor:
    """Return the logits that transformers computes with the numbers that products in fp8 have."""
    model: Any = AutoModelForCausalLM.from_pretrained(
        directory, dtype=torch.float32, attn_implementation="eager"
    )
    model.set_experts_implementation("eager")
    linear, places = functional.linear, set()
    for name, parameter in model.named_parameters():
        is_kept = parameter is model.lm_head.weight or name.endswith(("mlp.gate.weight", "norm"))
        if parameter.dim() < 2 or is_kept or "embed" in name:
            continue
        for matrix in parameter.data.view(-1, *parameter.shape[-2:]):
            matrix.copy_(dense(*round_weight(matrix)))
            places.add(matrix.data_ptr())

    def rounded_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        return linear(rounded(x) if weight.data_ptr() in places else x, weight, bias)

    with torch.inference_mode(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(functional, "linear", rounded_linear)
        return torch.cat([model(torch.tensor([ids])).logits[0] for ids in sequences])


def rounded(x: Tensor) -> Tensor:
    values, scales = round_activations(x.flatten(0, -2))
    return (values.float() * scales).view_as(x)


def dense(values: Tensor, scales: Tensor) -> Tensor:
    return values.float() * scales.unsqueeze(1)


def root_mean_square_error(
    runner: ModelRunner, directory: Path, reference: Callable[..., Tensor] = own_logits
) -> float:
    """Return the error of logits in chunks and decodes, in deviations of the reference's logits."""
    info = runner.info
    cached = {"float32": torch.float32, "float8_e4m3fn": FP8}[info.kv_dtype]
    with random_steps(runner.model, info.vocab_size, info.block_size, 16, cached) as steps:
        sequence = steps.sequence(60)
        parts = [steps.run([(sequence, *span)]) for span in ((0, 40), (40, 1), (41, 19))]
    expected = reference(directory, [sequence.token_ids])
    error = (torch.cat(parts) - expected) / expected.std()
    return float(error.square().mean().sqrt())


def fp8_matrices(runner: ModelRunner) -> list[Fp8Matrix]:
    """Return the fp8 matrices of a decoder, layer by layer, from query to down projection."""
    model: Any = runner.model
    found = []
    for layer in model._weights.layers:
        mlp = layer.feed_forward
        found += [
            layer.attention.qkv.matrix,
            layer.output.matrix,
            mlp.gate_up.matrix,
            mlp.down.matrix,
        ]
    return [matrix for matrix in found if isinstance(matrix, Fp8Matrix)]


def load_plain(directory: Path) -> dict[str, Tensor]:
    from safetensors.torch import load_file

    return load_file(directory / "model.safetensors")
