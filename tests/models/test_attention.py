"""Attention backends against attention written out over whole sequences."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from penstock_shard.models.attention import choose_backend, sdpa
from penstock_shard.models.attention.base import AttentionBackend, AttentionBatch, LayerSpec
from penstock_shard.models.attention.cpu import CpuBackend
from penstock_shard.models.attention.sdpa import SdpaBackend
from penstock_shard.models.errors import ModelError
from penstock_shard.models.kernels.cpu import load_kernels

HEADS, KV_HEADS = 6, 2


def make_batch(
    query_lens: Sequence[int], seq_lens: Sequence[int], tables: Tensor, block_size: int
) -> AttentionBatch:
    """A step whose row i computes the last `query_lens[i]` of `seq_lens[i]` tokens."""
    slots = [
        int(tables[row, position // block_size]) * block_size + position % block_size
        for row, (count, length) in enumerate(zip(query_lens, seq_lens, strict=True))
        for position in range(length - count, length)
    ]
    return AttentionBatch(
        query_lens=query_lens,
        seq_lens=seq_lens,
        num_decodes=len(list(itertools.takewhile(lambda count: count == 1, query_lens))),
        block_size=block_size,
        slots=torch.tensor(slots),
        cu_queries=torch.tensor([0, *itertools.accumulate(query_lens)], dtype=torch.int32),
        cu_keys=torch.tensor([0, *itertools.accumulate(seq_lens)], dtype=torch.int32),
        seq_lens_tensor=torch.tensor(seq_lens, dtype=torch.int32),
        block_table=tables.int(),
    )


def written_out(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Causal attention of a whole sequence, query by query and head by head."""
    length, heads, _ = query.shape
    group = heads // key.shape[1]
    output = torch.empty(length, heads, value.shape[2], dtype=query.dtype)
    for i, head in itertools.product(range(length), range(heads)):
        first = 0 if window is None else max(0, i - window + 1)
        keys = key[first : i + 1, head // group]
        scores = keys @ query[i, head] * scale
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        if sinks is not None:
            scores = torch.cat((scores, sinks[head : head + 1]))
        weights = torch.softmax(scores, dim=0)[: len(keys)]
        output[i, head] = weights @ value[first : i + 1, head // group]
    return output


def check_backend(
    backend: AttentionBackend,
    *,
    block_size: int,
    lengths: Sequence[int],
    dtype: torch.dtype = torch.float32,
    kv_dtype: torch.dtype | None = None,
    head_dim: int = 8,
    head_dim_v: int = 8,
    tolerance: float = 2e-5,
    **options: Any,
) -> None:
    """Three steps over four sequences (chunks, then decodes and chunks), shuffled blocks."""
    generator = torch.Generator().manual_seed(0)
    scale = head_dim**-0.5

    def noise(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(dtype)

    sequences = [
        (noise(n, HEADS, head_dim), noise(n, KV_HEADS, head_dim), noise(n, KV_HEADS, head_dim_v))
        for n in lengths
    ]
    expected = [
        written_out(*(part.float() for part in parts), scale=scale, **options)
        for parts in sequences
    ]
    width = -(-max(lengths) // block_size)
    blocks = torch.randperm(len(lengths) * width, generator=generator).view(len(lengths), width)
    spec = LayerSpec(0, HEADS, KV_HEADS, head_dim, head_dim_v, scale)
    cache = backend.make_cache(
        spec, blocks.numel(), block_size, kv_dtype or dtype, torch.device("cpu")
    )
    if backend.name == "sdpa":
        # What was never written must not matter; kernels that read whole blocks begin with zeros.
        for part in cache:
            part.fill_(torch.nan)
    elif backend.name == "flash_attn":
        for part in cache:
            part.zero_()
    done = [0] * len(lengths)
    for step in ([n - 1 if i % 2 else n // 3 for i, n in enumerate(lengths)], None):
        counts = step or [n - d for n, d in zip(lengths, done, strict=True)]
        order = sorted(range(len(lengths)), key=lambda i: counts[i] != 1)
        seq_lens = [done[i] + counts[i] for i in order]
        batch = make_batch([counts[i] for i in order], seq_lens, blocks[order], block_size)
        parts = [
            torch.cat([sequences[i][p][done[i] : done[i] + counts[i]] for i in order])
            for p in range(3)
        ]
        backend.write(cache, parts[1], parts[2], batch.slots)
        output = backend.attend(cache, parts[0], batch, scale=scale, **options)
        for i, got in zip(order, torch.split(output, [counts[i] for i in order]), strict=True):
            want = expected[i][done[i] : done[i] + counts[i]]
            torch.testing.assert_close(got.float(), want, atol=tolerance, rtol=tolerance)
        done = [d + c for d, c in zip(done, counts, strict=True)]


OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "window": {"window": 7},
    "softcap": {"softcap": 1.5},
    "sinks": {"sinks": torch.linspace(-1, 2, HEADS)},
    "all": {"window": 5, "softcap": 2.0, "sinks": torch.linspace(-1, 2, HEADS)},
}


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("head_dim_v", [8, 12])
def test_sdpa_equals_attention_written_out(name: str, head_dim_v: int) -> None:
    check_backend(
        SdpaBackend(),
        block_size=4,
        lengths=[30, 9, 17, 4],
        head_dim_v=head_dim_v,
        **OPTIONS[name],
    )


@pytest.mark.parametrize("kv_dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize(("head_dim", "head_dim_v"), [(8, 8), (8, 12), (20, 7), (64, 64)])
def test_the_cpu_kernels_equal_attention_written_out(
    name: str, head_dim: int, head_dim_v: int, kv_dtype: torch.dtype
) -> None:
    check_backend(
        CpuBackend(load_kernels()),
        block_size=16,
        lengths=[70, 9, 33, 4],
        kv_dtype=kv_dtype,
        head_dim=head_dim,
        head_dim_v=head_dim_v,
        tolerance=2e-5 if kv_dtype is torch.float32 else 4e-3,
        **OPTIONS[name],
    )


@pytest.mark.parametrize("name", OPTIONS)
def test_long_chunks_are_cut_without_a_difference(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sdpa, "_MAX_SCORES", 16)
    check_backend(SdpaBackend(), block_size=16, lengths=[70, 40], **OPTIONS[name])


def test_auto_is_sdpa_on_cpu() -> None:
    backend = choose_backend("auto", torch.device("cpu"), torch.bfloat16)
    assert backend.name == "sdpa"


def test_flash_attn_without_the_library_says_what_to_install() -> None:
    with pytest.raises(ModelError, match=r"not installed; install penstock\[flash\] or use sdpa"):
        choose_backend("flash_attn", torch.device("cpu"), torch.bfloat16)
