"""Chooses the ops that compute a model, from the flags and this machine's devices and libraries.
`choose_attention.py` chooses the attention backend later.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, cast

import torch
from transformers import PreTrainedConfig

from penstock_common.version import how_to_install
from penstock_shard.attention.backend_order import make_backend
from penstock_shard.attention.sdpa import SdpaBackend
from penstock_shard.checkpoint.quantization_config import scheme_of
from penstock_shard.config import ShardConfig
from penstock_shard.device.dtypes import dtype_name
from penstock_shard.device.triton_support import fault_on, is_installed, remember
from penstock_shard.errors import ModelError
from penstock_shard.kernels.build_cpu import KernelBuildError
from penstock_shard.kernels.cpu import CpuKernels, load_kernels
from penstock_shard.kernels.weight_layouts import WeightKind as KernelKind
from penstock_shard.model_loader.transformers_loader import resolve_dtype
from penstock_shard.ops.base import Ops, WeightKind
from penstock_shard.ops.cpu_ops import CpuOps
from penstock_shard.ops.quantized import (
    has_torchao,
    multiplies_fp8,
    multiplies_int4,
)
from penstock_shard.ops.torch_ops import TorchOps, packs_half
from penstock_shard.selfcheck.ops import triton_fault

# Values of --dtype with which weights on a GPU may be fp8 or int4, because activations are
# bfloat16.
_WITH_FEW_BITS = ("auto", "bfloat16")
# Levels of the cpu kernels with bfloat16 instructions.
_WITH_BFLOAT16 = ("avx512_amx", "avx512_bf16")
_FASTER = (
    "this CPU multiplies bfloat16 faster: --dtype bfloat16 gave 1.7 times the tokens with 16 "
    "streams, from activations that are rounded to it"
)


def choose_ops(
    config: ShardConfig,
    hf_config: PreTrainedConfig,
    device: torch.device,
    progress: Callable[[str], None],
) -> Ops:
    """Return the best ops that the flags allow. A line of progress says which kernels are missing.

    Raises ModelError if this machine cannot do what the flags ask.
    """
    ops = _choose(config, hf_config, device, progress)
    if config.attention_backend != "auto" and not ops.exact:
        # Refuse a backend that cannot be made here before the weights are read.
        make_backend(config.attention_backend, ops.device, ops.dtype)
    return ops


def _choose(
    config: ShardConfig,
    hf_config: PreTrainedConfig,
    device: torch.device,
    progress: Callable[[str], None],
) -> Ops:
    weights = choose_weights(config, hf_config, device)
    if config.exact:
        _check_exact_backend(config, device)
    if device.type == "cpu" and weights != "fp8":
        kernels = _kernels(config, progress)
        if kernels is not None:
            kind = _kernel_weights(config, hf_config)
            if kernels.level in _WITH_BFLOAT16 and kind == "float16" and config.dtype == "auto":
                progress(_FASTER)
            return CpuOps(kernels, kind)
    if weights == "int8" or (weights == "int4" and device.type == "cpu"):
        raise ModelError(
            f"--quantization {weights}: only the cpu kernels compute with it, and they do not run "
            "here"
        )
    if config.attention_backend == "cpu":
        reason = f"the device is {device}" if device.type != "cpu" else f"it has no {weights}"
        raise ModelError(f"--attention-backend cpu: {reason}")
    if device.type == "cpu" and not _interprets(config):
        if config.exact:
            raise ModelError(
                "--exact: on cpu it needs the cpu kernels, and they do not run here; leave it out"
            )
        return _torch_on_cpu(config, progress, weights)
    if weights is not None:
        return _device_ops(config, device, torch.bfloat16, weights, progress)
    dtype = resolve_dtype(config.dtype, hf_config)
    return _device_ops(config, device, dtype, _kind(dtype), progress)


def _check_exact_backend(config: ShardConfig, device: torch.device) -> None:
    exact = (
        ("auto", "cpu") if device.type == "cpu" and not _interprets(config) else ("auto", "triton")
    )
    if config.attention_backend not in exact:
        raise ModelError(
            f"--exact: results of --attention-backend {config.attention_backend} depend on the "
            f"batch; on {device.type} only {exact[1]} is exact"
        )


def _interprets(config: ShardConfig) -> bool:
    """Tell whether --attention-backend is triton and Triton's interpreter is on, as in tests."""
    if config.attention_backend != "triton" or not is_installed():
        return False
    import triton

    return bool(triton.knobs.runtime.interpret)


def _device_ops(
    config: ShardConfig,
    device: torch.device,
    dtype: torch.dtype,
    weights: WeightKind,
    progress: Callable[[str], None],
) -> TorchOps:
    if is_installed():
        remember(device.type, triton_fault(device, dtype, weights, exact=config.exact))
    fault = fault_on(device.type)
    if fault is not None:
        if config.exact:
            raise ModelError(f"--exact: {fault}")
        progress(f"without Triton kernels ({fault}): slower")
        return TorchOps(device, dtype, weights, SdpaBackend())
    from penstock_shard.attention.triton import TritonBackend
    from penstock_shard.ops.triton_ops import TritonOps

    if config.exact:
        return TritonOps(device, dtype, weights, TritonBackend(exact=True), exact=True)
    return TritonOps(device, dtype, weights, SdpaBackend())


def choose_weights(
    config: ShardConfig, hf_config: PreTrainedConfig, device: torch.device
) -> WeightKind | None:
    """Choose the quantization of weights, by --quantization or because the checkpoint is fp8; None
    if --dtype alone decides.

    Raises ModelError for a quantization that the device or the other flags do not allow.
    """
    scheme = scheme_of(hf_config)
    if config.quantization is None:
        # fp8 weights that stay fp8 lose nothing, or little if they have block scales.
        is_fp8 = scheme is not None and scheme.is_fp8 and multiplies_fp8(device)
        return "fp8" if is_fp8 and config.dtype in _WITH_FEW_BITS and not config.exact else None
    flag = f"--quantization {config.quantization}"
    if config.quantization == "int8":
        return "int8"
    if config.quantization == "int4" and device.type == "cpu":
        return "int4"
    if config.exact:
        raise ModelError(f"{flag}: its products are not exact; leave out --exact")
    if device.type == "cuda" and config.dtype not in _WITH_FEW_BITS:
        raise ModelError(f"{flag}: activations are bfloat16 with it, not --dtype {config.dtype}")
    if config.quantization == "fp8":
        if device.type == "cuda" and not multiplies_fp8(device):
            raise ModelError(f"{flag}: needs a GPU of compute capability 8.9 or later")
        return "fp8"
    if not multiplies_int4(device):
        raise ModelError(f"{flag}: needs a GPU of compute capability 8.0 or later")
    if not has_torchao():
        raise ModelError(f"{flag}: needs torchao; {how_to_install('int4')}")
    return "int4"


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


def _kernel_weights(
    config: ShardConfig, hf_config: PreTrainedConfig
) -> KernelKind | Literal["codes"]:
    if config.quantization in ("int8", "int4"):
        return cast(KernelKind, config.quantization)
    if config.dtype != "auto":
        return cast(KernelKind, config.dtype)
    scheme = scheme_of(hf_config)
    # Several ranks read their parts of a matrix dequantized, not as codes.
    is_whole = config.tensor_parallel_size == 1
    return "codes" if scheme is not None and scheme.has_codes and is_whole else "float16"


def _torch_on_cpu(
    config: ShardConfig, progress: Callable[[str], None], weights: WeightKind | None
) -> TorchOps:
    """Return plain torch ops, with float16 weights if this torch can pack them, and bfloat16 only
    if asked.
    """
    device = torch.device("cpu")
    dtype = torch.bfloat16 if config.dtype == "bfloat16" else torch.float32
    if weights is not None:
        progress(f"products in {weights} are emulated on cpu: for trying out, they are slow")
    else:
        half = config.dtype in ("auto", "float16") and packs_half()
        weights = "float16" if half else _kind(dtype)
    return TorchOps(device, dtype, weights, SdpaBackend())


def _kind(dtype: torch.dtype) -> WeightKind:
    return cast(WeightKind, dtype_name(dtype))
