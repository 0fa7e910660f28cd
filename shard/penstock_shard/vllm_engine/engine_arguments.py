"""Flags of a shard -> arguments of vLLM's engine. What has no counterpart is refused by name.

Imports nothing of vLLM: the command line is checked with it, where vLLM is not.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

from penstock_shard.config import ShardConfig

# Field of the configuration -> argument, where both mean the same.
_SAME = {
    "revision": "revision",
    "dtype": "dtype",
    "tensor_parallel_size": "tensor_parallel_size",
    "max_model_len": "max_model_len",
    "max_num_seqs": "max_num_seqs",
    "max_num_batched_tokens": "max_num_batched_tokens",
    "enable_prefix_caching": "enable_prefix_caching",
    "block_size": "block_size",
    "gpu_memory_utilization": "gpu_memory_utilization",
    "kv_blocks": "num_gpu_blocks_override",
    "kv_memory_bytes": "kv_cache_memory_bytes",
    "enforce_eager": "enforce_eager",
    "max_logprobs": "max_logprobs",
    "trust_remote_code": "trust_remote_code",
    "load_format": "load_format",
}
# Field -> why it has to stay as it is by default.
_REFUSED = {
    "runner": "the fake runner is of penstock's own engine",
    "embeddings": "this engine serves generated text alone",
    "standby": "a spare engine would need the device's memory a second time",
    "role": "KV blocks are not exchanged with this engine",
    "quantization": "give a checkpoint that is quantized",
    "kv_cache_dtype": "give --engine-arg kv_cache_dtype=...",
    "threads": "set VLLM_CPU_OMP_THREADS_BIND",
    "attention_backend": "vLLM chooses one; --engine-arg attention_config=... tells it which",
    "exact": "equal bits are not checked with this engine",
    "nnodes": "a model over several machines is not served with this engine",
    "max_prefill_tokens": "vLLM has no such bound",
    "speculative_tokens": "drafts are not offered with this engine",
    "state_spacing": "vLLM keeps no states for others",
    "kv_host_bytes": "copies of KV blocks are not kept with this engine",
    "kv_disk": "copies of KV blocks are not kept with this engine",
    "kv_peers": "KV blocks are not exchanged with this engine",
    "check_integrity": "counts of vLLM's blocks are its own",
    "loras": "adapters are not offered with this engine",
    "enable_lora": "adapters are not offered with this engine",
}
# Arguments that change the model, or who computes it: what shards of one name answer would differ.
_CHANGES_MODEL = frozenset(
    (
        *("model", "tokenizer", "tokenizer_revision", "code_revision", "config_format"),
        *("hf_config_path", "hf_overrides", "quantization", "logits_processors", "worker_cls"),
        *("worker_extension_cls", "scheduler_cls", "override_generation_config"),
        *("generation_config", "model_impl", "model_weights", "runner", "convert"),
        *("model_loader_extra_config", "kv_transfer_config", "ec_transfer_config"),
        *("speculative_config", "enable_lora", "lora_modules", "data_parallel_size"),
        *("distributed_executor_backend", "nnodes", "node_rank", "skip_tokenizer_init"),
        *("logprobs_mode", "reasoning_parser", "structured_outputs_config"),
    )
)


def engine_arguments(config: ShardConfig, model_dir: Path) -> dict[str, Any]:
    """Keyword arguments of vLLM's `AsyncEngineArgs`. Raises ValueError, as `check_engine` does."""
    check_engine(config)
    given = {theirs: getattr(config, ours) for ours, theirs in _SAME.items()}
    return {
        "model": str(model_dir),
        # Text is the router's.
        "skip_tokenizer_init": True,
        "generation_config": "vllm",
        "disable_log_stats": True,
        **{name: value for name, value in given.items() if value is not None},
        **dict(_read_argument(name, text) for name, text in config.engine_args),
    }


def check_engine(config: ShardConfig) -> None:
    """Raises ValueError, whose text names the flag, for what this engine cannot honour."""
    for field in dataclasses.fields(config):
        if field.name in _REFUSED and getattr(config, field.name) != field.default:
            flag = f"--{field.metadata.get('name') or field.name.replace('_', '-')}"
            raise ValueError(f"{flag}: with --engine vllm {_REFUSED[field.name]}")
    for name, _ in config.engine_args:
        check_argument(name)


def check_argument(name: str) -> None:
    """Raises ValueError for an argument of vLLM's that has to stay as this shard sets it."""
    flag = f"--engine-arg {name}"
    ours = next((ours for ours, theirs in _SAME.items() if theirs == name), None)
    if ours is not None:
        raise ValueError(f"{flag}: give --{ours.replace('_', '-')}")
    if name in _CHANGES_MODEL:
        raise ValueError(f"{flag}: it changes what is computed under the model's name")


def _read_argument(name: str, text: str) -> tuple[str, Any]:
    """A value is JSON if it can be read as such, else text."""
    try:
        return name, json.loads(text)
    except ValueError:
        return name, text
