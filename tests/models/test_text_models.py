"""The text of models of images and text is computed as the whole computes it, from their files."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from models.driver import Driver, load, make_sequence
from models.quantized_maker import awq, gptq, make_quantized, scaled
from models.tiny_families import (
    CONTEXT,
    WEIGHTS,
    generate,
    load_whole,
    make_family,
    rename_tensors,
    turn_stacks,
)
from safetensors.torch import load_file, save_file
from support.budget import in_soak
from torch import Tensor
from transformers import PreTrainedModel

from penstock_shard.checkpoint.safetensors import Checkpoint
from penstock_shard.checkpoint.stacked_experts import StackedExperts
from penstock_shard.checkpoint.text_config import text_config
from penstock_shard.errors import ModelError
from penstock_shard.model_loader.transformers_loader import LoadOptions, load_config, load_module
from penstock_shard.models.decoder.decoder import Decoder

# Whose text model can be built, by what transformers calls it; served or not so far.
TEXT_MODELS = {
    "gemma3": "Gemma3ForCausalLM",
    "gemma4": "Gemma4ForCausalLM",
    "gemma4_unified": "Gemma4UnifiedForCausalLM",
    "glm46v": "Glm4ForCausalLM",
    "glm4v": "Glm4ForCausalLM",
    "glm4v_moe": "Glm4MoeForCausalLM",
    "idefics3": "LlamaForCausalLM",
    "internvl": "Qwen2ForCausalLM",
    "kimi_k25": "DeepseekV3ForCausalLM",
    "lfm2_vl": "Lfm2ForCausalLM",
    "llama4": "Llama4ForCausalLM",
    "llava": "LlamaForCausalLM",
    "llava_next": "LlamaForCausalLM",
    "minimax_m3_vl": "MiniMaxM3VLForCausalLM",
    "mistral3": "MistralForCausalLM",
    "mistral4": "Mistral4ForCausalLM",
    "qwen2_5_vl": "Qwen2ForCausalLM",
    "qwen2_vl": "Qwen2ForCausalLM",
    "qwen3_5": "Qwen3_5ForCausalLM",
    "qwen3_5_moe": "Qwen3_5MoeForCausalLM",
    "qwen3_vl": "Qwen3ForCausalLM",
    "qwen3_vl_moe": "Qwen3MoeForCausalLM",
    "qwen4_exp": "Qwen4ExpForCausalLM",
    "smolvlm": "LlamaForCausalLM",
}
# Each with another way to its text; the soak has all.
UNLIKE = {
    *("gemma3", "gemma4_unified", "idefics3", "kimi_k25", "llama4", "minimax_m3_vl"),
    *("qwen2_5_vl", "qwen3_5_moe"),
}
PROMPTS = [[5, 9, 33, 120, 77, 8, 300, 41], list(range(10, 80))]
OUTPUT_TOKENS = 8


def text_module(directory: Path, family: str) -> PreTrainedModel:
    """The text model in transformers' code, whatever of it is served."""
    config = load_config(directory, trust_remote_code=False)
    if family == "qwen3_vl_moe":
        checkpoint: Checkpoint = StackedExperts(directory, config.get_text_config())
    else:
        checkpoint = Checkpoint(directory)
    text = text_config(config, has_head="lm_head.weight" in checkpoint.shapes)
    options = LoadOptions(
        torch.device("cpu"),
        torch.float32,
        tensors=checkpoint.lazy_tensors(),
        names=checkpoint.names,
    )
    return load_module(directory, text, options)


def served(directory: Path) -> list[list[int]]:
    """Greedy tokens after each prompt, in steps that are cut anyhow."""
    driver = Driver(load(directory))
    sequences = [make_sequence(prompt, max_tokens=OUTPUT_TOKENS) for prompt in PROMPTS]
    driver.generate(sequences)
    return [sequence.token_ids[sequence.num_prompt_tokens :].tolist() for sequence in sequences]


def change_tensors(directory: Path, changes: Mapping[str, Tensor | None]) -> None:
    """Put tensors beside the others, or take those away that are None."""
    path = directory / WEIGHTS
    tensors = {**load_file(path), **changes}
    kept = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    save_file(kept, path, {"format": "pt"})


def change_config(directory: Path, **changes: Any) -> None:
    path = directory / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


@pytest.mark.parametrize(
    "family", [family if family in UNLIKE else in_soak(family) for family in TEXT_MODELS]
)
def test_logits_are_those_of_the_whole_bit_for_bit(family: str, tmp_path: Path) -> None:
    directory = make_family(tmp_path, family)
    module = text_module(directory, family)
    assert type(module).__name__ == TEXT_MODELS[family]
    whole = load_whole(directory)
    assert len(list(module.parameters())) <= len(list(whole.parameters()))
    ids = torch.randint(3, 4000, (1, 60), generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        found, expected = (
            each(input_ids=ids, use_cache=False).logits for each in (module, whole.eval())
        )
    assert torch.equal(found, expected)


@pytest.mark.parametrize(
    ("family", "saved", "elsewhere"),
    [
        ("gemma3", "language_model.model.", "model.language_model."),
        ("qwen2_5_vl", "model.", "model.language_model."),
        in_soak("qwen3_vl", "model.language_model.", "language_model.model."),
    ],
)
def test_names_of_tensors_may_begin_as_in_other_releases(
    family: str, saved: str, elsewhere: str, tmp_path: Path
) -> None:
    directory = make_family(tmp_path, family)
    expected = generate(directory, PROMPTS, OUTPUT_TOKENS).outputs
    rename_tensors(directory, saved, elsewhere)
    assert served(directory) == expected


def test_gemma_3n_is_read_from_the_files_of_the_whole(tmp_path: Path) -> None:
    """The whole itself needs a package of image models, which is not among ours."""
    directory = make_family(tmp_path, "gemma3n_text")
    expected = generate(directory, PROMPTS, OUTPUT_TOKENS).outputs
    rename_tensors(directory, "model.", "model.language_model.")
    change_tensors(directory, {"model.vision_tower.timm_model.stem": torch.zeros(4)})
    text = json.loads((directory / "config.json").read_text())
    whole = {"model_type": "gemma3n", "architectures": ["Gemma3nForConditionalGeneration"]}
    (directory / "config.json").write_text(json.dumps({**whole, "text_config": text}))
    assert served(directory) == expected


@pytest.mark.parametrize(
    ("stated", "has_head"),
    # The configuration says the opposite; in the soak it is right, too.
    [(True, True), (False, False), in_soak(True, False), in_soak(False, True)],
)
def test_the_files_decide_whether_the_head_is_the_embedding(
    stated: bool, has_head: bool, tmp_path: Path
) -> None:
    directory = make_family(tmp_path, "internvl", tie_word_embeddings=not has_head)
    expected = generate(directory, PROMPTS, OUTPUT_TOKENS).outputs
    names = Checkpoint(directory).shapes
    assert ("lm_head.weight" in names) == has_head
    change_config(directory, tie_word_embeddings=stated)
    assert served(directory) == expected


def test_towers_are_not_read(tmp_path: Path) -> None:
    directory = make_family(tmp_path, "qwen3_vl")
    tensors = load_file(directory / WEIGHTS)
    towers = {name: each for name, each in tensors.items() if name.startswith("model.visual.")}
    # Nothing could be read from these.
    change_tensors(directory, {name: each.to(torch.float8_e4m3fn) for name, each in towers.items()})
    assert towers
    assert isinstance(load(directory).model, Decoder)
    assert not any("visual" in name for name in Checkpoint(directory).shapes)


@pytest.mark.parametrize(
    ("family", "root"),
    [("qwen3_vl", "model.language_model."), in_soak("kimi_k25", "language_model.model.")],
)
def test_a_tensor_of_the_text_model_that_is_missing_or_not_read_is_named(
    family: str, root: str, tmp_path: Path
) -> None:
    directory = make_family(tmp_path, family)
    norm = f"{root}layers.1.input_layernorm.weight"
    tensor = load_file(directory / WEIGHTS)[norm]
    for extra in (f"{root}layers.1.other.weight", f"{root}other.weight"):
        change_tensors(directory, {extra: torch.zeros(2)})
        refused(directory, f"have 1 tensors that .* does not read, {re.escape(extra)} for one")
        change_tensors(directory, {extra: None})
    change_tensors(directory, {norm: None})
    refused(directory, f"lack 1 of the model's tensors, {re.escape(norm)} for one")
    change_tensors(directory, {norm.replace("language_model", "text_model"): tensor})
    refused(directory, f"lack 1 of the model's tensors, {re.escape(norm)} for one")


def test_files_whose_names_all_begin_otherwise_are_refused(tmp_path: Path) -> None:
    directory = make_family(tmp_path, "qwen3_vl")
    rename_tensors(directory, "model.language_model.", "text_model.")
    refused(directory, r"lack 46 of the model's tensors, model\.embed_tokens\.weight for one")


def refused(directory: Path, reason: str) -> None:
    with pytest.raises(ModelError, match=reason) as caught:
        load(directory)
    assert "\n" not in str(caught.value)


def test_stacks_of_experts_may_lie_either_way(tmp_path: Path) -> None:
    directory = make_family(tmp_path, "qwen3_vl_moe")
    expected = generate(directory, PROMPTS, OUTPUT_TOKENS).outputs
    name = "model.language_model.layers.0.mlp.experts.gate_up_proj"
    assert load_file(directory / WEIGHTS)[name].shape == (4, 64, 48)
    assert served(directory) == expected
    turn_stacks(directory)
    assert served(directory) == expected


def test_a_stack_of_experts_that_does_not_fit_is_named(tmp_path: Path) -> None:
    directory = make_family(tmp_path, "qwen3_vl_moe")
    name = "model.language_model.layers.0.mlp.experts.down_proj"
    change_tensors(directory, {name: torch.zeros(4, 24, 65)})
    refused(directory, re.escape("experts.down_proj: has the shape [4, 24, 65]; the configuration"))


FORMATS = {"gptq": gptq(), "awq": awq(), "fp8": scaled("block", method="fp8")}


@pytest.mark.parametrize(
    ("family", "form"),
    [
        in_soak("internvl", "gptq"),
        ("qwen3_vl", "awq"),
        in_soak("glm4v", "gptq"),
        in_soak("kimi_k25", "fp8"),
        ("qwen2_5_vl", "fp8"),
    ],
)
def test_a_quantized_checkpoint_says_what_its_plain_twin_says(
    family: str, form: str, tmp_path: Path
) -> None:
    source = make_family(tmp_path / "source", family)
    quantized, plain = make_quantized(tmp_path, source, FORMATS[form])
    assert served(quantized) == served(plain)


def test_stacks_of_experts_beside_quantized_matrices_are_refused(tmp_path: Path) -> None:
    source = make_family(tmp_path / "source", "qwen3_vl_moe")
    quantized, _ = make_quantized(tmp_path, source, FORMATS["fp8"])
    refused(quantized, r"experts\.\w+_proj: stacks of experts are not served in quantized")


@pytest.mark.parametrize(
    ("generation", "whole", "text", "expected"),
    [
        ([7, 8], 5, 6, (7, 8)),
        (None, 5, 6, (5,)),
        (None, None, [6, 9], (6, 9)),
    ],
)
def test_eos_ids_stand_in_one_of_three_places(
    generation: Any, whole: Any, text: Any, expected: tuple[int, ...], tmp_path: Path
) -> None:
    directory = make_family(tmp_path, "qwen2_5_vl")
    parts = json.loads((directory / "config.json").read_text())["text_config"]
    change_config(directory, eos_token_id=whole, text_config={**parts, "eos_token_id": text})
    written = {} if generation is None else {"eos_token_id": generation}
    (directory / "generation_config.json").write_text(json.dumps(written))
    assert load(directory).info.eos_token_ids == expected


def test_the_whole_is_what_a_shard_says_it_serves(tmp_path: Path) -> None:
    directory = make_family(tmp_path, "mistral3")
    info = load(directory).info
    assert info.architecture == "Mistral3ForConditionalGeneration"
    assert info.max_model_len == CONTEXT


def split_without_index(directory: Path) -> None:
    """Save the weights in two parts that no index lists."""
    tensors = load_file(directory / WEIGHTS)
    (directory / WEIGHTS).unlink()
    for part in (1, 2):
        name = f"model-0000{part}-of-00002.safetensors"
        save_file(dict(list(tensors.items())[part - 1 :: 2]), directory / name, {"format": "pt"})


# Our decoder, transformers' code, and a text model beside a tower.
@pytest.mark.parametrize("family", ["llama", "opt", "qwen2_5_vl"])
def test_parts_that_no_index_lists_give_the_tokens_of_the_one_file(
    family: str, tmp_path: Path
) -> None:
    directory = make_family(tmp_path, family)
    expected = served(directory)
    split_without_index(directory)
    assert served(directory) == expected


@pytest.mark.parametrize("family", ["llama", "opt"])
def test_a_file_named_weights_gives_the_tokens_of_the_one_file(family: str, tmp_path: Path) -> None:
    directory = make_family(tmp_path, family)
    expected = served(directory)
    (directory / WEIGHTS).rename(directory / "weights.safetensors")
    other = make_family(tmp_path / "other", family, seed=1)
    for name in ("consolidated", "adapter_model", "x_optimizer"):
        shutil.copy(other / WEIGHTS, directory / f"{name}.safetensors")
    assert served(directory) == expected
