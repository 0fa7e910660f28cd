"""Whatever a configuration says, its model is loaded or refused, in bounded memory."""

from __future__ import annotations

import contextlib
import copy
import json
import resource
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support.budget import budget, seeded

from penstock_shard.checkpoint.model_source import BUILTIN_MODEL
from penstock_shard.config import ShardConfig
from penstock_shard.errors import ModelError
from penstock_shard.images.image_processor import ImageProcessor
from penstock_shard.model_loader.load_runner import load_runner

ODD: list[Any] = [None, True, -1, 0, 1, 3, 2**31, 2**62, 10**12, 10**30, 1e308, 0.5, float("nan")]
ODD += ["", "2", "x\n", [], [[]], {}, {"a": []}, [1, 1, 1], [None], ["x"], -(2**63), 2**20, 1000]
# Of tables of positions above all, whose number has a high bound.
_MOST_BYTES = 4 * 2**30
_TRIES = budget(25, 1000)


@pytest.fixture
def model(model_dir: Callable[[str], Path], tmp_path: Path) -> Path:
    """A model with a tokenizer, of which the test has a copy."""
    directory = tmp_path / "model"
    shutil.copytree(model_dir("llama"), directory)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(BUILTIN_MODEL / name, directory)
    return directory


def places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Yield the value and each dict or list within it, once with each of its keys or indices."""
    for key in list(value) if isinstance(value, dict) else range(len(value)):
        yield value, key
        if isinstance(value[key], dict | list):
            yield from places(value[key])


# Torch warns of tensors without elements.
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_each_odd_value_is_loaded_or_refused(model: Path) -> None:
    chance = seeded("odd configurations")
    plain = json.loads((model / "config.json").read_text())
    before_kb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for _ in range(_TRIES):
        config = copy.deepcopy(plain)
        holder, key = chance.choice(list(places(config)))
        holder[key] = chance.choice(ODD)
        (model / "config.json").write_text(json.dumps(config))
        print(key, repr(holder[key]))
        try_to_load(model)
    grown_bytes = 1024 * (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before_kb)
    assert grown_bytes < _MOST_BYTES


def try_to_load(model: Path) -> None:
    settings: dict[str, Any] = {"device": "cpu", "dtype": "float32", "kv_blocks": 64, "threads": 1}
    config = ShardConfig(model=str(model), load_cache_bytes=0, enforce_eager=True, **settings)
    with contextlib.suppress(ModelError):
        load_runner(config, lambda line: None)


@pytest.mark.parametrize(
    "settings",
    [
        [],
        {"image_processor_type": ["x"]},
        {"image_processor_type": "CLIPImageProcessor", "size": [[1]]},
        {"image_processor_type": "Own", "auto_map": {"AutoImageProcessor": "own.Own"}},
    ],
)
def test_odd_settings_of_images_are_refused_and_nobody_is_asked_about_code(
    settings: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "own"}')
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(settings))
    ran = tmp_path / "ran"
    (tmp_path / "own.py").write_text(f"open({str(ran)!r}, 'w')\nOwn = 1\n")
    monkeypatch.setattr("builtins.input", lambda _: "y")
    with pytest.raises(ModelError):
        ImageProcessor(tmp_path, {})
    assert not ran.exists()


@pytest.mark.parametrize(
    "settings",
    [
        {"size": {"shortest_edge": 20_000}},
        {"size": {"height": 224, "width": 1_000_000}},
        {"crop_size": {"height": 20_000, "width": 20_000}},
        {"image_processor_type": "Qwen2VLImageProcessor", "size": {"longest_edge": 10**12}},
    ],
)
def test_an_image_is_not_made_larger_than_any_model_sees(
    settings: dict[str, Any], tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "own"}')
    told = {"image_processor_type": "CLIPImageProcessor", **settings}
    told.setdefault("size", {"shortest_edge": 224})
    if "longest_edge" in told["size"]:
        told["size"]["shortest_edge"] = 3136
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(told))
    with pytest.raises(ModelError, match="is not within 1 and"):
        ImageProcessor(tmp_path, {})
