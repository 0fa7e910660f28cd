"""Older tokenizer files become a tokenizer.json that gives the same ids, or a one-line refusal."""

from __future__ import annotations

import base64
import importlib.util
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from model_maker import make_config, write_tokenizer
from support.budget import budget, seeded
from tokenizers import Tokenizer

from penstock_shard.checkpoint import tokenizer_conversion
from penstock_shard.checkpoint.tokenizer_conversion import make_tokenizer_files
from penstock_shard.config import ShardConfig
from penstock_shard.errors import ModelError
from penstock_shard.model_loader.load_runner import load_runner


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
    tokenizer = Tokenizer.from_str(
        make_tokenizer_files(old_model, False)["tokenizer.json"].decode()
    )
    encoded = tokenizer.encode("The lazy dog. Zwölf 🙂")
    assert encoded.ids[0] == 0
    assert tokenizer.decode(encoded.ids) == "The lazy dog. Zwölf 🙂"
    assert tokenizer.token_to_id("</s>") == 1


FIRST_LINE = "root:x:0:0"
WORDS = {"tokenizer_class": "BertTokenizer", "unk_token": FIRST_LINE}
HELLO = {"added_tokens_decoder": {"9": {"content": "hello", "special": False}}}


@pytest.mark.parametrize("suffix", ["", ".bin"])
@pytest.mark.parametrize("name", ["tokenizer_config.json", "special_tokens_map.json"])
@pytest.mark.parametrize(
    "way", ["a path", "a relative path", "above the model", "an argument in order", "a link"]
)
def test_no_setting_of_a_tokenizer_publishes_a_file_of_the_host(
    way: str, name: str, suffix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, secret = tmp_path / "model", tmp_path / f"secret{suffix}"
    model.mkdir()
    secret.write_text(f"{FIRST_LINE}\nhunter2\n")
    (model / "link.bin").symlink_to(secret)
    monkeypatch.chdir(tmp_path)
    ways: dict[str, dict[str, Any]] = {
        "a path": {"vocab": str(secret)},
        "a relative path": {"vocab": secret.name},
        "above the model": {"fast_tokenizer_files": [f"../{secret.name}"]},
        "an argument in order": {"init_inputs": [str(secret)]},
        "a link": {"vocab": str(model / "link.bin")},
    }
    (model / "config.json").write_text('{"model_type": "bert"}')
    (model / "tokenizer_config.json").write_text(json.dumps(WORDS | HELLO))
    (model / name).write_text(json.dumps({**WORDS, **HELLO, **ways[way]}))
    with pytest.raises(ModelError) as caught:
        make_tokenizer_files(model, False)
    assert f"{name}: names a file outside of the directory" in str(caught.value)


def test_settings_may_name_the_models_own_files_and_what_is_on_no_host(old_model: Path) -> None:
    path = old_model / "tokenizer_config.json"
    named = {"name_or_path": str(old_model), "vocab_file": "vocab.json", "from": "/no/such/file"}
    path.write_text(json.dumps(json.loads(path.read_text()) | named | {"note": "x" * 10_000}))
    assert make_tokenizer_files(old_model, False)


def test_what_the_package_of_tokenizers_refuses_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "bert"}')
    (tmp_path / "vocab.txt").write_text("a\nb\n")
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "BertTokenizer"}')
    with pytest.raises(ModelError) as caught:
        make_tokenizer_files(tmp_path, False)
    assert "WordPiece" in str(caught.value)


# The words of Mistral's tokenizer, and a few of its marks.
PATTERN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
MARKS = ("<unk>", "<s>", "</s>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]",
         "[TOOL_RESULTS]", "[/TOOL_RESULTS]", "[TOOL_CALLS]", "[IMG]", "<pad>", "[IMG_BREAK]",
         "[IMG_END]", "[PREFIX]", "[MIDDLE]", "[SUFFIX]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]",
         "[TOOL_CONTENT]")  # fmt: skip
PIECES = (b"he", b"ll", b"llo", b"hello", b" w", b"or", b" wor", b"ld", b" world", "ü".encode())
NUM_MARKS = 24


def tekken(**changes: Any) -> dict[str, Any]:
    """A tekken.json of single bytes and `PIECES`, with one token more than the model has."""
    tokens = [*(bytes([byte]) for byte in range(256)), *PIECES, b"hello world"]
    config = {
        "pattern": PATTERN,
        "num_vocab_tokens": len(tokens),
        "default_vocab_size": NUM_MARKS + len(tokens) - 1,
        "default_num_special_tokens": NUM_MARKS,
        "version": "v7",
    }
    marks = [*MARKS, *(f"<SPECIAL_{rank}>" for rank in range(len(MARKS), NUM_MARKS))]
    return {
        "config": config,
        "vocab": [
            {"rank": rank, "token_bytes": base64.b64encode(token).decode(), "token_str": None}
            for rank, token in enumerate(tokens)
        ],
        "special_tokens": [
            {"rank": rank, "token_str": mark, "is_control": True} for rank, mark in enumerate(marks)
        ],
        **changes,
    }


@pytest.fixture
def mistral(tmp_path: Path) -> Path:
    """A model whose only tokenizer is tekken.json, as Mistral publishes theirs."""
    make_config("mistral").save_pretrained(tmp_path)
    (tmp_path / "tekken.json").write_text(json.dumps(tekken()))
    return tmp_path


def test_tekken_becomes_a_tokenizer(mistral: Path) -> None:
    files = make_tokenizer_files(mistral, False)
    tokenizer = Tokenizer.from_str(files["tokenizer.json"].decode())
    first = NUM_MARKS + 256
    pieces = {piece: first + place for place, piece in enumerate(PIECES)}
    assert tokenizer.encode("hello world").ids == [1, pieces[b"hello"], pieces[b" world"]]
    assert tokenizer.encode("[INST]hello", add_special_tokens=False).ids == [3, pieces[b"hello"]]
    text = "Grüße, 東京 🙂\n  x"
    assert tokenizer.decode(tokenizer.encode(text).ids) == text
    assert tokenizer.get_vocab_size() == first + len(PIECES)
    marks = json.loads(files["tokenizer_config.json"])
    assert (marks["bos_token"], marks["eos_token"]) == ("<s>", "</s>")


def test_tekken_becomes_what_mistral_common_makes_of_it(mistral: Path) -> None:
    module = pytest.importorskip(
        "mistral_common.tokens.tokenizers.tekken", reason="mistral-common is not installed"
    )
    files = make_tokenizer_files(mistral, False)
    own = module.Tekkenizer.from_file(mistral / "tekken.json")
    tokenizer = Tokenizer.from_str(files["tokenizer.json"].decode())
    rng = seeded("texts for tekken")
    for _ in range(budget(200, 5000)):
        text = "".join(rng.choices("helo wrd\n\t.,ÜüßA1東🙂/", k=rng.randint(0, 40)))
        assert tokenizer.encode(text).ids == own.encode(text, bos=True, eos=False), text
    assert b"[INST]" in files["chat_template.jinja"]


@pytest.mark.parametrize("more", ["tokenizer_config.json", "chat_template.jinja"])
def test_files_that_are_there_go_before_what_is_made_of_tekken(mistral: Path, more: str) -> None:
    (mistral / more).write_text('{"bos_token": "<mine>"}')
    config = ShardConfig(model=str(mistral), device="cpu", load_format="dummy", kv_blocks=16)
    loaded = load_runner(config, lambda line: None)
    assert loaded.tokenizer_files[more] == b'{"bos_token": "<mine>"}'
    assert b"hello" in loaded.tokenizer_files["tokenizer.json"]


def test_a_tekken_file_that_lists_no_marks_says_what_to_install(
    mistral: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    older = tekken()
    del older["special_tokens"]
    (mistral / "tekken.json").write_text(json.dumps(older))
    if importlib.util.find_spec("mistral_common"):
        pytest.skip("mistral-common is installed, which knows them")
    with pytest.raises(ModelError, match=r"tekken\.json: .*: pip install mistral-common$"):
        make_tokenizer_files(mistral, False)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ("{", "cannot be converted: "),
        ("[]", "cannot be converted: "),
        ("{}", "cannot be converted: 'config'"),
        (json.dumps(tekken(vocab=[])), "cannot be converted: "),
        (json.dumps(tekken(vocab=[*tekken()["vocab"][:-3], {"rank": 1}])), "cannot be converted: "),
    ],
)
def test_a_broken_tekken_file_is_refused_in_a_line(
    mistral: Path, content: str, reason: str
) -> None:
    (mistral / "tekken.json").write_text(content)
    with pytest.raises(ModelError) as caught:
        make_tokenizer_files(mistral, False)
    assert f"tekken.json: {reason}" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_tekken_file_whose_ranks_are_in_another_order_is_refused(mistral: Path) -> None:
    changed = tekken()
    changed["vocab"][104]["rank"], changed["vocab"][101]["rank"] = 101, 104
    (mistral / "tekken.json").write_text(json.dumps(changed))
    with pytest.raises(ModelError, match="gives other ids"):
        make_tokenizer_files(mistral, False)


def test_a_model_without_a_tokenizer_is_refused(tmp_path: Path) -> None:
    make_config("opt").save_pretrained(tmp_path)
    with pytest.raises(ModelError, match=r"there is no tokenizer\.json, and") as caught:
        make_tokenizer_files(tmp_path, False)
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
        make_tokenizer_files(old_model, False)
