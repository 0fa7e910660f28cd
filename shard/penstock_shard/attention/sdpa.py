"""Reference backend: torch's scaled_dot_product_attention row by row, on any device and dtype.

Each row's blocks are gathered separately. A padded gather for the whole batch is a sixth faster if
rows have equal lengths, but slower if lengths differ.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from penstock_shard.attention.base import (
    AttentionBatch,
    LayerSpec,
    PairBackend,
    RowSpan,
    ScoreParams,
    visible_keys,
)

# The largest number of scores (queries times keys) in one masked product; a float mask of 4 million
# takes 16 MB.
_MAX_SCORES = 4_000_000


class SdpaBackend(PairBackend):
    """Supports all attention parameters of a layer."""

    name = "sdpa"
    block_multiple = 16
    capturable = False

    def refusal(self, spec: LayerSpec, dtype: torch.dtype) -> str | None:
        return None

    def attend(
        self,
        cache: tuple[Tensor, Tensor],
        query: Tensor,
        batch: AttentionBatch,
        *,
        scale: float,
        window: int | None = None,
        softcap: float | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        output = query.new_empty(*query.shape[:2], cache[1].shape[3])
        how = ScoreParams(scale, window, softcap, sinks)
        for row in batch.rows(window):
            output[row.queries] = _attend_row(cache, query, batch, row, how)
        return output


def attend_bidirectional(
    output: Tensor,
    cache: tuple[Tensor, Tensor],
    query: Tensor,
    batch: AttentionBatch,
    how: ScoreParams,
) -> Tensor:
    """Replace the bidirectional rows of a causal backend's output [T, Hq, Dv]; return it."""
    if batch.bidirectional:
        for row in batch.rows(how.window):
            if row.is_bidirectional:
                output[row.queries] = _attend_row(cache, query, batch, row, how)
    return output


def _attend_row(
    cache: tuple[Tensor, Tensor],
    query: Tensor,
    batch: AttentionBatch,
    row: RowSpan,
    how: ScoreParams,
) -> Tensor:
    keys, values = (_gather(part, row).to(query.dtype) for part in cache)
    queries = query[row.queries]
    if how.is_plain and row.num_queries == 1:
        return _decode(queries, keys, values, how.scale)
    return _masked(queries, keys, values, batch, how, is_bidirectional=row.is_bidirectional)


def _gather(part: Tensor, row: RowSpan) -> Tensor:
    """Return the keys or values [Hkv, L, D] that the row's queries see."""
    if part.dtype.itemsize == 1:
        # Not every device can gather 8-bit floats.
        blocks = part.view(torch.uint8).index_select(0, row.blocks).view(part.dtype)
    else:
        blocks = part.index_select(0, row.blocks)
    return blocks.flatten(0, 1)[row.keys].transpose(0, 1)


def _decode(query: Tensor, keys: Tensor, values: Tensor, scale: float) -> Tensor:
    """Attend with one query [1, Hq, D] over all keys; return [1, Hq, Dv].

    Query heads that share a KV head become the query axis, so that each key is read once.
    """
    num_kv_heads, _, head_dim = keys.shape
    folded = query.reshape(1, num_kv_heads, -1, head_dim)
    attended = functional.scaled_dot_product_attention(
        folded, keys.unsqueeze(0), values.unsqueeze(0), scale=scale
    )
    return attended.reshape(1, query.shape[1], values.shape[2])


def _masked(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    batch: AttentionBatch,
    how: ScoreParams,
    *,
    is_bidirectional: bool,
) -> Tensor:
    """Attend with queries [n, Hq, D], some at a time, over keys [Hkv, L, D]. The queries are of the
    last n tokens. Return [n, Hq, Dv].
    """
    num_queries, num_heads, head_dim = query.shape
    num_kv_heads, num_keys, _ = keys.shape
    group = num_heads // num_kv_heads
    # [Hkv, group, n, D]; KV heads are broadcast over the group without a copy.
    grouped = query.transpose(0, 1).reshape(num_kv_heads, group, num_queries, head_dim)
    keys = keys.unsqueeze(1).expand(-1, group, -1, -1)
    values = values.unsqueeze(1).expand(-1, group, -1, -1)
    offset = num_keys - num_queries
    is_causal = offset == 0 and not is_bidirectional
    if how.is_plain and is_causal and (how.window is None or num_keys <= how.window):
        attended = functional.scaled_dot_product_attention(
            grouped, keys, values, is_causal=True, scale=how.scale
        )
        return attended.flatten(0, 1).transpose(0, 1)
    pieces = []
    step = max(16, _MAX_SCORES // (num_keys if how.is_plain else num_keys * num_heads))
    for start in range(0, num_queries, step):
        piece = grouped[:, :, start : start + step]
        place = _Place(piece.shape[2], num_keys, offset + start, how.window, is_bidirectional)
        mask = _cached_mask(batch, place, query.device)
        if how.is_plain:
            attended = functional.scaled_dot_product_attention(
                piece, keys, values, attn_mask=mask, scale=how.scale
            )
        else:
            attended = _explicit(piece, keys, values, mask, how)
        pieces.append(attended)
    return torch.cat(pieces, dim=2).flatten(0, 1).transpose(0, 1)


class _Place(NamedTuple):
    """The position of queries among keys; see `visible_keys`."""

    num_queries: int
    num_keys: int
    offset: int
    window: int | None
    is_bidirectional: bool


def _cached_mask(batch: AttentionBatch, place: _Place, device: torch.device) -> Tensor:
    mask = batch.masks.get(place)
    if mask is None:
        mask = batch.masks[place] = visible_keys(*place, device)
    return mask


def _explicit(
    query: Tensor, keys: Tensor, values: Tensor, mask: Tensor, how: ScoreParams
) -> Tensor:
    """Attend in separate operations, as a softcap or sinks require; shapes as in `_masked`."""
    scores = torch.matmul(query, keys.transpose(-1, -2)).float() * how.scale
    if how.softcap is not None:
        scores = torch.tanh(scores / how.softcap) * how.softcap
    scores = scores.masked_fill(~mask, float("-inf"))
    if how.sinks is not None:
        sink = how.sinks.float().view(*query.shape[:2], 1, 1).expand(*scores.shape[:3], 1)
        scores = torch.cat((scores, sink), dim=-1)
    weights = torch.softmax(scores, dim=-1)
    if how.sinks is not None:
        weights = weights[..., :-1]
    return torch.matmul(weights.to(values.dtype), values)
