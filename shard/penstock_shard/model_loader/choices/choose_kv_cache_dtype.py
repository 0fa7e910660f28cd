"""Chooses the dtype of cached keys and values, from --kv-cache-dtype and the ops."""

from __future__ import annotations

import torch

from penstock_shard.attention.backend_order import READS_ANY_CACHE
from penstock_shard.config import ShardConfig
from penstock_shard.device.dtypes import dtype_name
from penstock_shard.errors import ModelError
from penstock_shard.ops.base import Ops
from penstock_shard.ops.cpu_ops import CpuOps
from penstock_shard.ops.quantized import FP8, multiplies_fp8

_KV_DTYPES = {"float32": torch.float32, "float16": torch.float16, "fp8": FP8}


def choose_kv_cache_dtype(config: ShardConfig, ops: Ops) -> torch.dtype:
    """Raises ModelError if the dtype is not supported here."""
    wanted = _KV_DTYPES.get(config.kv_cache_dtype)
    if isinstance(ops, CpuOps):
        if wanted is FP8:
            raise ModelError(
                "--kv-cache-dtype fp8: the cpu kernels keep keys and values in float32 or "
                "float16; use --attention-backend sdpa, or a GPU"
            )
        return wanted or (torch.float32 if ops.weights == "float32" else torch.float16)
    if wanted is FP8 and ops.device.type == "cuda" and not multiplies_fp8(ops.device):
        raise ModelError("--kv-cache-dtype fp8: needs a GPU of compute capability 8.9 or later")
    # "auto" is resolved later, and then takes this dtype into account.
    named = config.attention_backend
    if wanted not in (None, ops.dtype) and named != "auto" and named not in READS_ANY_CACHE:
        raise ModelError(
            f"--kv-cache-dtype {config.kv_cache_dtype}: attention backend {named} "
            f"keeps keys and values as {dtype_name(ops.dtype)}; use --attention-backend triton"
        )
    return wanted or ops.dtype
