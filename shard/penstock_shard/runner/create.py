"""A model directory -> a `ModelRunner` that is ready.

Knows in which order things are loaded and checked, and says so as it goes. Knows nothing of steps.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import PreTrainedConfig

from penstock_shard.config import ShardConfig
from penstock_shard.models import gate
from penstock_shard.models.base import CausalModel
from penstock_shard.models.errors import ModelError
from penstock_shard.models.kernels.build import kernel_hash
from penstock_shard.models.load import ModelFiles, load_model
from penstock_shard.models.ops.base import Ops
from penstock_shard.models.ops.choose import choose_ops, kv_dtype
from penstock_shard.models.transformers_loader import (
    generation_defaults,
    load_config,
    resolve_device,
)
from penstock_shard.models.transformers_model import TransformersModel
from penstock_shard.models.weights_hash import hash_weights
from penstock_shard.runner.base import RunnerInfo
from penstock_shard.runner.model_runner import CAPABILITIES, ModelRunner
from penstock_shard.runner.prepare import Preparation

# Raised when the same logits give other tokens than before.
_SAMPLER_REVISION = 1


def create_runner(
    config: ShardConfig, model_dir: Path, *, progress: Callable[[str], None]
) -> ModelRunner:
    """Load the model of a directory and make it ready to serve.

    `progress` gets one line for each stage. Raises ModelError, with one line that says what to do,
    if the model cannot be loaded, would be served wrongly, or does not fit.
    """
    device = resolve_device(config.device)
    hf_config = load_config(model_dir, trust_remote_code=config.trust_remote_code)
    max_model_len = _max_model_len(config, hf_config)
    gate.check_config(hf_config, max_model_len)
    ops = choose_ops(config, hf_config, device, progress)
    cached_as = kv_dtype(config, ops)
    threads = config.threads or default_threads()
    ops.set_threads(threads)
    dummy = config.load_format == "dummy"
    name = gate.architecture_of(hf_config)
    progress(f"loading {name}, weights in {ops.weights}, on {device}")
    files = ModelFiles(model_dir, hf_config, max_model_len, config.trust_remote_code, dummy)
    with ThreadPoolExecutor(max_workers=1) as pool:
        hashing = pool.submit(hash_weights, model_dir, config_only=dummy)
        model = load_model(files, ops, progress)
        weights_hash = hashing.result()
    text = hf_config.get_text_config()
    prepared = Preparation(
        config=config,
        model=model,
        ops=ops,
        kv_dtype=cached_as,
        vocab_size=int(text.vocab_size),
        max_model_len=max_model_len,
        progress=progress,
    ).run(threads)
    generation = generation_defaults(model_dir)
    info = RunnerInfo(
        architecture=name,
        weights_hash=weights_hash,
        vocab_size=int(text.vocab_size),
        max_model_len=max_model_len,
        eos_token_ids=_eos_token_ids(generation, text),
        default_sampling=_default_sampling(generation),
        block_size=prepared.block_size,
        num_blocks=prepared.num_blocks,
        dtype=ops.weights,
        kv_dtype=_dtype_name(cached_as),
        device=str(device),
        attention_backend=ops.backend.name,
        capabilities=CAPABILITIES,
        # On cpu the step itself needs the processor that would prepare the next one.
        max_steps_ahead=0 if device.type == "cpu" else 1,
        batch_invariant=prepared.batch_invariant,
        numerics_fingerprint=(
            _fingerprint(weights_hash, model, ops, cached_as) if prepared.batch_invariant else ""
        ),
    )
    return ModelRunner(model, info)


def default_threads() -> int:
    """Compute threads on cpu: all cores this process may use but one."""
    if hasattr(os, "sched_getaffinity"):
        cores = len(os.sched_getaffinity(0))
    else:
        cores = os.cpu_count() or 1
    return max(1, cores - 1)


def _fingerprint(weights_hash: str, model: CausalModel, ops: Ops, cached_as: torch.dtype) -> str:
    """With whom logits and draws are equal bit for bit: all that they depend on. 32 hex digits
    (blake2b-128).
    """
    runs_theirs = isinstance(model, TransformersModel)
    parts = (
        weights_hash,
        ops.weights,
        _dtype_name(cached_as),
        ops.backend.name,
        kernel_hash(),
        torch.__version__,
        # Torch's own functions, as the sampler uses them, differ by instruction set.
        torch.backends.cpu.get_cpu_capability(),
        transformers.__version__ if runs_theirs else "",
        str(_SAMPLER_REVISION),
    )
    return hashlib.blake2b("\0".join(parts).encode(), digest_size=16).hexdigest()


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _max_model_len(config: ShardConfig, hf_config: PreTrainedConfig) -> int:
    """--max-model-len, or all positions the model has. Raises ModelError beyond those."""
    text = hf_config.get_text_config()
    names = ("max_position_embeddings", "max_seq_len", "seq_length")
    positions = next((value for n in names if (value := getattr(text, n, None))), None)
    if config.max_model_len is None:
        if positions is None:
            raise ModelError(
                f"{gate.architecture_of(hf_config)} states no longest context; give --max-model-len"
            )
        return int(positions)
    if positions is not None and config.max_model_len > positions:
        raise ModelError(
            f"--max-model-len {config.max_model_len}: the model has {positions} positions"
        )
    return config.max_model_len


def _eos_token_ids(generation: dict[str, Any], text: PreTrainedConfig) -> tuple[int, ...]:
    """From generation_config.json, else from the configuration; () if neither names one."""
    value = generation.get("eos_token_id")
    if value is None:
        value = getattr(text, "eos_token_id", None)
    if value is None:
        return ()
    return tuple(value) if isinstance(value, list | tuple) else (int(value),)


def _default_sampling(generation: dict[str, Any]) -> dict[str, float]:
    """Sampling values that generation_config.json states and this runner honours."""
    names = ("temperature", "top_k", "top_p", "min_p", "typical_p", "repetition_penalty")
    return {name: generation[name] for name in names if generation.get(name) is not None}
