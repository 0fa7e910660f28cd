"""Routing to experts in Triton, in two launches: a program for each token chooses its experts, then
a program for each expert finds its tokens' rows.

Equal scores go to the lower expert. A token's weights depend only on its own logits, and equal
those of plain torch up to the last bits of an exponential and of a sum.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

# Tokens that a program reads at once.
_TOKENS = 256


def fits(num_experts: int, groups: int) -> bool:
    """Tell whether the kernels support these numbers. With several groups, both must be powers of
    two, and a group must have at least 2 experts.
    """
    powers = all(count & (count - 1) == 0 for count in (num_experts, groups))
    return groups == 1 or (powers and num_experts >= 2 * groups)


def route_tokens(
    logits: Tensor,
    bias: Tensor | None,
    *,
    top_k: int,
    softmax: bool,
    normalised: bool,
    scale: float,
    eps: float,
    groups: int,
    top_groups: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return the fields of a `Routing`, in order; see `Ops.route` and `RoutingRule`."""
    logits, device = logits.contiguous(), logits.device
    tokens, experts = logits.shape
    chosen = torch.empty(tokens, top_k, dtype=torch.int32, device=device)
    weights = torch.empty(tokens, top_k, device=device)
    rows = torch.empty(tokens, top_k, dtype=torch.int64, device=device)
    of_rows = torch.empty(2, tokens * top_k, dtype=torch.int64, device=device)
    offsets = torch.empty(experts + 1, dtype=torch.int32, device=device)
    padded, padded_k = triton.next_power_of_2(experts), triton.next_power_of_2(top_k)
    if tokens:
        _choose_kernel[(tokens,)](
            chosen,
            weights,
            logits,
            logits if bias is None else bias,
            scale,
            eps,
            SOFTMAX=softmax,
            BIAS=bias is not None,
            NORMALISED=normalised,
            GROUPS=groups,
            TOP_GROUPS=top_groups,
            EXPERTS=experts,
            PADDED=padded,
            TOP_K=top_k,
            PADDED_K=padded_k,
            num_warps=max(1, min(4, padded // 128)),
        )
    _sort_kernel[(experts,)](
        of_rows[0],
        of_rows[1],
        offsets,
        rows,
        chosen,
        tokens,
        EXPERTS=experts,
        TOP_K=top_k,
        PADDED_K=padded_k,
        TOKENS=_TOKENS,
    )
    return of_rows[0], of_rows[1], offsets, rows, weights


@triton.jit
def _choose_kernel(
    chosen_ptr,
    weights_ptr,
    logits_ptr,
    bias_ptr,
    scale,
    eps,
    SOFTMAX: tl.constexpr,
    BIAS: tl.constexpr,
    NORMALISED: tl.constexpr,
    GROUPS: tl.constexpr,
    TOP_GROUPS: tl.constexpr,
    EXPERTS: tl.constexpr,
    PADDED: tl.constexpr,
    TOP_K: tl.constexpr,
    PADDED_K: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    index = tl.arange(0, PADDED)
    inside = index < EXPERTS
    logits = tl.load(logits_ptr + token * EXPERTS + index, mask=inside, other=float("-inf"))
    logits = logits.to(tl.float32)
    if SOFTMAX:
        shares = tl.exp(logits - tl.max(logits, axis=0))
        scores = tl.div_rn(shares, tl.zeros([PADDED], tl.float32) + tl.sum(shares, axis=0))
        ranked = scores
    else:
        scores = 1.0 / (1.0 + tl.exp(0.0 - logits))
        # Large logits differ even if their sigmoids are all 1.
        ranked = logits
        if BIAS:
            ranked = scores + tl.load(bias_ptr + index, mask=inside, other=0.0)
    # NaN comes first, as in torch; padding comes last.
    ranked = tl.where(ranked == ranked, ranked, float("inf"))
    ranked = tl.where(inside, ranked, float("-inf"))
    if GROUPS > 1:
        ranked = _within_groups(ranked, GROUPS, TOP_GROUPS, PADDED)
    place = tl.arange(0, PADDED_K)
    chosen = tl.zeros([PADDED_K], tl.int32)
    weights = tl.zeros([PADDED_K], tl.float32)
    for i in tl.static_range(TOP_K):
        # A row of NaN may choose any valid expert.
        best = tl.minimum(tl.argmax(ranked, axis=0), EXPERTS - 1)
        score = tl.sum(tl.where(index == best, scores, 0.0), axis=0)
        chosen = tl.where(place == i, best, chosen)
        weights = tl.where(place == i, score, weights)
        ranked = tl.where(index == best, float("-inf"), ranked)
    if NORMALISED:
        total = tl.sum(weights, axis=0)
        if not SOFTMAX:
            total += eps
        weights = tl.div_rn(weights, tl.zeros([PADDED_K], tl.float32) + total)
    tl.store(chosen_ptr + token * TOP_K + place, chosen, mask=place < TOP_K)
    tl.store(weights_ptr + token * TOP_K + place, weights * scale, mask=place < TOP_K)


@triton.jit
def _within_groups(ranked, GROUPS: tl.constexpr, TOP_GROUPS: tl.constexpr, PADDED: tl.constexpr):
    """Mask scores outside of the best groups. A group is ranked by the sum of its two highest
    scores.
    """
    size: tl.constexpr = PADDED // GROUPS
    grouped = tl.reshape(ranked, [GROUPS, size])
    member, group = tl.arange(0, size)[None, :], tl.arange(0, GROUPS)
    first = tl.argmax(grouped, axis=1)
    others = tl.where(member == first[:, None], float("-inf"), grouped)
    sums = tl.max(grouped, axis=1) + tl.max(others, axis=1)
    taken = tl.zeros([GROUPS], tl.int32)
    for _ in tl.static_range(TOP_GROUPS):
        best = tl.argmax(sums, axis=0)
        taken = tl.where(group == best, 1, taken)
        sums = tl.where(group == best, float("-inf"), sums)
    kept = tl.where(taken[:, None] == 1, grouped, float("-inf"))
    return tl.reshape(kept, [PADDED])


@triton.jit(do_not_specialize=("tokens",), do_not_specialize_on_alignment=("experts_ptr",))
def _sort_kernel(
    tokens_ptr,
    experts_ptr,
    offsets_ptr,
    rows_ptr,
    chosen_ptr,
    tokens,
    EXPERTS: tl.constexpr,
    TOP_K: tl.constexpr,
    PADDED_K: tl.constexpr,
    TOKENS: tl.constexpr,
):
    expert = tl.program_id(0)
    place = tl.arange(0, PADDED_K)[None, :]
    before = tl.zeros([TOKENS], tl.int32)
    for start in range(0, tokens, TOKENS):
        token = start + tl.arange(0, TOKENS)[:, None]
        inside = (token < tokens) & (place < TOP_K)
        chosen = tl.load(chosen_ptr + token * TOP_K + place, mask=inside, other=EXPERTS)
        before += tl.sum((chosen < expert).to(tl.int32), axis=1)
    row = tl.sum(before, axis=0)
    tl.store(offsets_ptr + expert, row)
    for start in range(0, tokens, TOKENS):
        token = start + tl.arange(0, TOKENS)[:, None]
        inside = (token < tokens) & (place < TOP_K)
        chosen = tl.load(chosen_ptr + token * TOP_K + place, mask=inside, other=EXPERTS)
        own = (chosen == expert).to(tl.int32)
        counts = tl.sum(own, axis=1)
        rows = row + (tl.cumsum(counts, axis=0) - counts)[:, None] + tl.cumsum(own, axis=1) - 1
        tl.store(tokens_ptr + rows, (token + place * 0).to(tl.int64), mask=own == 1)
        tl.store(experts_ptr + rows, (expert + place * 0 + token * 0).to(tl.int64), mask=own == 1)
        tl.store(rows_ptr + token * TOP_K + place, rows.to(tl.int64), mask=own == 1)
        row += tl.sum(counts, axis=0)
    if expert == EXPERTS - 1:
        tl.store(offsets_ptr + EXPERTS, row)
