"""Our decoder computes what transformers computes, and takes only models it understands."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from model_maker import FAMILIES, make_config, make_model
from models.driver import Driver, load, make_sequence
from models.model_steps import cut_logits, errors_of, relative_errors
from safetensors.torch import load_file, save_file
from support.budget import in_soak

from penstock_shard.errors import ModelError
from penstock_shard.models.decoder.decoder import Decoder
from penstock_shard.models.decoder.from_config import decoder_spec
from penstock_shard.models.decoder.spec import NotOurs
from penstock_shard.models.transformers.transformers_model import TransformersModel

Directory = Callable[[str], Path]

DECODERS = (
    "llama",
    "mistral",
    "ministral3",
    "qwen2",
    "qwen3",
    "phi3",
    "glm4",
    "gemma2",
    "gemma3",
    "mixtral",
    "qwen3_moe",
    "deepseek_v3",
    "gpt_oss",
    "llama4",
    "gemma4",
)
EXPERTS = ("mixtral", "qwen3_moe", "deepseek_v3", "llama4", "gemma4")
REFUSED = ("falcon", "bloom")
# Not those of real shapes, which have a hyphen.
SERVED = [name for name in FAMILIES if name not in REFUSED and "-" not in name]

# Of our decoder and of transformers' code those that differ most; the soak has all.
GO_THEIR_WAY = {"llama", "gemma3", "mixtral", "deepseek_v3", "gpt2", "opt", "gpt_oss", "qwen2_moe"}

ROPES: dict[str, dict[str, Any]] = {
    "linear": {"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
        "rope_theta": 10000.0,
    },
    "yarn": {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 64,
        "rope_theta": 10000.0,
    },
}
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "tied": ("qwen2", {"tie_word_embeddings": True}),
    "tied and scaled": ("gemma3", {"tie_word_embeddings": True}),
    "wide heads": ("llama", {"head_dim": 24}),
    "one kv head": ("llama", {"num_key_value_heads": 1}),
    "odd sizes": ("llama", {"hidden_size": 40, "intermediate_size": 50, "vocab_size": 391}),
    "windows on some layers": (
        "qwen2",
        {"use_sliding_window": True, "sliding_window": 20, "max_window_layers": 1},
    ),
    "an expert a token": ("mixtral", {"num_experts_per_tok": 1}),
    "every expert for every token": ("mixtral", {"num_experts_per_tok": 4}),
    "experts in windows": ("mixtral", {"sliding_window": 20}),
    "experts counted as they are": ("qwen3_moe", {"norm_topk_prob": False}),
    "experts in each second layer": (
        "qwen3_moe",
        {"mlp_only_layers": [], "decoder_sparse_step": 2, "attention_bias": True},
    ),
    "latents of keys and values alone": ("deepseek_v3", {"q_lora_rank": None}),
    "latents with biases, halves rotated": (
        "deepseek_v3",
        {"attention_bias": True, "rope_interleave": False, "norm_topk_prob": False},
    ),
    "heads that are not normed": ("llama4", {"use_qk_norm": False, "attention_bias": True}),
    "heads that all rotate": ("llama4", {"no_rope_layers": [1, 1, 1]}),
    "stacks of experts that are square": ("llama4", {"intermediate_size": 16}),
    "stacks of experts whose halves are square": ("llama4", {"intermediate_size": 32}),
    "several experts, of which each has its own input": (
        "llama4",
        {"num_local_experts": 4, "num_experts_per_tok": 3},
    ),
    "a dense part without experts": (
        "gemma4",
        {"enable_moe_block": False, "attention_k_eq_v": False},
    ),
    "experts in no layer": ("qwen3_moe", {"mlp_only_layers": [0, 1, 2]}),
    **{f"{name} rope": ("llama", {"rope_parameters": rope}) for name, rope in ROPES.items()},
}


# On plain torch a few in each run of the tests, and all in the soak.
ON_TORCH = {"llama", "gemma3", "mixtral", "deepseek_v3", "experts in windows"}
# Much like another family or variant: in the soak.
ALIKE = {
    *("mistral", "ministral3", "qwen2"),
    *("wide heads", "experts in windows", "an expert a token", "experts counted as they are"),
    *("latents of keys and values alone", "stacks of experts that are square"),
    *("heads that are not normed", "experts in no layer", "linear rope", "tied"),
}


def unlike(names: Iterable[str]) -> list[Any]:
    return [in_soak(name) if name in ALIKE else name for name in names]


def on_backends(names: Iterable[str]) -> list[Any]:
    on_torch = [(name, "sdpa") for name in names]
    on_kernels = [(name, "cpu") for name in names]
    return [pair if pair[0] not in ALIKE else in_soak(*pair) for pair in on_kernels] + [
        pair if pair[0] in ON_TORCH else in_soak(*pair) for pair in on_torch
    ]


@pytest.mark.parametrize(("family", "backend"), on_backends(DECODERS))
def test_logits_are_those_of_transformers(family: str, backend: str, model_dir: Directory) -> None:
    worst, _ = relative_errors(model_dir(family), attention_backend=backend)
    assert worst < 1e-4


@pytest.mark.parametrize(("name", "backend"), on_backends(VARIANTS))
def test_logits_of_variants_are_those_of_transformers(
    name: str, backend: str, tmp_path: Path
) -> None:
    family, changes = VARIANTS[name]
    directory = make_model(tmp_path, family, **changes)
    runner = load(directory, attention_backend=backend)
    assert isinstance(runner.model, Decoder)
    worst, _ = errors_of(runner, directory)
    assert worst < 1e-4


@pytest.mark.parametrize(
    "family", [name if name in GO_THEIR_WAY else in_soak(name) for name in DECODERS]
)
def test_half_precision_is_as_near_as_it_can_be(family: str, model_dir: Directory) -> None:
    # One rounding of a weight is 2.8e-4 on average; three layers of random weights amplify it.
    worst, mean = relative_errors(model_dir(family), dtype="auto")
    if family in EXPERTS:
        # Rounding sends a token to other experts now and then.
        assert mean < 2e-2
        return
    assert worst < 0.1
    assert mean < 5e-3


@pytest.mark.parametrize("family", ["llama", in_soak("gemma3"), "gpt2"])
def test_bfloat16_errs_by_little_more_than_its_eight_bits(
    family: str, model_dir: Directory
) -> None:
    _, mean = relative_errors(model_dir(family), dtype="bfloat16")
    assert 1e-3 < mean < 3e-2


def test_cached_keys_and_values_may_be_rounded_alone(model_dir: Directory) -> None:
    worst, mean = relative_errors(model_dir("llama"), kv_cache_dtype="float16")
    assert 1e-4 < worst < 0.05
    assert mean < 3e-3


@pytest.mark.parametrize("family", ["llama", in_soak("gemma3"), in_soak("opt"), "gpt2"])
def test_int8_errs_by_a_tenth_of_the_spread_at_most(family: str, model_dir: Directory) -> None:
    _, mean = relative_errors(model_dir(family), dtype="auto", quantization="int8")
    assert 1e-3 < mean < 0.1


def test_int4_errs_by_less_than_the_spread(model_dir: Directory) -> None:
    _, mean = relative_errors(model_dir("llama"), dtype="auto", quantization="int4")
    assert 0.01 < mean < 0.6


def test_half_weights_keep_a_bfloat16_checkpoint_as_it_is(tmp_path: Path) -> None:
    directory = make_model(tmp_path, "llama")
    weights = directory / "model.safetensors"
    tensors = {name: tensor.bfloat16() for name, tensor in load_file(weights).items()}
    save_file(tensors, weights, {"format": "pt"})
    half = cut_logits(load(directory, dtype="auto", kv_cache_dtype="float32"))[1]
    full = cut_logits(load(directory, dtype="float32"))[1]
    assert torch.equal(half, full)


@pytest.mark.parametrize(
    "family", [name if name in GO_THEIR_WAY else in_soak(name) for name in SERVED]
)
def test_each_family_goes_its_way(family: str, model_dir: Directory) -> None:
    way = Decoder if family in DECODERS else TransformersModel
    assert isinstance(load(model_dir(family)).model, way)


@pytest.mark.parametrize(
    ("family", "changes", "reason"),
    [
        ("llama", {"attention_chunk_size": 8}, "attention_chunk_size"),
        ("llama", {"some_new_gate": "on"}, "some_new_gate"),
        ("llama", {"hidden_act": "relu"}, "activation relu"),
        ("llama", {"architectures": ["LlamaForSequenceClassification"]}, "architecture"),
        ("llama", {"rope_parameters": {**ROPES["yarn"], "rope_type": "dynamic"}}, "rope type"),
        ("llama", {"rope_parameters": {**ROPES["yarn"], "mrope_section": [1]}}, "mrope_section"),
        ("qwen3", {"layer_types": ["linear_attention"] * 3}, "layer type linear_attention"),
        ("gemma3", {"use_bidirectional_attention": True}, "use_bidirectional_attention"),
        ("gemma3", {"attn_logit_softcapping": 5.0}, "attn_logit_softcapping"),
        ("gemma4", {"hidden_size_per_layer_input": 8}, "hidden_size_per_layer_input"),
        ("gemma4", {"use_bidirectional_attention": "all"}, "use_bidirectional_attention"),
        ("gpt2", {}, "model type gpt2"),
        ("mixtral", {"num_experts_per_tok": 5}, "num_experts_per_tok 5 of 4 experts"),
        ("mixtral", {"shared_expert_intermediate_size": 8}, "shared_expert_intermediate_size"),
        ("qwen3_moe", {"n_group": 2}, "n_group"),
        ("deepseek_v3", {"scoring_func": "softmax"}, "scoring_func softmax"),
        ("deepseek_v3", {"n_group": 3}, "8 experts in n_group 3, topk_group 2"),
        ("deepseek_v3", {"num_experts_per_tok": 5}, "8 experts in n_group 4, topk_group 2"),
        ("deepseek_v3", {"index_topk": 8}, "index_topk"),
        ("deepseek_v3", {"n_group": 8, "topk_group": 4}, "8 experts in n_group 8, topk_group 4"),
        ("llama4", {"rope_interleave": False}, "rope_interleave"),
        ("llama4", {"rope_parameters": ROPES["yarn"]}, "rope type yarn before norms of heads"),
        ("mistral", {"sliding_window": 0}, "sliding_window 0"),
    ],
)
def test_a_configuration_that_says_more_is_left_to_transformers(
    family: str, changes: dict[str, Any], reason: str
) -> None:
    config = make_config(family)
    for name, value in changes.items():
        setattr(config, name, value)
    with pytest.raises(NotOurs, match=reason):
        decoder_spec(config)


def change_weights(directory: Path, **changes: torch.Tensor) -> Path:
    weights = directory / "model.safetensors"
    save_file({**load_file(weights), **changes}, weights, {"format": "pt"})
    return directory


def test_a_tensor_that_nobody_reads_is_refused_by_name(tmp_path: Path) -> None:
    name = "model.layers.0.self_attn.q_proj.bias"
    directory = change_weights(make_model(tmp_path, "llama"), **{name: torch.zeros(32)})
    with pytest.raises(ModelError, match=rf"1 tensors .* does not read, {name} for one"):
        load(directory)


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_known_leftovers_of_other_releases_are_ignored(family: str, tmp_path: Path) -> None:
    names = {
        "llama": "model.layers.0.self_attn.rotary_emb.inv_freq",
        "gpt2": "transformer.h.0.attn.masked_bias",
    }
    directory = make_model(tmp_path, family)
    expected = cut_logits(load(directory))[1]
    change_weights(directory, **{names[family]: torch.ones(4)})
    runner = load(directory)
    assert isinstance(runner.model, Decoder) == (family == "llama")
    assert torch.equal(cut_logits(runner)[1], expected)


def test_tensors_of_other_parts_are_left_out(tmp_path: Path) -> None:
    """The model also sees, and its text is served."""
    tower = {"vision_tower.layers.0.mlp.weight": torch.ones(4, 4)}
    runner = load(change_weights(make_model(tmp_path, "llama"), **tower))
    assert isinstance(runner.model, TransformersModel)


@pytest.mark.parametrize("backend", ["cpu", "sdpa"])
def test_a_head_of_its_own_is_used_though_the_configuration_says_tied(
    backend: str, tmp_path: Path
) -> None:
    directory = make_model(tmp_path, "qwen2", tie_word_embeddings=True)
    embedding = load_file(directory / "model.safetensors")["model.embed_tokens.weight"]
    change_weights(directory, **{"lm_head.weight": embedding.clone()})
    runner = load(directory, attention_backend=backend)
    assert isinstance(runner.model, Decoder)
    assert runner.model._spec.tied
    # One value past the first pieces that are compared.
    embedding[-1, -1] += 1.0
    change_weights(directory, **{"lm_head.weight": embedding})
    runner = load(directory, attention_backend=backend)
    assert isinstance(runner.model, Decoder)
    assert not runner.model._spec.tied
    assert relative_errors(directory, attention_backend=backend)[0] < 1e-4


@pytest.mark.parametrize(
    ("settings", "shared"),
    [
        ({"dtype": "auto"}, True),
        ({"dtype": "float32"}, True),
        ({"dtype": "float32", "attention_backend": "sdpa"}, True),
        ({"dtype": "auto", "quantization": "int8"}, False),
        ({"dtype": "auto", "quantization": "int4"}, False),
        ({"dtype": "auto", "attention_backend": "sdpa"}, False),
    ],
)
def test_a_tied_table_is_in_memory_once_where_its_rows_can_be_had(
    settings: dict[str, Any], shared: bool, tmp_path: Path
) -> None:
    tied = load(make_model(tmp_path / "tied", "gemma3", tie_word_embeddings=True), **settings)
    assert isinstance(tied.model, Decoder)
    weights = tied.model._weights
    assert (weights.embedding is weights.head.matrix) == shared
    # The same weights with a head of its own.
    other = tmp_path / "other"
    shutil.copytree(tmp_path / "tied", other)
    tensors = load_file(other / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, other / "model.safetensors", {"format": "pt"})
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": False}))
    untied = load(other, **settings)
    assert torch.equal(cut_logits(tied)[1], cut_logits(untied)[1])
    assert isinstance(untied.model, Decoder)
    assert untied.model._weights.embedding is not untied.model._weights.head.matrix


def test_a_tied_head_of_another_shape_is_not_taken_for_the_embedding(tmp_path: Path) -> None:
    directory = make_model(tmp_path, "qwen2", tie_word_embeddings=True)
    change_weights(directory, **{"lm_head.weight": torch.ones(384, 16)})
    with pytest.raises(ModelError, match="cannot load the weights"):
        load(directory)


@pytest.mark.parametrize(
    ("family", "dtype", "stored"),
    [
        ("llama", torch.float64, "F64"),
        ("llama", torch.int8, "I8"),
        ("llama", torch.float8_e4m3fn, "F8_E4M3"),
        in_soak("gpt2", torch.float64, "F64"),
        in_soak("gpt2", torch.int8, "I8"),
        ("gpt2", torch.float8_e4m3fn, "F8_E4M3"),
    ],
)
def test_weights_without_a_known_meaning_are_refused_by_name(
    family: str, dtype: torch.dtype, stored: str, tmp_path: Path
) -> None:
    directory = make_model(tmp_path, family)
    tensors = load_file(directory / "model.safetensors")
    name = next(name for name in tensors if "1.mlp" in name and name.endswith("weight"))
    change_weights(directory, **{name: tensors[name].to(dtype)})
    for backend in ("cpu", "sdpa"):
        with pytest.raises(ModelError, match=rf"{name}: is stored as {stored}") as caught:
            load(directory, attention_backend=backend)
        assert "--" not in str(caught.value)


def test_advice_names_no_flag_that_is_given(tmp_path: Path) -> None:
    directory = make_model(tmp_path, "llama")
    name = "model.layers.1.mlp.up_proj.weight"
    tensor = load_file(directory / "model.safetensors")[name]
    tensor[3, 5] = float("nan")
    change_weights(directory, **{name: tensor})
    with pytest.raises(ModelError, match="its weights are damaged") as caught:
        load(directory, dtype="float32")
    assert "--dtype" not in str(caught.value)
    with pytest.raises(ModelError, match=name) as caught:
        load(directory, dtype="auto", quantization="int8")
    assert "--dtype" not in str(caught.value)


@pytest.mark.parametrize(
    "name", ["model.layers.1.mlp.up_proj.weight", "model.embed_tokens.weight", "lm_head.weight"]
)
def test_a_weight_beyond_half_precision_is_refused_by_name(name: str, tmp_path: Path) -> None:
    directory = make_model(tmp_path, "llama")
    weights = directory / "model.safetensors"
    tensors = load_file(weights)
    tensors[name][3, 5] = 65521.0
    save_file(tensors, weights, {"format": "pt"})
    with pytest.raises(ModelError, match=rf"{name}.* 65504.*use --dtype float32") as caught:
        load(directory, dtype="auto")
    assert "\n" not in str(caught.value)
    tensors[name][3, 5] = 65504.0
    save_file(tensors, weights, {"format": "pt"})
    load(directory, dtype="auto")


def test_a_step_that_samples_nothing_gives_no_logits(model_dir: Directory) -> None:
    driver = Driver(load(model_dir("llama")))
    sequence = make_sequence(list(range(3, 40)))
    assert driver.step([(sequence, 20)])[0].token_id is None
    assert driver.step([(sequence, 17)])[0].token_id is not None
