"""A transformers causal LM whose attention runs on our paged cache.

The modelling code stays as it is: each attention layer calls the function registered here, which
hands queries, keys and values to whatever `_attention` has set for the current forward. The mask
function registered along with it gives none, since causality comes from the step's lengths.

Knows transformers' registries and modules. Knows nothing of requests, scheduling or sampling.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel
from transformers.masking_utils import AttentionMaskInterface

from penstock_shard.models.attention.base import (
    AttentionBackend,
    AttentionBatch,
    LayerCache,
    LayerSpec,
)

ATTENTION_NAME = "penstock"


@dataclass(frozen=True, slots=True)
class AttentionCall:
    """One layer's call: query [T, Hq, D], key [T, Hkv, D], value [T, Hkv, Dv]."""

    layer_index: int
    query: Tensor
    key: Tensor
    value: Tensor
    scale: float
    window: int | None
    softcap: float | None
    sinks: Tensor | None


_Hook = Callable[[AttentionCall], Tensor]
# What the registered function calls during a forward. A module global, because modelling code
# differs in which keyword arguments it passes on; the engine runs one forward at a time.
_hook: _Hook | None = None


@contextmanager
def _attention(hook: _Hook) -> Iterator[None]:
    global _hook
    outer, _hook = _hook, hook
    try:
        yield
    finally:
        _hook = outer


def _attention_function(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """What modelling code calls: query [1, Hq, T, D], key and value alike -> [1, T, Hq, Dv]."""
    if _hook is None:
        raise RuntimeError("a forward outside of TransformersModel")
    call = AttentionCall(
        layer_index=int(module.layer_idx),  # type: ignore[arg-type]
        query=query[0].transpose(0, 1),
        key=key[0].transpose(0, 1),
        value=value[0].transpose(0, 1),
        scale=float(query.shape[-1] ** -0.5 if scaling is None else scaling),
        window=sliding_window,
        softcap=softcap,
        sinks=s_aux,
    )
    return _hook(call).unsqueeze(0), None


def _no_mask(*args: Any, **kwargs: Any) -> None:
    """The mask our attention needs: none. Without it transformers would build a dense one."""


AttentionInterface.register(ATTENTION_NAME, _attention_function)
AttentionMaskInterface.register(ATTENTION_NAME, _no_mask)


class TransformersModel:
    """Runs flat steps: `input_ids` [T] of many sequences, each attending to its own cache."""

    def __init__(
        self, module: PreTrainedModel, backend: AttentionBackend, device: torch.device
    ) -> None:
        """Take over a loaded module; its attention implementation must be `ATTENTION_NAME`."""
        self.module = module
        self.backend = backend
        self.device = device
        self.dtype: torch.dtype = module.dtype
        self._caches: dict[int, LayerCache] = {}

    def probe(self) -> tuple[LayerSpec, ...]:
        """Run one token through the modules and record what each attention call asks for."""
        specs: list[LayerSpec] = []

        def record(call: AttentionCall) -> Tensor:
            specs.append(_spec_of(call))
            return call.query.new_zeros(*call.query.shape[:2], call.value.shape[2])

        token = torch.zeros(1, dtype=torch.int64, device=self.device)
        with _attention(record):
            self._call(token, token, token)
        return tuple(specs)

    def allocate(self, specs: Sequence[LayerSpec], num_blocks: int, block_size: int) -> None:
        """Make the cache of every layer: `num_blocks` blocks of `block_size` tokens."""
        self._caches = {}
        # On cpu memory is taken when it is first written; kernels that read whole blocks on a
        # GPU must not meet NaN in places that were never written.
        make = torch.empty if self.device.type == "cpu" else torch.zeros
        for spec in specs:
            shape = (num_blocks, block_size, spec.num_kv_heads)
            self._caches[spec.index] = (
                make(*shape, spec.head_dim, dtype=self.dtype, device=self.device),
                make(*shape, spec.head_dim_v, dtype=self.dtype, device=self.device),
            )

    def free(self) -> None:
        """Drop the cache."""
        self._caches = {}

    def forward(
        self, input_ids: Tensor, positions: Tensor, batch: AttentionBatch, logit_rows: Tensor
    ) -> Tensor:
        """input_ids and positions int64 [T], logit_rows int64 [N] into T -> logits [N, V]."""

        def attend(call: AttentionCall) -> Tensor:
            return self.backend.run(
                self._caches[call.layer_index],
                call.query,
                call.key,
                call.value,
                batch,
                scale=call.scale,
                window=call.window,
                softcap=call.softcap,
                sinks=call.sinks,
            )

        with _attention(attend):
            return self._call(input_ids, positions, logit_rows)

    def _call(self, input_ids: Tensor, positions: Tensor, logit_rows: Tensor) -> Tensor:
        output = self.module(
            input_ids=input_ids.unsqueeze(0),
            position_ids=positions.unsqueeze(0),
            use_cache=False,
            logits_to_keep=logit_rows,
        )
        logits: Tensor = output.logits[0]
        return logits


def _spec_of(call: AttentionCall) -> LayerSpec:
    return LayerSpec(
        index=call.layer_index,
        num_heads=call.query.shape[1],
        num_kv_heads=call.key.shape[1],
        head_dim=call.query.shape[2],
        head_dim_v=call.value.shape[2],
        scale=call.scale,
        window=call.window,
        softcap=call.softcap,
        has_sinks=call.sinks is not None,
    )
