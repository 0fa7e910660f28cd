"""Cuts a transformers module to one rank's part, by the model's own plan.

The plan, `base_model_tp_plan`, says which modules' outputs or inputs are divided. Weights are cut
in place. Forward hooks gather or sum results over ranks, without changes to the modeling code.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from penstock_shard.distributed.collectives import Ranks
from penstock_shard.distributed.divide_decoder import (
    check_divisible,
    even_part,
    states_are_whole,
    vocabulary_part,
)
from penstock_shard.distributed.parallel_linear import gathered
from penstock_shard.errors import ModelError
from penstock_shard.lora.lora import Share, Shares
from penstock_shard.models.transformers import recurrences

# Styles of transformers' plans. The names that end in _rep are those of releases before 5.10.
_ROWS = {"colwise", "colwise_gather_output", "colwise_rep"}
_GATHERED = {"colwise_gather_output", "colwise_rep"}
_COLUMNS = {"rowwise", "rowwise_split_input", "rowwise_rep"}
_SPLIT = {"rowwise_split_input", "rowwise_rep"}
# Every rank keeps these modules whole.
_WHOLE = {"replicated_with_grad_allreduce", "embedding_rowwise", "mla_kv_a_proj"}
_EXPERTS = "moe_tp_experts"
_PACKED = "packed_colwise"
_HEAD_COUNTS = ("num_heads", "num_attention_heads", "num_key_value_heads")


def divide_module(module: PreTrainedModel, ranks: Ranks) -> Shares:
    """Cut the module's weights to this rank's part; return its share of each divided linear layer.
    Raises ModelError if the model has no plan, or one with an unknown style.
    """
    name = type(module).__name__
    text = module.config.get_text_config()
    if recurrences.are_served(text):
        raise states_are_whole(ranks.size)
    plan: dict[str, str] = getattr(text, "base_model_tp_plan", None) or {}
    if not any(style in _COLUMNS for style in plan.values()):
        raise ModelError(
            f"--tensor-parallel-size {ranks.size}: {name} comes with no plan in transformers of "
            "how to divide it; only 1 is served"
        )
    _check_sizes(module, ranks.size)
    shares = {}
    for path, style in _planned(module, plan):
        share = _divide(path, module, style, ranks)
        if share is not None:
            shares[path] = share
    _divide_head(module, ranks)
    return shares


def _check_sizes(module: PreTrainedModel, count: int) -> None:
    text = module.config.get_text_config()
    names = ("num_attention_heads", "num_key_value_heads", "intermediate_size")
    # A size that differs between layers is a list; `_cut` checks it.
    sizes = {name: size for name in names if isinstance(size := getattr(text, name, None), int)}
    check_divisible(count, sizes, count)


def _planned(module: PreTrainedModel, plan: dict[str, str]) -> Iterator[tuple[str, str]]:
    prefix = module.base_model_prefix
    named = {name for name, _ in module.named_modules()}
    named |= {name for name, _ in module.named_parameters()}
    for pattern, style in plan.items():
        words = re.escape(f"{prefix}.{pattern}").replace(r"\*", r"\d+")
        found = sorted(name for name in named if re.fullmatch(words, name))
        yield from ((path, style) for path in found)


def _divide(path: str, module: PreTrainedModel, style: str, ranks: Ranks) -> Share | None:
    """Divide the module or parameter at `path`; return this rank's share of a linear layer."""
    parent, _, leaf = path.rpartition(".")
    holder = module.get_submodule(parent)
    part = getattr(holder, leaf)
    if isinstance(part, nn.Linear) and style in _ROWS | _COLUMNS:
        if style == "colwise":
            _fewer_heads(holder, ranks.size)
        return _divide_linear(path, part, style, ranks)
    if isinstance(part, nn.Parameter) and style == "colwise" and part.dim() == 1:
        # The parameter has a number for each head, such as attention sinks.
        _cut(path, holder, leaf, 0, ranks)
    elif isinstance(part, nn.Parameter) and style in {_PACKED, "colwise", "rowwise"}:
        _divide_experts(path, holder, leaf, style, ranks)
    elif style == _EXPERTS:
        part.register_forward_hook(_adding(ranks))
    elif style not in _WHOLE:
        raise ModelError(
            f"--tensor-parallel-size {ranks.size}: the plan of {type(module).__name__} in "
            f"transformers has {path} as {style}, which is not known here; only 1 is served"
        )
    return None


def _divide_linear(path: str, linear: nn.Linear, style: str, ranks: Ranks) -> Share:
    shape = (linear.out_features, linear.in_features)
    if style in _ROWS:
        _cut(path, linear, "weight", 0, ranks)
        if linear.bias is not None:
            _cut(path, linear, "bias", 0, ranks)
        if style in _GATHERED:
            linear.register_forward_hook(_gathering(ranks, linear.out_features))
        linear.out_features = len(linear.weight)
        return Share(shape, rows=(even_part(shape[0], ranks.rank, ranks.size),))
    _cut(path, linear, "weight", 1, ranks)
    linear.in_features = linear.weight.shape[1]
    # Add the bias once, to the sum over ranks.
    if linear.bias is not None:
        linear.register_parameter("bias_of_sum", linear.bias)
        linear.register_parameter("bias", None)
    if style in _SPLIT:
        linear.register_forward_pre_hook(_splitting(ranks))
    linear.register_forward_hook(_adding(ranks))
    return Share(shape, columns=even_part(shape[1], ranks.rank, ranks.size))


def _cut(path: str, holder: nn.Module, name: str, dim: int, ranks: Ranks) -> None:
    parameter = holder.get_parameter(name)
    _replace(holder, name, _part(path, parameter.data, dim, ranks))


def _part(path: str, whole: Tensor, dim: int, ranks: Ranks) -> Tensor:
    length = whole.shape[dim]
    if length % ranks.size:
        raise ModelError(
            f"--tensor-parallel-size {ranks.size}: {path} has {length} units, which must be a "
            "multiple of it"
        )
    return whole.narrow(dim, ranks.rank * (length // ranks.size), length // ranks.size)


def _replace(holder: nn.Module, name: str, part: Tensor) -> None:
    """Set the parameter to a copy of `part`, so that the whole can be freed."""
    copied = nn.Parameter(part.clone(memory_format=torch.contiguous_format), requires_grad=False)
    setattr(holder, name, copied)


def _divide_experts(path: str, experts: nn.Module, name: str, style: str, ranks: Ranks) -> None:
    """Divide the weights of all experts, [E, N, K], or transposed, [E, K, N]."""
    if not getattr(experts, "is_concatenated", True) or getattr(experts, "has_bias", False):
        raise ModelError(
            f"--tensor-parallel-size {ranks.size}: experts as {type(experts).__name__} keeps them "
            "cannot be divided; only 1 is served"
        )
    whole = experts.get_parameter(name).data
    rows, columns = (2, 1) if getattr(experts, "is_transposed", False) else (1, 2)
    if style == _PACKED:
        halves = whole.chunk(2, dim=rows)
        part = torch.cat([_part(path, half, rows, ranks) for half in halves], dim=rows)
    else:
        part = _part(path, whole, columns if style == "rowwise" else rows, ranks)
    _replace(experts, name, part)


def _fewer_heads(attention: nn.Module, size: int) -> None:
    """Lower the numbers of heads, which the modeling code stores and uses to reshape."""
    if not hasattr(attention, "layer_idx") or getattr(attention, "has_part_of_heads", False):
        return
    attention.has_part_of_heads = True  # type: ignore[assignment]
    for name in _HEAD_COUNTS:
        count = getattr(attention, name, None)
        if isinstance(count, int):
            setattr(attention, name, count // size)


def _divide_head(module: PreTrainedModel, ranks: Ranks) -> None:
    head = module.get_output_embeddings()
    if not isinstance(head, nn.Linear):
        return
    vocabulary = head.out_features
    bias = head.bias
    # Copy the rows of a tied head, because the embedding stays whole.
    _replace(head, "weight", vocabulary_part(head.weight.data, ranks.rank, ranks.size))
    if bias is not None:
        column = vocabulary_part(bias.data.unsqueeze(1), ranks.rank, ranks.size)
        _replace(head, "bias", column.squeeze(1))
    head.out_features = len(head.weight)
    head.register_forward_hook(_gathering(ranks, vocabulary))


_Hook = Callable[[nn.Module, Any, Tensor], Tensor]


def _adding(ranks: Ranks) -> _Hook:
    def add(module: nn.Module, arguments: Any, output: Tensor) -> Tensor:
        total = ranks.add_up(output.contiguous())
        bias = getattr(module, "bias_of_sum", None)
        return total if bias is None else total + bias

    return add


def _gathering(ranks: Ranks, out_features: int) -> _Hook:
    def gather(module: nn.Module, arguments: Any, output: Tensor) -> Tensor:
        return gathered(output, ranks, out_features)

    return gather


def _splitting(ranks: Ranks) -> Callable[[nn.Module, tuple[Any, ...]], tuple[Any, ...]]:
    def split(module: nn.Module, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
        whole, *rest = arguments
        count = whole.shape[-1] // ranks.size
        return (whole.narrow(-1, ranks.rank * count, count), *rest)

    return split
