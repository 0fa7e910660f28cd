"""Names of weight sets: equal for equal bytes, different after any change."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from penstock_shard.checkpoint import weights_hash
from penstock_shard.checkpoint.weights_hash import hash_weights


@pytest.fixture
def model(tmp_path: Path) -> Path:
    rng = np.random.default_rng(0)
    for part in ("a", "b"):
        tensors = {f"{part}.{i}": rng.random((50, 40), dtype=np.float32) for i in range(3)}
        save_file(tensors, tmp_path / f"model-{part}.safetensors")
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    return tmp_path


def test_equal_files_have_one_name(model: Path) -> None:
    first = hash_weights(model)
    assert hash_weights(model, threads=1) == first
    assert len(first) == 32


def test_one_changed_value_changes_the_name(model: Path) -> None:
    before = hash_weights(model)
    path = model / "model-b.safetensors"
    tensors = load_file(path)
    tensors["b.1"][49, 39] += 1e-3
    save_file(tensors, path)
    assert hash_weights(model) != before


def test_each_piece_of_a_file_counts(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weights_hash, "_PIECE_BYTES", 1000)
    path = model / "model-a.safetensors"
    content = path.read_bytes()
    names = {hash_weights(model)}
    offsets = range(0, len(content), 997)
    for offset in offsets:
        changed = bytearray(content)
        changed[offset] ^= 1
        path.write_bytes(changed)
        names.add(hash_weights(model))
    assert len(names) == 1 + len(offsets)


def test_the_models_own_code_counts_where_it_runs(model: Path) -> None:
    before, trusted = hash_weights(model), hash_weights(model, with_code=True)
    (model / "modeling_own.py").write_text("scale = 1")
    assert hash_weights(model) == before
    first = hash_weights(model, with_code=True)
    (model / "modeling_own.py").write_text("scale = 2")
    assert len({trusted, first, hash_weights(model, with_code=True)}) == 3


def test_exchanged_files_and_another_configuration_change_the_name(model: Path) -> None:
    before = hash_weights(model)
    a, b = model / "model-a.safetensors", model / "model-b.safetensors"
    first, second = a.read_bytes(), b.read_bytes()
    a.write_bytes(second)
    b.write_bytes(first)
    assert hash_weights(model) != before
    a.write_bytes(first)
    b.write_bytes(second)
    assert hash_weights(model) == before
    (model / "config.json").write_text('{"model_type": "qwen2"}')
    assert hash_weights(model) != before


def test_other_files_do_not_count_and_weights_can_be_left_out(model: Path) -> None:
    before, config_only = hash_weights(model), hash_weights(model, config_only=True)
    (model / "README.md").write_text("hello")
    assert hash_weights(model) == before
    (model / "model-a.safetensors").unlink()
    assert hash_weights(model) != before
    assert hash_weights(model, config_only=True) == config_only
