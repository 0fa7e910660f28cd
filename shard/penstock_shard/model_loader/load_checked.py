"""Loads and checks a model, or takes what an earlier start kept of the same load.

Kept are models of our decoder on one CPU: their weights as kernels read them, what their
configuration says of them, and what the checks found. A start that takes these does not import
transformers, reads no weights and checks nothing again.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from penstock_shard.attention import base as attention_base
from penstock_shard.attention import cpu as attention_cpu
from penstock_shard.config import ShardConfig
from penstock_shard.device.cache_directory import load_directory
from penstock_shard.errors import ModelError
from penstock_shard.kernels import cpu, weight_layouts
from penstock_shard.kernels.build_cpu import KernelBuildError
from penstock_shard.kernels.cpu import load_kernels
from penstock_shard.kernels.weight_layouts import packed_weight
from penstock_shard.load_cache.load_cache import LoadCache
from penstock_shard.load_cache.load_key import load_key
from penstock_shard.model_loader import check_model
from penstock_shard.model_loader.check_model import CheckResults
from penstock_shard.model_loader.choices.choose_device import resolve_device
from penstock_shard.model_loader.choices.choose_graphs import choose_graphs
from penstock_shard.models import embedding_table, latent_heads, loaded_model
from penstock_shard.models.decoder import (
    decoder,
    feed_forward,
    gated_delta_net,
    linear,
    self_attention,
    short_conv,
    spec,
    weights,
)
from penstock_shard.models.decoder.decoder import Decoder
from penstock_shard.models.loaded_model import LoadedModel, no_check
from penstock_shard.ops import base as ops_base
from penstock_shard.ops import cpu_ops, experts
from penstock_shard.ops.cpu_ops import CpuOps

# Modules with classes of what is kept.
_OF_LOADS = (
    *(attention_base, attention_cpu, check_model, cpu, cpu_ops, decoder, embedding_table, experts),
    *(feed_forward, gated_delta_net, latent_heads, linear, loaded_model, ops_base, self_attention),
    *(short_conv, spec, weight_layouts, weights),
)


@dataclass(frozen=True, slots=True)
class CheckedLoad:
    """A model that may be served."""

    loaded: LoadedModel
    weights_hash: str
    checks: CheckResults
    # What progress said that is true of the next start too.
    lines: tuple[str, ...] = ()


def load_checked(
    config: ShardConfig, model_dir: Path, progress: Callable[[str], None]
) -> CheckedLoad:
    """Raises ModelError if the model cannot be loaded, or would be served wrongly."""
    cache = LoadCache(load_directory(), config.load_cache_bytes, _kept_types(), progress)
    key = _key(config, model_dir) if _may_keep(config) else ""
    if key and (kept := _read(cache, key)) is not None:
        return _take(config, kept, progress)
    # Imported here, as it imports transformers, which takes seconds.
    from penstock_shard.model_loader.load_whole import load_whole

    lines: list[str] = []

    def note(line: str) -> None:
        progress(line)
        # But for how far something is.
        if not line.endswith("%"):
            lines.append(line)

    loaded, weights_hash = load_whole(config, model_dir, note)
    progress("checking what the model computes")
    checks = check_model.check_model(config, loaded, note)
    load = CheckedLoad(loaded, weights_hash, checks, tuple(lines))
    part = loaded.part
    if key and isinstance(part, Decoder) and isinstance(loaded.ops, CpuOps):
        plain = dataclasses.replace(load, loaded=loaded.with_graphs(None))
        cache.write(key, plain, part.nbytes)
    return load


def _kept_types() -> list[Callable[..., object]]:
    """All that a kept load consists of, and what makes it."""
    classes = [
        value
        for module in _OF_LOADS
        for value in vars(module).values()
        if isinstance(value, type) and value.__module__ == module.__name__
    ]
    return [*classes, CheckedLoad, frozenset, load_kernels, packed_weight, no_check]


def _may_keep(config: ShardConfig) -> bool:
    """Whether a load with these flags may be kept, where the model is of our decoder."""
    return (
        config.load_cache_bytes > 0
        and config.tensor_parallel_size == 1
        and config.load_format != "dummy"
        # Places for adapters are made in the model.
        and not config.serves_adapters
        # It may do anything.
        and not config.trust_remote_code
        and resolve_device(config.device).type == "cpu"
    )


def _key(config: ShardConfig, model_dir: Path) -> str:
    """Empty where there is none: the load will say why."""
    try:
        return load_key(config, model_dir)
    except (OSError, ModelError, KernelBuildError):
        return ""


def _read(cache: LoadCache, key: str) -> CheckedLoad | None:
    """None where there is none, or no kernels to compute it with, which the load will say."""
    try:
        kept = cache.read(key)
    except KernelBuildError:
        return None
    return kept if isinstance(kept, CheckedLoad) else None


def _take(config: ShardConfig, kept: CheckedLoad, progress: Callable[[str], None]) -> CheckedLoad:
    for line in kept.lines:
        progress(line)
    progress("weights, and what the checks found, are from an earlier start")
    loaded = kept.loaded
    loaded.ops.set_threads(loaded.threads)
    graphs = choose_graphs(config, loaded, progress)
    return dataclasses.replace(kept, loaded=loaded.with_graphs(graphs))
