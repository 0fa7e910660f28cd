"""Choice of the attention backend. Knows which exist, not how they work."""

from __future__ import annotations

import importlib.util

import torch

from penstock_shard.models.attention.base import AttentionBackend
from penstock_shard.models.attention.sdpa import SdpaBackend
from penstock_shard.models.errors import ModelError


def choose_backend(name: str, device: torch.device, dtype: torch.dtype) -> AttentionBackend:
    """The backend called `name`, or for "auto" the best that works here.

    Raises ModelError where the one asked for cannot work here.
    """
    if name == "sdpa":
        return SdpaBackend()
    importable = importlib.util.find_spec("flash_attn") is not None
    half = dtype in (torch.float16, torch.bfloat16)
    if name == "auto" and not (device.type == "cuda" and half and importable):
        return SdpaBackend()
    if not importable:
        raise ModelError(
            "--attention-backend flash_attn: the flash_attn package is not installed; "
            "install penstock[flash] or use sdpa"
        )
    if not half:
        raise ModelError(
            f"--attention-backend flash_attn: serves float16 and bfloat16, not {dtype}; "
            "change --dtype or use sdpa"
        )
    from penstock_shard.models.attention.flash_attn import FlashAttentionBackend

    return FlashAttentionBackend()
