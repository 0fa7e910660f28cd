"""A stand-in for CUDA graphs: it does its work again on the same memory, as a device does."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from penstock_shard.attention.base import LayerSpec
from penstock_shard.attention.cache_groups import cache_layout
from penstock_shard.ipc.runner_info import pools_for
from penstock_shard.models.base import CausalModel
from penstock_shard.models.cuda_graphs import Graph, GraphedModel

NUM_BLOCKS = 16


class Recorded:
    """A `Graph` without a device. The results of all of a pool lie in the same memory: a replay
    spoils those of the others.
    """

    def __init__(self, pool: Pool) -> None:
        self._pool = pool

    def capture(self, work: Callable[[], Tensor]) -> Tensor:
        self._work = work
        self._result = work().clone()
        self._pool.results.append(self._result)
        return self._result

    def replay(self) -> None:
        self._pool.num_replays += 1
        result = self._work()
        for other in self._pool.results:
            other.fill_(float("nan"))
        self._result.copy_(result)


class Pool:
    """Makes such graphs, and counts what they do."""

    def __init__(self, make: Callable[[Pool], Graph] = Recorded) -> None:
        self.results: list[Tensor] = []
        self.num_replays = 0
        self.make = make

    def __call__(self) -> Graph:
        return self.make(self)


def graphed(model: CausalModel, pool: Pool, *, max_rows: int = 7) -> GraphedModel:
    return GraphedModel(model, max_rows, 120, lambda: pool)


def allocate(model: CausalModel) -> None:
    """A cache of `NUM_BLOCKS` of each group, and a spare block in each pool."""
    pools = pools_for(NUM_BLOCKS, model.cache_layout.groups)
    model.allocate([num_blocks + 1 for num_blocks in pools], 16, torch.float32)


def capture_all(graphs: GraphedModel) -> None:
    groups = graphs.cache_layout.groups
    pools = pools_for(NUM_BLOCKS, groups)
    graphs.capture(graphs.shapes(16), 16, [pools[group.pool] for group in groups])


class Stale(Recorded):
    """Replays what was recorded, not what is to be computed."""

    def replay(self) -> None:
        self._pool.num_replays += 1


class NoModel:
    device = torch.device("cpu")
    layers = (LayerSpec(0, 1, 1, 4, 4, 1.0),)
    cache_layout = cache_layout(layers)
    hidden_size = 4
