"""Refuses configurations with values that our decoder does not read: ignoring one could silently
give wrong text.
"""

from __future__ import annotations

from transformers import GenerationConfig, PreTrainedConfig

from penstock_shard.models.decoder.families import ASSUMED_VALUES, Family
from penstock_shard.models.decoder.spec import NotOurs

# Rope types whose angles depend only on the position.
_ROPE_TYPES = {"default", "linear", "llama3", "yarn", "proportional"}
_ROPE_VALUES = {
    "rope_type",
    "type",
    "rope_theta",
    "factor",
    "original_max_position_embeddings",
    "low_freq_factor",
    "high_freq_factor",
    "attention_factor",
    "beta_fast",
    "beta_slow",
    "mscale",
    "mscale_all_dim",
    "truncate",
}
# Values that `decoder_spec` reads in every family.
_READ = {
    "auto_map",
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "hidden_act",
    "rms_norm_eps",
    "rope_parameters",
    "tie_word_embeddings",
    "max_position_embeddings",
    "original_max_position_embeddings",
}
# Values that do not change a forward pass.
_INDIFFERENT = {
    "architectures",
    "attention_dropout",
    "attn_implementation",
    "_attn_implementation",
    "_attn_implementation_autoset",
    "bos_token_id",
    "chunk_size_feed_forward",
    "dtype",
    "embd_pdrop",
    "eos_token_id",
    "id2label",
    "_flash_attn_2_enabled",
    "initializer_range",
    "is_llama_config",
    "label2id",
    "model_type",
    "_name_or_path",
    "pad_token_id",
    "pretraining_tp",
    "resid_pdrop",
    "return_dict",
    "torch_dtype",
    "transformers.js_config",
    "transformers_version",
    "unsloth_fixed",
    "unsloth_version",
    "use_cache",
    # About images, in a text model's configuration.
    "perceiver_config",
    "pixel_shuffle_factor",
    *GenerationConfig().to_dict(),
}


# Values that mean something even if they are false or 0.
_SAYING_SO = {
    "decoder_sparse_step",
    "enable_moe_block",
    "n_shared_experts",
    "rope_interleave",
    "routed_scaling_factor",
    "shared_expert_intermediate_size",
    "top_k_experts",
    "use_expert_bias",
    "use_qk_norm",
}


def refuse_unknown(config: PreTrainedConfig, family: Family) -> None:
    known = _READ | _INDIFFERENT | family.reads
    for name, value in config.to_dict().items():
        says_nothing = value is None or (name not in _SAYING_SO and value in (False, ""))
        if name not in known and not says_nothing:
            raise NotOurs(f"{name} in the configuration")
        if value not in (None, ASSUMED_VALUES.get(name, value)):
            raise NotOurs(f"{name} {value}")
    architectures = getattr(config, "architectures", None) or [f"{family.prefix}ForCausalLM"]
    if architectures != [f"{family.prefix}ForCausalLM"]:
        raise NotOurs(f"architecture {', '.join(architectures)}")
    parameters = config.rope_parameters or {}
    nested = [value for value in parameters.values() if isinstance(value, dict)]
    for rope in nested or [parameters]:
        rope_type = rope.get("rope_type", "default")
        if rope_type == "yarn" and family.head_norms == "plain":
            # yarn's rotation changes the length of vectors, which a later norm would undo.
            raise NotOurs("rope type yarn before norms of heads")
        if rope_type not in _ROPE_TYPES:
            raise NotOurs(f"rope type {rope_type}")
        unknown = sorted(set(rope) - _ROPE_VALUES - family.rope_reads)
        if unknown:
            raise NotOurs(f"{unknown[0]} in the rope parameters")
