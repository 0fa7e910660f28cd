"""Adds adapters to a loaded model's products: our decoder's and transformers'."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from torch import Tensor, nn

from penstock_shard.errors import ModelError
from penstock_shard.lora.lora import Delta, LoraBank
from penstock_shard.models.decoder.decoder import Decoder
from penstock_shard.models.decoder.linear import Linear
from penstock_shard.models.transformers.transformers_model import TransformersModel

# Modules that take no adapters: routers; experts, which see only some tokens; Mamba's dt_proj,
# whose code uses the weight directly. In latent attention also kv_b_proj, whose product is never
# computed.
_CLOSED = {"dt_proj", "experts", "gate", "router"}


def make_adaptable(model: Decoder | TransformersModel, bank: LoraBank) -> None:
    """Let the model's linear layers take the bank's adapters. Raises ModelError if none can."""
    if isinstance(model, Decoder):
        model.change(lambda linear: _adapted(bank, linear))
    else:
        _hook_products(model, bank)
    if not bank.modules:
        raise ModelError("adapters: no linear layer of this model can take one; leave --lora out")


def _adapted(bank: LoraBank, linear: Linear) -> Linear:
    return dataclasses.replace(linear, delta=bank.open(linear.modules, linear.matrix.in_features))


def _hook_products(model: TransformersModel, bank: LoraBank) -> None:
    closed = _CLOSED | {"kv_b_proj"} if model.latent else _CLOSED
    for prefix, stack in model.layer_stacks:
        for name, module in stack.named_modules():
            if isinstance(module, nn.Linear) and not closed & set(name.split(".")):
                out_features, in_features = module.weight.shape
                delta = bank.open([(f"{prefix}.{name}", out_features)], in_features)
                # These hooks run before those of tensor parallelism, which combine the ranks'
                # results.
                module.register_forward_hook(_adding(model, delta), prepend=True)


def _adding(
    model: TransformersModel, delta: Delta
) -> Callable[[nn.Module, tuple[Tensor, ...], Tensor], None]:
    def add(module: nn.Module, arguments: tuple[Tensor, ...], product: Tensor) -> None:
        tokens = model.token_adapters
        if tokens is None:
            return
        x = arguments[0].reshape(-1, arguments[0].shape[-1]).contiguous()
        # y is a view, so adding to it changes the product.
        y = product.view(-1, product.shape[-1])
        if len(y) != len(tokens.indices):
            raise RuntimeError(f"a product of {len(y)} rows in a step of {len(tokens.indices)}")
        delta.add(x, y, tokens)

    return add
