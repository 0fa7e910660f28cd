"""typical-p: tokens whose log-probability is nearest to the row's entropy. See Meister, Pimentel,
Wiher and Cotterell, "Locally Typical Sampling" (TACL 2023).
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from penstock_shard.worker.sampling.top_k_top_p import (
    FilteredTokens,
    Rows,
    draw_filtered,
    most_likely,
    share,
    weigh,
    widen,
)


def draw_typical(rows: Rows) -> Tensor:
    """Draw a token for each row, by typical-p over what the other filters left."""
    weights = weigh(rows.scaled)
    for kept in most_likely(rows, rows.ranked):
        own = weights[kept.rows]
        place = torch.arange(kept.ids.shape[1], device=own.device)
        inside = own.gather(1, kept.ids) * (place < kept.count)
        weights[kept.rows] = torch.zeros_like(own).scatter_(1, kept.ids, inside)
    weights *= weights >= rows.floor
    return draw_filtered(rows, _nearest_to_entropy(rows, weights))


def _nearest_to_entropy(rows: Rows, weights: Tensor) -> Iterator[FilteredTokens]:
    """Yield the tokens that typical-p keeps, among those with a weight above 0. Their
    log-probabilities are nearest to the mean (minus the entropy), and together they have
    `typical_p` of the mass.

    Scaled logits have the same distances as log-probabilities.
    """
    scaled = rows.scaled
    total = weights.sum(dim=1, keepdim=True)
    moments = torch.where(weights > 0, scaled, 0.0).double().mul_(weights).long()
    mean = moments.sum(dim=1, keepdim=True) / total
    nearness = (scaled - mean).abs_().neg_().float().masked_fill_(weights == 0, float("-inf"))
    goal = share(rows.typical_p, total)

    def keep(index: Tensor, ids: Tensor) -> tuple[FilteredTokens, Tensor]:
        cumulative = weights[index].gather(1, ids).cumsum(1)
        count = torch.searchsorted(cumulative, goal[index]) + 1
        settled = count <= ids.shape[1]
        return FilteredTokens(index, ids, cumulative, count.clamp(max=ids.shape[1])), settled

    yield from widen(nearness, dict.fromkeys(range(len(scaled)), 0), keep, rows.index)
