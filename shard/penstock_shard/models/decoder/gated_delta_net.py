"""The gated delta rule in place of attention (Yang et al., 2024), as in Qwen3-Next: a short
convolution of queries, keys and values, and a matrix per head that each token decays and corrects.

Called like attention. Written on the ops interface.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from penstock_shard.attention.base import AttentionBatch, LayerSpec
from penstock_shard.lora.lora import TokenAdapters
from penstock_shard.models.decoder.linear import Linear
from penstock_shard.models.decoder.self_attention import NO_ATTENTION_SCRATCH, AttentionScratch
from penstock_shard.models.paged_caches import StateCache
from penstock_shard.ops.base import Ops


@dataclass(frozen=True, slots=True)
class GatedDeltaNet:
    ops: Ops
    spec: LayerSpec
    # Hidden states -> queries, keys and values; gates of the output; for each head the inputs of
    # corrections and of decays. `columns` gives the order, if it is another.
    inputs: Linear
    columns: Tensor | None
    # float32 [taps, channels]
    conv: Tensor
    # Decays are e^(-rate softplus(x + bias)); float32 [H] each.
    rate: Tensor
    bias: Tensor
    # float32 [Dv]
    norm: Tensor
    norm_eps: float

    def __call__(
        self,
        hidden: Tensor,
        positions: Tensor,
        batch: AttentionBatch,
        cache: StateCache,
        scratch: AttentionScratch,
        adapters: TokenAdapters | None = None,
    ) -> Tensor:
        ops, heads, channels = self.ops, len(self.rate), self.conv.shape[1]
        width = heads * len(self.norm)
        inputs = self.inputs(hidden, None, adapters)
        if self.columns is not None:
            inputs = inputs[:, self.columns]
        qkv, gate, correction, decay = torch.split(inputs, [channels, width, heads, heads], dim=-1)
        qkv = ops.short_conv(qkv.contiguous(), self.conv, None, cache.inputs, batch, silu=True)
        decay = ops.decay(decay.contiguous(), self.rate, self.bias)
        ones = torch.ones_like(correction)
        beta = ops.gated_activation(torch.cat((correction, ones), dim=-1), "sigmoid")
        attended = ops.delta_rule(qkv, decay, beta.float(), cache.matrices, batch)
        normed = ops.add_rms_norm(
            attended.view(-1, len(self.norm)), None, self.norm, self.norm_eps, 0.0
        )
        gated = torch.cat((gate, normed.view(len(hidden), width)), dim=-1)
        return ops.gated_activation(gated, "silu")

    def make_scratch(self, num_tokens: int) -> AttentionScratch:
        return NO_ATTENTION_SCRATCH

    def change(self, change: Callable[[Linear], Linear]) -> GatedDeltaNet:
        return dataclasses.replace(self, inputs=change(self.inputs))
