"""Facts about a model that vLLM serves. penstock reads them from the files, so that shards with any
engine report the same.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from penstock_proto.facts import EmbeddingDefaults
from penstock_shard.checkpoint.weight_files import model_shape
from penstock_shard.checkpoint.weights_hash import hash_weights
from penstock_shard.config import ShardConfig
from penstock_shard.ipc.runner_info import RunnerInfo
from penstock_shard.model_loader.generation_config import as_ids, generation_defaults
from penstock_shard.vllm_engine.requests import bounds


def defaults_of(
    model_dir: Path, given: Any, progress: Callable[[str], None]
) -> tuple[tuple[int, ...], dict[str, float]]:
    """Return the model's eos ids and default sampling values. Raises ModelError."""
    model = given.model_config
    stated = as_ids(getattr(model.hf_text_config, "eos_token_id", None))
    return generation_defaults(model_dir, stated, model.get_vocab_size(), progress)


def describe(
    config: ShardConfig,
    model_dir: Path,
    given: Any,
    version: str,
    defaults: tuple[tuple[int, ...], dict[str, float]],
    capabilities: frozenset[str],
    embedding: EmbeddingDefaults | None,
) -> RunnerInfo:
    """Return the facts of a loaded model; `given` is vLLM's configuration. Raises ModelError."""
    model, cache = given.model_config, given.cache_config
    return RunnerInfo(
        architecture=model.architectures[0],
        weights_hash=hash_weights(
            model_dir,
            config_only=config.load_format == "dummy",
            with_code=config.trust_remote_code,
        ),
        vocab_size=model.get_vocab_size(),
        max_model_len=model.max_model_len,
        eos_token_ids=defaults[0],
        default_sampling=defaults[1],
        block_size=cache.block_size,
        pools=(cache.num_gpu_blocks,),
        dtype=str(model.dtype).removeprefix("torch."),
        kv_dtype=str(cache.cache_dtype),
        device=given.device_config.device_type,
        attention_backend=f"vllm {version}",
        capabilities=capabilities,
        embedding=embedding,
        bounds=bounds(len(defaults[0])),
        max_steps_ahead=1,
        shape=model_shape(model_dir),
    )
