"""Loads and checks a model, or takes the kept results of an earlier start.

Weights in the kernels' layout, facts and the results of checks are kept only for models of our
decoder on one CPU. A start that takes them imports no transformers, reads no weights and repeats no
check.
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

# Modules with the classes of kept objects.
_OF_LOADS = (
    *(attention_base, attention_cpu, check_model, cpu, cpu_ops, decoder, embedding_table, experts),
    *(feed_forward, gated_delta_net, latent_heads, linear, loaded_model, ops_base, self_attention),
    *(short_conv, spec, weight_layouts, weights),
)


@dataclass(frozen=True, slots=True)
class CheckedLoad:
    loaded: LoadedModel
    weights_hash: str
    checks: CheckResults
    # The lines of progress that the next start repeats.
    lines: tuple[str, ...] = ()


def load_checked(
    config: ShardConfig, model_dir: Path, progress: Callable[[str], None]
) -> CheckedLoad:
    """Load and check a model, or take a kept one. Raises ModelError if the model cannot be loaded,
    or would be served wrongly.
    """
    cache = LoadCache(load_directory(), config.load_cache_bytes, _kept_types(), progress)
    key = _key(config, model_dir) if _may_keep(config) else ""
    if key and (kept := _read(cache, key)) is not None:
        return _take(config, kept, progress)
    # Imported here because it imports transformers, which takes seconds.
    from penstock_shard.model_loader.load_whole import load_whole

    lines: list[str] = []

    def note(line: str) -> None:
        progress(line)
        # Lines with percentages are not kept.
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
    classes = [
        value
        for module in _OF_LOADS
        for value in vars(module).values()
        if isinstance(value, type) and value.__module__ == module.__name__
    ]
    return [*classes, CheckedLoad, frozenset, load_kernels, packed_weight, no_check]


def _may_keep(config: ShardConfig) -> bool:
    """Tell whether a load with these flags may be kept, if our decoder computes the model."""
    return (
        config.load_cache_bytes > 0
        and config.tensor_parallel_size == 1
        and config.load_format != "dummy"
        # A model holds memory for adapters, which would be kept too.
        and not config.serves_adapters
        # The model's own code may do anything.
        and not config.trust_remote_code
        and resolve_device(config.device).type == "cpu"
    )


def _key(config: ShardConfig, model_dir: Path) -> str:
    """Return the load's key; '' if that fails. Loading then reports the reason."""
    try:
        return load_key(config, model_dir)
    except (OSError, ModelError, KernelBuildError):
        return ""


def _read(cache: LoadCache, key: str) -> CheckedLoad | None:
    """Return the kept load, or None. If its kernels cannot be built, loading reports the reason."""
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
