"""A transformers configuration -> our decoder's spec, or the reason why there is none.

If a configuration has a value not read here, transformers' code runs the model.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

from transformers import PreTrainedConfig

from penstock_shard.attention.base import LayerSpec, StateSpec
from penstock_shard.models.decoder.families import FAMILIES, Family, transformers_module
from penstock_shard.models.decoder.spec import (
    NO_ROTATION,
    DecoderSpec,
    DeltaSpec,
    ExpertsSpec,
    LatentSpec,
    NotOurs,
)
from penstock_shard.models.decoder.unknown_values import refuse_unknown
from penstock_shard.models.layer_config import config_of_layer, source_of_keys
from penstock_shard.ops.base import Activation, RoutingRule

# The most inputs of a convolution that the kernels support.
MOST_TAPS = 16
_ACTIVATIONS: dict[str, Activation] = {"silu": "silu", "gelu_pytorch_tanh": "gelu_tanh"}


def decoder_spec(config: PreTrainedConfig, *, trust_remote_code: bool = False) -> DecoderSpec:
    """Return the spec. Raises NotOurs for a configuration that our decoder might not compute like
    transformers.

    With `trust_remote_code`, a model's own code runs it.
    """
    family = FAMILIES.get(config.model_type)
    if family is None or type(config).__module__.split(".")[:2] != ["transformers", "models"]:
        raise NotOurs(f"model type {config.model_type}")
    refuse_unknown(config, family)
    if trust_remote_code and getattr(config, "auto_map", None):
        raise NotOurs("auto_map in the configuration")
    if getattr(config, "use_bidirectional_attention", None) not in (None, False, "vision"):
        raise NotOurs("use_bidirectional_attention in the configuration")
    activation = _activation(config, family)
    layers = tuple(_layers(config, family))
    if all(layer.state is not None for layer in layers):
        raise NotOurs("no layer has keys")
    biases = bool(getattr(config, "attention_bias", False))
    return DecoderSpec(
        vocab_size=int(config.vocab_size),
        hidden_size=int(config.hidden_size),
        intermediate_size=_dense_size(config),
        layers=layers,
        rope_types=_rope_types(config, len(layers)),
        interleaved=bool(getattr(config, "rope_interleave", family.interleaved)),
        activation=activation,
        norm_eps=float(config.norm_eps if family.conv else config.rms_norm_eps),
        norm_offset=1.0 if family.delta or (family.gemma and not family.gemma4) else 0.0,
        head_norms=family.head_norms if getattr(config, "use_qk_norm", True) else None,
        value_norms=family.gemma4,
        keys_as_values=_keys_as_values(config),
        qkv_bias=family.qkv_bias or biases,
        output_bias=biases and family.output_bias,
        mlp_bias=bool(getattr(config, "mlp_bias", False)),
        embedding_scale=config.hidden_size**0.5 if family.gemma else 1.0,
        logit_softcap=getattr(config, "final_logit_softcapping", None),
        tied=bool(config.tie_word_embeddings),
        fused_heads=family.fused_heads,
        fused_gates=family.fused_gates,
        layer_scalars=family.gemma4,
        experts=_experts(config, family),
        latent=_latent(config) if family.latent else None,
        delta=_delta(config) if family.delta else None,
        gates_heads=family.delta,
        conv_bias=bool(getattr(config, "conv_bias", False)),
        names=family.names,
        unread=_unread(config, len(layers)),
    )


def _activation(config: PreTrainedConfig, family: Family) -> Activation:
    """Return the activation. Some Gemmas also have an older hidden_act with another value. LFM2 has
    only one activation.
    """
    name = config.hidden_activation if family.gemma else getattr(config, "hidden_act", "silu")
    if family.conv:
        return "silu"
    if family.gpt_oss:
        return "clamped_swiglu"
    # With the delta rule, the kernels activate convolutions with silu only.
    if name not in _ACTIVATIONS or (family.delta and name != "silu"):
        raise NotOurs(f"activation {name}")
    return _ACTIVATIONS[name]


def _dense_size(config: PreTrainedConfig) -> int:
    """The intermediate size of layers without experts; 0 if there are none."""
    size = getattr(config, "intermediate_size_mlp", None)
    size = int(size or getattr(config, "intermediate_size", None) or 0)
    if not getattr(config, "block_auto_adjust_ff_dim", False):
        return size
    # LFM2 configurations state 3/2 of the size.
    size, multiple = 2 * size // 3, int(config.block_multiple_of)
    if config.block_ffn_dim_multiplier is None:
        return size
    return -(-int(config.block_ffn_dim_multiplier * size) // multiple) * multiple


def _unread(config: PreTrainedConfig, count: int) -> tuple[str, ...]:
    extra = int(getattr(config, "num_nextn_predict_layers", None) or 0)
    return ("mtp.", *(f"model.layers.{count + index}." for index in range(extra)))


def _experts(config: PreTrainedConfig, family: Family) -> ExpertsSpec | None:
    """Return None if no layer has experts. Experts without a width of their own, as in Mixtral,
    have `intermediate_size`.
    """
    if family.experts is None or not getattr(config, "enable_moe_block", True):
        return None
    # The name depends on transformers' release.
    count = int(getattr(config, "num_local_experts", None) or config.num_experts)
    layers = _layers_with_experts(config) if count > 0 else frozenset()
    if not layers:
        return None
    wide = int(getattr(config, "moe_intermediate_size", None) or config.intermediate_size)
    shared = wide * int(getattr(config, "n_shared_experts", 1)) if family.experts.shared else 0
    shared = int(getattr(config, "shared_expert_intermediate_size", shared))
    names = family.experts
    if not getattr(config, "use_expert_bias", True):
        names = dataclasses.replace(names, bias=None)
    if not shared:
        names = dataclasses.replace(names, shared=None, shared_gate=None)
    return ExpertsSpec(
        layers=layers,
        num_experts=count,
        intermediate_size=wide,
        rule=_routing_rule(config, family, count),
        names=names,
        shared_size=shared,
        scales_inputs=family.scales_inputs,
        beside_dense=family.gemma4,
    )


def _layers_with_experts(config: PreTrainedConfig) -> frozenset[int]:
    """Return the layers with experts, by default all. Families state them by different values."""
    count = int(config.num_hidden_layers)
    listed = getattr(config, "moe_layers", None)
    if listed is not None:
        return frozenset(map(int, listed))
    first = getattr(config, "first_k_dense_replace", None) or getattr(
        config, "num_dense_layers", None
    )
    first = int(first or 0)
    step = int(getattr(config, "decoder_sparse_step", 1))
    dense = set(getattr(config, "mlp_only_layers", None) or ())
    return frozenset(
        index for index in range(first, count) if index not in dense and (index + 1) % step == 0
    )


def _routing_rule(config: PreTrainedConfig, family: Family, count: int) -> RoutingRule:
    # Gemma 4's own name.
    top_k = int(config.top_k_experts if family.gemma4 else config.num_experts_per_tok)
    if not 1 <= top_k <= count:
        raise NotOurs(f"num_experts_per_tok {top_k} of {count} experts")
    groups = int(getattr(config, "n_group", None) or 1)
    best = int(getattr(config, "topk_group", None) or 1)
    each = count // groups
    fits = not count % groups and each > 1 and 1 <= best <= groups and top_k <= each * best
    if groups > 1 and not fits:
        raise NotOurs(f"{count} experts in n_group {groups}, topk_group {best}")
    is_normalised = not family.scales_inputs
    if "norm_topk_prob" in family.reads:
        is_normalised = bool(config.norm_topk_prob)
    return RoutingRule(
        top_k=top_k,
        scores=family.scores,
        is_normalised=is_normalised,
        scale=float(getattr(config, "routed_scaling_factor", 1.0)),
        eps=family.scores_eps,
        groups=groups,
        top_groups=best,
    )


def _delta(config: PreTrainedConfig) -> DeltaSpec:
    is_fused = config.model_type == "qwen3_next"
    return DeltaSpec(int(config.linear_num_key_heads), is_fused)


def _state(config: PreTrainedConfig) -> StateSpec:
    heads, dim = int(config.linear_num_value_heads), int(config.linear_key_head_dim)
    dim_v, key_heads = int(config.linear_value_head_dim), int(config.linear_num_key_heads)
    if heads % key_heads:
        raise NotOurs(f"linear_num_value_heads {heads}, linear_num_key_heads {key_heads}")
    return StateSpec(
        channels=2 * key_heads * dim + heads * dim_v,
        taps=_taps(config.linear_conv_kernel_dim),
        heads=heads,
        dim=dim,
        dim_v=dim_v,
    )


def _taps(stated: int) -> int:
    if not 1 < int(stated) <= MOST_TAPS:
        raise NotOurs(f"convolutions of {stated} inputs")
    return int(stated)


def _latent(config: PreTrainedConfig) -> LatentSpec:
    return LatentSpec(
        query_rank=None if config.q_lora_rank is None else int(config.q_lora_rank),
        rank=int(config.kv_lora_rank),
        plain=int(config.qk_nope_head_dim),
        rotated=int(config.qk_rope_head_dim),
        value=int(config.v_head_dim),
        # transformers' modules ignore rms_norm_eps.
        norm_eps=1e-6,
        has_bias=bool(config.attention_bias),
    )


def _layers(config: PreTrainedConfig, family: Family) -> Iterator[LayerSpec]:
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
        ahead = _sees_ahead(config, family, types[index])
        heads = dataclasses.replace(heads, index=index, reads=reads, bidirectional_images=ahead)
        yield _of_type(config, family, types[index], heads)


def _heads(config: PreTrainedConfig, family: Family, num_heads: int) -> LayerSpec:
    """Return the spec of a layer with keys and values, from the layer's own configuration."""
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
        has_sinks=family.gpt_oss,
    )


def _sees_ahead(config: PreTrainedConfig, family: Family, layer_type: str) -> bool:
    """True if an image's tokens in this layer see the whole image, including later tokens."""
    if family.gemma4:
        of_vision = getattr(config, "use_bidirectional_attention", None) == "vision"
        return of_vision and layer_type == "sliding_attention"
    return family.bidirectional_images


def _keys_as_values(config: PreTrainedConfig) -> frozenset[int]:
    if not getattr(config, "attention_k_eq_v", False):
        return frozenset()
    types = config.layer_types
    return frozenset(index for index, each in enumerate(types) if each != "sliding_attention")


def _latent_heads(config: PreTrainedConfig, family: Family, num_heads: int) -> LayerSpec:
    rank, rotated = int(config.kv_lora_rank), int(config.qk_rope_head_dim)
    scale = (int(config.qk_nope_head_dim) + rotated) ** -0.5
    return LayerSpec(
        index=0,
        num_heads=num_heads,
        num_kv_heads=1,
        head_dim=rank + rotated,
        head_dim_v=rank,
        scale=float(transformers_module(family).yarn_apply_mscale(config.rope_parameters, scale)),
        values_in_keys=True,
    )


def _of_type(
    config: PreTrainedConfig, family: Family, layer_type: str, layer: LayerSpec
) -> LayerSpec:
    """Add to the spec what the layer's type decides: the visible keys, or a state."""
    if layer_type == "sliding_attention" and int(config.sliding_window) < 1:
        raise NotOurs(f"sliding_window {config.sliding_window}")
    if layer_type == "sliding_attention":
        return dataclasses.replace(layer, window=int(config.sliding_window))
    if layer_type == "conv" and family.conv:
        state = StateSpec(channels=int(config.hidden_size), taps=_taps(config.conv_L_cache))
        return dataclasses.replace(layer, state=state)
    if layer_type == "linear_attention" and family.delta:
        return dataclasses.replace(layer, state=_state(config))
    if layer_type == "chunked_attention":
        return dataclasses.replace(layer, chunk=int(config.attention_chunk_size))
    if layer_type != "full_attention":
        raise NotOurs(f"layer type {layer_type}")
    return layer


def _check_pattern(config: PreTrainedConfig, types: Sequence[str]) -> None:
    """Raise NotOurs if sliding_window_pattern, an older form of `layer_types`, disagrees."""
    period = int(getattr(config, "sliding_window_pattern", None) or 0)
    for index, layer_type in enumerate(types if period else ()):
        if (layer_type == "full_attention") != ((index + 1) % period == 0):
            raise NotOurs(f"sliding_window_pattern {period} other than layer_types")


def _default_types(config: PreTrainedConfig, count: int) -> list[str]:
    """Return types for models without `layer_types`. A window then applies to all layers."""
    windowed = getattr(config, "sliding_window", None) is not None
    return ["sliding_attention" if windowed else "full_attention"] * count


def _rope_types(config: PreTrainedConfig, count: int) -> tuple[str, ...]:
    if any(isinstance(value, dict) for value in (config.rope_parameters or {}).values()):
        return tuple(config.layer_types)
    rotates = getattr(config, "no_rope_layers", None) or [True] * count
    return tuple("" if rotates[index] else NO_ROTATION for index in range(count))
