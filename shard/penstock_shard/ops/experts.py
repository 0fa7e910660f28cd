"""Mixture of experts in plain torch: routing, products of each expert, and their weighted sum.

A token's result depends only on its own logits and rows, summed in a fixed order. So if products
have the same bits in any batch, results have too.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor
from torch.nn import functional

from penstock_shard.ops.base import Matrix, Routing, RoutingRule


class ExpertList:
    """Experts with a matrix each, computed one after the other."""

    capturable = False

    def __init__(self, matrices: Iterable[Matrix]) -> None:
        self.matrices = tuple(matrices)
        first = self.matrices[0]
        self.out_features, self.in_features = first.out_features, first.in_features
        self.nbytes = sum(matrix.nbytes for matrix in self.matrices)

    def grouped(self, x: Tensor, offsets: Tensor) -> Tensor:
        product = x.new_empty(len(x), self.out_features)
        for expert, start, end in _present(offsets):
            rows = product[start:end]
            found = self.matrices[expert].linear(x[start:end], None, rows)
            if found.data_ptr() != rows.data_ptr():
                rows.copy_(found)
        return product


class ExpertStack:
    """Experts in one ordinary tensor [E, N, K], computed one after the other."""

    capturable = False

    def __init__(self, weights: Tensor) -> None:
        self.weights = weights
        _, self.out_features, self.in_features = weights.shape
        self.nbytes = weights.nbytes

    def grouped(self, x: Tensor, offsets: Tensor) -> Tensor:
        product = x.new_empty(len(x), self.out_features)
        for expert, start, end in _present(offsets):
            product[start:end] = functional.linear(x[start:end], self.weights[expert])
        return product


def stack_experts(
    experts: Iterable[Sequence[Tensor]], count: int, device: torch.device, dtype: torch.dtype
) -> Tensor:
    """Stack the parts [N_i, K] of each expert into weights [E, N, K]."""
    stack: Tensor | None = None
    for index, parts in enumerate(experts):
        if stack is None:
            shape = (count, sum(len(part) for part in parts), parts[0].shape[1])
            stack = torch.empty(shape, device=device, dtype=dtype)
        start = 0
        for part in parts:
            stack[index, start : start + len(part)] = part
            start += len(part)
    assert stack is not None, "no experts"
    return stack


def route(logits: Tensor, rule: RoutingRule, bias: Tensor | None = None) -> Routing:
    """Compute `Ops.route` without waiting for the device."""
    num_experts, top_k = logits.shape[1], rule.top_k
    weights, chosen = _choose(logits.float(), rule, bias)
    if rule.is_normalised:
        total = weights.sum(dim=-1, keepdim=True)
        weights = weights / (total if rule.scores == "softmax" else total + rule.eps)
    if rule.scale != 1.0:
        weights = weights * rule.scale
    experts, order = chosen.view(-1).sort(stable=True)
    bounds = torch.arange(num_experts + 1, device=logits.device)
    rows = torch.empty_like(order)
    rows.scatter_(0, order, torch.arange(len(order), device=logits.device))
    return Routing(
        tokens=order // top_k,
        experts=experts,
        offsets=torch.searchsorted(experts, bounds, out_int32=True),
        rows=rows.view(-1, top_k),
        weights=weights,
    )


def _choose(logits: Tensor, rule: RoutingRule, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return scores and indices [T, k] of each token's experts."""
    if rule.scores == "softmax":
        scores = torch.softmax(logits, dim=-1)
        if rule.groups == 1:
            best, chosen = scores.topk(rule.top_k, dim=-1)
            return best, chosen
        ranked = scores
    else:
        scores = _sigmoid(logits)
        # Large logits differ even if their sigmoids are all 1.
        ranked = logits if bias is None else scores + bias
    if rule.groups > 1:
        ranked = _within_groups(ranked, rule)
    chosen = ranked.topk(rule.top_k, dim=-1).indices
    return scores.gather(1, chosen), chosen


def _sigmoid(x: Tensor) -> Tensor:
    """Compute a sigmoid by a softmax over x and 0, because torch gives equal rows equal bits
    wherever they are, but not equal elements.
    """
    return torch.softmax(torch.stack((x, torch.zeros_like(x)), dim=-1), dim=-1)[..., 0]


def _within_groups(ranked: Tensor, rule: RoutingRule) -> Tensor:
    """Mask scores [T, E] outside of each token's best groups (DeepSeek-V3, 2024)."""
    size = ranked.shape[1] // rule.groups
    grouped = ranked.view(-1, rule.groups, size)
    best = grouped.topk(2, dim=-1).values.sum(dim=-1).topk(rule.top_groups, dim=-1).indices
    outside = torch.ones(len(ranked), rule.groups, dtype=torch.bool, device=ranked.device)
    outside.scatter_(1, best, False)
    return grouped.masked_fill(outside.unsqueeze(-1), float("-inf")).flatten(1)


def combine(rows: Tensor, routing: Routing) -> Tensor:
    """Compute `Ops.combine`."""
    # Multiply and add separately: torch does not always use the fused operation, which rounds once
    # less.
    parts = rows[routing.rows] * routing.weights.unsqueeze(-1)
    first, *others = parts.unbind(1)
    total = first.clone() if others else first
    for part in others:
        total.add_(part)
    return total.to(rows.dtype)


def _present(offsets: Tensor) -> Iterable[tuple[int, int, int]]:
    bounds = offsets.tolist()
    for expert, (start, end) in enumerate(itertools.pairwise(bounds)):
        if end > start:
            yield expert, start, end
