"""A model's KV memory: a cache for each layer, in pools of blocks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from penstock_shard.attention.base import AttentionBackend, LayerCache, LayerSpec, StateSpec
from penstock_shard.attention.cache_groups import CacheLayout


@dataclass(frozen=True, slots=True)
class StateCache:
    """A layer's states, float32, by block: the convolution's last inputs [n, taps - 1, channels],
    the oldest first, and the matrices [n, heads, dim, dim_v]. A sequence's state is at block
    `block_table[row, 0]`.
    """

    inputs: Tensor
    matrices: Tensor

    @classmethod
    def of(cls, spec: StateSpec, count: int, device: torch.device) -> StateCache:
        """Allocate without clearing: a sequence's first token begins its state."""
        shape = (count, spec.heads, spec.dim, spec.dim_v)
        return cls(
            torch.empty(count, spec.taps - 1, spec.channels, device=device),
            torch.empty(shape, device=device),
        )


class PagedCaches:
    """The caches of a model's layers. A plane is memory in a pool: layers of different groups may
    share it, but use different blocks.
    """

    def __init__(self, layout: CacheLayout) -> None:
        self.layout = layout
        self._caches: dict[int, LayerCache] = {}
        # Each layer's tensors; their first dimension is the block.
        self._memory: dict[int, tuple[Tensor, ...]] = {}

    def allocate(
        self,
        backend: AttentionBackend,
        layers: Sequence[LayerSpec],
        pools: Sequence[int],
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """Make the caches of `layers`, and drop earlier ones. `pools` are numbers of blocks."""
        self.free()
        needed = {layer.index if layer.reads is None else layer.reads for layer in layers}
        for num_blocks, planes in zip(pools, self.layout.planes, strict=True):
            for plane in planes:
                if needed.isdisjoint(layer.index for layer in plane):
                    continue
                state = plane[0].state
                if state is not None:
                    cache = StateCache.of(state, num_blocks, device)
                    memory: tuple[Tensor, ...] = (cache.inputs, cache.matrices)
                else:
                    cache = backend.make_cache(plane[0], num_blocks, block_size, dtype, device)
                    memory = backend.memory(cache)
                self._caches.update((layer.index, cache) for layer in plane)
                self._memory.update((layer.index, memory) for layer in plane)

    def free(self) -> None:
        self._caches = {}
        self._memory = {}

    def block_parts(self, group: int, block_id: int) -> list[Tensor]:
        """See `CausalModel.block_parts`. Empty for a group without layers."""
        return [
            part[block_id].view(-1).view(torch.uint8)
            for layer, memory in sorted(self._memory.items())
            if self.layout.group_of[layer] == group
            for part in memory
        ]

    def copy_states(self, copies: Sequence[tuple[int, int]]) -> None:
        states = [cache for cache in self._caches.values() if isinstance(cache, StateCache)]
        for source, target in copies:
            for state in states:
                state.inputs[target] = state.inputs[source]
                state.matrices[target] = state.matrices[source]

    def of(self, layer: LayerSpec) -> LayerCache:
        """The cache with a layer's keys and values."""
        return self._caches[layer.index if layer.reads is None else layer.reads]
