"""The package data of the built-in model: small, complete, consistent, and honest about itself.

Reads the files with `tokenizers` and `jinja2` alone; that the weights answer well is shown by the
transcript in `training/`, not here.
"""

from __future__ import annotations

import ast
import importlib.util
import json
import struct
import sys
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from jinja2.exceptions import TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "shard" / "penstock_shard" / "builtin_model"
TRAINING = ROOT / "training"

ANY_TEXT = [
    "Hello, world!",
    "  leading and trailing spaces  ",
    "line\nbreaks\r\nand\ttabs",
    "äöüß éèê ñ",
    "emoji 😀 👩‍👩‍👧‍👦 🇳🇴 ❤️",
    "日本語の文章と漢字",
    "中文，标点。",
    "한국어 العربية עברית हिन्दी ไทย",
    "zero\x00byte and \x7f control",
    "𝔘𝔫𝔦𝔠𝔬𝔡𝔢 \U0010ffff",
    "curl -N http://localhost:8000/v1 -d '{\"stream\": true}'",
]


def read_json(name: str) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((FOLDER / name).read_text(encoding="utf-8"))
    return content


@cache
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(FOLDER / "tokenizer.json"))


def render(messages: list[dict[str, Any]], *, add_generation_prompt: bool = True) -> str:
    def raise_exception(message: str) -> None:
        raise TemplateError(message)

    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    environment.globals["raise_exception"] = raise_exception
    template = environment.from_string(read_json("tokenizer_config.json")["chat_template"])
    return template.render(messages=messages, add_generation_prompt=add_generation_prompt)


def weights_header() -> dict[str, Any]:
    with (FOLDER / "model.safetensors").open("rb") as file:
        (length_bytes,) = struct.unpack("<Q", file.read(8))
        header: dict[str, Any] = json.loads(file.read(length_bytes))
    header.pop("__metadata__", None)
    return header


@cache
def conversations() -> ModuleType:
    """`training/` is no package of the wheel, so it is loaded by its path."""
    name = "training_conversations"
    spec = importlib.util.spec_from_file_location(name, TRAINING / "conversations.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def test_the_folder_takes_less_than_ten_megabytes() -> None:
    assert sum(f.stat().st_size for f in FOLDER.iterdir()) < 10_000_000


def test_the_folder_holds_what_a_model_needs_and_nothing_else() -> None:
    assert {f.name for f in FOLDER.iterdir()} == {
        "README.md",
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    }


def test_it_is_a_llama_with_a_context_of_2048_tokens() -> None:
    config = read_json("config.json")
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert config["model_type"] == "llama"
    assert config["max_position_embeddings"] == 2_048
    assert config["tie_word_embeddings"] is True


def test_the_vocabulary_of_config_tokenizer_and_weights_is_the_same() -> None:
    size = read_json("config.json")["vocab_size"]
    assert tokenizer().get_vocab_size() == size
    assert weights_header()["model.embed_tokens.weight"]["shape"][0] == size


def test_it_has_a_few_million_parameters_in_two_bytes_each() -> None:
    tensors = weights_header().values()
    parameters = 0
    for tensor in tensors:
        count = 1
        for side in tensor["shape"]:
            count *= side
        parameters += count
    assert 2_000_000 < parameters < 5_000_000
    assert {tensor["dtype"] for tensor in tensors} == {"BF16"}


def test_the_end_token_is_the_same_in_all_files() -> None:
    end = tokenizer().token_to_id(read_json("tokenizer_config.json")["eos_token"])
    assert end is not None
    assert read_json("config.json")["eos_token_id"] == end
    assert read_json("generation_config.json")["eos_token_id"] == end


@pytest.mark.parametrize("text", ANY_TEXT)
def test_any_text_survives_encoding_and_decoding(text: str) -> None:
    ids = tokenizer().encode(text, add_special_tokens=False).ids
    assert tokenizer().decode(ids, skip_special_tokens=False) == text


def test_every_single_byte_has_a_token() -> None:
    text = "".join(map(chr, range(0x20, 0x250)))
    assert tokenizer().decode(tokenizer().encode(text).ids) == text


def test_encoding_adds_no_special_tokens_by_itself() -> None:
    assert tokenizer().encode("Hi").ids == tokenizer().encode("Hi", add_special_tokens=False).ids


def test_the_chat_template_marks_roles_and_asks_for_an_answer() -> None:
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": " Hi! "},
        {"role": "assistant", "content": "Hello."},
        {"role": "user", "content": "Bye"},
    ]
    assert render(messages) == (
        "<|begin|><|system|>Be brief.<|end|><|user|>Hi!<|end|><|assistant|>Hello.<|end|>"
        "<|user|>Bye<|end|><|assistant|>"
    )
    assert not render(messages, add_generation_prompt=False).endswith("<|assistant|>")


def test_the_chat_template_takes_content_in_parts() -> None:
    parts = [{"type": "text", "text": "Hello "}, {"type": "text", "text": "there"}]
    assert render([{"role": "user", "content": parts}]) == (
        "<|begin|><|user|>Hello there<|end|><|assistant|>"
    )


def test_the_chat_template_is_the_one_that_training_writes() -> None:
    tree = ast.parse((TRAINING / "train.py").read_text(encoding="utf-8"))
    [template] = [
        ast.literal_eval(node.value)
        for node in tree.body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "CHAT_TEMPLATE"
    ]
    assert read_json("tokenizer_config.json")["chat_template"] == template


def test_the_chat_template_refuses_an_unknown_role_by_name() -> None:
    with pytest.raises(TemplateError, match="wizard"):
        render([{"role": "wizard", "content": "x"}])


def test_the_marks_of_the_template_are_single_tokens() -> None:
    for mark in ("<|begin|>", "<|end|>", "<|system|>", "<|user|>", "<|assistant|>"):
        assert tokenizer().encode(mark, add_special_tokens=False).tokens == [mark]


def test_the_model_card_says_that_it_is_a_toy() -> None:
    assert "toy" in (FOLDER / "README.md").read_text(encoding="utf-8").lower()


def test_no_held_out_question_can_be_produced_by_the_corpus() -> None:
    module = conversations()
    held_out = module.load_held_out(TRAINING / "held_out.txt")
    assert len(held_out) == 30
    assert module.leaks(module.load_corpus(TRAINING / "corpus"), held_out) == []


def test_the_leak_check_sees_through_openers_contractions_and_case() -> None:
    module = conversations()
    corpus = module.load_corpus(TRAINING / "corpus")
    known = module.HeldOut("Hey, WHAT'S the KV cache, please?", ())
    unknown = module.HeldOut("Which grandmother stole the bicycle?", ())
    assert module.leaks(corpus, [known, unknown]) == [known.question]


def test_the_corpus_answers_say_that_the_model_is_a_toy() -> None:
    topics = {topic.name: topic for topic in conversations().load_corpus().topics}
    assert all("toy" in answer for answer in topics["who-are-you"].answers)
