"""A strict stand-in for the flash_attn library (signatures of 2.8), for machines without a GPU.

It refuses what the library's kernels refuse, or would read wrongly without a word: block sizes,
dtypes, layouts, tables, alignment. Results are computed in fp32 by the definition.
"""

from __future__ import annotations

import importlib.machinery
import types

import torch
from torch import Tensor

calls: list[str] = []


def as_module() -> types.ModuleType:
    """What `import flash_attn` gives."""
    module = types.ModuleType("flash_attn")
    module.__spec__ = importlib.machinery.ModuleSpec("flash_attn", loader=None)
    module.flash_attn_varlen_func = flash_attn_varlen_func  # type: ignore[attr-defined]
    module.flash_attn_with_kvcache = flash_attn_with_kvcache  # type: ignore[attr-defined]
    return module


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: Tensor | None = None,
) -> Tensor:
    """q [total, Hq, D]; k and v [blocks, block size, Hkv, D]."""
    calls.append("varlen")
    assert dropout_p == 0.0
    assert alibi_slopes is None
    assert not return_attn_probs
    assert block_table is not None, "only the paged form is used"
    check_data(q, k, v)
    assert q.dim() == 3
    for sums in (cu_seqlens_q, cu_seqlens_k):
        check_int32(sums)
        assert int(sums[0]) == 0, "sums must begin at 0"
    rows = len(cu_seqlens_q) - 1
    assert rows > 0, "batch size must be positive"
    assert len(cu_seqlens_k) == rows + 1
    query_lens = cu_seqlens_q.diff().tolist()
    key_lens = cu_seqlens_k.diff().tolist()
    assert sum(query_lens) == len(q)
    assert isinstance(max_seqlen_q, int)
    assert isinstance(max_seqlen_k, int)
    assert max_seqlen_q >= max(query_lens)
    assert max_seqlen_k >= max(key_lens)
    check_table(block_table, rows, key_lens, k)
    parts = [
        attend(part, k, v, length, table, softmax_scale, causal, window_size, softcap)
        for part, length, table in zip(
            torch.split(q, query_lens), key_lens, block_table, strict=True
        )
    ]
    return torch.cat(parts)


def flash_attn_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    cache_seqlens: int | Tensor | None = None,
    cache_batch_idx: Tensor | None = None,
    cache_leftpad: Tensor | None = None,
    block_table: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    alibi_slopes: Tensor | None = None,
    num_splits: int = 0,
    return_softmax_lse: bool = False,
) -> Tensor:
    """q [B, n, Hq, D]; caches [blocks, block size, Hkv, D]."""
    calls.append("kvcache")
    assert k is None
    assert v is None
    assert cache_batch_idx is None, "paged KV cache does not support cache_batch_idx"
    assert block_table is not None, "only the paged form is used"
    assert isinstance(cache_seqlens, Tensor)
    assert not return_softmax_lse
    check_data(q, k_cache, v_cache)
    assert q.dim() == 4
    check_int32(cache_seqlens)
    assert cache_seqlens.shape == (len(q),)
    lengths = cache_seqlens.tolist()
    check_table(block_table, len(q), lengths, k_cache)
    parts = [
        attend(part, k_cache, v_cache, length, table, softmax_scale, causal, window_size, softcap)
        for part, length, table in zip(q, lengths, block_table, strict=True)
    ]
    return torch.stack(parts)


def check_data(q: Tensor, k: Tensor, v: Tensor) -> None:
    for tensor in (q, k, v):
        assert tensor.dtype in (torch.float16, torch.bfloat16), tensor.dtype
        assert tensor.dtype == q.dtype
        assert tensor.stride(-1) == 1, "the last dimension must be contiguous"
        assert tensor.data_ptr() % 16 == 0, "kernels read 16 bytes at a time"
        assert all(stride * 2 % 16 == 0 for stride in tensor.stride()[:-1])
    assert k.is_contiguous()
    assert v.is_contiguous()
    assert k.shape == v.shape
    assert k.shape[1] % 256 == 0, "Paged KV cache block size must be divisible by 256"
    assert q.shape[-1] == k.shape[-1]
    assert q.shape[-1] <= 256
    assert q.shape[-1] % 8 == 0
    assert q.shape[-2] % k.shape[-2] == 0


def check_int32(tensor: Tensor) -> None:
    assert tensor.dtype == torch.int32, tensor.dtype
    assert tensor.is_contiguous()


def check_table(table: Tensor, rows: int, lengths: list[int], k: Tensor) -> None:
    assert table.dtype == torch.int32, table.dtype
    assert table.dim() == 2
    assert table.shape[0] == rows
    assert table.stride(-1) == 1, "block_table must have contiguous last dimension"
    assert table.shape[1] * k.shape[1] >= max(lengths)
    assert min(lengths) > 0
    assert int(table.min()) >= 0
    assert int(table.max()) < k.shape[0]


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    length: int,
    table: Tensor,
    scale: float | None,
    causal: bool,
    window_size: tuple[int, int],
    softcap: float,
) -> Tensor:
    """One row: q [n, Hq, D] is the end of `length` keys (bottom-right aligned)."""
    assert isinstance(scale, float)
    left, right = window_size
    keys = k[table.long()].flatten(0, 1)[:length].float()
    values = v[table.long()].flatten(0, 1)[:length].float()
    group = q.shape[1] // keys.shape[1]
    keys = keys.repeat_interleave(group, dim=1)
    values = values.repeat_interleave(group, dim=1)
    scores = torch.einsum("nhd,lhd->hnl", q.float(), keys) * scale
    if softcap > 0:
        scores = torch.tanh(scores / softcap) * softcap
    position = torch.arange(len(q)).unsqueeze(1) + length - len(q)
    index = torch.arange(length).unsqueeze(0)
    hidden = torch.zeros(len(q), length, dtype=torch.bool)
    if causal or right == 0:
        hidden |= index > position
    if left >= 0:
        hidden |= index < position - left
    if right > 0:
        hidden |= index > position + right
    weights = torch.softmax(scores.masked_fill(hidden, float("-inf")), dim=-1)
    return torch.einsum("hnl,lhd->nhd", weights, values).to(q.dtype)
