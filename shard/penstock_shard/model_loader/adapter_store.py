"""The LoRA adapters of a loaded model: finds, reads and checks their files, and places their
weights.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from penstock_shard.checkpoint.adapter_files import WEIGHTS, AdapterFiles, read_adapter_files
from penstock_shard.checkpoint.model_source import resolve_adapter
from penstock_shard.config import ShardConfig
from penstock_shard.device.dtypes import dtype_name
from penstock_shard.distributed.parallel_model import MirroredModel
from penstock_shard.errors import ModelError
from penstock_shard.lora.lora import LoraBank, LowRank, check_fit
from penstock_shard.models.base import CausalModel
from penstock_shard.worker.base import ReadAdapter


class ModelAdapters:
    """An `AdapterStore` (`penstock_shard.worker.base`)."""

    def __init__(
        self, bank: LoraBank, find: Callable[[str], Path], whole: MirroredModel | None = None
    ) -> None:
        """`find` returns the directory of an adapter's source. With several ranks, `bank` belongs
        to this rank, and `whole` passes changes to the others.
        """
        self._bank = bank
        self._find = find
        self._whole = whole

    def read(self, source: str) -> ReadAdapter:
        files = read_adapter_files(self._find(source))
        check_fit(self._bank, files)
        weights = read_weights(files, self._bank.dtype)
        return ReadAdapter(files.content_hash, files.rank, weights)

    def discard(self, adapter: ReadAdapter) -> None:
        """Do nothing, because only the adapter object holds the weights."""

    def place(self, index: int, adapter: ReadAdapter) -> None:
        assert isinstance(adapter.weights, dict)
        if self._whole is not None:
            self._whole.place_adapter(index, adapter.weights)
        self._bank.place(index, adapter.weights)

    def drop(self, index: int) -> None:
        if self._whole is not None:
            self._whole.drop_adapter(index)
        self._bank.drop(index)


def adapter_store(
    config: ShardConfig, bank: LoraBank | None, model: CausalModel
) -> ModelAdapters | None:
    """Return the adapters of a model, over all its ranks; None if none are served."""
    if bank is None:
        return None
    whole = model if isinstance(model, MirroredModel) else None
    return ModelAdapters(bank, lambda source: resolve_adapter(source, config), whole)


def read_weights(files: AdapterFiles, dtype: torch.dtype = torch.float32) -> dict[str, LowRank]:
    """Read the weights of each module. Raises ModelError for a value that is not finite in
    `dtype`.
    """
    try:
        with safe_open(files.path / WEIGHTS, framework="pt") as tensors:
            weights = {
                pair.module: LowRank(
                    tensors.get_tensor(pair.name_a).float(),
                    tensors.get_tensor(pair.name_b).float() * pair.scale,
                )
                for pair in files.pairs
            }
    except (OSError, SafetensorError) as error:
        raise ModelError(f"{files.path}: cannot read the weights: {error}") from error
    for module, pair in weights.items():
        if not all(bool(torch.isfinite(half.to(dtype)).all()) for half in (pair.a, pair.b)):
            raise ModelError(
                f"{files.path}: {module} has values that are no numbers in {dtype_name(dtype)}"
            )
    return weights
