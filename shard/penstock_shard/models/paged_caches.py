"""The KV memory of a model: a cache for each layer, in pools of blocks."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from penstock_shard.attention.base import AttentionBackend, LayerCache, LayerSpec
from penstock_shard.attention.cache_groups import CacheLayout


class PagedCaches:
    """The caches of a model's layers. Layers of different groups that share a plane of a pool have
    the same memory, each in blocks of its own.
    """

    def __init__(self, layout: CacheLayout) -> None:
        self.layout = layout
        self._caches: dict[int, LayerCache] = {}

    def allocate(
        self,
        backend: AttentionBackend,
        layers: Sequence[LayerSpec],
        pools: Sequence[int],
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """Make the caches of `layers`, in place of all earlier ones; `pools` are numbers of
        blocks.
        """
        self.free()
        needed = {layer.index if layer.reads is None else layer.reads for layer in layers}
        for num_blocks, planes in zip(pools, self.layout.planes, strict=True):
            for plane in planes:
                if needed.isdisjoint(layer.index for layer in plane):
                    continue
                cache = backend.make_cache(plane[0], num_blocks, block_size, dtype, device)
                self._caches.update((layer.index, cache) for layer in plane)

    def free(self) -> None:
        """Drop all caches."""
        self._caches = {}

    def of(self, layer: LayerSpec) -> LayerCache:
        """Where a layer's keys and values are."""
        return self._caches[layer.index if layer.reads is None else layer.reads]
