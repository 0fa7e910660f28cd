"""Reference backend: torch's scaled_dot_product_attention row by row, on any device and dtype.

The host loops over rows and gathers the blocks of each. Measured on one AVX2 core with 16 rows of
160 tokens, that is as fast as one padded gather for the whole batch (1.2 against 1.0 ms a layer)
and clearly faster once lengths differ.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from penstock_shard.attention.base import (
    AttentionBatch,
    LayerSpec,
    PairBackend,
    RowSpan,
    causal_mask,
)

# Most scores (queries times keys) of one masked product: at 4 M a float mask takes 16 MB.
_MAX_SCORES = 4_000_000


class SdpaBackend(PairBackend):
    """See the module's docstring; supports everything a layer can ask for."""

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
        plain = softcap is None and sinks is None
        for row in batch.rows(window):
            keys, values = (_gather(part, row).to(query.dtype) for part in cache)
            queries = query[row.queries]
            if plain and row.num_queries == 1:
                attended = _decode(queries, keys, values, scale)
            else:
                attended = _masked(queries, keys, values, batch, scale, window, softcap, sinks)
            output[row.queries] = attended
        return output


def _gather(part: Tensor, row: RowSpan) -> Tensor:
    """The keys or values [Hkv, L, D] in the cache that the row's queries see."""
    if part.dtype.itemsize == 1:
        # As bytes: not every device can gather 8-bit floats.
        blocks = part.view(torch.uint8).index_select(0, row.blocks).view(part.dtype)
    else:
        blocks = part.index_select(0, row.blocks)
    return blocks.flatten(0, 1)[row.keys].transpose(0, 1)


def _decode(query: Tensor, keys: Tensor, values: Tensor, scale: float) -> Tensor:
    """One query [1, Hq, D] that sees every key: [1, Hq, Dv].

    The query heads that share a KV head become the query axis, so that each key is read once.
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
    scale: float,
    window: int | None,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """query [n, Hq, D], the last n of keys [Hkv, L, D] -> [n, Hq, Dv], in pieces of queries."""
    num_queries, num_heads, head_dim = query.shape
    num_kv_heads, num_keys, _ = keys.shape
    group = num_heads // num_kv_heads
    # [Hkv, group, n, D]; the KV heads are broadcast over the group without a copy.
    grouped = query.transpose(0, 1).reshape(num_kv_heads, group, num_queries, head_dim)
    keys = keys.unsqueeze(1).expand(-1, group, -1, -1)
    values = values.unsqueeze(1).expand(-1, group, -1, -1)
    offset = num_keys - num_queries
    plain = softcap is None and sinks is None
    if plain and offset == 0 and (window is None or num_keys <= window):
        attended = functional.scaled_dot_product_attention(
            grouped, keys, values, is_causal=True, scale=scale
        )
        return attended.flatten(0, 1).transpose(0, 1)
    pieces = []
    step = max(16, _MAX_SCORES // (num_keys if plain else num_keys * num_heads))
    for start in range(0, num_queries, step):
        piece = grouped[:, :, start : start + step]
        mask = _cached_mask(batch, piece.shape[2], num_keys, offset + start, window, query.device)
        if plain:
            attended = functional.scaled_dot_product_attention(
                piece, keys, values, attn_mask=mask, scale=scale
            )
        else:
            attended = _explicit(piece, keys, values, mask, scale, softcap, sinks)
        pieces.append(attended)
    return torch.cat(pieces, dim=2).flatten(0, 1).transpose(0, 1)


def _cached_mask(
    batch: AttentionBatch,
    num_queries: int,
    num_keys: int,
    offset: int,
    window: int | None,
    device: torch.device,
) -> Tensor:
    name = (num_queries, num_keys, offset, window)
    mask = batch.masks.get(name)
    if mask is None:
        mask = batch.masks[name] = causal_mask(num_queries, num_keys, offset, window, device)
    return mask


def _explicit(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    mask: Tensor,
    scale: float,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """Attention written out, for layers with a softcap or sinks; shapes as in `_masked`."""
    scores = torch.matmul(query, keys.transpose(-1, -2)).float() * scale
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    scores = scores.masked_fill(~mask, float("-inf"))
    if sinks is not None:
        sink = sinks.float().view(*query.shape[:2], 1, 1).expand(*scores.shape[:3], 1)
        scores = torch.cat((scores, sink), dim=-1)
    weights = torch.softmax(scores, dim=-1)
    if sinks is not None:
        weights = weights[..., :-1]
    return torch.matmul(weights.to(values.dtype), values)
