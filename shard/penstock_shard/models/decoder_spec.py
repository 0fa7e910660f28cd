"""A transformers configuration -> the spec of our own decoder, or why it cannot be one.

Strict: a model whose configuration has a value that is not read here runs through transformers' own
code, since ignoring a value could silently give wrong text.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, PreTrainedConfig

from penstock_shard.attention.base import LayerSpec
from penstock_shard.ops.base import Activation, Rope

_ACTIVATIONS: dict[str, Activation] = {"silu": "silu", "gelu_pytorch_tanh": "gelu_tanh"}
# Rope types whose angles depend on the position alone.
_ROPE_TYPES = {"default", "linear", "llama3", "yarn"}
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


@dataclass(frozen=True, slots=True)
class ExpertNames:
    """Names of a layer's expert tensors in a family's checkpoints; {} stands for the expert's
    index.
    """

    router: str
    gate: str
    up: str
    down: str


@dataclass(frozen=True, slots=True)
class _Family:
    """How the models of one type differ from Llama."""

    # In transformers: the module under `models`, and the prefix of its class names.
    module: str
    prefix: str
    # Configuration values that are read beside `_READ`, and rope parameters beside `_ROPE_VALUES`.
    reads: frozenset[str] = frozenset()
    rope_reads: frozenset[str] = frozenset()
    qkv_bias: bool = False
    head_norms: bool = False
    # Query, key and value in one tensor, gate and up in another.
    fused_tensors: bool = False
    # Norm weights are stored minus 1, each block's output is normed too, embeddings are scaled.
    gemma: bool = False
    # For families whose layers may have experts.
    experts: ExpertNames | None = None


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
_QWEN_EXPERT_READS = frozenset(
    {"moe_intermediate_size", "norm_topk_prob", "mlp_only_layers", "decoder_sparse_step"}
)
_FAMILIES = {
    "llama": _Family("llama", "Llama", frozenset({"attention_bias", "mlp_bias"})),
    "mistral": _Family("mistral", "Mistral", frozenset({"sliding_window"})),
    "qwen2": _Family("qwen2", "Qwen2", _LAYER_WINDOWS, qkv_bias=True),
    "qwen3": _Family("qwen3", "Qwen3", _LAYER_WINDOWS | {"attention_bias"}, head_norms=True),
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
        head_norms=True,
        gemma=True,
    ),
    "mixtral": _Family(
        "mixtral", "Mixtral", _EXPERT_READS | {"sliding_window"}, experts=_MIXTRAL_NAMES
    ),
    "qwen3_moe": _Family(
        "qwen3_moe",
        "Qwen3Moe",
        _EXPERT_READS | _QWEN_EXPERT_READS | _LAYER_WINDOWS | {"attention_bias"},
        head_norms=True,
        experts=_QWEN_NAMES,
    ),
}


@dataclass(frozen=True, slots=True)
class ExpertsSpec:
    """The experts of the layers that have some."""

    layers: frozenset[int]
    num_experts: int
    # Experts per token.
    top_k: int
    intermediate_size: int
    # Whether the weights of a token's experts are scaled to sum to 1.
    normalised: bool
    names: ExpertNames


@dataclass(frozen=True, slots=True)
class DecoderSpec:
    """A decoder of the Llama family. Sizes are in elements; bools say which biases and norms there
    are.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    layers: tuple[LayerSpec, ...]
    # For each layer, the name of its rotary table; see `rope_tables`.
    rope_types: tuple[str, ...]
    activation: Activation
    norm_eps: float
    norm_offset: float
    # The output of attention and of the feed-forward part is normed before it is added.
    output_norms: bool
    head_norms: bool
    qkv_bias: bool
    output_bias: bool
    mlp_bias: bool
    embedding_scale: float
    logit_softcap: float | None
    tied: bool
    fused_tensors: bool
    experts: ExpertsSpec | None = None


class NotOurs(Exception):
    """Our decoder does not compute this model; the message names the reason."""


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
    # Some Gemmas also state the older name, hidden_act, with another value.
    activation = config.hidden_activation if family.gemma else config.hidden_act
    if activation not in _ACTIVATIONS:
        raise NotOurs(f"activation {activation}")
    all_biases = bool(getattr(config, "attention_bias", False))
    layers = tuple(_layers(config, family))
    return DecoderSpec(
        vocab_size=int(config.vocab_size),
        hidden_size=int(config.hidden_size),
        intermediate_size=int(config.intermediate_size),
        layers=layers,
        rope_types=_rope_types(config, len(layers)),
        activation=_ACTIVATIONS[activation],
        norm_eps=float(config.rms_norm_eps),
        norm_offset=1.0 if family.gemma else 0.0,
        output_norms=family.gemma,
        head_norms=family.head_norms,
        qkv_bias=family.qkv_bias or all_biases,
        output_bias=all_biases,
        mlp_bias=bool(getattr(config, "mlp_bias", False)),
        embedding_scale=config.hidden_size**0.5 if family.gemma else 1.0,
        logit_softcap=getattr(config, "final_logit_softcapping", None),
        tied=bool(config.tie_word_embeddings),
        fused_tensors=family.fused_tensors,
        experts=_experts(config, family),
    )


def _experts(config: PreTrainedConfig, family: _Family) -> ExpertsSpec | None:
    """None if no layer has experts. Where the configuration does not say, as in Mixtral: experts in
    all layers, as wide as `intermediate_size`.
    """
    if family.experts is None:
        return None
    # The name depends on the release of transformers.
    count = int(getattr(config, "num_local_experts", None) or config.num_experts)
    top_k = int(config.num_experts_per_tok)
    step = int(getattr(config, "decoder_sparse_step", 1))
    dense = set(getattr(config, "mlp_only_layers", None) or ())
    layers = frozenset(
        index
        for index in range(int(config.num_hidden_layers))
        if index not in dense and count > 0 and (index + 1) % step == 0
    )
    if not layers:
        return None
    if not 1 <= top_k <= count:
        raise NotOurs(f"num_experts_per_tok {top_k} of {count} experts")
    return ExpertsSpec(
        layers=layers,
        num_experts=count,
        top_k=top_k,
        intermediate_size=int(
            getattr(config, "moe_intermediate_size", None) or config.intermediate_size
        ),
        normalised="norm_topk_prob" not in family.reads or bool(config.norm_topk_prob),
        names=family.experts,
    )


def _refuse_unknown(config: PreTrainedConfig, family: _Family) -> None:
    known = _READ | _INDIFFERENT | family.reads
    for name, value in config.to_dict().items():
        if name not in known and value not in (None, False, ""):
            raise NotOurs(f"{name} in the configuration")
    architectures = getattr(config, "architectures", None) or [f"{family.prefix}ForCausalLM"]
    if architectures != [f"{family.prefix}ForCausalLM"]:
        raise NotOurs(f"architecture {', '.join(architectures)}")
    parameters = config.rope_parameters or {}
    nested = [value for value in parameters.values() if isinstance(value, dict)]
    for rope in nested or [parameters]:
        rope_type = rope.get("rope_type", "default")
        if rope_type not in _ROPE_TYPES:
            raise NotOurs(f"rope type {rope_type}")
        unknown = sorted(set(rope) - _ROPE_VALUES - family.rope_reads)
        if unknown:
            raise NotOurs(f"{unknown[0]} in the rope parameters")


def _layers(config: PreTrainedConfig, family: _Family) -> Iterator[LayerSpec]:
    num_heads = int(config.num_attention_heads)
    head_dim = int(getattr(config, "head_dim", None) or config.hidden_size // num_heads)
    query_size = config.query_pre_attn_scalar if family.gemma else head_dim
    count = int(config.num_hidden_layers)
    types = getattr(config, "layer_types", None) or _default_types(config, count)
    _check_pattern(config, types)
    for index in range(count):
        if types[index] not in ("full_attention", "sliding_attention"):
            raise NotOurs(f"layer type {types[index]}")
        yield LayerSpec(
            index=index,
            num_heads=num_heads,
            num_kv_heads=int(config.num_key_value_heads),
            head_dim=head_dim,
            head_dim_v=head_dim,
            scale=float(query_size**-0.5),
            window=int(config.sliding_window) if types[index] == "sliding_attention" else None,
            softcap=getattr(config, "attn_logit_softcapping", None),
        )


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
    return ("",) * count


def rope_tables(
    config: PreTrainedConfig, spec: DecoderSpec, max_positions: int, device: torch.device
) -> dict[str, Rope]:
    """A table for each of `spec.rope_types`, from the family's rotary module in transformers, which
    knows all ways to scale frequencies.
    """
    family = _FAMILIES[config.model_type]
    module = importlib.import_module(
        f"transformers.models.{family.module}.modeling_{family.module}"
    )
    rotary: Any = getattr(module, f"{family.prefix}RotaryEmbedding")(config)
    positions = torch.arange(max_positions).unsqueeze(0)
    like = torch.empty(0, dtype=torch.float32)
    tables = {}
    for name in set(spec.rope_types):
        layer_type = {"layer_type": name} if name else {}
        # cos and sin are [1, max_positions, rotary_dim]; the second half repeats the first.
        cos, sin = (part[0].chunk(2, dim=-1)[0] for part in rotary(like, positions, **layer_type))
        temperature = _temperature(config, positions[0])
        tables[name] = Rope(
            cos.contiguous().to(device),
            sin.contiguous().to(device),
            None if temperature is None else temperature.to(device),
        )
    return tables


def _temperature(config: PreTrainedConfig, positions: Tensor) -> Tensor | None:
    """By how much each position's queries attend more sharply (Llama 4, Ministral 3): more with
    each original context that is behind it.
    """
    rope = config.rope_parameters or {}
    beta = rope.get("llama_4_scaling_beta")
    if beta is None:
        return None
    contexts: Tensor = 1 + torch.floor(positions / rope["original_max_position_embeddings"])
    temperature: Tensor = 1 + float(beta) * contexts.log()
    return temperature


def tensor_shapes(spec: DecoderSpec) -> dict[str, tuple[int, ...]]:
    """Every tensor the checkpoint must have, and its shape."""
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (spec.vocab_size, spec.hidden_size),
        "model.norm.weight": (spec.hidden_size,),
    }
    if not spec.tied:
        shapes["lm_head.weight"] = (spec.vocab_size, spec.hidden_size)
    for layer in spec.layers:
        for name, shape in _layer_shapes(spec, layer):
            shapes[f"model.layers.{layer.index}.{name}"] = shape
    return shapes


def _layer_shapes(spec: DecoderSpec, layer: LayerSpec) -> Iterator[tuple[str, tuple[int, ...]]]:
    hidden = spec.hidden_size
    queries, keys = layer.num_heads * layer.head_dim, layer.num_kv_heads * layer.head_dim
    for name in norm_names(spec):
        yield f"{name}.weight", (hidden,)
    if spec.head_norms:
        yield "self_attn.q_norm.weight", (layer.head_dim,)
        yield "self_attn.k_norm.weight", (layer.head_dim,)
    if spec.fused_tensors:
        qkv = {"qkv_proj": queries + 2 * keys}
    else:
        qkv = {"q_proj": queries, "k_proj": keys, "v_proj": keys}
    for name, rows in qkv.items():
        yield from _linear_shapes(f"self_attn.{name}", rows, hidden, spec.qkv_bias)
    yield from _linear_shapes("self_attn.o_proj", hidden, queries, spec.output_bias)
    if spec.experts is not None and layer.index in spec.experts.layers:
        yield from _expert_shapes(spec.experts, hidden)
    else:
        yield from _dense_shapes(spec)


def _dense_shapes(spec: DecoderSpec) -> Iterator[tuple[str, tuple[int, ...]]]:
    hidden, wide = spec.hidden_size, spec.intermediate_size
    if spec.fused_tensors:
        gate_up = {"gate_up_proj": 2 * wide}
    else:
        gate_up = {"gate_proj": wide, "up_proj": wide}
    for name, rows in gate_up.items():
        yield from _linear_shapes(f"mlp.{name}", rows, hidden, spec.mlp_bias)
    yield from _linear_shapes("mlp.down_proj", hidden, wide, spec.mlp_bias)


def _expert_shapes(experts: ExpertsSpec, hidden: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    names, wide = experts.names, experts.intermediate_size
    yield names.router, (experts.num_experts, hidden)
    for expert in range(experts.num_experts):
        yield names.gate.format(expert), (wide, hidden)
        yield names.up.format(expert), (wide, hidden)
        yield names.down.format(expert), (hidden, wide)


def _linear_shapes(
    name: str, rows: int, columns: int, has_bias: bool
) -> Iterator[tuple[str, tuple[int, ...]]]:
    yield f"{name}.weight", (rows, columns)
    if has_bias:
        yield f"{name}.bias", (rows,)


def norm_names(spec: DecoderSpec) -> tuple[str, ...]:
    """Norms of a layer in the order of their use: before attention, on its output, before the
    feed-forward part, on its output. Without output norms only the two "before".
    """
    if spec.output_norms:
        return (
            "input_layernorm",
            "post_attention_layernorm",
            "pre_feedforward_layernorm",
            "post_feedforward_layernorm",
        )
    return ("input_layernorm", "post_attention_layernorm")


def check_tensors(spec: DecoderSpec, found: dict[str, tuple[int, ...]]) -> None:
    """Raises NotOurs unless the checkpoint has the tensors that the spec needs, and no others."""
    wanted = tensor_shapes(spec)
    for name, shape in wanted.items():
        if found.get(name) != shape:
            raise NotOurs(f"no tensor {name} of shape {list(shape)} in the weights")
    embedding = wanted["model.embed_tokens.weight"]
    for name, shape in found.items():
        is_tied_head = spec.tied and name == "lm_head.weight" and shape == embedding
        if name not in wanted and not is_tied_head and not name.endswith("rotary_emb.inv_freq"):
            raise NotOurs(f"tensor {name} in the weights")
