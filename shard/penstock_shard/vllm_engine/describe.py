"""Facts that a shard tells of a model that vLLM serves: by penstock's own reading of its files, so
that a shard with another engine tells the same of it.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from penstock_shard.checkpoint.weight_files import model_shape
from penstock_shard.checkpoint.weights_hash import hash_weights
from penstock_shard.config import ShardConfig
from penstock_shard.ipc.runner_info import RunnerInfo
from penstock_shard.model_loader.generation_config import as_ids, generation_defaults
from penstock_shard.vllm_engine.requests import CAPABILITIES


def describe(
    config: ShardConfig,
    model_dir: Path,
    given: Any,
    version: str,
    progress: Callable[[str], None],
) -> RunnerInfo:
    """Facts of a loaded model, with `given` vLLM's configuration of it. Raises ModelError."""
    model, cache = given.model_config, given.cache_config
    vocab_size = model.get_vocab_size()
    stated = as_ids(getattr(model.hf_text_config, "eos_token_id", None))
    eos_token_ids, defaults = generation_defaults(model_dir, stated, vocab_size, progress)
    return RunnerInfo(
        architecture=model.architectures[0],
        weights_hash=hash_weights(
            model_dir,
            config_only=config.load_format == "dummy",
            with_code=config.trust_remote_code,
        ),
        vocab_size=vocab_size,
        max_model_len=model.max_model_len,
        eos_token_ids=eos_token_ids,
        default_sampling=defaults,
        block_size=cache.block_size,
        pools=(cache.num_gpu_blocks,),
        dtype=str(model.dtype).removeprefix("torch."),
        kv_dtype=str(cache.cache_dtype),
        device=given.device_config.device_type,
        attention_backend=f"vllm {version}",
        capabilities=CAPABILITIES,
        max_steps_ahead=1,
        shape=model_shape(model_dir),
    )
