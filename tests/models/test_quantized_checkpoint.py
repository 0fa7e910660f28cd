"""Quantized checkpoints against plain ones with the same numbers, and those that are refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from models.driver import Driver, load, make_sequence
from models.quantized_maker import (
    Format,
    awq,
    change_config,
    gptq,
    make_quantized,
    packed,
    scaled,
)
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig

from penstock_shard.checkpoint.quantization_config import QuantizedCheckpoint, scheme_of
from penstock_shard.errors import ModelError

Directory = Callable[[str], Path]
CPU = torch.device("cpu")

FORMATS = {
    "gptq": gptq(),
    "gptq in 8 bits": gptq(bits=8),
    "gptq with one group": gptq(group=-1),
    "gptq in order of activations": gptq(order=True),
    "gptq of version 2": gptq(version="gptq_v2"),
    "awq": awq(),
    "packed integers of 4 bits": packed(),
    "packed integers with zero points": packed(zeros=True),
    "packed integers in order of activations": packed(zeros=True, order=True),
    "packed integers of 8 bits": packed(bits=8, group=None),
    "integers, a scale for each row": scaled(kind="int"),
    "fp8, a scale for each tensor": scaled("tensor"),
    "fp8, a scale for each row": scaled("channel"),
    "fp8 in blocks": scaled("block"),
    "fp8 in blocks, as DeepSeek has them": scaled("block", method="fp8"),
    "fp8 without blocks": scaled("tensor", method="fp8"),
}


@pytest.mark.parametrize("form", FORMATS.values(), ids=FORMATS.keys())
def test_matrices_are_read_as_the_numbers_that_were_written(form: Format, tmp_path: Path) -> None:
    # Blocks of 16 by 24 do not divide it.
    parts, expected = form.make(40, 64, np.random.default_rng(1))
    norm = torch.randn(64)
    tensors = {f"linear.{name}": value.contiguous() for name, value in parts.items()}
    save_file({**tensors, "norm.weight": norm}, tmp_path / "model.safetensors")
    config = AutoConfig.for_model("llama")
    config.quantization_config = form.config
    scheme = scheme_of(config)
    assert scheme is not None
    found = QuantizedCheckpoint(tmp_path, scheme, CPU)
    assert found.shapes == {"linear.weight": (40, 64), "norm.weight": (64,)}
    with found.read(["norm.weight", "linear.weight"]) as (same, matrix):
        assert torch.equal(same, norm)
        assert torch.equal(matrix, expected)


@pytest.mark.parametrize(
    "form",
    [gptq(order=True), awq(), packed(zeros=True), scaled("channel"), scaled("block", method="fp8")],
    ids=["gptq", "awq", "packed", "fp8", "fp8 blocks"],
)
def test_a_quantized_model_says_what_its_plain_twin_says(
    form: Format, model_dir: Directory, tmp_path: Path
) -> None:
    quantized, plain = make_quantized(tmp_path, model_dir("llama"), form)
    assert tokens_of(quantized) == tokens_of(plain)


# Not computed by our decoder; the second has biases, the third experts.
@pytest.mark.parametrize("family", ["olmo", "opt", "deepseek_v2"])
def test_so_it_does_through_the_code_of_transformers(
    family: str, model_dir: Directory, tmp_path: Path
) -> None:
    form = packed(group=8)
    quantized, plain = make_quantized(tmp_path, model_dir(family), form)
    assert tokens_of(quantized) == tokens_of(plain)


def test_experts_are_read_one_by_one(model_dir: Directory, tmp_path: Path) -> None:
    quantized, plain = make_quantized(tmp_path, model_dir("qwen3_moe"), gptq(group=8))
    assert tokens_of(quantized) == tokens_of(plain)


def test_biases_of_zeros_that_no_layer_has_are_left_out(
    model_dir: Directory, tmp_path: Path
) -> None:
    quantized, plain = make_quantized(tmp_path, model_dir("llama"), gptq(zero_bias=True))
    lines: list[str] = []
    assert tokens_of(quantized, lines) == tokens_of(plain)
    assert not any("code of transformers" in line for line in lines)


def test_loading_says_how_weights_are_stored_and_computed(
    model_dir: Directory, tmp_path: Path
) -> None:
    quantized, _ = make_quantized(tmp_path, model_dir("llama"), gptq())
    lines: list[str] = []
    tokens_of(quantized, lines)
    expected = (
        "weights are stored as gptq, 4 bits in groups of 16; each matrix is dequantized and kept "
        "in float32"
    )
    assert expected in lines


@pytest.mark.parametrize(
    ("kind", "strategy"),
    [
        ("int", "channel"),
        ("int", "group"),
        ("float", "channel"),
        ("float", "block"),
        ("float", "tensor"),
    ],
)
def test_the_package_of_the_format_agrees(kind: str, strategy: str, tmp_path: Path) -> None:
    quantization = pytest.importorskip("compressed_tensors.quantization")
    compressors = pytest.importorskip("compressed_tensors.compressors")
    shape = (48, 80)
    values: dict[str, Any] = {
        "num_bits": 4 if kind == "int" else 8,
        "type": kind,
        "strategy": strategy,
    }
    if strategy == "group":
        values["group_size"] = 16
    if strategy == "block":
        values["block_structure"] = [32, 32]
    counts = {"channel": (48, 1), "group": (48, 5), "block": (2, 3), "tensor": (1,)}[strategy]
    scheme = quantization.QuantizationScheme(targets=["Linear"], weights=values)
    generator = torch.Generator().manual_seed(5)
    state = {
        "weight": torch.randn(shape, generator=generator),
        "weight_scale": torch.rand(counts, generator=generator) * 0.2 + 0.1,
    }
    packs = kind == "int"
    name = "PackedQuantizationCompressor" if packs else "FloatQuantizationCompressor"
    compressor = getattr(compressors, name)
    compressed = compressor.compress(state, scheme)
    expected = compressor.decompress(compressed, scheme)["weight"]
    save_file(
        {f"layer.{part}": value.contiguous() for part, value in compressed.items()},
        tmp_path / "model.safetensors",
    )
    stated = quantization.QuantizationConfig(
        config_groups={"group_0": scheme},
        format="pack-quantized" if packs else "float-quantized",
    )
    config = AutoConfig.for_model("llama")
    config.quantization_config = stated.to_dict()
    found_scheme = scheme_of(config)
    assert found_scheme is not None
    checkpoint = QuantizedCheckpoint(tmp_path, found_scheme, CPU)
    with checkpoint.read(["layer.weight"]) as (found,):
        assert torch.allclose(found, expected, rtol=1e-6, atol=0)


@pytest.mark.parametrize(
    ("form", "changes", "reason"),
    [
        (gptq(), {"quant_method": "bitsandbytes"}, "quant_method is 'bitsandbytes'; served are"),
        (gptq(), {"bits": 3}, "bits is 3; served are 4, 8"),
        (gptq(), {"bits": 8}, "scales: has 4 groups for 32 inputs; that is not gptq, 8"),
        (gptq(), {"group_size": 64}, "scales: has 4 groups for 64 inputs; that is not gptq, 4"),
        (gptq(), {"checkpoint_format": "marlin"}, "checkpoint_format is 'marlin'"),
        (gptq(), {"group_size": "wide"}, "quantization_config: cannot be read"),
        (awq(), {"version": "gemv"}, "version is 'gemv'; served are gemm"),
        (awq(), {"bits": 8}, "bits is 8; served are 4"),
        (awq(), {"group_size": 8}, "scales: has 4 groups for 64 inputs"),
        (packed(), {"format": "nvfp4-pack-quantized"}, "format is 'nvfp4-pack-quantized'"),
        (packed(), {"sparsity_config": {"format": "sparse-24-bitmask"}}, "sparsity_config.format"),
        (packed(), {"transform_config": {"config_groups": {"u": {}}}}, "transform_config"),
        (packed(), {"config_groups": None}, "quantization_config: cannot be read"),
        (scaled("block", method="fp8"), {"weight_block_size": [8, 8]}, "weight_scale_inv: has"),
        (scaled("block", method="fp8"), {"expert_dtype": "fp4"}, "expert_dtype is 'fp4'"),
    ],
)
def test_what_a_configuration_asks_for_in_vain_is_named(
    form: Format, changes: dict[str, Any], reason: str, model_dir: Directory, tmp_path: Path
) -> None:
    quantized, _ = make_quantized(tmp_path, model_dir("llama"), form)
    change_config(quantized, {**form.config, **changes})
    with pytest.raises(ModelError, match=reason) as caught:
        load(quantized)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("field", ["type", "strategy", "num_bits"])
def test_a_scheme_of_weights_that_is_not_served_is_named(
    field: str, model_dir: Directory, tmp_path: Path
) -> None:
    form = packed()
    quantized, _ = make_quantized(tmp_path, model_dir("llama"), form)
    stated = json.loads(json.dumps(form.config))
    stated["config_groups"]["group_0"]["weights"][field] = 2
    change_config(quantized, stated)
    with pytest.raises(ModelError, match=rf"config_groups.group_0.weights.{field} is"):
        load(quantized)


@pytest.mark.parametrize(
    ("form", "part", "reason"),
    [
        (gptq(), "qzeros", "qzeros: is missing from the weights"),
        (gptq(), "qweight", "g_idx: the weights lack the rest of this matrix"),
        (gptq(order=True), "g_idx", "g_idx: is missing from the weights"),
        (awq(), "scales", "scales: is missing from the weights"),
        (packed(), "weight_scale", "weight_scale: is missing from the weights"),
        (packed(), "weight_shape", "weight_shape: is missing from the weights"),
        (scaled(), "weight_scale", "weight: is stored as F8_E4M3 without scales; .* is missing"),
    ],
)
def test_a_missing_part_of_a_matrix_is_named(
    form: Format, part: str, reason: str, model_dir: Directory, tmp_path: Path
) -> None:
    quantized, _ = make_quantized(tmp_path, model_dir("llama"), form)
    change_tensors(quantized, lambda tensors: tensors.pop(f"{PLACE}.{part}"))
    with pytest.raises(ModelError, match=f"{PLACE}.{reason}"):
        load(quantized)


@pytest.mark.parametrize(
    ("form", "part", "value", "reason"),
    [
        (gptq(), "g_idx", torch.full((32,), 7, dtype=torch.int32), "has the group 7 for an input"),
        (gptq(), "qzeros", torch.zeros(2, 5, dtype=torch.int32), r"has the shape \[2, 5\]"),
        (gptq(), "qweight", torch.zeros(4, 32), "is packed in torch.float32, not in int32"),
        (scaled(), "weight_scale", torch.ones(5, 1), r"has the shape \[5, 1\], which does not fit"),
        (packed(), "weight_packed", torch.zeros(32, 3, dtype=torch.int32), "which holds no matrix"),
    ],
)
def test_a_part_that_does_not_fit_is_named(
    form: Format, part: str, value: Tensor, reason: str, model_dir: Directory, tmp_path: Path
) -> None:
    quantized, _ = make_quantized(tmp_path, model_dir("llama"), form)
    change_tensors(quantized, lambda tensors: tensors.update({f"{PLACE}.{part}": value}))
    with pytest.raises(ModelError, match=reason) as caught:
        load(quantized)
    assert PLACE in str(caught.value)


PLACE = "model.layers.1.self_attn.q_proj"


def change_tensors(directory: Path, change: Callable[[dict[str, Tensor]], object]) -> None:
    tensors = load_file(directory / "model.safetensors")
    change(tensors)
    save_file(tensors, directory / "model.safetensors", {"format": "pt"})


def tokens_of(directory: Path, lines: list[str] | None = None) -> list[int | None]:
    """Twelve greedy tokens after a fixed prompt."""
    if lines is not None:
        from penstock_shard.config import ShardConfig
        from penstock_shard.model_loader.load_model_runner import load_model_runner

        config = ShardConfig(device="cpu", dtype="float32", threads=1, kv_blocks=64)
        runner = load_model_runner(config, directory, progress=lines.append)
    else:
        runner = load(directory)
    driver = Driver(runner)
    sequence = make_sequence(list(range(9, 30)))
    tokens = []
    count = 21
    for _ in range(12):
        (result,) = driver.step([(sequence, count)])
        tokens.append(result.token_id)
        count = 1
    return tokens
