"""Tiny random models of the families that people serve, and what transformers generates with them.

Each has four layers, among them every kind of layer that its family has, and sizes with which a
hundred tokens pass every window, chunk and block of its attention.
"""

from __future__ import annotations

import copy
import dataclasses
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from safetensors.torch import load_file, save_file
from transformers import (
    CONFIG_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    PreTrainedConfig,
    PreTrainedModel,
)

VOCABULARY = 4096
CONTEXT = 512
WEIGHTS = "model.safetensors"
LAYERS = 4
# As far apart, in standard deviations of the logits, two best ones must be that rounding changes no
# token.
DECISIVE = 5e-5

# Each value goes to every configuration that has a field of that name.
_SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "max_position_embeddings": CONTEXT,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "use_cache": True,
    # Width and depth.
    **dict.fromkeys(("hidden_size", "d_model", "n_embd"), 64),
    **dict.fromkeys(("out_hidden_size", "embed_dim", "projector_hidden_size"), 64),
    **dict.fromkeys(("num_hidden_layers", "n_layer"), LAYERS),
    **dict.fromkeys(("num_layers", "depth"), 2),
    **dict.fromkeys(("intermediate_size", "intermediate_size_mlp", "ffn_dim"), 128),
    "hidden_size_per_layer_input": 16,
    "vocab_size_per_layer_input": VOCABULARY,
    # Attention.
    **dict.fromkeys(("num_attention_heads", "n_head", "num_heads"), 4),
    "num_key_value_heads": 2,
    "head_dim": 16,
    **dict.fromkeys(("sliding_window", "attention_window_size"), 8),
    "attention_chunk_size": 16,
    # Latent attention, and the selection of keys; with fewer index heads, scores tie at zero.
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank"), 32),
    **dict.fromkeys(("qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim"), 16),
    "index_n_heads": 16,
    "index_head_dim": 32,
    # The tests' contexts are no longer.
    "index_topk": 128,
    # Experts.
    **dict.fromkeys(("num_experts", "n_routed_experts", "num_local_experts"), 4),
    "num_experts_per_tok": 2,
    **dict.fromkeys(("n_group", "topk_group", "n_shared_experts", "first_k_dense_replace"), 1),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size"), 32),
    "shared_intermediate_size": 32,
    # Linear attention and state spaces.
    "linear_num_key_heads": 2,
    **dict.fromkeys(("linear_num_value_heads", "linear_num_heads"), 4),
    **dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim", "linear_head_dim"), 16),
    **dict.fromkeys(("mamba_n_heads", "mamba_num_heads"), 4),
    **dict.fromkeys(("mamba_d_head", "mamba_head_dim"), 32),
    **dict.fromkeys(("mamba_d_state", "state_size", "ssm_state_size"), 16),
    **dict.fromkeys(("mamba_n_groups", "n_groups"), 1),
    **dict.fromkeys(("chunk_size", "mamba_chunk_size", "block_size"), 16),
    "expand": 2,
}

_LATENT = {"num_key_value_heads": 4}
_ROTATION = {"rope_type": "default", "rope_theta": 10000.0}
_YARN = {
    "rope_parameters": {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 16.0,
        "original_max_position_embeddings": 32,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "llama_4_scaling_beta": 0.1,
    }
}
_THREE_AXES = {"rope_parameters": {**_ROTATION, "mrope_section": [2, 3, 3]}}
_HALF_OF_THREE_AXES = {
    # A row or a column more turns each frequency far.
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 10.0,
        "partial_rotary_factor": 0.5,
        "mrope_section": [2, 1, 1],
        "mrope_interleaved": True,
    },
    "layer_types": ["linear_attention", "full_attention"] * 2,
}
_SHARED_KV = {
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "num_kv_shared_layers": 2,
}
_LINEAR_AND_FULL = {"layer_types": ["linear_attention", "full_attention"] * 2}
_CONV_AND_FULL = {"layer_types": ["conv", "full_attention"] * 2}
_MAMBA_HEADS = {"num_heads": 4, "head_dim": 32}

# What a (sub-)configuration of a type needs besides.
_OWN_VALUES: dict[str, dict[str, Any]] = {
    **dict.fromkeys(("deepseek_v3", "deepseek_v32", "kimi_linear", "bailing_hybrid"), _LATENT),
    "hy_v4": _LATENT,
    "mistral4": {**_LATENT, **_YARN},
    "ministral3": _YARN,
    "glm_moe_dsa": {**_LATENT, "indexer_types": ["full", "full", "shared", "shared"]},
    "glm5_next_text": {**_LATENT, "qk_rope_head_dim": 0, "index_kpool": 4},
    "longcat_flash": {
        **_LATENT,
        "ffn_hidden_size": 128,
        "expert_ffn_hidden_size": 32,
        "moe_topk": 2,
        "zero_expert_num": 2,
    },
    "deepseek_v4": {
        "num_key_value_heads": 1,
        "head_dim": 32,
        "o_groups": 2,
        "o_lora_rank": 16,
        "index_topk": 4,
        "mlp_layer_types": ["hash_moe", "moe", "moe", "moe"],
        "layer_types": [
            "sliding_attention",
            "heavily_compressed_attention",
            "compressed_sparse_attention",
            "sliding_attention",
        ],
        "compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": 8},
    },
    "minimax_m3_vl_text": {
        "layer_types": ["full_attention", "minimax_m3_sparse"] * 2,
        "index_n_heads": 2,
        "index_block_size": 64,
        "index_topk_blocks": 2,
        "dense_intermediate_size": 128,
    },
    "qwen4_exp_text": {
        "hc_lowrank": 8,
        "ple_layer_ids": [1],
        "ngram_vocab_size_base": 101,
        "split_ngram_parts": 4,
        "indexer_n_heads": 4,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 16,
        "indexer_budget": 8,
        "indexer_compress_ratio": 4,
    },
    **dict.fromkeys(("qwen2_vl_text", "qwen2_5_vl_text", "qwen3_vl_text"), _THREE_AXES),
    # Not half as wide as the model: else nothing shows which way a stack of experts is stored.
    "qwen3_vl_moe_text": {**_THREE_AXES, "moe_intermediate_size": 24},
    "glm4v_text": _THREE_AXES,
    "glm4v_moe_text": {
        "rope_parameters": {
            **_ROTATION,
            "partial_rotary_factor": 0.5,
            "mrope_section": [1, 2, 1],
        }
    },
    **dict.fromkeys(("qwen3_5_text", "qwen3_5_moe_text"), _HALF_OF_THREE_AXES),
    "gemma3n_text": {
        **_SHARED_KV,
        "laurel_rank": 8,
        "activation_sparsity_pattern": [0.95, 0.95, 0.0, 0.0],
    },
    "gemma4_text": {**_SHARED_KV, "global_head_dim": 32},
    "gemma4_unified_text": {
        **_SHARED_KV,
        "global_head_dim": 32,
        "num_global_key_value_heads": 1,
    },
    "gemma4_unified_vision": {
        "mm_embed_dim": 64,
        "mm_posemb_size": 64,
        "output_proj_dims": 64,
    },
    # The temperature of queries grows every 8 tokens.
    "llama4_text": {"floor_scale": 8},
    "llama4_vision_model": {
        "vision_output_dim": 64,
        "projector_input_dim": 64,
        "projector_output_dim": 64,
    },
    "mamba2": _MAMBA_HEADS,
    "falcon_h1": {"mamba_d_ssm": 128},
    "granitemoehybrid": _LINEAR_AND_FULL,
    "bamba": {"attn_layer_indices": [1, 3]},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "zamba2": {
        "layers_block_type": ["linear_attention", "hybrid"] * 2,
        "attention_head_dim": 32,
    },
    # As on the hub: the window that its code does not pass on is as long as the context.
    "phimoe": {"sliding_window": CONTEXT},
    "lfm2": _CONV_AND_FULL,
    "lfm2_moe": {**_CONV_AND_FULL, "num_dense_layers": 1},
}


def tiny_config(model_type: str, **changes: Any) -> PreTrainedConfig:
    """The configuration of a small model of this type, with `changes` to its values."""
    config_class = CONFIG_MAPPING[model_type]
    fields = {field.name for field in dataclasses.fields(config_class)}
    values = {name: value for name, value in _SIZES.items() if name in fields}
    values |= copy.deepcopy(_OWN_VALUES.get(model_type, {}))
    for name, part in config_class.sub_configs_defaults.items():
        values[name] = tiny_config(part.model_type or part.config_class.model_type)
    values |= changes
    config: PreTrainedConfig = config_class(**values)
    kinds = list(dict.fromkeys(getattr(config_class(), "layer_types", None) or ()))
    if "layer_types" in fields and set(kinds) - set(config.layer_types or ()):
        config = config_class(**values, layer_types=(kinds * LAYERS)[:LAYERS])
    return config


def make_family(directory: Path, model_type: str, *, seed: int = 0, **changes: Any) -> Path:
    """Write a model of this type to `directory` and return it: configuration and weights in fp32,
    as on the hub also where transformers saves them otherwise; with the towers of one that sees
    images.
    """
    torch.manual_seed(seed)
    module = _module(tiny_config(model_type, **changes))
    _draw(module)
    module.eval().save_pretrained(directory)
    if model_type == "kimi_k25":
        rename_tensors(directory, "language_model.model.blocks.", "language_model.model.layers.")
    elif model_type == "qwen3_vl_moe":
        turn_stacks(directory)
    return directory


def rename_tensors(directory: Path, old: str, new: str) -> None:
    """Change how names of tensors begin."""
    tensors = load_file(directory / WEIGHTS)
    renamed = {re.sub(f"^{re.escape(old)}", new, name): each for name, each in tensors.items()}
    save_file(renamed, directory / WEIGHTS, {"format": "pt"})


def turn_stacks(directory: Path) -> None:
    """Transpose each matrix of each stack of experts."""
    tensors = load_file(directory / WEIGHTS)
    for name, tensor in tensors.items():
        if ".experts." in name:
            tensors[name] = tensor.transpose(1, 2).contiguous()
    save_file(tensors, directory / WEIGHTS, {"format": "pt"})


def _makers(config: PreTrainedConfig) -> list[Any]:
    """Return the auto classes to try in turn. A composite comes with its towers, as on the hub."""
    makers: list[Any] = [AutoModelForCausalLM, AutoModelForImageTextToText]
    return makers[::-1] if config.sub_configs else makers


def _module(config: PreTrainedConfig) -> PreTrainedModel:
    first, second = _makers(config)
    try:
        made: PreTrainedModel = first.from_config(config, dtype=torch.float32)
    except ValueError:
        made = second.from_config(config, dtype=torch.float32)
    return made


@torch.no_grad()
def _draw(module: PreTrainedModel) -> None:
    """Random weights with which every part of a model changes its tokens."""
    for name, parameter in module.named_parameters():
        if name.endswith("A_log"):
            # As transformers draws them, a state forgets everything at once.
            parameter.uniform_(-3, 0)
        elif name.endswith(("dt_bias", "dt_proj.bias")):
            parameter.uniform_(-1, 1)
        elif parameter.dim() > 1:
            scale = 0.2 if "embed" in name else 1.0
            parameter.normal_(0, scale * parameter.shape[-1] ** -0.5)
        else:
            parameter.add_(torch.randn_like(parameter), alpha=0.1)
    for name, buffer in module.named_buffers():
        if name.endswith("e_score_correction_bias"):
            buffer.normal_(0, 0.1)
        elif name.endswith("layer_scalar"):
            buffer.uniform_(0.5, 1.5)
        elif name.endswith("tid2eid"):
            buffer.random_(0, _SIZES["n_routed_experts"])


@dataclass(frozen=True, slots=True)
class Generated:
    """The tokens that `generate` appends to each prompt, and the margin of its closest choice, in
    standard deviations of the logits.
    """

    outputs: list[list[int]]
    margin: float


def generate(directory: Path, prompts: Sequence[Sequence[int]], most_tokens: int) -> Generated:
    """Greedy continuations by transformers, one prompt at a time, end-of-sequence ignored."""
    module = load_whole(directory)
    module.generation_config.eos_token_id = None
    outputs, margins = [], []
    for prompt in prompts:
        ids = torch.tensor([prompt])
        found = module.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=most_tokens,
            do_sample=False,
            pad_token_id=0,
            return_dict_in_generate=True,
            output_logits=True,
        )
        outputs.append(found.sequences[0, len(prompt) :].tolist())
        for logits in found.logits:
            best, second = logits[0].topk(2).values.tolist()
            margins.append((best - second) / float(logits.std()))
    return Generated(outputs, min(margins))


def load_whole(directory: Path) -> PreTrainedModel:
    """The module of a directory, in float32, with its towers."""
    config = AutoConfig.from_pretrained(directory)
    # Eager, because sdpa in transformers 5.17 drops Gemma 2's softcap without a word.
    options: dict[str, Any] = {"dtype": torch.float32, "attn_implementation": "eager"}
    first, second = _makers(config)
    try:
        module: PreTrainedModel = first.from_pretrained(directory, **options)
    except ValueError:
        module = second.from_pretrained(directory, **options)
    return module
