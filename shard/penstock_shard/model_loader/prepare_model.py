"""Gives a checked model its KV memory and graphs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from penstock_shard.config import ShardConfig
from penstock_shard.model_loader.block_count import KVShape
from penstock_shard.model_loader.check_model import CheckResults
from penstock_shard.model_loader.prepare_cuda_graphs import GraphPreparation
from penstock_shard.model_loader.prepare_kv_memory import MemoryPreparation
from penstock_shard.models.loaded_model import LoadedModel
from penstock_shard.ops.cpu_ops import CpuOps


@dataclass(frozen=True, slots=True)
class PreparedModel:
    # The number of KV blocks of each pool.
    pools: list[int]
    kv_shape: KVShape
    # True if decode steps replay graphs.
    has_graphs: bool = False


def prepare_model(
    config: ShardConfig,
    loaded: LoadedModel,
    checks: CheckResults,
    beside_bytes: int,
    progress: Callable[[str], None],
) -> PreparedModel:
    """Measure memory, allocate KV blocks, record graphs. `beside_bytes` are reserved for work
    outside steps.

    Raises ModelError if the model does not fit.
    """
    block_size = checks.block_size
    graphs = _graph_preparation(loaded, progress, is_exact=checks.batch_invariant)
    # Measure graphs before KV blocks take the memory.
    graph_bytes = graphs.measure(block_size) if graphs else None
    memory = MemoryPreparation(config, loaded, block_size)
    pools = memory.allocate(graph_bytes, beside_bytes, progress)
    has_graphs = False
    if graphs is not None and graph_bytes is not None:
        has_graphs = graphs.capture(block_size, pools)
    return PreparedModel(pools, memory.shape(), has_graphs)


def _graph_preparation(
    loaded: LoadedModel, progress: Callable[[str], None], *, is_exact: bool
) -> GraphPreparation | None:
    if loaded.graphs is None:
        return None
    return GraphPreparation(
        loaded.graphs,
        loaded.kv_dtype,
        loaded.vocab_size,
        loaded.max_model_len,
        progress,
        is_exact,
        on_demand=isinstance(loaded.ops, CpuOps),
    )
