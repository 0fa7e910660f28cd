"""A gated short convolution in place of attention, as in LFM2. Its state is the last inputs.

Called like attention. Written on the ops interface.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from penstock_shard.attention.base import AttentionBatch
from penstock_shard.lora.lora import TokenAdapters
from penstock_shard.models.decoder.linear import Linear
from penstock_shard.models.decoder.self_attention import NO_ATTENTION_SCRATCH, AttentionScratch
from penstock_shard.models.paged_caches import StateCache
from penstock_shard.ops.base import Ops


@dataclass(frozen=True, slots=True)
class ShortConv:
    ops: Ops
    # Hidden states -> gates of the inputs, gates of the outputs, and inputs, [T, C] each.
    inputs: Linear
    # float32 [taps, C]; the bias is [C].
    conv: Tensor
    bias: Tensor | None

    def __call__(
        self,
        hidden: Tensor,
        positions: Tensor,
        batch: AttentionBatch,
        cache: StateCache,
        scratch: AttentionScratch,
        adapters: TokenAdapters | None = None,
    ) -> Tensor:
        before, after, x = self.inputs(hidden, None, adapters).chunk(3, dim=-1)
        gated = (before * x).contiguous()
        mixed = self.ops.short_conv(gated, self.conv, self.bias, cache.inputs, batch, silu=False)
        return mixed.mul_(after)

    def make_scratch(self, num_tokens: int) -> AttentionScratch:
        return NO_ATTENTION_SCRATCH

    def change(self, change: Callable[[Linear], Linear]) -> ShortConv:
        return dataclasses.replace(self, inputs=change(self.inputs))
