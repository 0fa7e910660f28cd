"""Weights as the codes that a checkpoint stores: read without loss, and multiplied as they are."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from model_maker import make_model
from models.driver import load
from models.gguf_maker import HALVES, make_gguf, random_blocks
from models.model_steps import cut_logits, own_logits
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
from support.budget import budget, in_soak

from penstock_shard.checkpoint.codes.gguf_blocks import read_codes
from penstock_shard.checkpoint.gguf_files import unfold
from penstock_shard.config import ShardConfig
from penstock_shard.errors import ModelError
from penstock_shard.model_loader.load_model_runner import load_model_runner
from penstock_shard.models.decoder.decoder import Decoder
from penstock_shard.worker.model_runner import ModelRunner

Directory = Callable[[str], Path]
# Root mean square of what activations in int8 change, in deviations of the logits; it is half of
# what weights in int8 do besides. The exact bound of a product is in test_cpu_kernels.py: here
# codes that are read wrongly show, which change all.
_BOUND = 0.2
# Of each form of codes: whether the kernels' results depend on the batch is asked of some.
_CHECK = ("short_check", "whole_check")[budget(0, 1)]
# Types of a file: without and with minimums, in large blocks without and with them. The others
# have codes of another width.
_UNLIKE = {"Q4_0", "Q5_1", "Q6_K", "Q4_K"}
FORMATS: dict[str, Format] = {
    "gptq": gptq(),
    "gptq of 8 bits": gptq(bits=8, group=32),
    "gptq in an order of its own": gptq(group=16, order=True),
    "awq": awq(),
    "packed": packed(),
    "packed with zeros": packed(zeros=True),
    "packed in an order of its own": packed(order=True),
    "packed by row": packed(bits=8, group=None),
    "int8 by row": scaled(kind="int"),
    "int8 in blocks": scaled("block", kind="int", block=(16, 16)),
}


def seed() -> int:
    chosen = int(os.environ.get("PENSTOCK_SEED") or torch.seed() % 2**31)
    print(f"PENSTOCK_SEED={chosen}")
    return chosen


def error_of(directory: Path) -> tuple[ModelRunner, float]:
    """A model in codes, and how far its logits are from those of its numbers in float32."""
    runner = load(directory, dtype="auto")
    _, expected = cut_logits(load(directory))
    _, found = cut_logits(runner)
    return runner, float(((found - expected) / expected.std()).square().mean().sqrt())


def wide(tmp_path: Path, **changes: Any) -> Path:
    """A model whose rows are whole blocks of any type."""
    sizes = {"hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 2} | changes
    return make_model(tmp_path / "model", "llama", **sizes)


@pytest.fixture(scope="module")
def wide_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model of `wide`; no test changes it."""
    return wide(tmp_path_factory.mktemp("wide"))


@pytest.mark.parametrize("kind", HALVES)
def test_codes_of_a_gguf_file_are_its_numbers_bit_for_bit(kind: str) -> None:
    random = np.random.default_rng(seed())
    rows = random_blocks(kind, 7 * 3, random).reshape(7, -1)
    codes = read_codes(rows, kind)
    assert codes is not None
    expected = gguf.dequantize(rows, gguf.GGMLQuantizationType[kind])
    assert torch.equal(codes.dense(), torch.from_numpy(expected))
    assert int(codes.values.max()) < 1 << codes.bits


def test_what_is_no_codes_is_read_as_floats() -> None:
    assert read_codes(np.zeros((2, 64), np.uint8), "F16") is None
    assert read_codes(np.zeros((2, 66), np.uint8), "IQ2_XXS") is None


@pytest.mark.usefixtures(_CHECK)
@pytest.mark.parametrize("kind", [kind if kind in _UNLIKE else in_soak(kind) for kind in HALVES])
def test_a_gguf_file_is_multiplied_by_its_codes(kind: str, wide_dir: Path, tmp_path: Path) -> None:
    file = make_gguf(wide_dir, tmp_path / "model.gguf", kind)
    runner, error = error_of(unfold(file))
    assert 0 < error < _BOUND
    info = runner.info
    assert (info.dtype, info.batch_invariant) == ("codes", True)


@pytest.mark.usefixtures("whole_check")
def test_a_file_with_codes_of_two_kinds_in_one_product(wide_dir: Path, tmp_path: Path) -> None:
    kinds = {"attn_v": "Q6_K", "ffn_down": "Q6_K", "output": "Q6_K", "attn_output": "F16"}
    file = make_gguf(wide_dir, tmp_path / "model.gguf", "Q4_K", kinds=kinds)
    runner, error = error_of(unfold(file))
    assert 0 < error < _BOUND
    assert runner.info.batch_invariant


@pytest.mark.usefixtures(_CHECK)
@pytest.mark.parametrize("name", FORMATS)
def test_a_quantized_checkpoint_is_multiplied_by_its_codes(
    name: str, model_dir: Directory, tmp_path: Path
) -> None:
    stored, _ = make_quantized(tmp_path, model_dir("llama"), FORMATS[name], seed())
    runner, error = error_of(stored)
    assert 0 < error < _BOUND
    assert (runner.info.dtype, runner.info.batch_invariant) == ("codes", True)


@pytest.mark.usefixtures("whole_check")
def test_experts_are_multiplied_by_their_codes(model_dir: Directory, tmp_path: Path) -> None:
    stored, _ = make_quantized(tmp_path, model_dir("mixtral"), packed(), seed())
    runner, error = error_of(stored)
    assert 0 < error < _BOUND
    assert runner.info.batch_invariant


def with_mxfp4(directory: Path, plain: Path) -> Path:
    """A model of gpt-oss with random blocks in place of its experts' matrices, and with the numbers
    that they stand for.
    """
    random = np.random.default_rng(seed())
    numbers = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)
    tensors = load_file(plain / "model.safetensors")
    shutil.copytree(plain, directory)
    stored = dict(tensors)
    for name, stack in tensors.items():
        if not name.endswith(("gate_up_proj", "down_proj")):
            continue
        experts, inputs, outputs = stack.shape
        blocks = random.integers(0, 256, (experts, outputs, inputs // 32, 16), np.uint8)
        scales = random.integers(121, 126, (experts, outputs, inputs // 32), np.uint8)
        values = numbers[np.stack((blocks & 15, blocks >> 4), axis=-1)]
        values = (
            values.reshape(*scales.shape, 32) * 2.0 ** (scales.astype(np.float32) - 127)[..., None]
        )
        dense = torch.from_numpy(values.reshape(experts, outputs, inputs).astype(np.float32))
        tensors[name] = dense.transpose(1, 2).contiguous()
        del stored[name]
        stored[f"{name}_blocks"] = torch.from_numpy(blocks)
        stored[f"{name}_scales"] = torch.from_numpy(scales)
    save_file(tensors, plain / "model.safetensors", {"format": "pt"})
    save_file(stored, directory / "model.safetensors", {"format": "pt"})
    change_config(directory, {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]})
    return directory


@pytest.mark.usefixtures(_CHECK)
def test_experts_in_mxfp4_are_multiplied_by_their_codes(tmp_path: Path) -> None:
    plain = make_model(tmp_path / "plain", "gpt_oss", hidden_size=64, intermediate_size=96)
    stored = with_mxfp4(tmp_path / "stored", plain)
    _, expected = cut_logits(load(plain))
    sequences, found = cut_logits(load(stored))
    # The numbers themselves are the same.
    assert (found - expected).abs().max() < 1e-4 * expected.std()
    assert (found - own_logits(plain, sequences)).abs().max() < 1e-3 * expected.std()
    runner, error = error_of(stored)
    assert 0 < error < _BOUND
    assert (runner.info.dtype, runner.info.batch_invariant) == ("codes", True)


def test_blocks_in_mxfp4_that_do_not_fit_are_one_line(tmp_path: Path) -> None:
    plain = make_model(tmp_path / "plain", "gpt_oss", hidden_size=64, intermediate_size=96)
    stored = with_mxfp4(tmp_path / "stored", plain)
    tensors = load_file(stored / "model.safetensors")
    name = "model.layers.1.mlp.experts.down_proj_scales"
    tensors[name] = tensors[name][:, :, :2].contiguous()
    save_file(tensors, stored / "model.safetensors", {"format": "pt"})
    line = (
        rf"{name}: has the shape \[4, 64, 2\]; with matrices of 96 inputs it must be \[4, 64, 3\]"
    )
    with pytest.raises(ModelError, match=line):
        load(stored)
    change_config(wide(tmp_path / "other"), {"quant_method": "mxfp4"})
    with pytest.raises(ModelError, match="mxfp4 is served of gpt-oss alone"):
        load(tmp_path / "other" / "model")


@pytest.mark.usefixtures(_CHECK)
def test_groups_that_the_kernels_do_not_store_are_kept_in_float16(
    model_dir: Directory, tmp_path: Path
) -> None:
    stored, _ = make_quantized(tmp_path, model_dir("llama"), packed(group=4), seed())
    runner, error = error_of(stored)
    assert error < 0.003
    assert runner.info.batch_invariant


def _weights(directory: Path, **settings: Any) -> tuple[Any, list[str]]:
    said: list[str] = []
    config = ShardConfig(device="cpu", threads=1, kv_blocks=64, enforce_eager=True, **settings)
    runner = load_model_runner(config, directory, progress=said.append)
    assert isinstance(runner.model, Decoder)
    return runner.model._weights, said


def test_embeddings_in_codes_are_looked_up_as_what_they_stand_for(tmp_path: Path) -> None:
    directory = wide(tmp_path, tie_word_embeddings=True)
    file = make_gguf(directory, tmp_path / "model.gguf", "Q4_K", kinds={"token_embd": "Q6_K"})
    weights, said = _weights(unfold(file))
    exact, _ = _weights(unfold(file), dtype="float32")
    ids = torch.tensor([0, 5, 255, 3])
    assert torch.equal(weights.embedding.rows(ids), exact.embedding.rows(ids))
    assert any("Q4_K and Q6_K; kept as they are" in line for line in said)
    stored = file.stat().st_size
    assert weights.head.matrix is weights.embedding
    assert weights.head.matrix.nbytes < 1.3 * stored


def test_codes_are_multiplied_unless_a_dtype_or_another_kind_is_named(
    model_dir: Directory, tmp_path: Path
) -> None:
    stored, _ = make_quantized(tmp_path, model_dir("llama"), gptq(), seed())
    kinds: dict[str, dict[str, Any]] = {
        "codes": {},
        "float16": {"dtype": "float16"},
        "int8": {"quantization": "int8"},
        "int4": {"quantization": "int4"},
    }
    sizes = {}
    for kind, settings in kinds.items():
        weights, said = _weights(stored, **settings)
        sizes[kind] = sum(layer.attention.qkv.matrix.nbytes for layer in weights.layers)
        how = {"codes": "kept as they are", "float16": "dequantized and kept in float16"}
        assert any(how.get(kind, "dequantized") in line for line in said)
    # Groups of 16, whose scales and minimums are as large as their codes.
    assert sizes["codes"] < 0.6 * sizes["float16"]
    assert sizes["int4"] < 0.7 * sizes["int8"] < 0.5 * sizes["float16"]
