"""The size of a model, by its files."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import pytest

from penstock_proto.facts import ModelShape
from penstock_shard.checkpoint.weight_files import model_shape

CONFIG = {
    "model_type": "qwen3",
    "num_hidden_layers": 2,
    "hidden_size": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


def write(folder: Path, config: dict[str, Any], **files: dict[str, list[int]]) -> Path:
    """Write a model whose files have tensors of these shapes, in 16 bits. Returns its folder."""
    (folder / "config.json").write_text(json.dumps(config))
    for name, shapes in files.items():
        header, end = {}, 0
        for tensor, shape in shapes.items():
            size = 2
            for length in shape:
                size *= length
            header[tensor] = {"dtype": "BF16", "shape": shape, "data_offsets": [end, end + size]}
            end += size
        data = json.dumps(header).encode()
        path = folder / f"{name.replace('_', '-')}.safetensors"
        path.write_bytes(struct.pack("<Q", len(data)) + data + bytes(end))
    return folder


def test_parameters_are_counted_over_all_files_of_the_index(tmp_path: Path) -> None:
    write(tmp_path, CONFIG, a={"x": [3, 4], "y": [5]}, b={"z": []}, unused={"w": [100]})
    index = {"weight_map": {"x": "a.safetensors", "y": "a.safetensors", "z": "b.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert model_shape(tmp_path) == ModelShape("qwen3", 18, 36, 2, 8, 4, 2)


def test_a_model_of_images_is_as_large_as_its_text_and_of_its_own_kind(tmp_path: Path) -> None:
    config = {"model_type": "llava", "text_config": {**CONFIG, "model_type": "llama"}}
    shape = model_shape(write(tmp_path, config))
    assert shape == ModelShape("llava", 0, 0, 2, 8, 4, 2)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"num_key_value_heads": None}, 4),
        ({"num_key_value_heads": [1, 2]}, 0),
        ({"num_key_value_heads": None, "multi_query": True}, 0),
        ({"num_key_value_heads": None, "num_kv_heads": 3}, 3),
    ],
)
def test_heads_of_keys_are_told_only_where_they_are_sure(
    tmp_path: Path, changes: dict[str, Any], expected: int
) -> None:
    assert model_shape(write(tmp_path, {**CONFIG, **changes})).num_kv_heads == expected


def test_parameters_of_what_is_quantized_are_not_counted(tmp_path: Path) -> None:
    config = {**CONFIG, "quantization_config": {"quant_method": "gptq"}}
    shape = model_shape(write(tmp_path, config, model={"packed": [4]}))
    assert (shape.num_parameters, shape.weight_bytes) == (0, 8)


def test_what_a_configuration_does_not_say_is_not_told(tmp_path: Path) -> None:
    strange = {"num_hidden_layers": "many", "hidden_size": -1, "num_attention_heads": 2**40}
    assert model_shape(write(tmp_path, strange)) == ModelShape()
