"""Checks that ranks together compute the same as the whole transformers module.

A plan that does not fit the modeling code would silently give wrong text. So logits of a few
tokens, on one layer of each kind, are computed before and after the division.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from penstock_shard.errors import ModelError
from penstock_shard.models.transformers.transformers_model import layer_stacks, own_logits
from penstock_shard.ops.base import Ops
from penstock_shard.selfcheck.own_attention import check_logits

_NUM_TOKENS = 8


@dataclass(frozen=True, slots=True)
class WholeLogits:
    """The logits [T, V] for token_ids [1, T], from some layers of the undivided module."""

    token_ids: Tensor
    layers: Sequence[int]
    logits: Tensor


def logits_of_whole(module: PreTrainedModel) -> WholeLogits:
    """Compute logits with the module's own attention."""
    text = module.config.get_text_config()
    generator = torch.Generator().manual_seed(1)
    token_ids = torch.randint(int(text.vocab_size), (1, _NUM_TOKENS), generator=generator)
    layers = _one_of_each_kind(module)
    with _only(module, layers):
        logits = own_logits(module, token_ids)
    return WholeLogits(token_ids, layers, logits[0].float())


def check_division(module: PreTrainedModel, whole: WholeLogits, ops: Ops, size: int) -> None:
    """Compare the logits; all ranks must call it. Raises ModelError if they differ by more than
    rounding.
    """
    # The whole module computed its logits with unquantized weights.
    precision = "int8" if ops.weights in ("int4", "fp8") else ops.weights
    token_ids, logits = whole.token_ids.to(ops.device), whole.logits.to(ops.device)
    try:
        with _only(module, whole.layers):
            own = own_logits(module, token_ids)[0]
        check_logits(type(module).__name__, own, logits, precision)
    except ModelError as error:
        raise ModelError(
            f"--tensor-parallel-size {size}: {type(module).__name__} divided by its plan in "
            "transformers gives other logits than whole; only 1 is served"
        ) from error


def _one_of_each_kind(module: PreTrainedModel) -> list[int]:
    types = getattr(module.config.get_text_config(), "layer_types", None)
    kinds: dict[tuple[str, str], int] = {}
    for _, _, stack in _stacks(module):
        for index, layer in enumerate(stack):
            kinds.setdefault((str(types and types[index]), repr(layer)), index)
    return sorted(kinds.values())


@contextmanager
def _only(module: PreTrainedModel, layers: Sequence[int]) -> Iterator[None]:
    """Let the module have only these layers in the context."""
    stacks = _stacks(module)
    for parent, name, stack in stacks:
        setattr(parent, name, nn.ModuleList(stack[index] for index in layers))
    try:
        yield
    finally:
        for parent, name, stack in stacks:
            setattr(parent, name, stack)


def _stacks(module: PreTrainedModel) -> list[tuple[nn.Module, str, nn.ModuleList]]:
    return list(layer_stacks(module, module.config.get_text_config().num_hidden_layers))
