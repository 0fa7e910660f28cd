"""The pooling that sentence-transformers' files name, and kinds of it that are not served."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from penstock_proto.types import Pooling
from penstock_shard.checkpoint.hub import _wanted
from penstock_shard.checkpoint.pooling_files import pooling_of
from penstock_shard.errors import ModelError

MODULES = ("Transformer", "Pooling", "Normalize")


def write(directory: Path, kinds: tuple[str, ...], pooling: dict[str, object]) -> Path:
    modules = [
        {"idx": i, "path": f"{i}_{kind}" if i else "", "type": f"sentence_transformers.x.{kind}"}
        for i, kind in enumerate(kinds)
    ]
    (directory / "modules.json").write_text(json.dumps(modules))
    (directory / "1_Pooling").mkdir()
    (directory / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
    return directory


def read(directory: Path, asked: str = "auto") -> tuple[tuple[Pooling, bool] | None, list[str]]:
    lines: list[str] = []
    return pooling_of(directory, asked, lines.append), lines


@pytest.mark.parametrize("mode", ["lasttoken", "mean_tokens"])
@pytest.mark.parametrize("kinds", [MODULES, MODULES[:2]])
def test_pooling_and_normalising_are_read(
    mode: str, kinds: tuple[str, ...], tmp_path: Path
) -> None:
    modes = ("cls_token", "mean_tokens", "max_tokens", "weightedmean_tokens", "lasttoken")
    stated: dict[str, object] = {f"pooling_mode_{each}": each == mode for each in modes}
    write(tmp_path, kinds, {**stated, "word_embedding_dimension": 32, "include_prompt": True})
    pooling = Pooling.LAST if mode == "lasttoken" else Pooling.MEAN
    assert read(tmp_path) == ((pooling, len(kinds) == 3), [])


@pytest.mark.parametrize(
    ("mode", "pooling"),
    [("lasttoken", Pooling.LAST), ("mean", Pooling.MEAN), (["lasttoken"], Pooling.LAST)],
)
def test_pooling_is_read_as_later_releases_write_it(
    mode: object, pooling: Pooling, tmp_path: Path
) -> None:
    write(tmp_path, MODULES, {"pooling_mode": mode, "embedding_dimension": 32})
    assert read(tmp_path) == ((pooling, True), [])


def test_a_model_without_these_files_embeds_nothing_and_says_nothing(tmp_path: Path) -> None:
    assert read(tmp_path) == (None, [])


@pytest.mark.parametrize(
    ("kinds", "pooling", "reason"),
    [
        (MODULES, {"pooling_mode_cls_token": True}, "cls_token"),
        (MODULES, {"pooling_mode_lasttoken": True, "pooling_mode_max_tokens": True}, "max_tokens"),
        (MODULES, {"pooling_mode_lasttoken": False}, "by nothing"),
        (MODULES, {"pooling_mode": "weightedmean"}, "weightedmean"),
        (MODULES, {"pooling_mode": ["lasttoken", "mean"]}, "lasttoken and mean"),
        (MODULES, {"pooling_mode": "mean", "include_prompt": False}, "instruction"),
        (MODULES, {"pooling_mode_mean_tokens": True, "include_prompt": False}, "instruction"),
        ((*MODULES[:2], "Dense"), {"pooling_mode_lasttoken": True}, "Dense"),
        (("Transformer", "Normalize"), {}, "no Pooling module"),
    ],
)
def test_what_is_not_served_is_one_line_and_no_embeddings(
    kinds: tuple[str, ...], pooling: dict[str, object], reason: str, tmp_path: Path
) -> None:
    write(tmp_path, kinds, pooling)
    found, (line,) = read(tmp_path)
    assert found is None
    assert reason in line
    assert "\n" not in line


def test_what_is_asked_for_goes_before_what_the_files_say(tmp_path: Path) -> None:
    assert read(tmp_path, "mean") == ((Pooling.MEAN, False), [])
    write(tmp_path, MODULES, {"pooling_mode_cls_token": True})
    assert read(tmp_path, "last") == ((Pooling.LAST, True), [])


@pytest.mark.parametrize("text", ["{", "{}x", "[1]", '{"a": 1}', '[{"type": "Pooling"}]'])
def test_a_damaged_list_of_modules_is_named(text: str, tmp_path: Path) -> None:
    (tmp_path / "modules.json").write_text(text)
    with pytest.raises(ModelError, match=r"modules\.json: "):
        read(tmp_path)


def test_a_missing_pooling_file_is_named(tmp_path: Path) -> None:
    write(tmp_path, MODULES, {})
    (tmp_path / "1_Pooling" / "config.json").unlink()
    with pytest.raises(ModelError, match=r"1_Pooling/config\.json: cannot be read"):
        read(tmp_path)


def test_the_file_that_says_how_to_pool_is_downloaded() -> None:
    names = ["config.json", "modules.json", "1_Pooling/config.json", "2_Dense/config.json"]
    assert _wanted(dict.fromkeys(names, 1), False, False) == names[:3]
