"""Backends over the flash-attn libraries, 2 (>= 2.8) and 3, which read the paged cache in place.

They call `flash_attn_varlen_func` and `flash_attn_with_kvcache` of flash-attn 2.8, and
`flash_attn_interface.flash_attn_with_kvcache` of flash-attn 3. Tables and lengths are int32, data
is fp16 or bf16; version 2 needs blocks of a multiple of 256 tokens.
"""

from __future__ import annotations

import importlib
import importlib.util
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from penstock_common.version import how_to_install
from penstock_shard.attention.base import AttentionBatch, LayerSpec, NotHere, Unusable
from penstock_shard.attention.gpu_library import AttentionParams, LibraryBackend, Pair, serves
from penstock_shard.device.dtypes import dtype_name
from penstock_shard.errors import first_line

_OLDEST = (2, 8)
_HOPPER = (9, 0)


class _FlashAttention(LibraryBackend):
    """The base class of both versions, with the decode call. Only the name of the call's block
    table argument differs.
    """

    name = "flash_attn"
    table: str

    def __init__(self, library: ModuleType, version: str) -> None:
        self.version = version
        self._library = library

    def _decode(
        self, query: Tensor, cache: Pair, batch: AttentionBatch, how: AttentionParams
    ) -> Tensor:
        rows = batch.num_decodes
        attended: Tensor = self._library.flash_attn_with_kvcache(
            query.unsqueeze(1),
            cache[0],
            cache[1],
            cache_seqlens=batch.seq_lens_tensor[:rows],
            **{self.table: batch.block_table[:rows]},
            **_options(how),
        )
        return attended.squeeze(1)


class FlashAttention2(_FlashAttention):
    """flash-attn 2: both calls take a block table."""

    block_multiple = 256
    table = "block_table"

    def __init__(self, library: ModuleType) -> None:
        super().__init__(library, str(library.__version__))

    def refusal(self, spec: LayerSpec, dtype: torch.dtype) -> str | None:
        if spec.head_dim != spec.head_dim_v:
            return f"needs keys and values of one size, not {spec.head_dim} and {spec.head_dim_v}"
        return super().refusal(spec, dtype)

    def _prefill(
        self, query: Tensor, cache: Pair, batch: AttentionBatch, how: AttentionParams
    ) -> Tensor:
        rows = batch.num_decodes
        attended: Tensor = self._library.flash_attn_varlen_func(
            query,
            cache[0],
            cache[1],
            cu_seqlens_q=batch.prefill_cu_queries,
            cu_seqlens_k=batch.prefill_cu_keys,
            max_seqlen_q=max(batch.query_lens[rows:]),
            max_seqlen_k=max(batch.seq_lens[rows:]),
            block_table=batch.block_table[rows:],
            **_options(how),
        )
        return attended


class FlashAttention3(_FlashAttention):
    """flash-attn 3, for Hopper: blocks of any size. Prefill also uses `flash_attn_with_kvcache`,
    because no other call takes a block table.
    """

    block_multiple = 16
    table = "page_table"

    def __init__(self, library: ModuleType) -> None:
        """`library` is the module `flash_attn_interface`, which states no version."""
        super().__init__(library, "3")

    def refusal(self, spec: LayerSpec, dtype: torch.dtype) -> str | None:
        keys, values = spec.head_dim, spec.head_dim_v
        # If keys and values differ in size, only these sizes have kernels.
        served = values <= 256 if keys <= 64 else 128 < keys <= 192 and 96 < values <= 128
        if keys != values and not served:
            return f"has no kernel for keys of {keys} and values of {values}"
        return super().refusal(spec, dtype)

    def _prefill(
        self, query: Tensor, cache: Pair, batch: AttentionBatch, how: AttentionParams
    ) -> Tensor:
        rows = batch.num_decodes
        attended: Tensor = self._library.flash_attn_with_kvcache(
            query,
            cache[0],
            cache[1],
            cache_seqlens=batch.seq_lens_tensor[rows:],
            page_table=batch.block_table[rows:],
            cu_seqlens_q=batch.prefill_cu_queries,
            max_seqlen_q=max(batch.query_lens[rows:]),
            **_options(how),
        )
        return attended


def make_flash_attention_2(device: torch.device, dtype: torch.dtype) -> FlashAttention2:
    """Raises Unusable if the library is missing, too old, or does not serve `dtype`."""
    library = _import("flash_attn", how_to_install("flash"))
    version = str(getattr(library, "__version__", "0"))
    numbers = tuple(int(part) for part in version.split(".")[:2] if part.isdecimal())
    if numbers < _OLDEST:
        raise Unusable(f"flash_attn {version} is installed, and 2.8 or later is needed")
    _check_dtype(dtype)
    return FlashAttention2(library)


def make_flash_attention_3(device: torch.device, dtype: torch.dtype) -> FlashAttention3:
    """Raises Unusable if the library is missing or does not serve the device or `dtype`."""
    if device.type != "cuda" or torch.cuda.get_device_capability(device) != _HOPPER:
        raise NotHere("flash-attn 3 runs on devices of compute capability 9.0")
    library = _import("flash_attn_interface", "build it from flash-attn's folder hopper")
    _check_dtype(dtype)
    return FlashAttention3(library)


def _import(name: str, remedy: str) -> ModuleType:
    if importlib.util.find_spec(name) is None:
        raise NotHere(f"the {name} package is not installed; {remedy}")
    try:
        return importlib.import_module(name)
    # A library compiled for another torch may raise any of these.
    except (ImportError, OSError, RuntimeError, AttributeError) as error:
        reason = first_line(error)
        raise Unusable(f"{name} is installed and cannot be imported: {reason}") from error


def _check_dtype(dtype: torch.dtype) -> None:
    if not serves(dtype):
        name = dtype_name(dtype)
        raise NotHere(f"flash_attn serves float16 and bfloat16, not {name}; change --dtype")


def _options(how: AttentionParams) -> dict[str, Any]:
    """Return the arguments that all calls share. Without a window, both sizes are -1, and only
    `causal` bounds the keys.
    """
    return {
        "softmax_scale": how.scale,
        "causal": True,
        "window_size": (how.left, -1 if how.left < 0 else 0),
        "softcap": how.softcap,
    }
