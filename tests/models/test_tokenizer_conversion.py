"""Older tokenizer files become a tokenizer.json that gives the same ids, or a one-line refusal."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
from model_maker import make_config, write_tokenizer
from tokenizers import Tokenizer

from penstock_shard.checkpoint import tokenizer_conversion
from penstock_shard.checkpoint.tokenizer_conversion import convert_tokenizer
from penstock_shard.errors import ModelError


@pytest.fixture
def old_model(tmp_path: Path) -> Path:
    """An OPT with vocab.json and merges.txt, as OPT-125M comes."""
    make_config("opt").save_pretrained(tmp_path)
    write_tokenizer(tmp_path)
    path = tmp_path / "tokenizer.json"
    Tokenizer.from_file(str(path)).model.save(str(tmp_path))
    path.unlink()
    settings = {
        "tokenizer_class": "GPT2Tokenizer",
        "bos_token": "<s>",
        "eos_token": "</s>",
        "pad_token": "<pad>",
        "add_bos_token": True,
    }
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    return tmp_path


def test_vocabulary_and_merges_become_a_tokenizer(old_model: Path, tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_str(convert_tokenizer(old_model, False).decode())
    encoded = tokenizer.encode("The lazy dog. Zwölf 🙂")
    assert encoded.ids[0] == 0
    assert tokenizer.decode(encoded.ids) == "The lazy dog. Zwölf 🙂"
    assert tokenizer.token_to_id("</s>") == 1


def test_a_model_without_a_tokenizer_is_refused(tmp_path: Path) -> None:
    make_config("opt").save_pretrained(tmp_path)
    with pytest.raises(ModelError, match=r"there is no tokenizer\.json, and") as caught:
        convert_tokenizer(tmp_path, False)
    assert "\n" not in str(caught.value)


def test_a_conversion_with_other_ids_is_refused(
    old_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def changed(content: str) -> Tokenizer:
        other = content.replace('"add_prefix_space":false', '"add_prefix_space":true')
        assert other != content
        return Tokenizer.from_str(other)

    stand_in = SimpleNamespace(from_str=changed)
    monkeypatch.setattr(tokenizer_conversion, "Tokenizer", stand_in)
    with pytest.raises(ModelError, match="gives other ids"):
        convert_tokenizer(old_model, False)
