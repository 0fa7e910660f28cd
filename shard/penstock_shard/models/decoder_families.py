"""The families of our decoder: a transformers configuration -> the spec of the decoder, or why it
cannot be one.

Strict: a model whose configuration has a value that is not read here runs through transformers' own
code, since ignoring a value could silently give wrong text.
"""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from transformers import GenerationConfig, PreTrainedConfig

from penstock_shard.attention.base import LayerSpec, StateSpec
from penstock_shard.models.decoder_spec import (
    NO_ROTATION,
    DecoderSpec,
    DeltaSpec,
    ExpertNames,
    ExpertsSpec,
    LatentSpec,
    NotOurs,
)
from penstock_shard.models.transformers.layer_config import config_of_layer, source_of_keys
from penstock_shard.ops.base import Activation, RoutingRule

_ACTIVATIONS: dict[str, Activation] = {"silu": "silu", "gelu_pytorch_tanh": "gelu_tanh"}
# Rope types whose angles depend on the position alone.
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
# Configuration values of every family that `decoder_spec` reads.
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
# Configuration values that do not change what a forward pass computes.
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
    *GenerationConfig().to_dict(),
}


# Values that say something where they are false or 0.
_SAYING_SO = {
    "decoder_sparse_step",
    "enable_moe_block",
    "n_shared_experts",
    "rope_interleave",
    "routed_scaling_factor",
    "shared_expert_intermediate_size",
    "top_k_experts",
    "use_qk_norm",
}


@dataclass(frozen=True, slots=True)
class _Family:
    """How the models of one type differ from Llama."""

    # In transformers: the module under `models`, and the prefix of its class names, rotary ones
    # included unless said.
    module: str
    prefix: str
    # Configuration values that are read beside `_READ`, and rope parameters beside `_ROPE_VALUES`.
    reads: frozenset[str] = frozenset()
    rope_reads: frozenset[str] = frozenset()
    rotary_prefix: str | None = None
    qkv_bias: bool = False
    head_norms: Literal["learned", "plain"] | None = None
    interleaved: bool = False
    latent: bool = False
    # Query, key and value in one tensor, gate and up in another.
    fused_tensors: bool = False
    # Norm weights are stored minus 1, each block's output is normed too, embeddings are scaled.
    gemma: bool = False
    # As Gemma 4: norm weights as they are, scores that are not scaled, normed values, and what else
    # `_GEMMA4_READS` has.
    gemma4: bool = False
    # As Qwen3-Next: norm weights are stored minus 1, attention has a gate, other layers a state.
    delta: bool = False
    feed_forward: str = "mlp"
    # For families whose layers may have experts.
    experts: ExpertNames | None = None


# Values that configurations of DeepSeek V3 state and transformers does not read.
_DEEPSEEK_VALUES = {"scoring_func": "sigmoid", "topk_method": "noaux_tc", "moe_layer_freq": 1}
# The same of Qwen3.5.
_QWEN35_VALUES = {"attn_output_gate": True, "mamba_ssm_dtype": "float32"}
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
        # Of what sees images.
        "use_bidirectional_attention",
        # Of the embeddings of layers, which are refused where there are some.
        "vocab_size_per_layer_input",
        "enable_moe_block",
        "top_k_experts",
        "moe_intermediate_size",
    }
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
        # Used in training only.
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
# Experts as DeepSeek V3 has them.
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
        # What transformers takes for granted.
        *_DEEPSEEK_VALUES,
        # Used in training only.
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
# Experts as Qwen3-Next has them.
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
        # What transformers takes for granted.
        *_QWEN35_VALUES,
        # Of predicting further tokens, whose weights have names of their own.
        "mtp_num_hidden_layers",
        "mtp_use_dedicated_embeddings",
    }
)
# Where all three of a token's positions are equal, as in text, they are one.
_DELTA_ROPE_READS = frozenset({"partial_rotary_factor", "mrope_section", "mrope_interleaved"})
_QWEN_EXPERT_READS = frozenset(
    {"moe_intermediate_size", "norm_topk_prob", "mlp_only_layers", "decoder_sparse_step"}
)
_FAMILIES = {
    "llama": _Family("llama", "Llama", frozenset({"attention_bias", "mlp_bias"})),
    "mistral": _Family("mistral", "Mistral", frozenset({"sliding_window"})),
    "qwen2": _Family("qwen2", "Qwen2", _LAYER_WINDOWS, qkv_bias=True),
    "qwen3": _Family("qwen3", "Qwen3", _LAYER_WINDOWS | {"attention_bias"}, head_norms="learned"),
    "ministral3": _Family(
        "ministral3",
        "Ministral3",
        frozenset({"sliding_window"}),
        # The second is also a value of the configuration itself.
        rope_reads=frozenset({"llama_4_scaling_beta", "max_position_embeddings"}),
    ),
    "phi3": _Family(
        "phi3",
        "Phi3",
        frozenset({"sliding_window"}),
        rope_reads=frozenset({"partial_rotary_factor"}),
        fused_tensors=True,
    ),
    "gemma2": _Family("gemma2", "Gemma2", _GEMMA_READS | {"attn_logit_softcapping"}, gemma=True),
    "gemma3_text": _Family(
        "gemma3",
        "Gemma3",
        _GEMMA_READS | {"_sliding_window_pattern", "sliding_window_pattern"},
        head_norms="learned",
        gemma=True,
    ),
    "gemma4_text": _Family(
        "gemma4",
        "Gemma4",
        _EXPERT_READS | _GEMMA4_READS,
        rope_reads=frozenset({"partial_rotary_factor"}),
        rotary_prefix="Gemma4Text",
        head_norms="learned",
        gemma=True,
        gemma4=True,
        experts=_GEMMA4_NAMES,
    ),
    "gemma4_unified_text": _Family(
        "gemma4_unified",
        "Gemma4Unified",
        _GEMMA4_READS,
        rope_reads=frozenset({"partial_rotary_factor"}),
        rotary_prefix="Gemma4UnifiedText",
        head_norms="learned",
        gemma=True,
        gemma4=True,
    ),
    "mixtral": _Family(
        "mixtral", "Mixtral", _EXPERT_READS | {"sliding_window"}, experts=_MIXTRAL_NAMES
    ),
    "qwen3_moe": _Family(
        "qwen3_moe",
        "Qwen3Moe",
        _EXPERT_READS | _QWEN_EXPERT_READS | _LAYER_WINDOWS | {"attention_bias"},
        head_norms="learned",
        experts=_QWEN_NAMES,
    ),
    "qwen3_next": _Family(
        "qwen3_next",
        "Qwen3Next",
        _EXPERT_READS | _QWEN_EXPERT_READS | _DELTA_READS | {"shared_expert_intermediate_size"},
        rope_reads=_DELTA_ROPE_READS,
        head_norms="learned",
        delta=True,
        experts=_GATED_NAMES,
    ),
    "qwen3_5_text": _Family(
        "qwen3_5",
        "Qwen3_5",
        _DELTA_READS,
        rope_reads=_DELTA_ROPE_READS,
        rotary_prefix="Qwen3_5Text",
        head_norms="learned",
        delta=True,
    ),
    "qwen3_5_moe_text": _Family(
        "qwen3_5_moe",
        "Qwen3_5Moe",
        _EXPERT_READS | _DELTA_READS | {"moe_intermediate_size", "shared_expert_intermediate_size"},
        rope_reads=_DELTA_ROPE_READS,
        rotary_prefix="Qwen3_5MoeText",
        head_norms="learned",
        delta=True,
        experts=_GATED_NAMES,
    ),
    "glm4_moe": _Family(
        "glm4_moe",
        "Glm4Moe",
        _EXPERT_READS | _DEEPSEEK_EXPERT_READS | {"attention_bias", "use_qk_norm"},
        rope_reads=frozenset({"partial_rotary_factor"}),
        head_norms="learned",
        experts=_DEEPSEEK_NAMES,
    ),
    "deepseek_v3": _Family(
        "deepseek_v3",
        "DeepseekV3",
        _EXPERT_READS | _DEEPSEEK_EXPERT_READS | _LATENT_READS,
        interleaved=True,
        latent=True,
        experts=_DEEPSEEK_NAMES,
    ),
    "mistral4": _Family(
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
    "llama4_text": _Family(
        "llama4",
        "Llama4",
        _EXPERT_READS | _LLAMA4_READS,
        rotary_prefix="Llama4Text",
        head_norms="plain",
        interleaved=True,
        feed_forward="feed_forward",
        experts=_LLAMA4_NAMES,
    ),
}


def decoder_spec(config: PreTrainedConfig, *, trust_remote_code: bool = False) -> DecoderSpec:
    """Raises NotOurs for a configuration that our decoder might not compute like transformers.

    With `trust_remote_code`, a model that comes with its own code runs that code.
    """
    family = _FAMILIES.get(config.model_type)
    if family is None or type(config).__module__.split(".")[:2] != ["transformers", "models"]:
        raise NotOurs(f"model type {config.model_type}")
    _refuse_unknown(config, family)
    if trust_remote_code and getattr(config, "auto_map", None):
        raise NotOurs("auto_map in the configuration")
    if getattr(config, "use_bidirectional_attention", None) not in (None, False, "vision"):
        raise NotOurs("use_bidirectional_attention in the configuration")
    # Some Gemmas also state the older name, hidden_act, with another value.
    activation = config.hidden_activation if family.gemma else config.hidden_act
    if activation not in _ACTIVATIONS:
        raise NotOurs(f"activation {activation}")
    layers = tuple(_layers(config, family))
    biases = bool(getattr(config, "attention_bias", False))
    return DecoderSpec(
        vocab_size=int(config.vocab_size),
        hidden_size=int(config.hidden_size),
        intermediate_size=_dense_size(config),
        layers=layers,
        rope_types=_rope_types(config, len(layers)),
        interleaved=bool(getattr(config, "rope_interleave", family.interleaved)),
        activation=_ACTIVATIONS[activation],
        norm_eps=float(config.rms_norm_eps),
        norm_offset=1.0 if family.delta or (family.gemma and not family.gemma4) else 0.0,
        output_norms=family.gemma,
        head_norms=family.head_norms if getattr(config, "use_qk_norm", True) else None,
        value_norms=family.gemma4,
        keys_as_values=_keys_as_values(config),
        qkv_bias=family.qkv_bias or biases,
        output_bias=biases and config.model_type != "glm4_moe",
        mlp_bias=bool(getattr(config, "mlp_bias", False)),
        embedding_scale=config.hidden_size**0.5 if family.gemma else 1.0,
        logit_softcap=getattr(config, "final_logit_softcapping", None),
        tied=bool(config.tie_word_embeddings),
        fused_tensors=family.fused_tensors,
        layer_scalars=family.gemma4,
        experts=_experts(config, family),
        latent=_latent(config) if family.latent else None,
        delta=_delta(config) if family.delta else None,
        gates_heads=family.delta,
        feed_forward=family.feed_forward,
        unread=_unread(config, len(layers)),
    )


def _dense_size(config: PreTrainedConfig) -> int:
    """Of layers without experts; 0 if there are none."""
    size = getattr(config, "intermediate_size_mlp", None)
    return int(size or getattr(config, "intermediate_size", None) or 0)


def _unread(config: PreTrainedConfig, count: int) -> tuple[str, ...]:
    """How names of tensors begin that predict further tokens."""
    extra = int(getattr(config, "num_nextn_predict_layers", None) or 0)
    return ("mtp.", *(f"model.layers.{count + index}." for index in range(extra)))


def _experts(config: PreTrainedConfig, family: _Family) -> ExpertsSpec | None:
    """None if no layer has experts. Where the configuration does not say, as in Mixtral: they are
    as wide as `intermediate_size`.
    """
    if family.experts is None or not getattr(config, "enable_moe_block", True):
        return None
    # The name depends on the release of transformers.
    count = int(getattr(config, "num_local_experts", None) or config.num_experts)
    layers = _layers_with_experts(config) if count > 0 else frozenset()
    if not layers:
        return None
    wide = int(getattr(config, "moe_intermediate_size", None) or config.intermediate_size)
    shared = wide * int(getattr(config, "n_shared_experts", 1)) if family.experts.shared else 0
    shared = int(getattr(config, "shared_expert_intermediate_size", shared))
    names = family.experts
    if not shared:
        names = dataclasses.replace(names, shared=None, shared_gate=None)
    return ExpertsSpec(
        layers=layers,
        num_experts=count,
        intermediate_size=wide,
        rule=_routing_rule(config, family, count),
        names=names,
        shared_size=shared,
        scales_inputs=config.model_type == "llama4_text",
        beside_dense=family.gemma4,
    )


def _layers_with_experts(config: PreTrainedConfig) -> frozenset[int]:
    """By each family's own way to say it; without one, all."""
    count = int(config.num_hidden_layers)
    listed = getattr(config, "moe_layers", None)
    if listed is not None:
        return frozenset(map(int, listed))
    first = int(getattr(config, "first_k_dense_replace", None) or 0)
    step = int(getattr(config, "decoder_sparse_step", 1))
    dense = set(getattr(config, "mlp_only_layers", None) or ())
    return frozenset(
        index for index in range(first, count) if index not in dense and (index + 1) % step == 0
    )


def _routing_rule(config: PreTrainedConfig, family: _Family, count: int) -> RoutingRule:
    # The name is a family's own.
    top_k = int(config.top_k_experts if family.gemma4 else config.num_experts_per_tok)
    if not 1 <= top_k <= count:
        raise NotOurs(f"num_experts_per_tok {top_k} of {count} experts")
    groups = int(getattr(config, "n_group", None) or 1)
    best = int(getattr(config, "topk_group", None) or 1)
    each = count // groups
    fits = not count % groups and each > 1 and 1 <= best <= groups and top_k <= each * best
    if groups > 1 and not fits:
        raise NotOurs(f"{count} experts in n_group {groups}, topk_group {best}")
    is_sigmoid = config.model_type in ("deepseek_v3", "glm4_moe", "llama4_text")
    # Llama 4 multiplies by each expert's own score.
    is_normalised = config.model_type != "llama4_text"
    if "norm_topk_prob" in family.reads:
        is_normalised = bool(config.norm_topk_prob)
    return RoutingRule(
        top_k=top_k,
        scores="sigmoid" if is_sigmoid else "softmax",
        is_normalised=is_normalised,
        scale=float(getattr(config, "routed_scaling_factor", 1.0)),
        groups=groups,
        top_groups=best,
    )


def _delta(config: PreTrainedConfig) -> DeltaSpec:
    is_fused = config.model_type == "qwen3_next"
    return DeltaSpec(int(config.linear_num_key_heads), is_fused)


def _state(config: PreTrainedConfig) -> StateSpec:
    heads, dim = int(config.linear_num_value_heads), int(config.linear_key_head_dim)
    dim_v = int(config.linear_value_head_dim)
    return StateSpec(
        channels=2 * int(config.linear_num_key_heads) * dim + heads * dim_v,
        taps=int(config.linear_conv_kernel_dim),
        heads=heads,
        dim=dim,
        dim_v=dim_v,
    )


def _latent(config: PreTrainedConfig) -> LatentSpec:
    return LatentSpec(
        query_rank=None if config.q_lora_rank is None else int(config.q_lora_rank),
        rank=int(config.kv_lora_rank),
        plain=int(config.qk_nope_head_dim),
        rotated=int(config.qk_rope_head_dim),
        value=int(config.v_head_dim),
        # Whatever rms_norm_eps is: the modules of transformers are made without it.
        norm_eps=1e-6,
        has_bias=bool(config.attention_bias),
    )


def _refuse_unknown(config: PreTrainedConfig, family: _Family) -> None:
    known = _READ | _INDIFFERENT | family.reads
    for name, value in config.to_dict().items():
        says_nothing = value is None or (name not in _SAYING_SO and value in (False, ""))
        if name not in known and not says_nothing:
            raise NotOurs(f"{name} in the configuration")
        if value not in (None, (_DEEPSEEK_VALUES | _QWEN35_VALUES).get(name, value)):
            raise NotOurs(f"{name} {value}")
    architectures = getattr(config, "architectures", None) or [f"{family.prefix}ForCausalLM"]
    if architectures != [f"{family.prefix}ForCausalLM"]:
        raise NotOurs(f"architecture {', '.join(architectures)}")
    parameters = config.rope_parameters or {}
    nested = [value for value in parameters.values() if isinstance(value, dict)]
    for rope in nested or [parameters]:
        rope_type = rope.get("rope_type", "default")
        if rope_type == "yarn" and family.head_norms == "plain":
            # Its angles are longer than 1, which a norm after the rotation takes back.
            raise NotOurs("rope type yarn before norms of heads")
        if rope_type not in _ROPE_TYPES:
            raise NotOurs(f"rope type {rope_type}")
        unknown = sorted(set(rope) - _ROPE_VALUES - family.rope_reads)
        if unknown:
            raise NotOurs(f"{unknown[0]} in the rope parameters")


def _layers(config: PreTrainedConfig, family: _Family) -> Iterator[LayerSpec]:
    num_heads = int(config.num_attention_heads)
    count = int(config.num_hidden_layers)
    types = getattr(config, "layer_types", None) or _default_types(config, count)
    _check_pattern(config, types)
    for index in range(count):
        if family.latent:
            heads = _latent_heads(config, family, num_heads)
        else:
            heads = _heads(config_of_layer(config, index), family, num_heads)
        reads = source_of_keys(config, index)
        heads = dataclasses.replace(heads, index=index, reads=reads)
        yield _of_type(config, family, types[index], heads)


def _heads(config: PreTrainedConfig, family: _Family, num_heads: int) -> LayerSpec:
    """A layer with keys and values of heads, by its own configuration."""
    head_dim = int(getattr(config, "head_dim", None) or config.hidden_size // num_heads)
    query_size = head_dim
    if family.gemma:
        query_size = 1 if family.gemma4 else config.query_pre_attn_scalar
    return LayerSpec(
        index=0,
        num_heads=num_heads,
        num_kv_heads=int(config.num_key_value_heads),
        head_dim=head_dim,
        head_dim_v=head_dim,
        scale=float(query_size**-0.5),
        softcap=getattr(config, "attn_logit_softcapping", None),
    )


def _keys_as_values(config: PreTrainedConfig) -> frozenset[int]:
    if not getattr(config, "attention_k_eq_v", False):
        return frozenset()
    types = config.layer_types
    return frozenset(index for index, each in enumerate(types) if each != "sliding_attention")


def _latent_heads(config: PreTrainedConfig, family: _Family, num_heads: int) -> LayerSpec:
    rank, rotated = int(config.kv_lora_rank), int(config.qk_rope_head_dim)
    scale = (int(config.qk_nope_head_dim) + rotated) ** -0.5
    return LayerSpec(
        index=0,
        num_heads=num_heads,
        num_kv_heads=1,
        head_dim=rank + rotated,
        head_dim_v=rank,
        scale=float(_module(family).yarn_apply_mscale(config.rope_parameters, scale)),
        values_in_keys=True,
    )


def _of_type(
    config: PreTrainedConfig, family: _Family, layer_type: str, layer: LayerSpec
) -> LayerSpec:
    """The layer with the keys that layers of its type see."""
    if layer_type == "sliding_attention" and int(config.sliding_window) < 1:
        raise NotOurs(f"sliding_window {config.sliding_window}")
    if layer_type == "sliding_attention":
        return dataclasses.replace(layer, window=int(config.sliding_window))
    if layer_type == "linear_attention" and family.delta:
        return dataclasses.replace(layer, state=_state(config))
    if layer_type == "chunked_attention":
        return dataclasses.replace(layer, chunk=int(config.attention_chunk_size))
    if layer_type != "full_attention":
        raise NotOurs(f"layer type {layer_type}")
    return layer


def _check_pattern(config: PreTrainedConfig, types: Sequence[str]) -> None:
    """Raises NotOurs if sliding_window_pattern, an older form of `layer_types`, disagrees."""
    period = int(getattr(config, "sliding_window_pattern", None) or 0)
    for index, layer_type in enumerate(types if period else ()):
        if (layer_type == "full_attention") != ((index + 1) % period == 0):
            raise NotOurs(f"sliding_window_pattern {period} other than layer_types")


def _default_types(config: PreTrainedConfig, count: int) -> list[str]:
    """Without `layer_types`, a window applies to all layers."""
    windowed = getattr(config, "sliding_window", None) is not None
    return ["sliding_attention" if windowed else "full_attention"] * count


def _rope_types(config: PreTrainedConfig, count: int) -> tuple[str, ...]:
    if any(isinstance(value, dict) for value in (config.rope_parameters or {}).values()):
        return tuple(config.layer_types)
    rotates = getattr(config, "no_rope_layers", None) or [True] * count
    return tuple("" if rotates[index] else NO_ROTATION for index in range(count))


def own_layer_types(text: PreTrainedConfig) -> set[str]:
    """Types of layers that no other code than our decoder serves for such a model."""
    family = _FAMILIES.get(text.model_type)
    if text.model_type == "llama4_text":
        return {"chunked_attention"}
    return {"linear_attention"} if family is not None and family.delta else set()


def rotary_class(config: PreTrainedConfig) -> Any:
    """The family's module of transformers that makes cosines and sines."""
    family = _FAMILIES[config.model_type]
    return getattr(_module(family), f"{family.rotary_prefix or family.prefix}RotaryEmbedding")


def _module(family: _Family) -> Any:
    return importlib.import_module(f"transformers.models.{family.module}.modeling_{family.module}")
