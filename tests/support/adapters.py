"""Adapters as peft saves them, of random numbers: for tests that need no torch."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

# in_features and out_features.
Modules = Mapping[str, tuple[int, int]]
ONE_MODULE: Modules = {"model.layers.0.self_attn.q_proj": (32, 32)}


def make_adapter(
    directory: Path,
    modules: Modules = ONE_MODULE,
    *,
    rank: int = 4,
    seed: int = 0,
    size: float = 0.3,
    **config: Any,
) -> Path:
    """Write it; `config` goes over what its adapter_config.json would say."""
    generator = np.random.default_rng(seed)
    tensors: dict[str, Any] = {}
    for module, (in_features, out_features) in modules.items():
        for half, shape in (("A", (rank, in_features)), ("B", (out_features, rank))):
            values = generator.standard_normal(shape, dtype=np.float32) * np.float32(size)
            tensors[f"base_model.model.{module}.lora_{half}.weight"] = values
    told: dict[str, Any] = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": "random",
        "r": rank,
        "lora_alpha": 2 * rank,
        "lora_dropout": 0.1,
        "bias": "none",
        "use_rslora": False,
        "target_modules": sorted({name.rpartition(".")[2] for name in modules}),
        "init_lora_weights": True,
        **config,
    }
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "adapter_config.json").write_text(json.dumps(told))
    write_safetensors(directory / "adapter_model.safetensors", tensors)
    return directory


def write_safetensors(path: Path, tensors: Mapping[str, Any]) -> None:
    """float32 arrays by name, in the format's own way."""
    header: dict[str, Any] = {}
    data = b""
    for name, values in tensors.items():
        end = len(data) + values.nbytes
        header[name] = {
            "dtype": "F32",
            "shape": list(values.shape),
            "data_offsets": [len(data), end],
        }
        data += values.tobytes()
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)
