"""Logits -> tokens drawn at random, by temperature, top-k, top-p, min-p and typical-p.

Knows distributions; knows nothing of penalties, requests or what was drawn before.

One uniform number a row is looked up in the row's cumulative distribution. A row without top-k,
top-p and typical-p has its tokens in the order of their ids; with top-k or top-p the most likely
stand first; with typical-p those nearest to the row's entropy. The lower id goes first among
equals, also at the edge of what is kept. Which of these holds follows from the row's own
parameters.

A token's weight is exp((logit - largest) / temperature) as an integer. Sums of integers are the
same in any order, so that a row's token is bit for bit the same in any batch, on any number of
threads, however wide a window it is found in.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from penstock_shard.request import SamplingParams
from penstock_shard.runner.philox import uniforms

# The weight of the most likely token: a million of them fit into 63 bits. A token that is less
# likely than that one by this factor is never drawn.
_ONE = 2.0**42
# What a row keeps is looked for among its first so many tokens, then among all.
_WINDOW = 1024
# Smaller temperatures divide to infinity in float32; at this one the largest logit always wins
# unless two differ by less than 3e-5.
_MIN_TEMPERATURE = 1e-6
# Logits that are looked at together: on cpu few enough to stay in the cache.
_CHUNK_LOGITS_CPU = 2**19
_CHUNK_LOGITS_DEVICE = 2**24


@dataclass(frozen=True, slots=True)
class _Kept:
    """What is kept of some rows of a chunk (int64 [n]): the first `count` [n, 1] of `ids` [n, w],
    which stand in the order they are drawn in, their weights summed up in `cumulative` [n, w].
    """

    rows: Tensor
    ids: Tensor
    cumulative: Tensor
    count: Tensor


# Rows of the chunk and their first ids [n, w] -> what is kept of these, and bool [n, 1]: nothing
# beyond them is kept.
_Keep = Callable[[Tensor, Tensor], tuple[_Kept, Tensor]]


def draw(
    logits: Sequence[Tensor],
    largest: Sequence[float],
    params: Sequence[SamplingParams],
    positions: Sequence[int],
) -> list[int]:
    """A token for each row of logits [V], whose largest is finite; none of them is greedy."""
    random = uniforms([p.seed for p in params], positions).tolist()
    vocabulary = len(logits[0])
    routes: dict[Callable[[_Rows], Tensor], list[int]] = {}
    for i, row in enumerate(params):
        routes.setdefault(_route(row, vocabulary), []).append(i)
    on_cpu = logits[0].device.type == "cpu"
    step = max(1, (_CHUNK_LOGITS_CPU if on_cpu else _CHUNK_LOGITS_DEVICE) // vocabulary)
    tokens = [0] * len(logits)
    for route, rows in routes.items():
        for start in range(0, len(rows), step):
            chunk = rows[start : start + step]
            part = _Rows(
                torch.stack([logits[i] for i in chunk]),
                [largest[i] for i in chunk],
                [params[i] for i in chunk],
                [random[i] for i in chunk],
            )
            for i, token in zip(chunk, route(part).tolist(), strict=True):
                tokens[i] = token
    return tokens


def _route(params: SamplingParams, vocabulary: int) -> Callable[[_Rows], Tensor]:
    if params.typical_p < 1.0:
        return _draw_typical
    return _draw_by_rank if _is_ranked(params, vocabulary) else _draw_by_id


def _is_ranked(params: SamplingParams, vocabulary: int) -> bool:
    return _top_k(params, vocabulary) > 0 or params.top_p < 1.0


def _top_k(params: SamplingParams, vocabulary: int) -> int:
    """0 where it leaves everything."""
    return params.top_k if params.top_k < vocabulary else 0


class _Rows:
    """Rows that go the same way, and a column [n, 1] for each parameter."""

    def __init__(
        self,
        logits: Tensor,
        largest: Sequence[float],
        params: Sequence[SamplingParams],
        uniform: Sequence[float],
    ) -> None:
        """logits float32 [n, V] are overwritten."""
        self.params = params
        self.vocabulary = vocabulary = logits.shape[1]
        values = [
            (p.temperature, _top_k(p, vocabulary), p.top_p, p.min_p, p.typical_p, best, random)
            for p, best, random in zip(params, largest, uniform, strict=True)
        ]
        table = torch.tensor(values, dtype=torch.float64).to(logits.device).unsqueeze(2)
        temperature, top_k, top_p, min_p, typical_p, best, random = table.unbind(1)
        # At most 0: from the largest down, so that a small temperature gives no NaN.
        self.scaled = logits.sub_(best.float())
        self.scaled.div_(temperature.clamp(min=_MIN_TEMPERATURE).float())
        self.top_k = top_k.long()
        self.top_p, self.typical_p, self.uniform = top_p, typical_p, random
        # The least weight that min-p keeps.
        self.floor = (min_p * _ONE).ceil().long()


def _weigh(scaled: Tensor) -> Tensor:
    return scaled.exp().mul_(_ONE).long()


def _draw_by_id(rows: _Rows) -> Tensor:
    weights = _weigh(rows.scaled)
    if any(p.min_p > 0 for p in rows.params):
        weights *= weights >= rows.floor
    cumulative = weights.cumsum(1)
    return _pick(cumulative, cumulative[:, -1:], rows.uniform).squeeze(1)


def _draw_by_rank(rows: _Rows) -> Tensor:
    return _draw_kept(rows, _most_likely(rows, range(len(rows.params))))


def _draw_typical(rows: _Rows) -> Tensor:
    """After Meister, Pimentel, Wiher and Cotterell, "Locally Typical Sampling" (TACL 2023)."""
    weights = _weigh(rows.scaled)
    ranked = [i for i, p in enumerate(rows.params) if _is_ranked(p, rows.vocabulary)]
    for kept in _most_likely(rows, ranked):
        own = weights[kept.rows]
        place = torch.arange(kept.ids.shape[1], device=own.device)
        inside = own.gather(1, kept.ids) * (place < kept.count)
        weights[kept.rows] = torch.zeros_like(own).scatter_(1, kept.ids, inside)
    weights *= weights >= rows.floor
    return _draw_kept(rows, _nearest_to_entropy(rows.scaled, weights, rows.typical_p))


def _draw_kept(rows: _Rows, groups: Iterator[_Kept]) -> Tensor:
    tokens = torch.empty(len(rows.params), dtype=torch.int64, device=rows.scaled.device)
    for kept in groups:
        total = kept.cumulative.gather(1, kept.count - 1)
        place = _pick(kept.cumulative, total, rows.uniform[kept.rows])
        tokens[kept.rows] = kept.ids.gather(1, place).squeeze(1)
    return tokens


def _pick(cumulative: Tensor, total: Tensor, uniform: Tensor) -> Tensor:
    """Columns [n, 1]: the first whose cumulative weight exceeds uniform [n, 1] of total [n, 1]."""
    # A uniform number has 53 bits, so its product with a whole number rounds to less than that.
    return torch.searchsorted(cumulative, (uniform * total).long(), right=True)


def _most_likely(rows: _Rows, chosen: Sequence[int]) -> Iterator[_Kept]:
    """What top-k, then top-p (of what top-k left), then min-p keep in the chosen rows."""
    # A row with top-k starts with a window that holds all of it.
    first = {i: _top_k(rows.params[i], rows.vocabulary) for i in chosen}
    totals = torch.zeros_like(rows.top_k)
    if whole := [i for i in chosen if not first[i]]:
        index = torch.tensor(whole, device=totals.device)
        totals[index] = _weigh(rows.scaled[index]).sum(dim=1, keepdim=True)

    def keep(index: Tensor, ids: Tensor) -> tuple[_Kept, Tensor]:
        weights = _weigh(rows.scaled[index].gather(1, ids))
        cumulative = weights.cumsum(1)
        width = ids.shape[1]
        top_k = rows.top_k[index]
        limited = top_k > 0
        most = torch.where(limited, top_k, width)
        total = torch.where(limited, cumulative.gather(1, most - 1), totals[index])
        goal = _share(rows.top_p[index], total)
        count = torch.searchsorted(cumulative, goal) + 1
        count = torch.minimum(count, most)
        if any(p.min_p > 0 for p in rows.params):
            above = (weights >= rows.floor[index]).sum(dim=1, keepdim=True)
            count = torch.minimum(count, above)
        return _Kept(index, ids, cumulative, count), cumulative[:, -1:] >= goal

    yield from _widen(rows.scaled, first, keep)


def _nearest_to_entropy(scaled: Tensor, weights: Tensor, typical_p: Tensor) -> Iterator[_Kept]:
    """What typical-p keeps of the tokens with a weight: those whose log-probability is nearest to
    its mean, which is minus the entropy, until they have `typical_p` of the mass.

    As log-probabilities are scaled logits less a constant, distances are those of scaled logits.
    """
    total = weights.sum(dim=1, keepdim=True)
    moments = torch.where(weights > 0, scaled, 0.0).double().mul_(weights).long()
    mean = moments.sum(dim=1, keepdim=True) / total
    nearness = (scaled - mean).abs_().neg_().float().masked_fill_(weights == 0, float("-inf"))
    goal = _share(typical_p, total)

    def keep(index: Tensor, ids: Tensor) -> tuple[_Kept, Tensor]:
        cumulative = weights[index].gather(1, ids).cumsum(1)
        count = torch.searchsorted(cumulative, goal[index]) + 1
        return _Kept(index, ids, cumulative, count), count <= ids.shape[1]

    yield from _widen(nearness, dict.fromkeys(range(len(scaled)), 0), keep)


def _share(share: Tensor, total: Tensor) -> Tensor:
    """The least whole weight that is `share` of a total, both [n, 1]; never more than the total."""
    # A total may round down as a float: all of it must not lose the last token.
    return torch.where(share < 1.0, (share * total).ceil().long(), total)


def _widen(keys: Tensor, first: dict[int, int], keep: _Keep) -> Iterator[_Kept]:
    """What `keep` keeps of each row of keys [N, V], largest key first, in a window that holds it.

    `first` has the rows that are asked for, each with the least width to look at.
    """
    vocabulary = keys.shape[1]
    pending = list(first)
    for window in (min(_WINDOW, vocabulary), vocabulary):
        now = [i for i in pending if first[i] <= window]
        if not now:
            continue
        index = torch.tensor(now, device=keys.device)
        ids = ordered_topk(keys if len(now) == len(keys) else keys[index], window)
        kept, settled = keep(index, ids)
        found = settled.squeeze(1).tolist()
        yield kept if all(found) else _only(kept, settled.squeeze(1))
        settled_rows = {i for i, is_settled in zip(now, found, strict=True) if is_settled}
        pending = [i for i in pending if i not in settled_rows]


def _only(kept: _Kept, chosen: Tensor) -> _Kept:
    return _Kept(kept.rows[chosen], kept.ids[chosen], kept.cumulative[chosen], kept.count[chosen])


def ordered_topk(values: Tensor, k: int) -> Tensor:
    """Indices int64 [n, k] of the k largest of values float32 [n, V]: larger first, then lower
    index. No value may be above 0 or NaN, and V not above 2**29.
    """
    # As the bits of positive floats rise with them, and those that a double has more than a float
    # are free for the index, one integer stands for both, and no two are equal.
    keys = (0.0 - values).double().view(torch.int64)
    keys += torch.arange(values.shape[1], device=keys.device)
    return _smallest(keys, k) & (2**29 - 1)


def _smallest(keys: Tensor, k: int) -> Tensor:
    """The k smallest of int64 keys [n, V], which are overwritten, in order."""
    if keys.device.type != "cpu":
        return keys.topk(k, dim=1, largest=False).values
    # numpy's use vector instructions: a tenth of torch's time.
    array = keys.numpy()
    if k < array.shape[1]:
        array.partition(k - 1, axis=1)
    smallest = array[:, :k]
    smallest.sort(axis=1)
    return torch.from_numpy(smallest)
