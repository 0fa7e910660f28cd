"""Logits -> tokens and log-probabilities. Knows nothing of models, caches or scheduling.

A token is a function of (its row of logits, its parameters, its seed, its position) and of nothing
else. One uniform number a row is drawn from a counter-based generator and looked up in the row's
cumulative distribution. Which distribution, and in which order its tokens stand, follows from the
row's own parameters and logits alone; what other rows ask for only lets work be skipped.

Filters apply in this order: allowed_token_ids, temperature, top-k, top-p (over what top-k left),
min-p (relative to the most likely token after temperature). Greedy rows take the largest logit, the
lowest id among equals. Log-probabilities are of the raw logits, before all of these.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from penstock_shard.request import SamplingParams
from penstock_shard.runner.base import Logprobs, RowResult
from penstock_shard.runner.philox import uniforms

# A row with top-k or top-p is looked at through its most likely tokens: this many, then more if
# what it keeps does not fit, then all.
_WINDOWS = (64, 1024)
# Smaller temperatures divide to infinity in float32; at this one the largest logit always wins
# unless two differ by less than 2e-5.
_MIN_TEMPERATURE = 1e-6


@dataclass(frozen=True, slots=True)
class SampleRow:
    """How one row of logits becomes a token: `position` counts from the first output token."""

    params: SamplingParams
    position: int
    # None: no log-probabilities; k: the chosen token's and the k best.
    logprobs: int | None = None


def sample(logits: Tensor, rows: Sequence[SampleRow]) -> list[RowResult]:
    """logits [N, V] -> one result a row. A row without finite logits gets an error, alone."""
    if not rows:
        return []
    logits = logits.float()
    best, tokens = logits.max(dim=-1)
    # max() passes NaN on; +inf leaves no distribution, -inf nothing to choose from.
    usable = torch.isfinite(best)
    masked = _mask_disallowed(logits, rows)
    if masked is not logits:
        best, tokens = masked.max(dim=-1)
        usable &= torch.isfinite(best)
    finite = usable.tolist()
    drawn = [i for i, row in enumerate(rows) if not row.params.is_greedy and finite[i]]
    if drawn:
        index = torch.tensor(drawn, device=logits.device)
        tokens[index] = _draw(masked[index], best[index], [rows[i] for i in drawn])
    chosen = tokens.tolist()
    results = [
        RowResult(token_id=token)
        if ok
        else RowResult(error=f"the model gave no finite logits at output position {row.position}")
        for row, token, ok in zip(rows, chosen, finite, strict=True)
    ]
    _add_logprobs(logits, tokens, rows, results)
    return results


def _mask_disallowed(logits: Tensor, rows: Sequence[SampleRow]) -> Tensor:
    """-inf for all but the allowed ids, in rows that name some."""
    limited = [i for i, row in enumerate(rows) if row.params.allowed_token_ids]
    if not limited:
        return logits
    masked = logits.clone()
    for i in limited:
        allowed = torch.tensor(rows[i].params.allowed_token_ids, device=logits.device)
        masked[i] = float("-inf")
        masked[i, allowed] = logits[i, allowed]
    return masked


def _draw(logits: Tensor, best: Tensor, rows: Sequence[SampleRow]) -> Tensor:
    """logits [n, V] and their maxima [n] -> tokens int64 [n], drawn by each row's parameters."""
    device = logits.device
    temperature = _column([max(row.params.temperature, _MIN_TEMPERATURE) for row in rows], device)
    # From the maximum down, so that a small temperature gives 0 and -inf, never NaN.
    scaled = (logits - best.unsqueeze(1)) / temperature.float()
    probabilities = torch.softmax(scaled, dim=-1)
    random = uniforms([row.params.seed for row in rows], [row.position for row in rows])
    uniform = torch.from_numpy(random).to(device).unsqueeze(1)
    tokens = torch.empty(len(rows), dtype=torch.int64, device=device)
    vocabulary = logits.shape[1]
    ranked = [i for i, row in enumerate(rows) if _needs_ranking(row.params, vocabulary)]
    plain = sorted(set(range(len(rows))) - set(ranked))
    if plain:
        index = torch.tensor(plain, device=device)
        tokens[index] = _draw_by_id(
            probabilities[index], uniform[index], [rows[i].params for i in plain]
        )
    for window in (*_WINDOWS, vocabulary):
        if not ranked:
            break
        index = torch.tensor(ranked, device=device)
        drawn, settled = _draw_by_rank(
            scaled[index],
            probabilities[index],
            uniform[index],
            [rows[i].params for i in ranked],
            min(window, vocabulary),
        )
        tokens[index] = torch.where(settled, drawn, tokens[index])
        ranked = [i for i, done in zip(ranked, settled.tolist(), strict=True) if not done]
    return tokens


def _needs_ranking(params: SamplingParams, vocabulary: int) -> bool:
    return 0 < params.top_k < vocabulary or params.top_p < 1.0


def _draw_by_id(probabilities: Tensor, uniform: Tensor, params: Sequence[SamplingParams]) -> Tensor:
    """Inverse CDF over tokens in the order of their ids; min-p is the only filter."""
    if any(p.min_p > 0 for p in params):
        share = _column([p.min_p for p in params], probabilities.device).float()
        floor = share * probabilities.amax(dim=1, keepdim=True)
        probabilities = probabilities.masked_fill(probabilities < floor, 0.0)
    cumulative = probabilities.cumsum(dim=-1, dtype=torch.float64)
    return _invert(cumulative, cumulative[:, -1:], uniform)


def _draw_by_rank(
    scaled: Tensor,
    probabilities: Tensor,
    uniform: Tensor,
    params: Sequence[SamplingParams],
    window: int,
) -> tuple[Tensor, Tensor]:
    """Inverse CDF over the `window` most likely tokens, most likely first, lowest id among equals.

    Returns tokens [n] and whether all that the row's filters keep lay within the window, bool [n].
    """
    vocabulary = scaled.shape[1]
    device = scaled.device
    _, ids = ordered_topk(scaled, window)
    weights = probabilities.gather(1, ids).double()
    cumulative = weights.cumsum(dim=-1)
    top_k = _column([p.top_k if 0 < p.top_k < vocabulary else vocabulary for p in params], device)
    top_p = _column([p.top_p for p in params], device)
    min_p = _column([p.min_p for p in params], device)
    rank = torch.arange(window, device=device).unsqueeze(0)
    inside = top_k <= window
    # The mass that top-p is a share of: what top-k leaves. Softmax made all of it 1.
    last = (top_k.clamp(max=window) - 1).long()
    total = torch.where(inside, cumulative.gather(1, last), 1.0)
    share = top_p * total
    keep = (rank < top_k) & ((cumulative - weights < share) | (top_p >= 1.0))
    keep &= weights >= min_p * weights[:, :1]
    # The most likely token stays, whatever the filters say.
    kept = keep.sum(dim=1, keepdim=True).clamp(min=1)
    reached = (cumulative[:, -1:] >= share) | (kept < window) | (window == vocabulary)
    settled = torch.where(top_k < vocabulary, inside, reached).squeeze(1)
    drawn = _invert(cumulative, cumulative.gather(1, kept - 1), uniform)
    return ids.gather(1, drawn.unsqueeze(1)).squeeze(1), settled


def _invert(cumulative: Tensor, total: Tensor, uniform: Tensor) -> Tensor:
    """The first index whose cumulative weight exceeds uniform * total, where total [n, 1] is the
    cumulative weight of the last token that is kept.
    """
    # The product may round up to total, which would point past the kept tokens.
    below = torch.nextafter(total, torch.zeros_like(total))
    target = torch.minimum(uniform * total, below)
    return torch.searchsorted(cumulative, target, right=True).squeeze(1)


def ordered_topk(values: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The k largest of values [n, V] and their indices [n, k]: larger first, then lower index.

    torch.topk leaves open which of equal values it takes, and in which order.
    """
    width = values.shape[1]
    if k >= width:
        return values.sort(dim=-1, descending=True, stable=True)
    top, indices = values.topk(k + 1, dim=-1)
    # Two stable sorts: by index, then by value.
    indices, order = indices.sort(dim=-1)
    top, order = top.gather(1, order).sort(dim=-1, descending=True, stable=True)
    indices = indices.gather(1, order)
    # Where the edge is tied, topk may have left out the lower index. Ties of -inf never matter.
    tied = torch.nonzero((top[:, k - 1] == top[:, k]) & torch.isfinite(top[:, k])).flatten()
    if tied.numel():
        full, order = values[tied].sort(dim=-1, descending=True, stable=True)
        top[tied], indices[tied] = full[:, : k + 1], order[:, : k + 1]
    return top[:, :k], indices[:, :k]


def _column(values: Sequence[float], device: torch.device) -> Tensor:
    """float64 [n, 1]"""
    return torch.tensor(values, dtype=torch.float64, device=device).unsqueeze(1)


def _add_logprobs(
    logits: Tensor, tokens: Tensor, rows: Sequence[SampleRow], results: Sequence[RowResult]
) -> None:
    wanted = [
        i for i, row in enumerate(rows) if row.logprobs is not None and results[i].error is None
    ]
    if not wanted:
        return
    index = torch.tensor(wanted, device=logits.device)
    counts = [rows[i].logprobs or 0 for i in wanted]
    for i, logprobs in zip(
        wanted, token_logprobs(logits[index], tokens[index], counts), strict=True
    ):
        results[i].logprobs = logprobs


def token_logprobs(logits: Tensor, tokens: Tensor, counts: Sequence[int]) -> list[Logprobs]:
    """Of raw logits [n, V]: the log-probability of tokens [n], their rank (1 is the most likely;
    equals share a rank), and the `counts[i]` best of row i.
    """
    scores = torch.log_softmax(logits.float(), dim=-1)
    chosen = scores.gather(1, tokens.unsqueeze(1))
    ranks = (scores > chosen).sum(dim=1) + 1
    most = max(counts)
    top = ids = np.empty((len(counts), 0))
    if most:
        top_scores, top_ids = ordered_topk(scores, min(most, scores.shape[1]))
        top, ids = top_scores.cpu().numpy(), top_ids.cpu().numpy()
    return [
        Logprobs(
            chosen=[score],
            ranks=[rank],
            top_n=min(count, scores.shape[1]),
            top_token_ids=ids[i, :count].tolist(),
            top_logprobs=top[i, :count].tolist(),
        )
        for i, (score, rank, count) in enumerate(
            zip(chosen.squeeze(1).tolist(), ranks.tolist(), counts, strict=True)
        )
    ]
