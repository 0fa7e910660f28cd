"""Strict stand-ins for attention libraries that run on GPUs only: flash-attn 2.8, flash-attn 3 and
`varlen_attn` of torch 2.13, with their signatures.

They refuse what the libraries' kernels refuse, or would read wrongly without a word: block sizes,
dtypes, layouts, tables, alignment. Results are computed in fp32 by the definition.
"""

from __future__ import annotations

import importlib.machinery
import types
from typing import Any

import torch
from torch import Tensor

calls: list[str] = []


def flash_attn_2(version: str = "2.8.3") -> types.ModuleType:
    """Return a stand-in for the module `flash_attn`."""
    return _module(
        "flash_attn",
        __version__=version,
        flash_attn_varlen_func=flash_attn_varlen_func,
        flash_attn_with_kvcache=flash_attn_with_kvcache,
    )


def flash_attn_3() -> types.ModuleType:
    """Return a stand-in for the module `flash_attn_interface`."""
    return _module("flash_attn_interface", flash_attn_with_kvcache=flash_attn_3_with_kvcache)


def _module(name: str, **members: object) -> types.ModuleType:
    module = types.ModuleType(name)
    module.__spec__ = importlib.machinery.ModuleSpec(name, loader=None)
    for member, value in members.items():
        setattr(module, member, value)
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
    check_data(q, k, v, 3, block_multiple=256)
    assert q.shape[-1] == v.shape[-1]
    query_lens = check_sums(cu_seqlens_q, q)
    check_int32(cu_seqlens_k, len(query_lens) + 1)
    assert int(cu_seqlens_k[0]) == 0, "sums must begin at 0"
    lengths = cu_seqlens_k.diff().tolist()
    check_longest(max_seqlen_q, query_lens)
    check_longest(max_seqlen_k, lengths)
    check_table(block_table, lengths, k)
    attended = rows_of(
        torch.split(q, query_lens), k, v, lengths, block_table, softmax_scale, causal, window_size,
        softcap,
    )  # fmt: skip
    return torch.cat(attended)


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
    check_data(q, k_cache, v_cache, 4, block_multiple=256)
    assert q.shape[-1] == v_cache.shape[-1]
    check_int32(cache_seqlens, len(q))
    lengths = cache_seqlens.tolist()
    check_table(block_table, lengths, k_cache)
    attended = rows_of(
        list(q), k_cache, v_cache, lengths, block_table, softmax_scale, causal, window_size, softcap
    )
    return torch.stack(attended)


def flash_attn_3_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    qv: Tensor | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    cache_seqlens: int | Tensor | None = None,
    cache_batch_idx: Tensor | None = None,
    cache_leftpad: Tensor | None = None,
    page_table: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k_new: Tensor | None = None,
    max_seqlen_q: int | None = None,
    rotary_seqlens: Tensor | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    scheduler_metadata: Tensor | None = None,
    num_splits: int = 0,
    pack_gqa: bool | None = None,
    sm_margin: int = 0,
    return_softmax_lse: bool = False,
) -> Tensor:
    """q [B, n, Hq, D], or [total, Hq, D] with sums; caches [blocks, block size, Hkv, D and Dv]."""
    calls.append("kvcache 3" if cu_seqlens_q is None else "varlen 3")
    for absent in (k, v, qv, cache_batch_idx, cache_leftpad, cu_seqlens_k_new):
        assert absent is None
    assert page_table is not None, "only the paged form is used"
    assert isinstance(cache_seqlens, Tensor)
    assert not return_softmax_lse
    assert attention_chunk == 0
    if cu_seqlens_q is None:
        check_data(q, k_cache, v_cache, 4)
        queries = list(q)
    else:
        check_data(q, k_cache, v_cache, 3)
        query_lens = check_sums(cu_seqlens_q, q)
        check_longest(max_seqlen_q, query_lens)
        queries = list(torch.split(q, query_lens))
    keys, values = q.shape[-1], v_cache.shape[-1]
    if keys != values:
        assert (128 < keys <= 192 and 96 < values <= 128) or (keys <= 64 and values <= 512)
    check_int32(cache_seqlens, len(queries))
    lengths = cache_seqlens.tolist()
    check_table(page_table, lengths, k_cache)
    attended = rows_of(
        queries, k_cache, v_cache, lengths, page_table, softmax_scale, causal, window_size, softcap
    )
    return torch.stack(attended) if cu_seqlens_q is None else torch.cat(attended)


def varlen_attn(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seq_q: Tensor,
    cu_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    *,
    return_aux: object = None,
    scale: float | None = None,
    window_size: tuple[int, int] = (-1, -1),
    enable_gqa: bool = False,
    seqused_k: Tensor | None = None,
    block_table: Tensor | None = None,
    num_splits: int | None = None,
) -> Tensor:
    """query [total, Hq, D]; key and value [blocks, block size, Hkv, D]."""
    calls.append("decode" if max_q == 1 else "prefill")
    assert return_aux is None
    assert block_table is not None, "only the paged form is used"
    assert seqused_k is not None, "block_table requires seqused_k"
    check_data(query, key, value, 3, block_multiple=256)
    assert query.shape[-1] == value.shape[-1]
    assert enable_gqa or query.shape[1] == key.shape[2], "Try setting enable_gqa=True for GQA."
    query_lens = check_sums(cu_seq_q, query)
    assert cu_seq_k is not None, "must be both set or both not set"
    check_int32(cu_seq_k, len(query_lens) + 1)
    check_int32(seqused_k, len(query_lens))
    lengths = seqused_k.tolist()
    check_longest(max_q, query_lens)
    check_longest(max_k, lengths)
    check_table(block_table, lengths, key)
    assert isinstance(window_size, tuple)
    attended = rows_of(
        torch.split(query, query_lens), key, value, lengths, block_table, scale,
        window_size == (-1, 0), window_size, 0.0,
    )  # fmt: skip
    return torch.cat(attended)


def check_data(q: Tensor, k: Tensor, v: Tensor, dims: int, block_multiple: int = 1) -> None:
    assert q.dim() == dims
    for tensor in (q, k, v):
        assert tensor.dtype in (torch.float16, torch.bfloat16), tensor.dtype
        assert tensor.dtype == q.dtype
        assert tensor.stride(-1) == 1, "the last dimension must be contiguous"
        assert tensor.data_ptr() % 16 == 0, "kernels read 16 bytes at a time"
        assert all(stride * 2 % 16 == 0 for stride in tensor.stride()[:-1])
        assert tensor.shape[-1] <= 256
        assert tensor.shape[-1] % 8 == 0
    assert k.is_contiguous()
    assert v.is_contiguous()
    assert k.shape[:3] == v.shape[:3]
    assert k.shape[1] % block_multiple == 0, "Paged KV cache block size must be divisible by 256"
    assert q.shape[-1] == k.shape[-1]
    assert q.shape[-2] % k.shape[-2] == 0


def check_sums(sums: Tensor, q: Tensor) -> list[int]:
    """The lengths whose sums these are."""
    check_int32(sums, len(sums))
    assert int(sums[0]) == 0, "sums must begin at 0"
    assert len(sums) > 1, "batch size must be positive"
    lengths: list[int] = sums.diff().tolist()
    assert sum(lengths) == len(q)
    assert min(lengths) > 0
    return lengths


def check_int32(tensor: Tensor, length: int) -> None:
    assert tensor.dtype == torch.int32, tensor.dtype
    assert tensor.is_contiguous()
    assert tensor.shape == (length,)


def check_longest(longest: int | None, lengths: list[int]) -> None:
    assert type(longest) is int
    assert longest >= max(lengths)


def check_table(table: Tensor, lengths: list[int], k: Tensor) -> None:
    assert table.dtype == torch.int32, table.dtype
    assert table.dim() == 2
    assert len(table) == len(lengths)
    assert table.stride(-1) == 1, "block_table must have contiguous last dimension"
    assert table.shape[1] * k.shape[1] >= max(lengths)
    assert min(lengths) > 0
    assert int(table.min()) >= 0
    assert int(table.max()) < k.shape[0]


def rows_of(
    queries: Any,
    k: Tensor,
    v: Tensor,
    lengths: list[int],
    tables: Tensor,
    scale: float | None,
    causal: bool,
    window_size: tuple[int, int],
    softcap: float,
) -> list[Tensor]:
    return [
        attend(part, k, v, length, table, scale, causal, window_size, softcap)
        for part, length, table in zip(queries, lengths, tables, strict=True)
    ]


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
    """Return attention of a row. q [n, Hq, D] belongs to the last n of `length` keys."""
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
