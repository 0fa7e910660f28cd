"""Our decoder's spec, and the tensors that a checkpoint must have for it.

`from_config` makes the spec from a configuration.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from penstock_shard.attention.base import LayerSpec, StateSpec
from penstock_shard.ops.base import Activation, RoutingRule

NO_ROTATION = "none"
# Norms before and after experts in layers that also have a dense part.
EXPERT_NORMS = ("pre_feedforward_layernorm_2", "post_feedforward_layernorm_2")

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ExpertNames:
    """Names of a layer's expert tensors in checkpoints; {} is the expert's index."""

    router: str
    gate: str
    up: str
    down: str
    # The tensor that is added to an expert's score when experts are chosen.
    bias: str | None = None
    # The biases of the router's logits; then true if each expert's matrices have biases.
    router_bias: str | None = None
    has_biases: bool = False
    # The modules of the shared experts, which are stored as one module, and of their gate.
    shared: str | None = None
    shared_gate: str | None = None


@dataclass(frozen=True, slots=True)
class ModuleNames:
    """Names of a layer's modules, and of the last norm, in checkpoints."""

    before_attention: str = "input_layernorm"
    before_feed_forward: str = "post_attention_layernorm"
    # Norms of each part's output before it is added; None without these norms.
    after_attention: str | None = None
    after_feed_forward: str | None = None
    query_norm: str = "q_norm"
    key_norm: str = "k_norm"
    output: str = "o_proj"
    feed_forward: str = "mlp"
    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"
    final_norm: str = "model.norm"


LLAMA_NAMES = ModuleNames()


@dataclass(frozen=True, slots=True)
class ExpertsSpec:
    """Experts, and the layers that have them."""

    layers: frozenset[int]
    num_experts: int
    intermediate_size: int
    rule: RoutingRule
    names: ExpertNames
    # Intermediate size of all shared experts together.
    shared_size: int = 0
    # True if the routing weight multiplies an expert's input, not its output.
    scales_inputs: bool = False
    # True if layers with experts also have a dense part, each with its own norms.
    beside_dense: bool = False


@dataclass(frozen=True, slots=True)
class LatentSpec:
    """Latent attention (DeepSeek-V2, 2024). Queries and keys have a rotated part and one without
    rotation. All heads share the rotated part of keys.
    """

    # Elements of a query's latent; None if queries are made from hidden states.
    query_rank: int | None
    # Elements of the latent of keys and values.
    rank: int
    # A head's elements: of queries and keys without rotation, of both with rotation, and of values.
    plain: int
    rotated: int
    value: int
    norm_eps: float
    # True if the matrices that make latents have biases.
    has_bias: bool


@dataclass(frozen=True, slots=True)
class DeltaSpec:
    """Layers of the gated delta rule. Each layer's `state` has its heads' number and sizes."""

    key_heads: int
    # True if the checkpoint groups queries, keys, values and gates by key head, and likewise the
    # inputs of corrections and decays.
    is_fused: bool


@dataclass(frozen=True, slots=True)
class DecoderSpec:
    """A decoder of the Llama family. Sizes are in elements. Bools say which biases and
    norms exist.
    """

    vocab_size: int
    hidden_size: int
    # The size in layers without experts.
    intermediate_size: int
    layers: tuple[LayerSpec, ...]
    # Each layer's rotary table; see `rope_tables`.
    rope_types: tuple[str, ...]
    # True if rotation pairs elements 2 i and 2 i + 1; otherwise i and i + half of the rotated part.
    interleaved: bool
    activation: Activation
    norm_eps: float
    norm_offset: float
    # Norms of queries and keys: with learned weights, or without weights in layers that rotate.
    head_norms: Literal["learned", "plain"] | None
    # True if values are normed, without weights.
    value_norms: bool
    # Layers whose values are the keys before norm and rotation.
    keys_as_values: frozenset[int]
    qkv_bias: bool
    output_bias: bool
    mlp_bias: bool
    embedding_scale: float
    logit_softcap: float | None
    tied: bool
    # True if one tensor has query, key and value; in the next field, gate and up.
    fused_heads: bool
    fused_gates: bool
    # True if a number multiplies the residual stream after each layer.
    layer_scalars: bool = False
    experts: ExpertsSpec | None = None
    latent: LatentSpec | None = None
    # The sizes of layers with the delta rule.
    delta: DeltaSpec | None = None
    # True if attention's query matrix also makes gates of the output.
    gates_heads: bool = False
    # True if short convolutions have biases, in models without the delta rule.
    conv_bias: bool = False
    names: ModuleNames = LLAMA_NAMES
    # Name prefixes of tensors that are not read.
    unread: tuple[str, ...] = ()

    @property
    def output_norms(self) -> bool:
        """True if the outputs of attention and feed-forward part are normed before they
        are added.
        """
        return self.names.after_attention is not None

    def has_output_bias(self, layer: LayerSpec) -> bool:
        """True if the output matrix of attention, or of its replacement, has a bias."""
        if layer.state is None:
            return self.output_bias
        return self.delta is None and self.conv_bias

    def has_experts(self, index: int) -> bool:
        return self.experts is not None and index in self.experts.layers


class NotOurs(Exception):
    """Our decoder does not compute this model, for the reason in the message."""


def tensor_shapes(spec: DecoderSpec) -> dict[str, Shape]:
    """Every tensor that the checkpoint must have, and its shape."""
    shapes: dict[str, Shape] = {
        "model.embed_tokens.weight": (spec.vocab_size, spec.hidden_size),
        f"{spec.names.final_norm}.weight": (spec.hidden_size,),
    }
    if not spec.tied:
        shapes["lm_head.weight"] = (spec.vocab_size, spec.hidden_size)
    for layer in spec.layers:
        for name, shape in _layer_shapes(spec, layer):
            shapes[f"model.layers.{layer.index}.{name}"] = shape
    return shapes


def _layer_shapes(spec: DecoderSpec, layer: LayerSpec) -> Iterator[tuple[str, Shape]]:
    for name in norm_names(spec):
        yield f"{name}.weight", (spec.hidden_size,)
    width = layer.num_heads * layer.head_dim_v
    if layer.state is not None and spec.delta is None:
        yield from _conv_shapes(spec, layer.state)
        width = spec.hidden_size
    elif layer.state is not None and spec.delta is not None:
        yield from _delta_shapes(spec.delta, layer.state, spec.hidden_size)
        width = layer.state.heads * layer.state.dim_v
    elif spec.latent is None:
        yield from _head_shapes(spec, layer)
    else:
        yield from _latent_shapes(spec.latent, layer.num_heads, spec.hidden_size)
        width = layer.num_heads * spec.latent.value
    output = output_module(spec, layer)
    yield from _linear_shapes(output, spec.hidden_size, width, spec.has_output_bias(layer))
    if spec.layer_scalars:
        yield "layer_scalar", (1,)
    experts = spec.experts if spec.has_experts(layer.index) else None
    if experts is not None:
        yield from _expert_shapes(spec, experts)
    if experts is None or experts.beside_dense:
        yield from _dense_shapes(spec, spec.names.feed_forward, spec.intermediate_size)


def _head_shapes(spec: DecoderSpec, layer: LayerSpec) -> Iterator[tuple[str, Shape]]:
    queries, keys = layer.num_heads * layer.head_dim, layer.num_kv_heads * layer.head_dim
    queries *= 2 if spec.gates_heads else 1
    if spec.head_norms == "learned":
        yield f"self_attn.{spec.names.query_norm}.weight", (layer.head_dim,)
    if layer.has_sinks:
        yield "self_attn.sinks", (layer.num_heads,)
    if spec.head_norms == "learned" and layer.reads is None:
        yield f"self_attn.{spec.names.key_norm}.weight", (layer.head_dim,)
    rows_of = {"q_proj": queries, "k_proj": keys, "v_proj": keys, "qkv_proj": queries + 2 * keys}
    for name in dict.fromkeys(attention_modules(spec, layer)):
        rows = rows_of[name]
        yield from _linear_shapes(f"self_attn.{name}", rows, spec.hidden_size, spec.qkv_bias)


def output_module(spec: DecoderSpec, layer: LayerSpec) -> str:
    if layer.state is None:
        return f"self_attn.{spec.names.output}"
    return "conv.out_proj" if spec.delta is None else "linear_attn.out_proj"


def _conv_shapes(spec: DecoderSpec, state: StateSpec) -> Iterator[tuple[str, Shape]]:
    yield from _linear_shapes("conv.in_proj", 3 * state.channels, spec.hidden_size, spec.conv_bias)
    yield "conv.conv.weight", (state.channels, 1, state.taps)
    if spec.conv_bias:
        yield "conv.conv.bias", (state.channels,)


def delta_modules(delta: DeltaSpec, state: StateSpec) -> dict[str, int]:
    """The modules that make the delta rule's inputs, and their rows."""
    values = state.heads * state.dim_v
    if delta.is_fused:
        return {"in_proj_qkvz": state.channels + values, "in_proj_ba": 2 * state.heads}
    return {
        "in_proj_qkv": state.channels,
        "in_proj_z": values,
        "in_proj_b": state.heads,
        "in_proj_a": state.heads,
    }


def _delta_shapes(delta: DeltaSpec, state: StateSpec, hidden: int) -> Iterator[tuple[str, Shape]]:
    for name, rows in delta_modules(delta, state).items():
        yield f"linear_attn.{name}.weight", (rows, hidden)
    yield "linear_attn.conv1d.weight", (state.channels, 1, state.taps)
    yield "linear_attn.dt_bias", (state.heads,)
    yield "linear_attn.A_log", (state.heads,)
    yield "linear_attn.norm.weight", (state.dim_v,)


def attention_modules(spec: DecoderSpec, layer: LayerSpec) -> tuple[str, ...]:
    """The modules that make heads' queries, keys and values, in this order."""
    if layer.reads is not None:
        return ("q_proj",)
    if spec.fused_heads:
        return ("qkv_proj",)
    if layer.index in spec.keys_as_values:
        return ("q_proj", "k_proj", "k_proj")
    return ("q_proj", "k_proj", "v_proj")


def _latent_shapes(latent: LatentSpec, num_heads: int, hidden: int) -> Iterator[tuple[str, Shape]]:
    queries = num_heads * (latent.plain + latent.rotated)
    if latent.query_rank is None:
        yield "self_attn.q_proj.weight", (queries, hidden)
    else:
        yield from _linear_shapes("self_attn.q_a_proj", latent.query_rank, hidden, latent.has_bias)
        yield "self_attn.q_a_layernorm.weight", (latent.query_rank,)
        yield "self_attn.q_b_proj.weight", (queries, latent.query_rank)
    rows = latent.rank + latent.rotated
    yield from _linear_shapes("self_attn.kv_a_proj_with_mqa", rows, hidden, latent.has_bias)
    yield "self_attn.kv_a_layernorm.weight", (latent.rank,)
    yield "self_attn.kv_b_proj.weight", (num_heads * (latent.plain + latent.value), latent.rank)


def _dense_shapes(spec: DecoderSpec, module: str, wide: int) -> Iterator[tuple[str, Shape]]:
    hidden, names = spec.hidden_size, spec.names
    two = {names.gate: wide, names.up: wide}
    for name, rows in ({"gate_up_proj": 2 * wide} if spec.fused_gates else two).items():
        yield from _linear_shapes(f"{module}.{name}", rows, hidden, spec.mlp_bias)
    yield from _linear_shapes(f"{module}.{names.down}", hidden, wide, spec.mlp_bias)


def _expert_shapes(spec: DecoderSpec, experts: ExpertsSpec) -> Iterator[tuple[str, Shape]]:
    names, wide, hidden = experts.names, experts.intermediate_size, spec.hidden_size
    yield names.router, (experts.num_experts, hidden)
    for bias in filter(None, (names.bias, names.router_bias)):
        yield bias, (experts.num_experts,)
    for expert in range(experts.num_experts):
        for name, shape in (
            (names.gate, (wide, hidden)),
            (names.up, (wide, hidden)),
            (names.down, (hidden, wide)),
        ):
            yield name.format(expert), shape
            if names.has_biases:
                yield bias_of(name.format(expert)), shape[:1]
    if names.shared is not None:
        yield from _dense_shapes(spec, names.shared, experts.shared_size)
    if names.shared_gate is not None:
        yield names.shared_gate, (1, hidden)
    if experts.beside_dense:
        yield "router.scale", (hidden,)
        yield "router.per_expert_scale", (experts.num_experts,)
        for name in ("post_feedforward_layernorm_1", *EXPERT_NORMS):
            yield f"{name}.weight", (hidden,)


def bias_of(weight: str) -> str:
    return f"{weight.removesuffix('weight')}bias"


def _linear_shapes(
    name: str, rows: int, columns: int, has_bias: bool
) -> Iterator[tuple[str, Shape]]:
    yield f"{name}.weight", (rows, columns)
    if has_bias:
        yield f"{name}.bias", (rows,)


def norm_names(spec: DecoderSpec) -> tuple[str, ...]:
    """A layer's norms in order of use: before attention, on its output, before the feed-forward
    part, on its output. Without output norms, only the two "before" norms.
    """
    names = spec.names
    norms = (
        names.before_attention,
        names.after_attention,
        names.before_feed_forward,
        names.after_feed_forward,
    )
    return tuple(name for name in norms if name is not None)


def check_tensors(spec: DecoderSpec, found: dict[str, Shape]) -> None:
    """Raise NotOurs unless the checkpoint has exactly the spec's tensors."""
    wanted = tensor_shapes(spec)
    for name, shape in wanted.items():
        if found.get(name) != shape:
            raise NotOurs(f"no tensor {name} of shape {list(shape)} in the weights")
    embedding = wanted["model.embed_tokens.weight"]
    for name, shape in found.items():
        is_tied_head = spec.tied and name == "lm_head.weight" and shape == embedding
        is_needless = (
            is_tied_head or name.endswith("rotary_emb.inv_freq") or name.startswith(spec.unread)
        )
        if name not in wanted and not is_needless:
            raise NotOurs(f"tensor {name} in the weights")
