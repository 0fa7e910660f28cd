"""--model as a directory: complete ones are taken, others refused in one line."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from penstock_shard.checkpoint.model_source import (
    BUILTIN_MODEL,
    check_directory,
    resolve_adapter,
    resolve_model,
)
from penstock_shard.checkpoint.weight_files import INDEX, unlisted, weight_files
from penstock_shard.config import ShardConfig
from penstock_shard.errors import ModelError


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A directory with a configuration and weights in two parts."""
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    weight_map = {}
    for i in (1, 2):
        part = f"model-0000{i}-of-00002.safetensors"
        save_file({f"w{i}": np.ones((8, 8), dtype=np.float32)}, tmp_path / part)
        weight_map[f"w{i}"] = part
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return tmp_path


def resolve(model: str | None, **settings: object) -> Path:
    config = ShardConfig(model=model, **settings)  # type: ignore[arg-type]
    source = resolve_model(config, progress=lambda line: None)
    assert source.revision == ""
    return source.path


def refusal(directory: Path, *, needs_weights: bool = True) -> str:
    with pytest.raises(ModelError) as caught:
        check_directory(directory, needs_weights=needs_weights)
    text = str(caught.value)
    assert "\n" not in text
    assert str(directory) in text
    return text


def test_a_complete_directory_is_taken(model: Path) -> None:
    assert resolve(str(model)) == model


def test_a_relative_name_that_exists_is_a_directory(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(model.parent)
    assert resolve(model.name) == Path(model.name)


def test_without_a_name_the_builtin_model_is_taken() -> None:
    assert resolve(None) == BUILTIN_MODEL


def test_a_missing_directory(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="there is no such directory"):
        resolve(str(tmp_path / "nothing"))
    with pytest.raises(ModelError, match=r"a/b/c: there is no such directory"):
        resolve("a/b/c")


def make_directory(path: Path) -> None:
    path.unlink()
    path.mkdir()


def cut(path: Path, end: int) -> None:
    path.write_bytes(path.read_bytes()[:end])


PART = "model-00002-of-00002.safetensors"
FAULTS: dict[str, tuple[Callable[[Path], object], str]] = {
    "no config": (lambda d: (d / "config.json").unlink(), "no config.json"),
    "config not JSON": (lambda d: (d / "config.json").write_text("{"), "is not valid JSON"),
    "config a list": (lambda d: (d / "config.json").write_text("[]"), "is not a JSON object"),
    "config not UTF-8": (lambda d: (d / "config.json").write_bytes(b"\xff"), "is not valid JSON"),
    "index empty": (
        lambda d: (d / "model.safetensors.index.json").write_text("{}"),
        "names no weights",
    ),
    "part missing": (lambda d: (d / PART).unlink(), f"1 of 2 parts .* missing, {PART}"),
    "part cut": (lambda d: cut(d / PART, -10), "cut short: "),
    "part cut in header": (lambda d: cut(d / PART, 20), "cut short or is no safetensors"),
    "part empty": (lambda d: cut(d / PART, 0), "cut short or is no safetensors"),
    "part not safetensors": (
        lambda d: (d / PART).write_bytes(b"\x05" + bytes(7) + b"[1,2]" + bytes(99)),
        "is no safetensors file",
    ),
    "config a directory": (
        lambda d: make_directory(d / "config.json"),
        "cannot be read: Is a directory",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_each_fault_is_one_line(fault: str, model: Path) -> None:
    change, expected = FAULTS[fault]
    change(model)
    with pytest.raises(ModelError, match=expected) as caught:
        check_directory(model)
    assert "\n" not in str(caught.value)
    assert str(model) in str(caught.value)


def test_a_directory_without_weights_needs_to_be_dummy(model: Path) -> None:
    for path in model.glob("model*"):
        path.unlink()
    assert "there are no weights" in refusal(model)
    check_directory(model, needs_weights=False)
    assert resolve(str(model), load_format="dummy") == model
    assert resolve(str(model), runner="fake") == model


def without_index(model: Path) -> Path:
    (model / "model.safetensors.index.json").unlink()
    return model


def test_parts_that_no_index_lists_are_taken(model: Path) -> None:
    assert resolve(str(without_index(model))) == model
    (model / "consolidated.safetensors").write_bytes(b"the same once more")
    assert [path.name for path in weight_files(model)] == ["model-00001-of-00002.safetensors", PART]


@pytest.mark.parametrize(
    "names",
    [
        ["model-00000-of-00002.safetensors", "model-00001-of-00002.safetensors"],
        ["model-00001-of-000002.safetensors", "model-00002-of-000002.safetensors"],
        ["weights-1-of-2.safetensors", "weights-2-of-2.safetensors"],
        ["model.00.safetensors", "model.01.safetensors"],
        ["gptq_model-4bit-128g.safetensors"],
    ],
)
def test_files_without_an_index_may_have_any_names(names: list[str]) -> None:
    others = ["adapter_model.safetensors", "config.json", "a/b.safetensors", *BESIDE]
    assert unlisted([*names, *others]) == names


# The same once more in Mistral's own form, an adapter, and what training goes on from.
BESIDE = [
    "consolidated.safetensors",
    "consolidated-00001-of-00002.safetensors",
    "adapter_model.safetensors",
    "adapter_0.safetensors",
    "optimizer.safetensors",
    "model_optimizer.safetensors",
    "scheduler.safetensors",
    "model_ema.safetensors",
    "optimizer_0.safetensors",
]


@pytest.mark.parametrize(
    ("names", "others"),
    [
        (["weights.safetensors"], ["draft.safetensors", "vae.safetensors"]),
        (["weights.00.safetensors", "weights.01.safetensors"], ["other.safetensors"]),
        (["model.00.safetensors"], ["weights.safetensors"]),
        (["model-fp8.safetensors"], ["gptq.safetensors"]),
    ],
)
def test_of_files_without_an_index_the_models_name_goes_first_then_that_of_weights(
    names: list[str], others: list[str]
) -> None:
    assert unlisted([*others, *names, *BESIDE]) == names


def test_a_file_named_weights_is_the_model(model: Path) -> None:
    for path in model.glob("model*"):
        path.unlink()
    save_file({"w": np.ones((8, 8), dtype=np.float32)}, model / "weights.safetensors")
    (model / "optimizer.safetensors").write_bytes(b"no model's")
    assert resolve(str(model)) == model
    assert [path.name for path in weight_files(model)] == ["weights.safetensors"]


@pytest.mark.parametrize("name", BESIDE)
def test_what_is_not_the_models_own_is_named_where_there_is_nothing_else(
    model: Path, name: str
) -> None:
    for path in model.glob("model*"):
        path.unlink()
    save_file({"w": np.ones((8, 8), dtype=np.float32)}, model / name)
    line = refusal(model)
    assert f"there are no weights (model.safetensors or {INDEX}), and {name} is not" in line


@pytest.mark.parametrize("lost", ["model-00001-of-00002.safetensors", PART])
def test_a_part_that_no_index_lists_is_missed_by_the_name_of_another(
    model: Path, lost: str
) -> None:
    (without_index(model) / lost).unlink()
    assert f"1 of 2 parts of the weights are missing, {lost}" in refusal(model)


def test_a_tensor_in_two_parts_without_an_index_is_refused_by_name(model: Path) -> None:
    tensors = {f"w{i}": np.ones((8, 8), dtype=np.float32) for i in (2, 1)}
    save_file(tensors, model / PART)
    # An index says which of them is meant.
    assert resolve(str(model)) == model
    line = refusal(without_index(model))
    assert f"model-00001-of-00002.safetensors and {PART} both have a tensor w1" in line


def test_pickled_weights_are_refused_by_name(model: Path) -> None:
    for path in model.glob("model*"):
        path.unlink()
    (model / "pytorch_model.bin").write_bytes(b"x")
    assert "only as pickle (pytorch_model.bin)" in refusal(model)


def test_a_file_is_not_a_model(model: Path) -> None:
    assert "is a file" in refusal(model / "config.json")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_an_unreadable_file_is_one_line(model: Path) -> None:
    (model / "config.json").chmod(0)
    assert "cannot be read: Permission denied" in refusal(model)


def test_an_adapter_of_an_unknown_user_is_refused_in_one_line() -> None:
    with pytest.raises(ModelError, match="~nobody-has-this-name/x: there is no such user"):
        resolve_adapter("~nobody-has-this-name/x", ShardConfig())


@pytest.mark.parametrize("name", [["x"], 5, "../other/model.safetensors", "/etc/passwd"])
def test_an_index_that_names_no_file_of_the_directory_is_refused(tmp_path: Path, name: Any) -> None:
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": {"a": name}}))
    with pytest.raises(ModelError, match="is no name of a file beside it"):
        weight_files(tmp_path)
