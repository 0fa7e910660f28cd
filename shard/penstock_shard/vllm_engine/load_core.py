"""Loads a model into vLLM's core, and describes it."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from penstock_proto.facts import EmbeddingDefaults
from penstock_proto.types import CONSTRAINT_KINDS
from penstock_shard.checkpoint.model_source import resolve_model
from penstock_shard.checkpoint.pooling_files import pooling_of
from penstock_shard.checkpoint.tokenizer_files import read_tokenizer_files, tokenizer_hash
from penstock_shard.config import ShardConfig
from penstock_shard.errors import ModelError, first_line
from penstock_shard.ipc.messages import Ready
from penstock_shard.structured_output.compiler import Compiler, TokenizerUnusable
from penstock_shard.vllm_engine import touched
from penstock_shard.vllm_engine.core import VllmCore, configure, version
from penstock_shard.vllm_engine.describe import defaults_of, describe
from penstock_shard.vllm_engine.devices import free_shares, wait_for_memory
from penstock_shard.vllm_engine.engine_arguments import engine_arguments
from penstock_shard.vllm_engine.generate_core import GENERATE_CAPABILITIES, GenerateCore
from penstock_shard.vllm_engine.images import PromptImages, prompt_images, serves_images
from penstock_shard.vllm_engine.in_core.core_settings import CoreSettings, add_settings
from penstock_shard.vllm_engine.load_checks.trials import CheckedCore
from penstock_shard.vllm_engine.requests import CAPABILITIES
from penstock_shard.vllm_engine.touched import missing

logger = logging.getLogger(__name__)

# Minor versions that `core.py` supports.
_TRIED = ("0.31.", "0.32.")
_TRIED_TEXT = " and ".join(each.rstrip(".") for each in _TRIED)


@dataclass(frozen=True, slots=True)
class LoadedCore:
    core: CheckedCore
    ready: Ready
    # None if the model's images are not served.
    images: PromptImages | None


def load_core(config: ShardConfig, progress: Callable[[str], None]) -> LoadedCore:
    """Load the configured model. An embedding model serves only embeddings.

    Call this in a running event loop, which it blocks. Raises ModelError.
    """
    source = resolve_model(config, progress=progress)
    template = None if config.chat_template is None else Path(config.chat_template)
    files = read_tokenizer_files(source.path, template)
    if "tokenizer.json" not in files:
        raise ModelError(f"{source.path}: has no tokenizer.json, which --engine vllm needs")
    pools = pooling_of(source.path, config.embeddings, progress)
    if config.kv_memory_bytes is not None:
        # On CPUs, this variable would override the flag.
        os.environ.pop("VLLM_CPU_KVCACHE_SPACE", None)
    progress("importing vLLM and loading the model, which takes a minute")
    number, make_core = _level(config, progress)
    if pools and make_core is GenerateCore:
        raise ModelError(f"embeddings are served with vLLM {_TRIED_TEXT}, and not with {number}")
    is_tried = make_core is VllmCore
    sees = serves_images(config, source.path, is_tried=is_tried, progress=progress)
    if pools and sees:
        sees = False
    arguments = engine_arguments(config, source.path, pools[0].value if pools else None, sees)
    try:
        given = configure(arguments, schedules=is_tried)
        defaults = defaults_of(source.path, given, progress)
        settings = CoreSettings()
        if pools is None and is_tried:
            settings = _settings(config, files["tokenizer.json"], source.path, given, defaults[0])
        add_settings(given, settings)
        size = config.tensor_parallel_size
        share = given.cache_config.gpu_memory_utilization
        wait_for_memory(share, progress, partial(free_shares, size))
        images = prompt_images(source.path, given) if sees else None
        core = make_core(given)
    except Exception as error:
        raise ModelError(f"vLLM: {_reason(error)}") from error
    embedding = None
    if pools:
        embedding = EmbeddingDefaults(*pools, size=given.model_config.get_hidden_size())
    served = frozenset(("embed",)) if pools else _generates(config, settings, make_core)
    if images is not None:
        served |= {"images"}
    info = describe(config, source.path, given, number, defaults, served, embedding)
    ready = Ready(info, files, tokenizer_hash(files), source.revision)
    return LoadedCore(core, ready, images)


def _level(
    config: ShardConfig, progress: Callable[[str], None]
) -> tuple[str, type[VllmCore | GenerateCore]]:
    """Return the installed version and its core class. Raises ModelError if neither class can use
    it.
    """
    number = version(is_exact=config.exact)
    if number.startswith(_TRIED) and not missing(touched.CORE):
        return number, VllmCore
    if lacks := missing(touched.GENERATE):
        raise ModelError(f"vLLM {number} has no {lacks[0]}, which --engine vllm needs")
    progress(
        f"vLLM {number} was not tried with this shard, {_TRIED_TEXT} were: requests run "
        "by generate(), without constraints, bad words and embeddings"
    )
    return number, GenerateCore


def _generates(
    config: ShardConfig, settings: CoreSettings, make_core: type[VllmCore | GenerateCore]
) -> frozenset[str]:
    served = CAPABILITIES if make_core is VllmCore else GENERATE_CAPABILITIES
    lacks = frozenset[str]() if settings.tokenizer_dir else CONSTRAINT_KINDS
    return served - lacks - (frozenset() if config.serves_adapters else {"adapter"})


def _settings(
    config: ShardConfig, tokenizer: bytes, model_dir: Path, given: Any, eos: tuple[int, ...]
) -> CoreSettings:
    vocab_size, limits = given.model_config.get_vocab_size(), config.constraint_limits
    try:
        Compiler(tokenizer, vocab_size, eos, limits)
    except TokenizerUnusable as error:
        logger.warning("outputs cannot be constrained: %s", error)
        return CoreSettings()
    return CoreSettings(
        str(model_dir),
        vocab_size,
        eos,
        limits.timeout_s,
        limits.memory_bytes,
        config.constraint_threads,
    )


def _reason(error: Exception) -> str:
    """Return the most useful line of an error. The first of several lines only names a class."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return " ".join((lines[1] if len(lines) > 1 else first_line(error)).split())[:500]
