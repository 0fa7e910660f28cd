"""Chooses whether a model's decode steps are recorded: as CUDA graphs, or as calls of kernels."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from penstock_shard.config import ShardConfig
from penstock_shard.models.base import CausalModel
from penstock_shard.models.cpu_graphs import MOST_ROWS, CpuGraph
from penstock_shard.models.cuda_graphs import GraphedModel
from penstock_shard.models.decoder.decoder import Decoder
from penstock_shard.models.loaded_model import LoadedModel
from penstock_shard.ops.cpu_ops import CpuOps
from penstock_shard.ops.quantized import captures_fp8


def choose_graphs(
    config: ShardConfig, loaded: LoadedModel, progress: Callable[[str], None]
) -> GraphedModel | None:
    """Wrap this rank's part so that its decodes are recorded; return None if they cannot or must
    not be.
    """
    part, ops = loaded.part, loaded.ops
    if config.enforce_eager or not ops.backend.capturable:
        return None
    if isinstance(ops, CpuOps):
        return _cpu_graphs(config, part, ops, loaded.max_model_len)
    if any(layer.state is not None for layer in part.layers):
        progress("CUDA graphs: none, they were not tried with layers that keep a state")
        return None
    if isinstance(part, Decoder) and not part.capturable:
        progress("CUDA graphs: none, experts are multiplied one after the other")
        return None
    if ops.weights == "fp8" and not captures_fp8(part.device):
        progress("CUDA graphs: none, products in fp8 need torch 2.12 for them on this GPU")
        return None
    # max_step_logits bounds the rows: a step with drafts has a row for each of its logits.
    return GraphedModel(
        part,
        config.max_step_logits,
        loaded.max_model_len,
        serves_adapters=config.serves_adapters,
    )


def _cpu_graphs(
    config: ShardConfig, part: CausalModel, ops: CpuOps, max_model_len: int
) -> GraphedModel | None:
    if not isinstance(part, Decoder) or not part.capturable or config.tensor_parallel_size > 1:
        return None
    most = min(MOST_ROWS, config.max_step_logits)
    pool = partial(CpuGraph, ops.kernels)
    return GraphedModel(part, most, max_model_len, lambda: pool, exact_rows=True)
