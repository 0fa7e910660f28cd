"""Translates a shard's flags to arguments of vLLM's engine, and refuses flags without a
counterpart.

Imports nothing of vLLM, because the shard's server, which checks the command line, may lack it.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

from penstock_shard.config import ShardConfig

# Field of the configuration -> argument of vLLM.
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
# Field -> why it must keep its default.
_REFUSED = {
    "runner": "the fake runner is of penstock's own engine",
    "standby": "a spare engine would need the device's memory a second time",
    "role": "KV blocks are not exchanged with this engine",
    "quantization": "give a checkpoint that is quantized",
    "kv_cache_dtype": "give --engine-arg kv_cache_dtype=...",
    "threads": "set VLLM_CPU_OMP_THREADS_BIND",
    "attention_backend": "vLLM chooses one; --engine-arg attention_config=... tells it which",
    "max_prefill_tokens": "vLLM has no such bound",
    "speculative_tokens": "drafts are not offered with this engine",
    "state_spacing": "vLLM keeps no states for others",
    "kv_host_bytes": "copies of KV blocks are not kept with this engine",
    "retained_kv_share": "vLLM retains no KV blocks for requests that have ended",
    "kv_disk": "copies of KV blocks are not kept with this engine",
    "kv_peers": "KV blocks are not exchanged with this engine",
    "check_integrity": "counts of vLLM's blocks are its own",
}
# The ranks that vLLM supports.
_LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
# Arguments that change the model or its computation, so that shards of one name would answer
# differently.
_CHANGES_MODEL = frozenset(
    (
        *("model", "tokenizer", "tokenizer_revision", "code_revision", "config_format"),
        *("hf_config_path", "hf_overrides", "quantization", "logits_processors", "worker_cls"),
        *("worker_extension_cls", "scheduler_cls", "override_generation_config"),
        *("generation_config", "model_impl", "model_weights", "runner", "convert"),
        "pooler_config",
        *("model_loader_extra_config", "kv_transfer_config", "ec_transfer_config"),
        *("enable_lora", "max_loras", "max_lora_rank", "max_cpu_loras", "lora_modules"),
        *("speculative_config", "data_parallel_size"),
        *("distributed_executor_backend", "nnodes", "node_rank", "master_addr", "master_port"),
        *("skip_tokenizer_init", "logprobs_mode", "reasoning_parser", "structured_outputs_config"),
        *("language_model_only", "limit_mm_per_prompt", "mm_device_do_normalize"),
        "mm_processor_kwargs",
    )
)


def engine_arguments(
    config: ShardConfig,
    model_dir: Path,
    pooling: str | None = None,
    images: bool | None = None,
) -> dict[str, Any]:
    """Return keyword arguments of vLLM's `AsyncEngineArgs`. With a `pooling`, the engine serves
    only embeddings. `images` is the result of `images.serves_images`. Raises the ValueError of
    `check_engine`.
    """
    check_engine(config)
    given = {theirs: getattr(config, ours) for ours, theirs in _SAME.items()}
    return {
        "model": str(model_dir),
        # Routers handle text.
        "skip_tokenizer_init": True,
        "generation_config": "vllm",
        "disable_log_stats": True,
        **{name: value for name, value in given.items() if value is not None},
        **_for_machines(config),
        **_for_adapters(config),
        **({} if pooling is None else _for_embeddings(pooling)),
        **({} if images is None else _for_images(images)),
        **dict(_read_argument(name, text) for name, text in config.engine_args),
    }


def _for_machines(config: ShardConfig) -> dict[str, Any]:
    if config.nnodes == 1:
        return {}
    names = ("nnodes", "node_rank", "master_addr", "master_port")
    given = {name: getattr(config, name) for name in names}
    return {**given, "distributed_executor_backend": "mp"}


def _for_adapters(config: ShardConfig) -> dict[str, Any]:
    if not config.serves_adapters:
        return {}
    return {
        "enable_lora": True,
        "max_loras": config.max_loras,
        # An adapter may be read before an index is free.
        "max_cpu_loras": config.max_loras + 1,
        "max_lora_rank": min(rank for rank in _LORA_RANKS if rank >= config.max_lora_rank),
    }


def _for_embeddings(pooling: str) -> dict[str, Any]:
    pooler = {"pooling_type": pooling.upper()}
    return {"runner": "pooling", "convert": "embed", "pooler_config": pooler}


def _for_images(are_served: bool) -> dict[str, Any]:
    if not are_served:
        # With this, vLLM does not load the encoder.
        return {"language_model_only": True}
    return {
        # vLLM needs a tokenizer to measure the encoder's memory.
        "skip_tokenizer_init": False,
        "limit_mm_per_prompt": {"video": 0},
        # Pixels arrive normalized; the server caches them.
        "mm_device_do_normalize": False,
        "mm_processor_cache_gb": 0,
    }


def check_engine(config: ShardConfig) -> None:
    """Raise ValueError, with the flag's name, for flags that this engine does not support."""
    for field in dataclasses.fields(config):
        if field.name in _REFUSED and getattr(config, field.name) != field.default:
            flag = f"--{field.metadata.get('name') or field.name.replace('_', '-')}"
            raise ValueError(f"{flag}: with --engine vllm {_REFUSED[field.name]}")
    for name, _ in config.engine_args:
        check_argument(name)


def check_argument(name: str) -> None:
    """Raise ValueError for an argument of vLLM that this shard sets itself."""
    flag = f"--engine-arg {name}"
    ours = next((ours for ours, theirs in _SAME.items() if theirs == name), None)
    if ours is not None:
        raise ValueError(f"{flag}: give --{ours.replace('_', '-')}")
    if name in _CHANGES_MODEL:
        raise ValueError(f"{flag}: it changes what is computed under the model's name")


def _read_argument(name: str, text: str) -> tuple[str, Any]:
    """Parse a value as JSON, or keep the text."""
    try:
        return name, json.loads(text)
    except ValueError:
        return name, text
