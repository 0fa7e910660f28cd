"""Adapters' files: read as peft writes them, and refused by name for what is not served."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.adapters import make_adapter, write_safetensors

from penstock_shard.models.errors import ModelError
from penstock_shard.models.lora_files import read_adapter_files

Q = "model.layers.0.self_attn.q_proj"
UP = "model.layers.1.mlp.up_proj"
MODULES = {Q: (32, 24), UP: (32, 64)}


def test_an_adapter_is_read(tmp_path: Path) -> None:
    files = read_adapter_files(make_adapter(tmp_path / "a", MODULES, rank=4, lora_alpha=10))
    assert files.rank == 4
    assert files.base_model == "random"
    found = [(p.module, p.rank, p.in_features, p.out_features, p.scale) for p in files.pairs]
    assert found == [(Q, 4, 32, 24, 2.5), (UP, 4, 32, 64, 2.5)]
    assert files.pairs[0].name_b == f"base_model.model.{Q}.lora_B.weight"


@pytest.mark.parametrize(
    ("config", "scales"),
    [
        ({"use_rslora": True, "lora_alpha": 6}, (3.0, 3.0)),
        ({"lora_alpha": 6, "alpha_pattern": {"q_proj": 8}}, (2.0, 1.5)),
        ({"lora_alpha": 6, "alpha_pattern": {"layers.1.mlp.up_proj": 8}}, (1.5, 2.0)),
        ({"lora_alpha": 6, "alpha_pattern": {r"layers\.\d+\..*_proj": 8}}, (2.0, 2.0)),
        ({"lora_alpha": 6, "alpha_pattern": {"proj": 8}}, (1.5, 1.5)),
    ],
)
def test_the_scale_is_that_of_the_module(
    config: dict[str, Any], scales: tuple[float, float], tmp_path: Path
) -> None:
    files = read_adapter_files(make_adapter(tmp_path / "a", MODULES, rank=4, **config))
    assert tuple(pair.scale for pair in files.pairs) == scales


def test_the_hash_is_that_of_the_content(tmp_path: Path) -> None:
    one = make_adapter(tmp_path / "one", seed=1)
    shutil.copytree(one, tmp_path / "copy")
    others = [
        make_adapter(tmp_path / "two", seed=2),
        make_adapter(tmp_path / "alpha", seed=1, lora_alpha=3),
    ]
    known = read_adapter_files(one).content_hash
    assert read_adapter_files(tmp_path / "copy").content_hash == known
    assert known not in [read_adapter_files(other).content_hash for other in others]


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"peft_type": "IA3"}, "peft_type: 'IA3' is not served"),
        ({"use_dora": True}, "use_dora: 'True' is not served"),
        ({"bias": "all"}, "bias: 'all' is not served"),
        ({"lora_bias": True}, "lora_bias"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save: .*lm_head"),
        ({"fan_in_fan_out": True}, "fan_in_fan_out"),
        ({"trainable_token_indices": [1]}, "trainable_token_indices"),
        ({"layer_replication": [[0, 2]]}, "layer_replication"),
        ({"of_next_year": {"on": 1}}, "of_next_year"),
        ({"init_lora_weights": "pissa"}, "'pissa' changes the model's own weights"),
        ({"lora_alpha": "much"}, "lora_alpha: 'much' is no number"),
        ({"lora_alpha": float("nan")}, "lora_alpha: 'nan' is no number"),
        ({"r": 5}, "lora_A of rank 4 and lora_B of rank 4; adapter_config.json says 5"),
        ({"rank_pattern": {"q_proj": 3}}, "says 3"),
        ({"rank_pattern": {"(": 3}}, "rank_pattern: cannot be read"),
    ],
)
def test_what_would_change_results_is_refused_by_its_name(
    config: dict[str, Any], words: str, tmp_path: Path
) -> None:
    with pytest.raises(ModelError, match=words) as refused:
        read_adapter_files(make_adapter(tmp_path / "a", **config))
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    "config",
    [
        {
            "use_dora": False,
            "modules_to_save": None,
            "layer_replication": None,
            "arrow_config": None,
        },
        {"init_lora_weights": "gaussian", "rank_pattern": {}, "megatron_core": "megatron.core"},
        {"layers_to_transform": [0], "layers_pattern": "layers", "exclude_modules": ["k_proj"]},
    ],
)
def test_what_changes_nothing_is_no_error(config: dict[str, Any], tmp_path: Path) -> None:
    assert read_adapter_files(make_adapter(tmp_path / "a", **config)).rank == 4


def cut(path: Path) -> None:
    weights = path / "adapter_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-10])


def pickle(path: Path) -> None:
    (path / "adapter_model.safetensors").rename(path / "adapter_model.bin")


def half(path: Path) -> None:
    name = f"base_model.model.{Q}.lora_A.weight"
    write_safetensors(path / "adapter_model.safetensors", {name: np.zeros((4, 32), np.float32)})


def magnitude(path: Path) -> None:
    name = f"base_model.model.{Q}.lora_magnitude_vector"
    write_safetensors(path / "adapter_model.safetensors", {name: np.zeros(4, np.float32)})


def whole_numbers(path: Path) -> None:
    name = f"base_model.model.{Q}.lora_A.weight"
    write_safetensors(path / "adapter_model.safetensors", {name: np.zeros((4, 32), np.float32)})
    weights = path / "adapter_model.safetensors"
    weights.write_bytes(weights.read_bytes().replace(b'"F32"', b'"I32"'))


def list_of_settings(path: Path) -> None:
    (path / "adapter_config.json").write_text(json.dumps([1]))


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (shutil.rmtree, "there is no such directory"),
        (lambda path: (path / "adapter_config.json").unlink(), "there is no adapter_config.json"),
        (lambda path: (path / "adapter_model.safetensors").unlink(), "there is no adapter_model"),
        (pickle, "only as pickle"),
        (cut, "is cut short"),
        (half, f"lora_B of {Q} is missing"),
        (magnitude, "lora_magnitude_vector is no matrix of a LoRA adapter"),
        (whole_numbers, "has tensors of I32"),
        (list_of_settings, "is not a JSON object"),
        (
            lambda path: write_safetensors(path / "adapter_model.safetensors", {}),
            "there are no tensors in it",
        ),
    ],
)
def test_a_damaged_adapter_is_refused_in_one_line(
    damage: Callable[[Path], object], words: str, tmp_path: Path
) -> None:
    path = make_adapter(tmp_path / "a")
    damage(path)
    with pytest.raises(ModelError, match=words) as refused:
        read_adapter_files(path)
    assert "\n" not in str(refused.value)
