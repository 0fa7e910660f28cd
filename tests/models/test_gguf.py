"""GGUF files: the model of the same numbers in safetensors, or one line that says why not."""

from __future__ import annotations

import itertools
import json
import random
import shutil
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from model_maker import make_model, write_tokenizer
from models.driver import Driver, load, make_sequence
from models.gguf_maker import dequantized, make_gguf
from models.runners import make_runner
from safetensors.torch import load_file, save_file
from support.budget import in_soak
from tokenizers import Tokenizer

from penstock_shard.checkpoint import gguf_files
from penstock_shard.checkpoint.gguf_files import unfold
from penstock_shard.checkpoint.model_source import BUILTIN_MODEL, resolve_model
from penstock_shard.checkpoint.weights_hash import hash_weights
from penstock_shard.config import ShardConfig
from penstock_shard.errors import ModelError
from penstock_shard.model_loader.load_runner import load_runner
from penstock_shard.models.decoder.decoder import Decoder

FAMILIES = ("llama", "qwen2", "qwen3")
IN_EVERY_RUN = {("llama", "F32"), ("llama", "Q8_0"), ("qwen2", "Q4_0"), ("qwen3", "Q8_0")}
PROMPT = random.Random(1).choices(range(3, 300), k=40)


def make(tmp_path: Path, family: str = "llama", **changes: Any) -> Path:
    directory = make_model(tmp_path / "model", family, **changes)
    write_tokenizer(directory)
    return directory


def rounded(directory: Path, target: Path, kind: str) -> Path:
    """The same model with its matrices rounded as a file of this kind has them."""
    shutil.copytree(directory, target)
    tensors = load_file(target / "model.safetensors")
    block, _ = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
    for name, tensor in tensors.items():
        if tensor.dim() == 2 and tensor.shape[1] % block == 0:
            tensors[name] = torch.from_numpy(dequantized(tensor.float().numpy(), kind))
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    return target


def logprobs(directory: Path) -> Any:
    """Return the log-probabilities of a prompt, and the tokens that follow it with theirs."""
    loaded = load(directory, max_model_len=128)
    assert isinstance(loaded.model, Decoder)
    driver = Driver(make_runner(loaded.model, loaded.info))
    sequence = make_sequence(PROMPT, prompt_logprobs=0, logprobs=2, max_tokens=4)
    first = driver.step([(sequence, len(PROMPT))])[0]
    rest = [driver.step([(sequence, 1)])[0] for _ in range(3)]
    return first.prompt_logprobs, [(each.token_id, each.logprobs) for each in (first, *rest)]


@pytest.mark.parametrize(
    ("family", "kind"),
    [
        pair if pair in IN_EVERY_RUN else in_soak(*pair)
        for pair in itertools.product(FAMILIES, ("F32", "Q8_0", "Q4_0"))
    ],
)
def test_a_file_is_the_model_of_its_numbers(family: str, kind: str, tmp_path: Path) -> None:
    directory = make(tmp_path, family)
    file = make_gguf(directory, tmp_path / "model.gguf", kind)
    expected = logprobs(rounded(directory, tmp_path / "rounded", kind))
    found = logprobs(unfold(file))
    assert [token for token, _ in found[1]] == [token for token, _ in expected[1]]
    np.testing.assert_allclose(found[0].chosen, expected[0].chosen, atol=1e-4)


def test_what_is_unfolded_serves_the_next_start_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PENSTOCK_LOAD_CACHE", str(tmp_path / "kept"))
    file = make_gguf(make(tmp_path), tmp_path / "model.gguf", "Q8_0")
    first = unfold(file, keep=True)
    assert first.parent == tmp_path / "kept" / "gguf"
    with monkeypatch.context() as patch:
        patch.setattr(gguf_files, "open_file", None)
        assert unfold(file, keep=True) == first
    for name in ("config.json", "tokenizer.json"):
        (first / name).write_text("")
        assert unfold(file, keep=True) == first
        assert json.loads((first / name).read_text())
    assert [each.name for each in first.parent.iterdir()] == [first.name]
    file.touch()
    again = unfold(file, keep=True)
    assert again != first
    assert (again / "tokenizer.json").read_bytes() == (first / "tokenizer.json").read_bytes()
    # Only the latest stay.
    monkeypatch.setattr(gguf_files, "_MOST_KEPT", 1)
    assert unfold(file, keep=True) == again
    assert not first.exists()
    # None is used where others may write.
    first.parent.chmod(0o777)
    assert unfold(file, keep=True).parent != first.parent
    assert unfold(file).parent != first.parent


def test_a_file_brings_its_tokenizer_and_its_chat_template(tmp_path: Path) -> None:
    file = make_gguf(BUILTIN_MODEL, tmp_path / "toy.gguf", "Q8_0")
    runner = load_runner(ShardConfig(model=str(file), device="cpu"), progress=lambda line: None)
    own, files = Tokenizer.from_file(str(BUILTIN_MODEL / "tokenizer.json")), runner.tokenizer_files
    made = Tokenizer.from_str(files["tokenizer.json"].decode())
    for text in ("Hello,  world!", "<|user|>What?<|end|>", "Grüße 東京 🙂", "def f(x):\n\treturn"):
        assert made.encode(text).ids == own.encode(text).ids
    assert made.get_vocab() == own.get_vocab()
    template = json.loads((BUILTIN_MODEL / "tokenizer_config.json").read_text())["chat_template"]
    shown = (
        files.get("chat_template.jinja", b"").decode()
        or json.loads(files["tokenizer_config.json"])["chat_template"]
    )
    assert shown == template
    info = runner.runner.info
    assert (info.architecture, info.max_model_len) == ("LlamaForCausalLM", 2048)
    assert info.eos_token_ids == (2,)


def test_a_tokenizer_of_pieces_joins_the_best_first_and_falls_back_to_bytes(
    tmp_path: Path,
) -> None:
    letters = dict.fromkeys("▁abcdefghijklmnopqrstuvwxyz", -50.0)
    pieces = {"he": -1.0, "ll": -2.0, "hell": -3.0, "hello": -4.0, "▁hello": -5.0, **letters}
    file = make_gguf(make(tmp_path), tmp_path / "model.gguf", pieces=pieces)
    tokenizer = Tokenizer.from_file(str(unfold(file) / "tokenizer.json"))

    def said(text: str) -> list[str]:
        return tokenizer.encode(text, add_special_tokens=False).tokens

    assert said("hello hel") == ["▁hello", "▁", "he", "l"]
    assert said("é") == ["▁", "<0xC3>", "<0xA9>"]
    for text in ("hello hello", "a é 🙂 b", "two  spaces"):
        ids = tokenizer.encode(text, add_special_tokens=False).ids
        assert tokenizer.decode(ids) == text
    assert max(tokenizer.get_vocab().values()) < 384


def with_words(tmp_path: Path) -> Path:
    """A small model with the tokenizer of the built-in one."""
    size = json.loads((BUILTIN_MODEL / "config.json").read_text())["vocab_size"]
    directory = make(tmp_path, vocab_size=size, bos_token_id=1, eos_token_id=2)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(BUILTIN_MODEL / name, directory)
    return directory


@pytest.mark.parametrize("pieces", [{}, dict.fromkeys("▁abc", -1.0)])
@pytest.mark.parametrize("adds_bos", [None, True, False])
def test_texts_begin_as_the_file_says(
    pieces: dict[str, float], adds_bos: bool | None, tmp_path: Path
) -> None:
    directory = make(tmp_path) if pieces else with_words(tmp_path)
    file = make_gguf(directory, tmp_path / "model.gguf", pieces=pieces, adds_bos=adds_bos)
    tokenizer = Tokenizer.from_file(str(unfold(file) / "tokenizer.json"))
    expected = bool(pieces) if adds_bos is None else adds_bos
    assert tokenizer.encode("abc").ids.count(1) == expected
    assert tokenizer.encode("abc", add_special_tokens=False).ids.count(1) == 0
    assert tokenizer.decode(tokenizer.encode("abc").ids) == "abc"


def add_factors(file: Path, target: Path, factors: list[float]) -> Path:
    """The same file with factors of its rotation."""
    make_gguf(file, target, extra={"rope_freqs.weight": np.array(factors, np.float32)})
    return target


def test_factors_of_the_rotation_are_those_of_llama_3_or_refused(tmp_path: Path) -> None:
    rope = {
        "rope_type": "llama3",
        "rope_theta": 500000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    directory = make(tmp_path, rope_parameters=rope)
    half = torch.arange(4) / 4
    wavelengths = 2 * np.pi * 500000.0**half
    smooth = ((8192 / wavelengths - 1) / 3).clamp(0, 1)
    factors = (1 / ((1 - smooth) / 8 + smooth)).tolist()
    unfolded = unfold(add_factors(directory, tmp_path / "model.gguf", factors))
    found = json.loads((unfolded / "config.json").read_text())["rope_parameters"]
    assert found == pytest.approx(rope)
    other = add_factors(directory, tmp_path / "other.gguf", [1.0, 1.5, 2.0, 8.0])
    with pytest.raises(ModelError, match="factors of a rotation that are not those of Llama 3"):
        unfold(other)


def test_what_is_no_file_of_a_model_is_one_line(tmp_path: Path) -> None:
    directory = make(tmp_path)
    file = make_gguf(directory, tmp_path / "model.gguf", "Q8_0")
    (tmp_path / "text.gguf").write_text("hello " * 100)
    (tmp_path / "empty.gguf").write_bytes(b"")
    for part in (0.05, 0.5, 0.99):
        whole = file.read_bytes()
        (tmp_path / f"cut{part}.gguf").write_bytes(whole[: int(part * len(whole))])
    make_gguf(directory, tmp_path / "yarn.gguf", fields={"rope.scaling.factor": 4.0})
    make_gguf(directory, tmp_path / "narrow.gguf", fields={"rope.dimension_count": 4})
    other = gguf.GGUFWriter(tmp_path / "bert.gguf", "bert")
    other.write_header_to_file()
    other.write_kv_data_to_file()
    other.close()
    lines = {
        "text": "is no GGUF file, or is cut short",
        "empty": "is no GGUF file, or is cut short",
        "cut0.05": "is no GGUF file, or is cut short",
        "cut0.5": "cut short",
        "cut0.99": "cut short",
        "bert": "is of the architecture bert; GGUF files are served of llama, qwen2, qwen3",
        "yarn": "llama.rope.scaling.factor is not served, so its text would be wrong",
        "narrow": "llama.rope.dimension_count is 4 where keys have 8, which is not served",
        "none": "there is no such file",
    }
    for name, line in lines.items():
        config = ShardConfig(model=str(tmp_path / f"{name}.gguf"))
        with pytest.raises(ModelError, match=line) as caught:
            resolve_model(config, progress=print)
        assert "\n" not in str(caught.value)


def test_a_tensor_that_is_missing_or_of_no_layer_is_named(tmp_path: Path) -> None:
    directory = make(tmp_path)
    lacking = make_gguf(directory, tmp_path / "a.gguf", drop=("blk.1.ffn_up.weight",))
    with pytest.raises(ModelError, match=r"layers\.1\.mlp\.up_proj\.weight") as caught:
        load(unfold(lacking))
    assert "\n" not in str(caught.value)
    extra = {"blk.1.ffn_extra.weight": np.ones((4, 4), np.float32)}
    with pytest.raises(ModelError, match=r"blk\.1\.ffn_extra\.weight is not of a llama"):
        load(unfold(make_gguf(directory, tmp_path / "b.gguf", extra=extra)))


def test_the_hash_of_weights_is_of_the_file(tmp_path: Path) -> None:
    directory = make(tmp_path)
    hashes = {
        hash_weights(unfold(make_gguf(directory, tmp_path / f"{kind}.gguf", kind)))
        for kind in ("F32", "F16", "Q8_0")
    }
    assert len(hashes) == 3
    again = make_gguf(directory, tmp_path / "again.gguf", "F16")
    assert load(unfold(again)).info.weights_hash in hashes
