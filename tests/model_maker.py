"""Model directories for tests and benchmarks: random weights, a small tokenizer, no downloads.

    make_model(tmp_path / "llama", "llama")
    make_model(directory, "llama-130m")

Needs torch and transformers, which are imported when a model is made and not before.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

VOCABULARY = 384
CONTEXT = 256

_SMALL: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": CONTEXT,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 2,
    # Wide enough that the two best logits of a random model are never a rounding error apart.
    "initializer_range": 0.3,
}
_GEMMA: dict[str, Any] = {
    **_SMALL,
    "head_dim": 16,
    "query_pre_attn_scalar": 16,
    # Scaled and tied embeddings would make a random model repeat its last token; large logits
    # would all meet at the final softcap.
    "tie_word_embeddings": False,
    "initializer_range": 0.1,
}
_NO_KV_HEADS = {name: value for name, value in _SMALL.items() if name != "num_key_value_heads"}
_GPT2: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "n_embd": 32,
    "n_layer": 3,
    "n_head": 4,
    "n_positions": CONTEXT,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "initializer_range": 0.3,
}
_OPT: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "ffn_dim": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": CONTEXT,
    "word_embed_proj_dim": 32,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 2,
    "init_std": 0.3,
}
_PARTIAL_ROPE = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}
# Keys and values of different sizes, dense and expert layers, latent attention.
_DEEPSEEK: dict[str, Any] = {
    **_SMALL,
    "num_key_value_heads": 4,
    "moe_intermediate_size": 32,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "first_k_dense_replace": 1,
    "kv_lora_rank": 16,
    "q_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
}
# Family -> model type of transformers, and configuration values.
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", _SMALL),
    "qwen2": ("qwen2", _SMALL),
    "qwen3": ("qwen3", {**_SMALL, "head_dim": 16}),
    "mistral": ("mistral", {**_SMALL, "sliding_window": 24}),
    "ministral3": (
        "ministral3",
        {
            **_SMALL,
            "head_dim": 16,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 10000.0,
                "factor": 8.0,
                "original_max_position_embeddings": 32,
                "llama_4_scaling_beta": 0.3,
            },
        },
    ),
    "gemma2": (
        "gemma2",
        {**_GEMMA, "sliding_window": 24, "attn_logit_softcapping": 1.0},
    ),
    "gemma3": (
        "gemma3_text",
        {
            **_GEMMA,
            "sliding_window": 24,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
    ),
    # Heads of two sizes, values that are keys, and experts beside a dense part.
    "gemma4": (
        "gemma4_text",
        {
            **{name: value for name, value in _GEMMA.items() if name != "query_pre_attn_scalar"},
            "sliding_window": 24,
            "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
            "global_head_dim": 24,
            "num_global_key_value_heads": 1,
            "attention_k_eq_v": True,
            "hidden_size_per_layer_input": 0,
            "enable_moe_block": True,
            "num_experts": 4,
            "top_k_experts": 2,
            "moe_intermediate_size": 24,
        },
    ),
    "gpt_oss": (
        "gpt_oss",
        {
            **_SMALL,
            "head_dim": 16,
            "sliding_window": 24,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        },
    ),
    "glm4": ("glm4", {**_SMALL, "head_dim": 16, "rope_parameters": _PARTIAL_ROPE}),
    "phi3": ("phi3", {**_SMALL, "rope_parameters": _PARTIAL_ROPE}),
    "mixtral": ("mixtral", {**_SMALL, "num_local_experts": 4, "num_experts_per_tok": 2}),
    "qwen3_moe": (
        "qwen3_moe",
        {
            **_SMALL,
            "head_dim": 16,
            "moe_intermediate_size": 24,
            "num_experts": 8,
            "num_experts_per_tok": 3,
            "norm_topk_prob": True,
            # The middle layer is dense.
            "mlp_only_layers": [1],
        },
    ),
    "stablelm": ("stablelm", {**_SMALL, "use_qkv_bias": True}),
    "olmo2": ("olmo2", _SMALL),
    "granite": ("granite", _SMALL),
    "cohere2": ("cohere2", _SMALL),
    "gpt_neox": ("gpt_neox", _NO_KV_HEADS),
    "starcoder2": ("starcoder2", _SMALL),
    "olmoe": ("olmoe", {**_SMALL, "num_experts": 4, "num_experts_per_tok": 2}),
    "qwen2_moe": (
        "qwen2_moe",
        {
            **_SMALL,
            "moe_intermediate_size": 32,
            "shared_expert_intermediate_size": 32,
            "num_experts": 4,
            "num_experts_per_tok": 2,
        },
    ),
    "deepseek_v2": ("deepseek_v2", _DEEPSEEK),
    "deepseek_v3": (
        "deepseek_v3",
        {**_DEEPSEEK, "n_routed_experts": 8, "n_group": 4, "topk_group": 2},
    ),
    "phi": ("phi", _SMALL),
    "olmo": ("olmo", _SMALL),
    "opt": ("opt", _OPT),
    "gpt2": ("gpt2", _GPT2),
    # Not served; see tests/models/test_gate.py.
    "falcon": ("falcon", _NO_KV_HEADS),
    "bloom": (
        "bloom",
        {
            "vocab_size": VOCABULARY,
            "hidden_size": 32,
            "n_layer": 3,
            "n_head": 4,
            "seq_length": CONTEXT,
        },
    ),
    "llama4": (
        "llama4_text",
        {
            **_SMALL,
            "head_dim": 8,
            "attention_chunk_size": 16,
            "floor_scale": 8,
            "num_local_experts": 2,
            "intermediate_size_mlp": 64,
            # The first layer is dense; the last rotates nothing and sees all keys.
            "moe_layers": [1, 2],
            "no_rope_layers": [1, 1, 0],
        },
    ),
    # Real shapes: slow to make, for benchmarks and tests at size.
    "llama-130m": (
        "llama",
        {
            "vocab_size": 32000,
            "hidden_size": 768,
            "intermediate_size": 2304,
            "num_hidden_layers": 12,
            "num_attention_heads": 12,
            "num_key_value_heads": 4,
            "max_position_embeddings": 2048,
            "bos_token_id": 0,
            "eos_token_id": 1,
            "pad_token_id": 2,
        },
    ),
    # Three of four layers keep a state in place of keys.
    "hybrid-130m": (
        "qwen3_5_text",
        {
            "vocab_size": 32000,
            "hidden_size": 768,
            "intermediate_size": 2304,
            "num_hidden_layers": 12,
            "num_attention_heads": 6,
            "num_key_value_heads": 2,
            "head_dim": 128,
            "linear_num_key_heads": 4,
            "linear_num_value_heads": 8,
            "linear_key_head_dim": 96,
            "linear_value_head_dim": 96,
            "max_position_embeddings": 32768,
            "bos_token_id": 0,
            "eos_token_id": 1,
            "pad_token_id": 2,
        },
    ),
    "llama-3m": (
        "llama",
        {
            "vocab_size": 8192,
            "hidden_size": 128,
            "intermediate_size": 384,
            "num_hidden_layers": 4,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "max_position_embeddings": 2048,
            "bos_token_id": 0,
            "eos_token_id": 1,
            "pad_token_id": 2,
        },
    ),
    "opt-125m": (
        "opt",
        {
            "vocab_size": 50272,
            "hidden_size": 768,
            "ffn_dim": 3072,
            "num_hidden_layers": 12,
            "num_attention_heads": 12,
            "max_position_embeddings": 2048,
            "word_embed_proj_dim": 768,
            "bos_token_id": 0,
            "eos_token_id": 1,
            "pad_token_id": 2,
        },
    ),
}

CHAT_TEMPLATE = (
    "{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
_TEXTS = [
    "The quick brown fox jumps over the lazy dog.",
    "A shard computes tokens; the router reads and writes text.",
    "Zwölf Boxkämpfer jagen Viktor quer über den großen Sylter Deich.",
    "0123456789 +-*/= () [] {} <> \"quoted\" 'text' https://example.org/?q=1",
]


def make_config(family: str, **changes: Any) -> PreTrainedConfig:
    """The configuration of a family, with `changes` to its values."""
    from transformers import AutoConfig

    model_type, values = FAMILIES[family]
    config: PreTrainedConfig = AutoConfig.for_model(model_type, **{**values, **changes})
    return config


def make_model(
    directory: Path, family: str, *, seed: int = 0, shard_size: str = "5GB", **changes: Any
) -> Path:
    """Write a model of the family to `directory` and return it.

    Weights are random but the same for the same seed, in fp32 safetensors, cut into parts of
    `shard_size`. Also written: config.json, generation_config.json, a byte-level BPE tokenizer.
    """
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    import torch
    from transformers import AutoModelForCausalLM

    config = make_config(family, **changes)
    torch.manual_seed(seed)
    module = AutoModelForCausalLM.from_config(config)
    _randomise_constants(module)
    module.save_pretrained(directory, max_shard_size=shard_size)
    write_tokenizer(directory)
    return directory


def _randomise_constants(module: Any) -> None:
    """Biases start as 0 and norms as 1, which would hide their being swapped or left out."""
    import torch

    with torch.no_grad():
        # Also those that are no parameters, but are saved, such as biases of routers.
        for name, constant in module.state_dict().items():
            is_constant = constant.dim() == 1 or name.endswith("_bias")
            if is_constant and constant.is_floating_point():
                constant.add_(torch.randn_like(constant) * 0.1)


def write_tokenizer(directory: Path) -> None:
    """A byte-level BPE tokenizer of at most `VOCABULARY` ids: bos 0, eos 1, pad 2."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=["<s>", "</s>", "<pad>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_TEXTS * 4, trainer)
    tokenizer.save(str(directory / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<s>",
        "eos_token": "</s>",
        "pad_token": "<pad>",
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n")
