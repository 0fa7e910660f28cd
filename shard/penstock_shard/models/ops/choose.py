"""Which ops compute a model here: decided once, from the flags and what this machine has.

Knows which ops and backends exist, not how they work.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, cast

import torch
from transformers import PreTrainedConfig

from penstock_shard.config import ShardConfig
from penstock_shard.models.attention import choose_backend
from penstock_shard.models.errors import ModelError
from penstock_shard.models.kernels.build import KernelBuildError
from penstock_shard.models.kernels.cpu import CpuKernels, load_kernels
from penstock_shard.models.ops.base import Ops, WeightKind
from penstock_shard.models.ops.cpu_ops import CpuOps
from penstock_shard.models.ops.torch_ops import TorchOps, packs_half
from penstock_shard.models.transformers_loader import resolve_dtype


def choose_ops(
    config: ShardConfig,
    hf_config: PreTrainedConfig,
    device: torch.device,
    progress: Callable[[str], None],
) -> Ops:
    """The best ops the flags allow; says in a line of progress which kernels are missing.

    Raises ModelError where the flags ask for what cannot be had.
    """
    if device.type == "cpu":
        kernels = _kernels(config, progress)
        if kernels is not None:
            return CpuOps(kernels, _kernel_weights(config))
    if config.quantization is not None:
        raise ModelError(
            f"--quantization {config.quantization}: only the cpu kernels compute with it, "
            f"and they do not run here"
        )
    if config.attention_backend == "cpu":
        raise ModelError(f"--attention-backend cpu: the device is {device}")
    if device.type == "cpu":
        return _torch_on_cpu(config)
    dtype = resolve_dtype(config.dtype, hf_config)
    backend = choose_backend(config.attention_backend, device, dtype)
    return TorchOps(device, dtype, _name(dtype), backend)


def kv_dtype(config: ShardConfig, ops: Ops) -> torch.dtype:
    """The dtype of cached keys and values. Raises ModelError for one the backend cannot read."""
    wanted = {"float32": torch.float32, "float16": torch.float16}.get(config.kv_cache_dtype)
    if ops.backend.name == "cpu":
        return wanted or (torch.float32 if ops.weights == "float32" else torch.float16)
    if wanted not in (None, ops.dtype) and ops.backend.name != "sdpa":
        raise ModelError(
            f"--kv-cache-dtype {config.kv_cache_dtype}: attention backend {ops.backend.name} "
            f"keeps keys and values as {_name(ops.dtype)}"
        )
    return wanted or ops.dtype


def _kernels(config: ShardConfig, progress: Callable[[str], None]) -> CpuKernels | None:
    if config.attention_backend not in ("auto", "cpu"):
        return None
    progress("loading the cpu kernels, which are compiled at the first start")
    try:
        return load_kernels(progress=progress)
    except KernelBuildError as error:
        if config.attention_backend == "cpu":
            raise ModelError(f"--attention-backend cpu: {error}") from error
        progress(f"without cpu kernels ({error}): slower, and results depend on the batch")
        return None


def _kernel_weights(config: ShardConfig) -> Literal["float32", "float16", "int8"]:
    if config.dtype == "bfloat16":
        raise ModelError(
            "--dtype bfloat16: the cpu kernels have float32, float16 and int8 weights; use auto "
            "(float16 loses nothing of bfloat16 in its range), or --attention-backend sdpa"
        )
    if config.quantization == "int8":
        return "int8"
    return "float32" if config.dtype == "float32" else "float16"


def _torch_on_cpu(config: ShardConfig) -> TorchOps:
    """Plain torch: float16 weights where this torch packs them, bfloat16 as torch computes it."""
    device = torch.device("cpu")
    dtype = torch.bfloat16 if config.dtype == "bfloat16" else torch.float32
    backend = choose_backend(config.attention_backend, device, dtype)
    half = config.dtype in ("auto", "float16") and packs_half()
    return TorchOps(device, dtype, "float16" if half else _name(dtype), backend)


def _name(dtype: torch.dtype) -> WeightKind:
    return cast(WeightKind, str(dtype).removeprefix("torch."))
