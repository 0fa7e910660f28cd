"""The files of a model that a router gets."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from penstock_shard.checkpoint import hub
from penstock_shard.checkpoint.tokenizer_files import read_tokenizer_files
from penstock_shard.errors import ModelError


def write(directory: Path, **files: Any) -> None:
    """Write each value as JSON to NAME.json."""
    for name, value in files.items():
        (directory / f"{name}.json").write_text(json.dumps(value))


def test_a_processors_template_is_sent_where_the_tokenizer_has_none(tmp_path: Path) -> None:
    write(tmp_path, tokenizer_config={"eos_token": "</s>"}, chat_template={"chat_template": "A"})
    files = read_tokenizer_files(tmp_path)
    assert files["chat_template.jinja"] == b"A"
    assert "chat_template.json" not in files


def test_the_tokenizers_own_template_goes_first(tmp_path: Path) -> None:
    write(tmp_path, tokenizer_config={"chat_template": "B"}, chat_template={"chat_template": "A"})
    assert "chat_template.jinja" not in read_tokenizer_files(tmp_path)
    (tmp_path / "chat_template.jinja").write_text("C")
    assert read_tokenizer_files(tmp_path)["chat_template.jinja"] == b"C"


def test_the_users_template_goes_before_all(tmp_path: Path) -> None:
    write(tmp_path, chat_template={"chat_template": "A"})
    (tmp_path / "mine").write_text("D")
    assert read_tokenizer_files(tmp_path, tmp_path / "mine")["chat_template.jinja"] == b"D"


def test_what_images_take_is_sent_of_a_model_that_sees_them(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"preprocessor_config": {"a": 1}, "processor_config": {"b": 2}}
    write(tmp_path, config={"vision_config": {"depth": 2}}, **settings)
    files = read_tokenizer_files(tmp_path)
    assert set(files) == {"config.json", "preprocessor_config.json", "processor_config.json"}
    assert json.loads(files["config.json"]) == {"vision_config": {"depth": 2}}


def test_the_files_of_a_model_of_text_are_as_they_were(tmp_path: Path) -> None:
    write(tmp_path, config={"vision_config": None}, preprocessor_config={}, processor_config={})
    assert read_tokenizer_files(tmp_path) == {}


def test_a_broken_file_of_a_processors_template_is_named(tmp_path: Path) -> None:
    (tmp_path / "chat_template.json").write_text("{")
    with pytest.raises(ModelError, match=r"chat_template\.json: is not valid JSON"):
        read_tokenizer_files(tmp_path)


def test_further_templates_are_sent_with_the_models_own_only(tmp_path: Path) -> None:
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "tool_use.jinja").write_text("T")
    write(tmp_path, tokenizer_config={"chat_template": "B"})
    files = read_tokenizer_files(tmp_path)
    assert files["additional_chat_templates/tool_use.jinja"] == b"T"
    (tmp_path / "mine").write_text("D")
    files = read_tokenizer_files(tmp_path, tmp_path / "mine")
    assert set(files) == {"chat_template.jinja", "tokenizer_config.json"}


def test_further_templates_of_a_hub_model_are_fetched() -> None:
    more = ["additional_chat_templates/tool_use.jinja", "additional_chat_templates/notes.md"]
    names = [*more, "config.json", "other/tool_use.jinja"]
    wanted = hub._wanted(dict.fromkeys(names, 1), False, False)
    assert set(wanted) == {"config.json", "additional_chat_templates/tool_use.jinja"}
