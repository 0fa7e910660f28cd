"""Decode attention of one layer: bytes of keys and values read a second, beside a copy's rate.

It is timed as a captured graph, as in decode steps, because some kernels take less time than their
launch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from benchmarks.gpu_bench.machine import copy_bytes_per_s, device_of, recorded, seconds_of
from benchmarks.gpu_bench.shapes import SHAPES
from penstock_shard.attention.backend_order import make_backend
from penstock_shard.attention.base import AttentionBackend, AttentionBatch, LayerSpec

# Several KV caches, of this size together, are read in turn, so that they do not fit into L2.
_ROTATE_BYTES = 2**30


def attention(
    shape_name: str, device_name: str, backend_name: str, cases: Sequence[tuple[int, int]]
) -> Iterator[dict[str, Any]]:
    """Yield a row of figures for each (batch, context)."""
    device = device_of(device_name)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    shape = SHAPES[shape_name]
    spec = LayerSpec(
        0, shape.num_heads, shape.num_kv_heads, shape.head_dim, shape.head_dim, shape.head_dim**-0.5
    )
    copy = copy_bytes_per_s(device)
    backend = make_backend(backend_name, device, dtype)
    for count, context in cases:
        num_bytes = count * context * spec.elements_per_token * dtype.itemsize
        seconds = _seconds(backend, spec, count, context, num_bytes, device, dtype)
        yield {
            "what": "attention",
            "model": shape_name,
            "backend": backend.name,
            "batch": count,
            "context": context,
            "us": 1e6 * seconds,
            # The copy's rate counts reads and writes; attention only reads.
            "of_copy": num_bytes / seconds / copy,
        }


@torch.inference_mode()
def _seconds(
    backend: AttentionBackend,
    spec: LayerSpec,
    count: int,
    context: int,
    num_bytes: int,
    device: torch.device,
    dtype: torch.dtype,
) -> float:
    """Return the seconds of one layer's attention in a decode step."""
    block_size = max(16, backend.block_multiple)
    blocks = -(-context // block_size)
    caches = [
        _cache(backend, spec, count * blocks, block_size, device, dtype)
        for _ in range(max(1, min(8, _ROTATE_BYTES // max(1, num_bytes))))
    ]
    batch = _decodes(count, context, blocks, block_size, device)
    query = torch.randn(count, spec.num_heads, spec.head_dim, device=device).to(dtype)

    def attend() -> None:
        for cache in caches:
            backend.attend(cache, query, batch, scale=spec.scale)

    work = recorded(attend, device) if backend.capturable else attend
    return seconds_of(work, device) / len(caches)


def _cache(
    backend: AttentionBackend,
    spec: LayerSpec,
    num_blocks: int,
    block_size: int,
    device: torch.device,
    dtype: torch.dtype,
) -> Any:
    """Make a KV cache of random keys and values, because a device may be faster on zeros."""
    cache = backend.make_cache(spec, num_blocks, block_size, dtype, device)
    slots = torch.arange(num_blocks * block_size, device=device)
    for some in torch.split(slots, 2**16):
        key = torch.randn(len(some), spec.num_kv_heads, spec.head_dim, device=device).to(dtype)
        backend.write(cache, key, key, some)
    return cache


def _decodes(
    count: int, context: int, blocks: int, block_size: int, device: torch.device
) -> AttentionBatch:
    sums = torch.arange(count + 1, dtype=torch.int32, device=device)
    table = torch.randperm(count * blocks).view(count, blocks).to(device, torch.int32)
    last = table[:, (context - 1) // block_size].long() * block_size
    return AttentionBatch(
        query_lens=[1] * count,
        seq_lens=[context] * count,
        num_decodes=count,
        block_size=block_size,
        slots=last + (context - 1) % block_size,
        cu_queries=sums,
        cu_keys=sums * context,
        seq_lens_tensor=torch.full((count,), context, dtype=torch.int32, device=device),
        block_table=table,
    )
