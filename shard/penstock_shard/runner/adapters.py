"""The adapters of a model that computes: found, read, checked against the model, put into slots.

Knows files, and the model's places for adapters. Knows nothing of requests or names.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from penstock_shard.config import ShardConfig
from penstock_shard.models.adapt import make_adaptable
from penstock_shard.models.base import CausalModel
from penstock_shard.models.decoder import Decoder
from penstock_shard.models.errors import ModelError
from penstock_shard.models.lora import LoraBank, LoraLimits, LowRank, check_fit
from penstock_shard.models.lora_files import WEIGHTS, AdapterFiles, read_adapter_files
from penstock_shard.models.ops.base import Ops
from penstock_shard.models.source import resolve_adapter
from penstock_shard.models.transformers_model import TransformersModel
from penstock_shard.runner.base import ReadAdapter


class ModelAdapters:
    """An `AdapterStore`: see `penstock_shard.runner.base`."""

    def __init__(self, bank: LoraBank, find: Callable[[str], Path]) -> None:
        """`find` gives the directory of a source."""
        self._bank = bank
        self._find = find

    def read(self, source: str) -> ReadAdapter:
        files = read_adapter_files(self._find(source))
        check_fit(self._bank, files)
        weights = read_weights(files, self._bank.dtype)
        return ReadAdapter(files.content_hash, files.rank, weights)

    def place(self, slot: int, adapter: ReadAdapter) -> None:
        assert isinstance(adapter.weights, dict)
        self._bank.place(slot, adapter.weights)

    def drop(self, slot: int) -> None:
        self._bank.drop(slot)


def adapter_store(
    config: ShardConfig, model: CausalModel, ops: Ops, progress: Callable[[str], None]
) -> ModelAdapters | None:
    """Let a model that was just loaded have adapters; None where none are to be served.

    Raises ModelError if it can have none.
    """
    if not config.serves_adapters:
        return None
    if not isinstance(model, Decoder | TransformersModel):
        raise ModelError(f"adapters are not served for {type(model).__name__}; leave --lora out")
    limits = LoraLimits(config.max_loras, config.max_lora_rank)
    bank = LoraBank(limits, ops, stacked=ops.device.type != "cpu")
    make_adaptable(model, bank)
    if bank.nbytes:
        progress(f"adapters: {bank.nbytes / 1e6:.0f} MB set aside for {config.max_loras}")
    return ModelAdapters(bank, lambda source: resolve_adapter(source, config))


def read_weights(files: AdapterFiles, dtype: torch.dtype = torch.float32) -> dict[str, LowRank]:
    """By module. Raises ModelError for a value that is no number in this dtype."""
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
            text = f"{files.path}: {module} has values that are no numbers in {dtype}"
            raise ModelError(text.replace("torch.", ""))
    return weights
