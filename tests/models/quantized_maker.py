"""Quantized checkpoints of small models, beside plain ones with the same numbers.

Written from what the formats say, bit by bit in numpy, and without any of the code that is tested.

    quantized, plain = make_quantized(tmp_path, model_dir("llama"), gptq(bits=4, group=16))
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

Numbers = npt.NDArray[np.int64]
# N, K and a generator -> tensors by the last part of their names, and the matrix [N, K] they are.
Maker = Callable[[int, int, np.random.Generator], tuple[dict[str, Tensor], Tensor]]


@dataclass(frozen=True)
class Format:
    """One way to write a matrix, and what config.json says of it."""

    config: dict[str, Any]
    make: Maker


def make_quantized(directory: Path, source: Path, form: Format, seed: int = 0) -> tuple[Path, Path]:
    """Directories of a model with its linear layers replaced by random quantized ones, and of the
    same model with the same numbers in float32.
    """
    random = np.random.default_rng(seed)
    quantized, plain = directory / "quantized", directory / "plain"
    for target in (quantized, plain):
        shutil.copytree(source, target)
    tensors = load_file(source / "model.safetensors")
    stored, dense = {}, {}
    for name, tensor in tensors.items():
        if not _is_linear(name, tensor):
            stored[name] = dense[name] = tensor
            continue
        rows, columns = tensor.shape
        parts, matrix = form.make(rows, columns, random)
        dense[name] = matrix
        for part, value in parts.items():
            stored[f"{name.removesuffix('weight')}{part}"] = value.contiguous()
    save_file(dense, plain / "model.safetensors", {"format": "pt"})
    save_file(stored, quantized / "model.safetensors", {"format": "pt"})
    change_config(quantized, form.config)
    return quantized, plain


def change_config(directory: Path, quantization: dict[str, Any]) -> None:
    path = directory / "config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps({**config, "quantization_config": quantization}))


def _is_linear(name: str, tensor: Tensor) -> bool:
    return "layers." in name and name.endswith(".weight") and tensor.dim() == 2


def gptq(
    bits: int = 4,
    group: int = 16,
    *,
    order: bool = False,
    version: str = "gptq",
    zero_bias: bool = False,
) -> Format:
    """`order` mixes which inputs share a scale, as desc_act does."""

    def make(rows: int, columns: int, random: np.random.Generator) -> Any:
        count = 1 if group == -1 else columns // group
        numbers = random.integers(0, 1 << bits, (columns, rows))
        zeros = random.integers(0, 1 << bits, (count, rows))
        scales = _scales(random, (count, rows), bits)
        groups = np.arange(columns) * count // columns
        if order:
            random.shuffle(groups)
        matrix = (numbers - zeros[groups]) * scales.numpy().astype(np.float32)[groups]
        stored = zeros - 1 if version == "gptq" else zeros
        parts = {
            "qweight": _words(numbers, bits, axis=0),
            "qzeros": _words(stored & ((1 << bits) - 1), bits, axis=1),
            "scales": scales,
            "g_idx": torch.from_numpy(groups.astype(np.int32)),
        }
        if zero_bias:
            parts["bias"] = torch.zeros(rows, dtype=torch.float16)
        return parts, _transposed(matrix)

    config = {
        "quant_method": "gptq",
        "bits": bits,
        "group_size": group,
        "desc_act": order,
        "sym": False,
        "checkpoint_format": version,
    }
    return Format(config, make)


def awq(group: int = 16) -> Format:
    def make(rows: int, columns: int, random: np.random.Generator) -> Any:
        numbers = random.integers(0, 16, (columns, rows))
        zeros = random.integers(0, 16, (columns // group, rows))
        scales = _scales(random, zeros.shape, 4)
        groups = np.arange(columns) // group
        matrix = (numbers - zeros[groups]) * scales.numpy().astype(np.float32)[groups]
        parts = {"qweight": _awq_words(numbers), "qzeros": _awq_words(zeros), "scales": scales}
        return parts, _transposed(matrix)

    config = {
        "quant_method": "awq",
        "bits": 4,
        "group_size": group,
        "zero_point": True,
        "version": "gemm",
    }
    return Format(config, make)


def packed(
    bits: int = 4, group: int | None = 16, *, zeros: bool = False, order: bool = False
) -> Format:
    """compressed-tensors, integers; one scale for each row where `group` is None."""

    def make(rows: int, columns: int, random: np.random.Generator) -> Any:
        count = 1 if group is None else columns // group
        middle = 1 << (bits - 1)
        numbers = random.integers(-middle, middle, (rows, columns))
        offsets = random.integers(-middle, middle, (rows, count))
        scales = _scales(random, (rows, count), bits).to(torch.bfloat16)
        groups = np.arange(columns) * count // columns
        if order:
            random.shuffle(groups)
        spread = offsets[:, groups] if zeros else 0
        matrix = (numbers - spread) * scales.float().numpy()[:, groups]
        parts = {
            "weight_packed": _words(numbers + middle, bits, axis=1),
            "weight_scale": scales,
            "weight_shape": torch.tensor([rows, columns]),
        }
        if zeros:
            parts["weight_zero_point"] = _words(offsets + middle, bits, axis=0)
        if order:
            parts["weight_g_idx"] = torch.from_numpy(groups.astype(np.int32))
        return parts, torch.from_numpy(matrix.astype(np.float32))

    weights = {
        "num_bits": bits,
        "type": "int",
        "symmetric": not zeros,
        "strategy": "channel" if group is None else "group",
        "group_size": group,
    }
    return Format(_compressed("pack-quantized", weights), make)


def scaled(
    strategy: str = "channel",
    *,
    method: str = "compressed-tensors",
    kind: str = "float",
    block: tuple[int, int] = (16, 24),
) -> Format:
    """Numbers of 8 bits and scales, as compressed-tensors or checkpoints in fp8 have them."""

    def make(rows: int, columns: int, random: np.random.Generator) -> Any:
        values = torch.from_numpy(random.normal(size=(rows, columns)) * 60)
        values = values.clamp(-127, 127).to(torch.int8 if kind == "int" else torch.float8_e4m3fn)
        height, width = {"tensor": (rows, columns), "channel": (1, columns)}.get(strategy, block)
        counts = (-(-rows // height), -(-columns // width))
        scales = torch.from_numpy(random.uniform(1e-3, 5e-3, counts).astype(np.float32))
        if method == "compressed-tensors":
            scales = scales.to(torch.bfloat16)
        down, across = np.arange(rows) // height, np.arange(columns) // width
        matrix = values.float() * scales.float()[down][:, across]
        name = "weight_scale_inv" if method == "fp8" else "weight_scale"
        stored = scales.flatten() if strategy == "tensor" else scales
        parts = {"weight": values, name: stored}
        if method == "compressed-tensors" and strategy == "tensor":
            parts["input_scale"] = torch.tensor([0.01], dtype=torch.bfloat16)
        return parts, matrix

    if method == "fp8":
        size = list(block) if strategy == "block" else None
        config = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": size}
        return Format(config, make)
    weights: dict[str, Any] = {"num_bits": 8, "type": kind, "symmetric": True, "strategy": strategy}
    if strategy == "block":
        weights["block_structure"] = list(block)
    return Format(_compressed(f"{kind}-quantized", weights), make)


def _compressed(written: str, weights: dict[str, Any]) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": weights, "input_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "format": written,
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
    }


def _scales(random: np.random.Generator, shape: Any, bits: int) -> Tensor:
    """Return random scales in float16, for weights with a spread of about 0.2."""
    values = random.uniform(0.5, 1.5, shape) * 0.6 / (1 << bits)
    return torch.from_numpy(values).to(torch.float16)


def _words(numbers: Numbers, bits: int, axis: int) -> Tensor:
    """Numbers from 0 on, so many to a word of 32 bits along an axis, the first in the lowest."""
    each = 32 // bits
    rows = numbers if axis == 0 else numbers.T
    missing = -len(rows) % each
    rows = np.concatenate([rows, np.zeros((missing, rows.shape[1]), dtype=rows.dtype)])
    words = np.zeros((len(rows) // each, rows.shape[1]), dtype=np.uint32)
    for place in range(each):
        words |= rows[place::each].astype(np.uint32) << np.uint32(bits * place)
    return _as_int32(words if axis == 0 else words.T)


def _awq_words(numbers: Numbers) -> Tensor:
    """Eight columns to a word; AutoAWQ's order_map says which goes where."""
    words = np.zeros((len(numbers), numbers.shape[1] // 8), dtype=np.uint32)
    for place, column in enumerate((0, 2, 4, 6, 1, 3, 5, 7)):
        words |= numbers[:, column::8].astype(np.uint32) << np.uint32(4 * place)
    return _as_int32(words)


def _as_int32(words: npt.NDArray[np.uint32]) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(words).view(np.int32))


def _transposed(matrix: npt.NDArray[Any]) -> Tensor:
    return torch.from_numpy(matrix.astype(np.float32)).T.contiguous()
