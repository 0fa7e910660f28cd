"""Lets the products of a loaded model take adapters, for our decoder and transformers' code."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

from torch import Tensor, nn

from penstock_shard.errors import ModelError
from penstock_shard.lora.lora import Delta, LoraBank
from penstock_shard.models.decoder import Decoder
from penstock_shard.models.decoder_weights import LayerWeights
from penstock_shard.models.feed_forward import Dense, FeedForward, Linear
from penstock_shard.models.transformers.transformers_model import TransformersModel

# Modules of a layer without adapters: routers, and experts, which see only some of the tokens. And
# of latent attention what makes keys and values of latents, as its products are not computed.
_CLOSED = {"experts", "gate", "router"}

_Module = tuple[str, int]


def make_adaptable(model: Decoder | TransformersModel, bank: LoraBank) -> None:
    """Let the model's linear layers take the bank's adapters.

    Raises ModelError for a model without any such layer.
    """
    if isinstance(model, Decoder):
        model.change_weights(lambda index, weights: _adapted(bank, index, weights, model))
    else:
        _hook_products(model, bank)
    if not bank.modules:
        raise ModelError("adapters: no linear layer of this model can take one; leave --lora out")


# ---- our decoder ----


def _adapted(bank: LoraBank, index: int, weights: LayerWeights, model: Decoder) -> LayerWeights:
    prefix = f"model.layers.{index}."
    spec = model.layers[index]
    query, key = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    attention = f"{prefix}self_attn."
    qkv: list[_Module] = [("q_proj", query), ("k_proj", key), ("v_proj", key)]
    if model.fused_tensors:
        qkv = [("qkv_proj", query + 2 * key)]
    output = [("o_proj", weights.output.matrix.out_features)]
    return dataclasses.replace(
        weights,
        qkv=_open(bank, weights.qkv, attention, qkv),
        output=_open(bank, weights.output, attention, output),
        feed_forward=_adapted_feed_forward(bank, f"{prefix}mlp.", weights.feed_forward, model),
    )


def _adapted_feed_forward(
    bank: LoraBank, prefix: str, part: FeedForward, model: Decoder
) -> FeedForward:
    if not isinstance(part, Dense):
        return part
    size = part.gate_up.matrix.out_features
    gate_up = [("gate_proj", size // 2), ("up_proj", size // 2)]
    if model.fused_tensors:
        gate_up = [("gate_up_proj", size)]
    down = [("down_proj", part.down.matrix.out_features)]
    return dataclasses.replace(
        part,
        gate_up=_open(bank, part.gate_up, prefix, gate_up),
        down=_open(bank, part.down, prefix, down),
    )


def _open(bank: LoraBank, linear: Linear, prefix: str, modules: Sequence[_Module]) -> Linear:
    named = [(prefix + name, size) for name, size in modules]
    return dataclasses.replace(linear, delta=bank.open(named, linear.matrix.in_features))


# ---- transformers' code ----


def _hook_products(model: TransformersModel, bank: LoraBank) -> None:
    closed = _CLOSED | {"kv_b_proj"} if model.latent else _CLOSED
    for prefix, stack in model.layer_stacks:
        for name, module in stack.named_modules():
            if isinstance(module, nn.Linear) and not closed & set(name.split(".")):
                out_features, in_features = module.weight.shape
                delta = bank.open([(f"{prefix}.{name}", out_features)], in_features)
                # Before the hooks of tensor parallelism, which combine the ranks' results.
                module.register_forward_hook(_adding(model, delta), prepend=True)


def _adding(
    model: TransformersModel, delta: Delta
) -> Callable[[nn.Module, tuple[Tensor, ...], Tensor], None]:
    """A forward hook that adds what the tokens' adapters compute to the product."""

    def add(module: nn.Module, arguments: tuple[Tensor, ...], product: Tensor) -> None:
        tokens = model.token_adapters
        if tokens is None:
            return
        x = arguments[0].reshape(-1, arguments[0].shape[-1]).contiguous()
        # A view, so that adding to y changes the product.
        y = product.view(-1, product.shape[-1])
        if len(y) != len(tokens.indices):
            raise RuntimeError(f"a product of {len(y)} rows in a step of {len(tokens.indices)}")
        delta.add(x, y, tokens)

    return add
