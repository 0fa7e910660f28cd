"""The model families of our decoder: how each differs from Llama, and which configuration values
are read.
"""

from __future__ import annotations

import dataclasses
import importlib
from dataclasses import dataclass
from typing import Any, Literal

from transformers import PreTrainedConfig

from penstock_shard.models.decoder.spec import LLAMA_NAMES, ExpertNames, ModuleNames
from penstock_shard.ops.base import SWIGLU_ALPHA, SWIGLU_LIMIT


@dataclass(frozen=True, slots=True)
class Family:
    """The differences of one model type from Llama."""

    # The module under transformers' `models`, and the prefix of its class names (also of rotary
    # classes unless `rotary_prefix` is set).
    module: str
    prefix: str
    # Configuration values read in addition to `_READ`, and rope parameters in addition to
    # `_ROPE_VALUES`.
    reads: frozenset[str] = frozenset()
    rope_reads: frozenset[str] = frozenset()
    rotary_prefix: str | None = None
    qkv_bias: bool = False
    head_norms: Literal["learned", "plain"] | None = None
    interleaved: bool = False
    latent: bool = False
    # True if one tensor has query, key and value; in the next field, gate and up.
    fused_heads: bool = False
    fused_gates: bool = False
    gemma: bool = False
    # Like Gemma 4: norm weights without offset, unscaled scores, normed values, and the other
    # values of `_GEMMA4_READS`.
    gemma4: bool = False
    # Like Qwen3-Next: norm weights are stored minus 1, attention has a gate, and other layers a
    # state.
    delta: bool = False
    conv: bool = False
    names: ModuleNames = LLAMA_NAMES
    # None if layers never have experts.
    experts: ExpertNames | None = None
    scores: Literal["softmax", "sigmoid"] = "softmax"
    scores_eps: float = 1e-20
    # True if an expert's routing weight multiplies its input, not its output.
    scales_inputs: bool = False
    # True if attention's output matrix has a bias when queries, keys and values do.
    output_bias: bool = True
    # True if an image's tokens see the whole image, including later tokens.
    bidirectional_images: bool = False
    # Like gpt-oss: heads have attention sinks, and the activation is gpt-oss' own.
    gpt_oss: bool = False


# Configuration values of DeepSeek V3 that transformers assumes without reading them.
_DEEPSEEK_V3_VALUES = {"scoring_func": "sigmoid", "topk_method": "noaux_tc", "moe_layer_freq": 1}
# Configuration values of Qwen3.5 that transformers assumes without reading them.
_QWEN35_VALUES = {"attn_output_gate": True, "mamba_ssm_dtype": "float32"}
# The values of gpt-oss that the kernels implement.
_GPT_OSS_VALUES = {"swiglu_alpha": SWIGLU_ALPHA, "swiglu_limit": SWIGLU_LIMIT}
ASSUMED_VALUES: dict[str, Any] = _DEEPSEEK_V3_VALUES | _QWEN35_VALUES | _GPT_OSS_VALUES
_LAYER_WINDOWS = frozenset(
    {"layer_types", "sliding_window", "use_sliding_window", "max_window_layers"}
)
_GEMMA_READS = frozenset(
    {
        "attention_bias",
        "hidden_activation",
        "layer_types",
        "sliding_window",
        "query_pre_attn_scalar",
        "final_logit_softcapping",
    }
)
_GEMMA4_READS = frozenset(
    {
        "attention_bias",
        "hidden_activation",
        "layer_types",
        "sliding_window",
        "final_logit_softcapping",
        "per_layer_config",
        "attention_k_eq_v",
        "num_kv_shared_layers",
        "use_bidirectional_attention",
        # Size of per-layer embeddings; models with them are refused.
        "vocab_size_per_layer_input",
        "enable_moe_block",
        "top_k_experts",
        "moe_intermediate_size",
    }
)
_GEMMA_NAMES = ModuleNames(
    after_attention="post_attention_layernorm",
    before_feed_forward="pre_feedforward_layernorm",
    after_feed_forward="post_feedforward_layernorm",
)
_GLM4_NAMES = ModuleNames(
    after_attention="post_self_attn_layernorm", after_feed_forward="post_mlp_layernorm"
)
_GEMMA4_NAMES = ExpertNames(
    router="router.proj.weight",
    gate="experts.{}.gate_proj.weight",
    up="experts.{}.up_proj.weight",
    down="experts.{}.down_proj.weight",
)
_EXPERT_READS = frozenset(
    {
        "num_experts",
        "num_local_experts",
        "num_experts_per_tok",
        # Used only in training.
        "output_router_logits",
        "router_aux_loss_coef",
        "router_jitter_noise",
    }
)
_MIXTRAL_NAMES = ExpertNames(
    router="block_sparse_moe.gate.weight",
    gate="block_sparse_moe.experts.{}.w1.weight",
    up="block_sparse_moe.experts.{}.w3.weight",
    down="block_sparse_moe.experts.{}.w2.weight",
)
_QWEN_NAMES = ExpertNames(
    router="mlp.gate.weight",
    gate="mlp.experts.{}.gate_proj.weight",
    up="mlp.experts.{}.up_proj.weight",
    down="mlp.experts.{}.down_proj.weight",
)
_GPT_OSS_NAMES = dataclasses.replace(
    _QWEN_NAMES,
    router="mlp.router.weight",
    router_bias="mlp.router.bias",
    has_biases=True,
)
# Experts of DeepSeek V3.
_DEEPSEEK_NAMES = dataclasses.replace(
    _QWEN_NAMES, bias="mlp.gate.e_score_correction_bias", shared="mlp.shared_experts"
)
_LLAMA4_NAMES = ExpertNames(
    router="feed_forward.router.weight",
    gate="feed_forward.experts.{}.gate_proj.weight",
    up="feed_forward.experts.{}.up_proj.weight",
    down="feed_forward.experts.{}.down_proj.weight",
    shared="feed_forward.shared_expert",
)
_DEEPSEEK_EXPERT_READS = frozenset(
    {
        "n_routed_experts",
        "n_shared_experts",
        "first_k_dense_replace",
        "moe_intermediate_size",
        "routed_scaling_factor",
        "norm_topk_prob",
        "n_group",
        "topk_group",
        "num_nextn_predict_layers",
        # transformers assumes these values.
        *_DEEPSEEK_V3_VALUES,
        # Used only in training.
        "aux_loss_alpha",
        "seq_aux",
        "ep_size",
    }
)
_LATENT_READS = frozenset(
    {
        "q_lora_rank",
        "kv_lora_rank",
        "qk_nope_head_dim",
        "qk_rope_head_dim",
        "qk_head_dim",
        "v_head_dim",
        "rope_interleave",
        "attention_bias",
    }
)
_LLAMA4_READS = frozenset(
    {
        "intermediate_size_mlp",
        "moe_layers",
        "interleave_moe_layer_step",
        "use_qk_norm",
        "no_rope_layers",
        "no_rope_layer_interval",
        "attention_chunk_size",
        "layer_types",
        "attn_temperature_tuning",
        "floor_scale",
        "attn_scale",
        "attention_bias",
    }
)
# Experts of Qwen3-Next.
_GATED_NAMES = dataclasses.replace(
    _QWEN_NAMES, shared="mlp.shared_expert", shared_gate="mlp.shared_expert_gate.weight"
)
_DELTA_READS = frozenset(
    {
        "attention_bias",
        "layer_types",
        "full_attention_interval",
        "linear_conv_kernel_dim",
        "linear_key_head_dim",
        "linear_value_head_dim",
        "linear_num_key_heads",
        "linear_num_value_heads",
        # transformers assumes these values.
        *_QWEN35_VALUES,
        # For the prediction of further tokens, whose weights have separate names.
        "mtp_num_hidden_layers",
        "mtp_use_dedicated_embeddings",
    }
)
# In text, a token's three positions are equal: one is enough.
_DELTA_ROPE_READS = frozenset({"partial_rotary_factor", "mrope_section", "mrope_interleaved"})
_QWEN_EXPERT_READS = frozenset(
    {"moe_intermediate_size", "norm_topk_prob", "mlp_only_layers", "decoder_sparse_step"}
)
_LFM2_NAMES = ModuleNames(
    before_attention="operator_norm",
    before_feed_forward="ffn_norm",
    query_norm="q_layernorm",
    key_norm="k_layernorm",
    output="out_proj",
    feed_forward="feed_forward",
    gate="w1",
    up="w3",
    down="w2",
    final_norm="model.embedding_norm",
)
_LFM2_EXPERTS = ExpertNames(
    router="feed_forward.gate.weight",
    gate="feed_forward.experts.{}.w1.weight",
    up="feed_forward.experts.{}.w3.weight",
    down="feed_forward.experts.{}.w2.weight",
    bias="feed_forward.expert_bias",
)
_CONV_READS = frozenset({"norm_eps", "conv_bias", "conv_L_cache", "layer_types"})
_LFM2_SIZES = frozenset(
    {
        "block_auto_adjust_ff_dim",
        "block_ffn_dim_multiplier",
        "block_multiple_of",
        "full_attn_idxs",
        # Values that repeat others, or only initialize weights.
        "block_dim",
        "block_mlp_init_scale",
        "block_norm_eps",
        "block_out_init_scale",
        "block_use_swiglu",
        "block_use_xavier_init",
        "conv_dim",
        "conv_dim_out",
        "conv_use_xavier_init",
        "num_heads",
        "use_pos_enc",
    }
)
FAMILIES = {
    "llama": Family("llama", "Llama", frozenset({"attention_bias", "mlp_bias"})),
    "mistral": Family("mistral", "Mistral", frozenset({"sliding_window"})),
    "qwen2": Family("qwen2", "Qwen2", _LAYER_WINDOWS, qkv_bias=True),
    "qwen3": Family("qwen3", "Qwen3", _LAYER_WINDOWS | {"attention_bias"}, head_norms="learned"),
    "ministral3": Family(
        "ministral3",
        "Ministral3",
        frozenset({"sliding_window"}),
        # max_position_embeddings is here and in the configuration itself.
        rope_reads=frozenset({"llama_4_scaling_beta", "max_position_embeddings"}),
    ),
    "phi3": Family(
        "phi3",
        "Phi3",
        frozenset({"sliding_window"}),
        rope_reads=frozenset({"partial_rotary_factor"}),
        fused_heads=True,
        fused_gates=True,
    ),
    "gemma2": Family(
        "gemma2",
        "Gemma2",
        _GEMMA_READS | {"attn_logit_softcapping"},
        gemma=True,
        names=_GEMMA_NAMES,
    ),
    "gemma3_text": Family(
        "gemma3",
        "Gemma3",
        _GEMMA_READS | {"_sliding_window_pattern", "sliding_window_pattern"},
        head_norms="learned",
        gemma=True,
        names=_GEMMA_NAMES,
        bidirectional_images=True,
    ),
    "gemma4_text": Family(
        "gemma4",
        "Gemma4",
        _EXPERT_READS | _GEMMA4_READS,
        rope_reads=frozenset({"partial_rotary_factor"}),
        rotary_prefix="Gemma4Text",
        head_norms="learned",
        gemma=True,
        gemma4=True,
        names=_GEMMA_NAMES,
        experts=_GEMMA4_NAMES,
    ),
    "gemma4_unified_text": Family(
        "gemma4_unified",
        "Gemma4Unified",
        _GEMMA4_READS,
        rope_reads=frozenset({"partial_rotary_factor"}),
        rotary_prefix="Gemma4UnifiedText",
        head_norms="learned",
        gemma=True,
        gemma4=True,
        names=_GEMMA_NAMES,
    ),
    "mixtral": Family(
        "mixtral", "Mixtral", _EXPERT_READS | {"sliding_window"}, experts=_MIXTRAL_NAMES
    ),
    "qwen3_moe": Family(
        "qwen3_moe",
        "Qwen3Moe",
        _EXPERT_READS | _QWEN_EXPERT_READS | _LAYER_WINDOWS | {"attention_bias"},
        head_norms="learned",
        experts=_QWEN_NAMES,
    ),
    "gpt_oss": Family(
        "gpt_oss",
        "GptOss",
        _EXPERT_READS
        | _GPT_OSS_VALUES.keys()
        | {"attention_bias", "layer_types", "sliding_window"}
        # Duplicates of other values.
        | {"experts_per_token", "initial_context_length"},
        experts=_GPT_OSS_NAMES,
        gpt_oss=True,
    ),
    "qwen3_next": Family(
        "qwen3_next",
        "Qwen3Next",
        _EXPERT_READS | _QWEN_EXPERT_READS | _DELTA_READS | {"shared_expert_intermediate_size"},
        rope_reads=_DELTA_ROPE_READS,
        head_norms="learned",
        delta=True,
        experts=_GATED_NAMES,
    ),
    "qwen3_5_text": Family(
        "qwen3_5",
        "Qwen3_5",
        _DELTA_READS,
        rope_reads=_DELTA_ROPE_READS,
        rotary_prefix="Qwen3_5Text",
        head_norms="learned",
        delta=True,
    ),
    "qwen3_5_moe_text": Family(
        "qwen3_5_moe",
        "Qwen3_5Moe",
        _EXPERT_READS | _DELTA_READS | {"moe_intermediate_size", "shared_expert_intermediate_size"},
        rope_reads=_DELTA_ROPE_READS,
        rotary_prefix="Qwen3_5MoeText",
        head_norms="learned",
        delta=True,
        experts=_GATED_NAMES,
    ),
    "lfm2": Family(
        "lfm2",
        "Lfm2",
        _CONV_READS | _LFM2_SIZES,
        head_norms="learned",
        conv=True,
        names=_LFM2_NAMES,
    ),
    "lfm2_moe": Family(
        "lfm2_moe",
        "Lfm2Moe",
        _EXPERT_READS
        | _CONV_READS
        | {
            "moe_intermediate_size",
            "num_dense_layers",
            "use_expert_bias",
            "routed_scaling_factor",
            "norm_topk_prob",
        },
        head_norms="learned",
        conv=True,
        names=_LFM2_NAMES,
        experts=_LFM2_EXPERTS,
        scores="sigmoid",
        scores_eps=1e-6,
    ),
    "glm4": Family(
        "glm4",
        "Glm4",
        frozenset({"attention_bias"}),
        rope_reads=frozenset({"partial_rotary_factor"}),
        interleaved=True,
        fused_gates=True,
        names=_GLM4_NAMES,
        output_bias=False,
    ),
    "glm4_moe": Family(
        "glm4_moe",
        "Glm4Moe",
        _EXPERT_READS | _DEEPSEEK_EXPERT_READS | {"attention_bias", "use_qk_norm"},
        rope_reads=frozenset({"partial_rotary_factor"}),
        head_norms="learned",
        experts=_DEEPSEEK_NAMES,
        scores="sigmoid",
        output_bias=False,
    ),
    "deepseek_v3": Family(
        "deepseek_v3",
        "DeepseekV3",
        _EXPERT_READS | _DEEPSEEK_EXPERT_READS | _LATENT_READS,
        interleaved=True,
        latent=True,
        experts=_DEEPSEEK_NAMES,
        scores="sigmoid",
    ),
    "mistral4": Family(
        "mistral4",
        "Mistral4",
        _EXPERT_READS | _DEEPSEEK_EXPERT_READS | _LATENT_READS,
        rope_reads=frozenset(
            {"llama_4_scaling_beta", "max_position_embeddings", "partial_rotary_factor"}
        ),
        interleaved=True,
        latent=True,
        experts=dataclasses.replace(_DEEPSEEK_NAMES, bias=None),
    ),
    "llama4_text": Family(
        "llama4",
        "Llama4",
        _EXPERT_READS | _LLAMA4_READS,
        rotary_prefix="Llama4Text",
        head_norms="plain",
        interleaved=True,
        names=ModuleNames(feed_forward="feed_forward"),
        experts=_LLAMA4_NAMES,
        scores="sigmoid",
        scales_inputs=True,
    ),
}


def own_layer_types(text: PreTrainedConfig) -> set[str]:
    """The layer types of this model that only our decoder serves."""
    family = FAMILIES.get(text.model_type)
    if text.model_type == "llama4_text":
        return {"chunked_attention"}
    if family is not None and family.conv:
        return {"conv"}
    return {"linear_attention"} if family is not None and family.delta else set()


def transformers_module(family: Family) -> Any:
    return importlib.import_module(f"transformers.models.{family.module}.modeling_{family.module}")
