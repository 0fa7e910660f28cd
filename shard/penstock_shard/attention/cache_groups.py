"""The division of layers into groups that share block tables, and pools that share memory.

Layers that see the same keys form a group, with one block table for each sequence. Groups that need
equal memory for a token share a pool of blocks, so that no memory is reserved for one group.

Layers with a state form a group too; a block of their pool is one state. A model with only such
layers also has a group without layers. The blocks of that group take no device memory; their hashes
identify the tokens that a state covers.

A pool consists of planes, each the memory of one layer. A block has a part of every plane, and
belongs to one group at a time. Each layer of that group has its own plane.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from penstock_shard.attention.base import LayerSpec, StateSpec
from penstock_shard.ipc.runner_info import CacheGroup

# The largest number of groups for layers of one shape. More groups cost more host work in a step.
# With fewer groups, blocks of small groups leave more planes unused.
_MOST_GROUPS = 8
# `_Shape`: the memory layout of a layer's keys and values. `_Sight`: which keys a query sees.
_Shape = tuple[int, int, int, bool] | StateSpec
_Sight = tuple[int | None, int | None, bool]


@dataclass(frozen=True, slots=True)
class CacheLayout:
    """The groups and pools of a model's layers. `group_of` maps a layer's index to its group. For
    each plane of each pool, `planes` has the layers that use it; they are in different groups.
    """

    groups: tuple[CacheGroup, ...]
    group_of: dict[int, int]
    planes: tuple[tuple[tuple[LayerSpec, ...], ...], ...]

    def block_bytes(self, pool: int, block_size: int, itemsize: int) -> int:
        return sum(
            block_size * first.elements_per_token * itemsize
            if first.state is None
            else first.state.nbytes
            for first, *_ in self.planes[pool]
        )


def cache_layout(layers: Sequence[LayerSpec]) -> CacheLayout:
    """Return the layout for these layers. A layer that reads another layer's keys is in that
    layer's group.
    """
    shapes: dict[_Shape, dict[_Sight, list[LayerSpec]]] = {}
    for layer in layers:
        if layer.reads is None:
            kinds = shapes.setdefault(_shape_of(layer), {})
            sight = (layer.window, layer.chunk, layer.bidirectional_images)
            kinds.setdefault(sight, []).append(layer)
    assert sum(isinstance(shape, StateSpec) for shape in shapes) <= 1, "states of two kinds"
    groups: list[CacheGroup] = []
    group_of: dict[int, int] = {}
    planes = []
    for pool, kinds in enumerate(shapes.values()):
        counts = [len(kind) for kind in kinds.values()]
        size = max(min(counts), -(-max(counts) // _MOST_GROUPS))
        parts = [
            kind[start : start + size]
            for kind in kinds.values()
            for start in range(0, len(kind), size)
        ]
        for part in parts:
            group_of.update((layer.index, len(groups)) for layer in part)
            first = part[0]
            has_state = first.state is not None
            group = CacheGroup(
                first.window, first.chunk, pool, has_state, first.bidirectional_images
            )
            groups.append(group)
        planes.append(
            tuple(
                tuple(part[plane] for part in parts if plane < len(part)) for plane in range(size)
            )
        )
    for layer in layers:
        if layer.reads is not None:
            group_of[layer.index] = group_of[layer.reads]
    if all(group.has_state for group in groups):
        groups.append(CacheGroup(pool=len(planes)))
        planes.append(())
    return CacheLayout(tuple(groups), group_of, tuple(planes))


def _shape_of(layer: LayerSpec) -> _Shape:
    if layer.state is not None:
        return layer.state
    return layer.num_kv_heads, layer.head_dim, layer.head_dim_v, layer.values_in_keys
