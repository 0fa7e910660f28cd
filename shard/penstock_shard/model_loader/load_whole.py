"""Loads a model over all its ranks, and computes its weights' hash. Imports transformers, which a
kept load does not need.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

from penstock_shard.checkpoint.weights_hash import hash_weights
from penstock_shard.config import ShardConfig
from penstock_shard.distributed.group import gather_group
from penstock_shard.model_loader.choices.choose_graphs import choose_graphs
from penstock_shard.model_loader.load_rank import load_part, rank_device
from penstock_shard.models.loaded_model import LoadedModel


def load_whole(
    config: ShardConfig, model_dir: Path, progress: Callable[[str], None]
) -> tuple[LoadedModel, str]:
    """Return the model and its weights' hash."""
    group = None
    if config.tensor_parallel_size > 1:
        group = gather_group(config, model_dir, rank_device(config, 0), progress)
    with _hashing(config, model_dir) as hashing:
        loaded = load_part(config, model_dir, None if group is None else group.ranks, progress)
        loaded = loaded.with_graphs(choose_graphs(config, loaded, progress))
        weights_hash = hashing.result()
    if group is not None:
        whole = group.whole(loaded, loaded.ops.backend.name, weights_hash)
        loaded = loaded.over_ranks(whole)
    return loaded, weights_hash


@contextmanager
def _hashing(config: ShardConfig, model_dir: Path) -> Iterator[Future[str]]:
    """Compute the weights' hash in a thread while the weights are loaded."""
    stop = threading.Event()
    with ThreadPoolExecutor(max_workers=1) as pool:
        try:
            yield pool.submit(
                hash_weights,
                model_dir,
                config_only=config.load_format == "dummy",
                with_code=config.trust_remote_code,
                stop=stop,
            )
        finally:
            # If loading failed, do not wait for the hash.
            stop.set()
