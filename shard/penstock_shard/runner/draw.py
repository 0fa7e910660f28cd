"""Logits -> tokens drawn at random, by temperature, top-k, top-p, min-p and typical-p.

Knows distributions; knows nothing of penalties, requests or what was drawn before.

One uniform number a row is looked up in the row's cumulative distribution. A row without top-k,
top-p and typical-p has its tokens ordered by id; with top-k or top-p the most likely come first;
with typical-p those nearest to the row's entropy. Among equals the lower id comes first, also at
the cut-off of a filter. A row's own parameters alone decide which order it has.

A token's weight is exp((logit - largest) / temperature) as an integer. Sums of integers are the
same in any order, so that a row's token is bit for bit the same in any batch, on any number of
threads, and with any width of the window (the most likely tokens that are sorted).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import compress
from operator import not_
from typing import NamedTuple, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from penstock_shard.models.triton_here import fault_on
from penstock_shard.runner.device import is_host, to_device

Floats: TypeAlias = NDArray[np.float64]

# The weight of the most likely token: a million of them fit into 63 bits. A token that is less
# likely than that one by this factor is never drawn.
_ONE = 2.0**42
# Filters other than top-k are tried on a row's first this many tokens in its order, then on all.
# Rows with top-k need as many as the largest k of a step; a k above this widens no smaller one's.
_WINDOW = 1024
# Smaller temperatures divide to infinity in float32; at this one the largest logit always wins
# unless two differ by less than 3e-5.
_MIN_TEMPERATURE = 1e-6
# Logits that are processed together: on cpu few enough to stay in the cache.
_CHUNK_LOGITS_CPU = 2**19
_CHUNK_LOGITS_DEVICE = 2**24


@dataclass(frozen=True, slots=True)
class _Kept:
    """What the filters keep of `rows` (int64 [n]) of a chunk: the first `count` [n, 1] of `ids`
    [n, w], in the order they are drawn in; `cumulative` [n, w] are the running sums of weights.
    """

    rows: Tensor
    ids: Tensor
    cumulative: Tensor
    count: Tensor


# Rows of the chunk and their first ids [n, w] -> what is kept of these, and bool [n, 1]: whether
# the filters keep nothing beyond these ids.
_Keep = Callable[[Tensor, Tensor], tuple[_Kept, Tensor]]


class Columns(NamedTuple):
    """Parameters of rows, float64 [n] each, and their uniform numbers."""

    temperature: Floats
    top_k: Floats
    top_p: Floats
    min_p: Floats
    typical_p: Floats
    uniform: Floats

    def only(self, index: NDArray[np.intp] | slice) -> Columns:
        return Columns(*(column[index] for column in self))


# logits [N, V], the largest of each row [N], some of the rows, and their parameters -> a token for
# each of these, int64 [n].
_Route = Callable[[Tensor, Tensor, NDArray[np.intp], Columns], Tensor]


def draw(logits: Tensor, best: Tensor, index: NDArray[np.intp], columns: Columns) -> Tensor:
    """A token for each of the rows `index` of logits [N, V], int64 [n] on their device; `best`
    float32 [N] is the largest of each row. None of the rows is greedy.

    A row whose largest is not finite gets an arbitrary token. The host reads nothing that is
    computed here, except for rows with typical-p, and without Triton those with top-p and no top-k.
    """
    vocabulary = logits.shape[1]
    columns = columns._replace(top_k=np.where(columns.top_k < vocabulary, columns.top_k, 0.0))
    ranked = (columns.top_k > 0) | (columns.top_p < 1.0)
    typical = columns.typical_p < 1.0
    routes: list[tuple[NDArray[np.bool_], _Route]] = [
        (
            ~typical & ~ranked,
            _draw_by_id_there if _has_kernels(logits) else partial(_in_parts, _draw_by_id),
        ),
        # Apart from top-p alone: with top-k the host knows beforehand how many tokens are kept.
        (~typical & (columns.top_k > 0), partial(_in_parts, _draw_by_rank)),
        (~typical & ranked & (columns.top_k == 0), partial(_in_parts, _draw_by_rank)),
        (typical, partial(_in_parts, _draw_typical)),
    ]
    parts: list[tuple[NDArray[np.intp], Tensor]] = []
    for chosen, route in routes:
        if chosen.any():
            places = np.flatnonzero(chosen)
            parts.append((places, route(logits, best, index[places], columns.only(places))))
    if len(parts) == 1:
        return parts[0][1]
    order = np.argsort(np.concatenate([places for places, _ in parts]))
    tokens = torch.cat([drawn for _, drawn in parts])
    return tokens.index_select(0, to_device(order, tokens.device))


def _has_kernels(logits: Tensor) -> bool:
    """Whether the logits are on a device that Triton runs on."""
    return not is_host(logits) and fault_on(logits.device.type) is None


def _in_parts(
    route: Callable[[_Rows], Tensor],
    logits: Tensor,
    best: Tensor,
    index: NDArray[np.intp],
    columns: Columns,
) -> Tensor:
    """A `_Route` that calls `route` on chunks of rows, to bound the logits copied at once."""
    most = _CHUNK_LOGITS_CPU if is_host(logits) else _CHUNK_LOGITS_DEVICE
    step = max(1, most // logits.shape[1])
    parts = [slice(start, start + step) for start in range(0, len(index), step)]
    drawn = [route(_Rows(logits, best, index[part], columns.only(part))) for part in parts]
    return drawn[0] if len(drawn) == 1 else torch.cat(drawn)


def _draw_by_id_there(
    logits: Tensor, best: Tensor, index: NDArray[np.intp], columns: Columns
) -> Tensor:
    """A `_Route` that copies no logits: the same as `_draw_by_id`, up to the last bits of an
    exponential.
    """
    # Imported here: Triton is not always installed, and takes long to import.
    from penstock_shard.models.kernels.triton_draw import draw_by_id

    temperature = np.maximum(columns.temperature, _MIN_TEMPERATURE)
    floor = np.ceil(columns.min_p * _ONE)
    settings = np.stack((index, temperature, floor, columns.uniform), axis=1)
    return draw_by_id(logits, best, to_device(settings, logits.device), _ONE)


class _Rows:
    """Rows of the same `_Route`, and a column [n, 1] for each parameter."""

    def __init__(
        self, logits: Tensor, best: Tensor, index: NDArray[np.intp], columns: Columns
    ) -> None:
        """The rows `index` of logits float [N, V]."""
        device = logits.device
        self.columns = columns
        self.vocabulary = logits.shape[1]
        if len(index) < len(logits):
            chosen = to_device(index, device)
            logits, best = logits.index_select(0, chosen), best.index_select(0, chosen)
            scaled = logits.float()
        else:
            scaled = logits.to(torch.float32, copy=True)
        table = to_device(np.stack(columns)[:, :, None], device)
        temperature, top_k, top_p, min_p, typical_p, random = table.unbind()
        # Relative to the largest, so at most 0: a small temperature then gives no NaN.
        self.scaled = scaled.sub_(best.float().unsqueeze(1))
        self.scaled.div_(temperature.clamp(min=_MIN_TEMPERATURE).float())
        self.top_k = top_k.long()
        self.top_p, self.typical_p, self.uniform = top_p, typical_p, random
        # The least weight that min-p keeps.
        self.floor = (min_p * _ONE).ceil().long()

    @property
    def ranked(self) -> list[int]:
        """The rows with top-k or top-p."""
        return np.flatnonzero((self.columns.top_k > 0) | (self.columns.top_p < 1.0)).tolist()

    @property
    def has_floor(self) -> bool:
        return bool((self.columns.min_p > 0).any())

    def index(self, rows: Sequence[int]) -> Tensor:
        """Numbers of rows as int64, on the device."""
        return to_device(np.array(rows, dtype=np.int64), self.scaled.device)


def _weigh(scaled: Tensor) -> Tensor:
    return scaled.exp().mul_(_ONE).long()


def _draw_by_id(rows: _Rows) -> Tensor:
    weights = _weigh(rows.scaled)
    if rows.has_floor:
        weights *= weights >= rows.floor
    cumulative = weights.cumsum(1)
    return _pick(cumulative, cumulative[:, -1:], rows.uniform).squeeze(1)


def _draw_by_rank(rows: _Rows) -> Tensor:
    everyone = range(len(rows.scaled))
    is_unsure = rows.vocabulary > _WINDOW and not rows.columns.top_k.any()
    if is_unsure and _has_kernels(rows.scaled):
        return _draw_without_a_look(rows)
    return _draw_kept(rows, _most_likely(rows, everyone))


def _draw_without_a_look(rows: _Rows) -> Tensor:
    """Draw all rows from the first window; a kernel draws those again that it was too small for."""
    # Imported here: Triton is not always installed, and takes long to import.
    from penstock_shard.models.kernels.triton_draw import draw_unsettled

    weights = _weigh(rows.scaled)
    totals = weights.sum(dim=1, keepdim=True)
    index = rows.index(range(len(rows.scaled)))
    kept, settled = _keep_most_likely(rows, totals, index, ordered_topk(rows.scaled, _WINDOW))
    tokens = _draw_kept(rows, iter([kept]))
    goal = _share(rows.top_p, totals)
    draw_unsettled(rows.scaled, weights, goal, rows.floor, rows.uniform, settled, tokens)
    return tokens


def _draw_typical(rows: _Rows) -> Tensor:
    """After Meister, Pimentel, Wiher and Cotterell, "Locally Typical Sampling" (TACL 2023)."""
    weights = _weigh(rows.scaled)
    for kept in _most_likely(rows, rows.ranked):
        own = weights[kept.rows]
        place = torch.arange(kept.ids.shape[1], device=own.device)
        inside = own.gather(1, kept.ids) * (place < kept.count)
        weights[kept.rows] = torch.zeros_like(own).scatter_(1, kept.ids, inside)
    weights *= weights >= rows.floor
    return _draw_kept(rows, _nearest_to_entropy(rows, weights))


def _draw_kept(rows: _Rows, groups: Iterator[_Kept]) -> Tensor:
    tokens = torch.empty(len(rows.scaled), dtype=torch.int64, device=rows.scaled.device)
    for kept in groups:
        total = kept.cumulative.gather(1, kept.count - 1)
        place = _pick(kept.cumulative, total, rows.uniform[kept.rows])
        tokens[kept.rows] = kept.ids.gather(1, place).squeeze(1)
    return tokens


def _pick(cumulative: Tensor, total: Tensor, uniform: Tensor) -> Tensor:
    """Columns [n, 1]: the first whose cumulative weight exceeds uniform [n, 1] of total [n, 1]."""
    # A uniform number has 53 bits, so its product with a whole number rounds to less than that.
    place = torch.searchsorted(cumulative, (uniform * total).long(), right=True)
    # Only rows with NaN logits exceed the range; their index must be valid all the same.
    return place.clamp_(max=cumulative.shape[1] - 1)


def _most_likely(rows: _Rows, chosen: Sequence[int]) -> Iterator[_Kept]:
    """What top-k, then top-p (of what top-k left), then min-p keep in the chosen rows."""
    # A row with top-k starts with a window that holds all of it.
    first = {i: int(rows.columns.top_k[i]) for i in chosen}
    totals = torch.zeros_like(rows.top_k)
    if whole := [i for i in chosen if not first[i]]:
        index = rows.index(whole)
        totals[index] = _weigh(rows.scaled[index]).sum(dim=1, keepdim=True)

    keep = partial(_keep_most_likely, rows, totals)
    yield from _widen(rows.scaled, first, keep, rows.index)


def _keep_most_likely(
    rows: _Rows, totals: Tensor, index: Tensor, ids: Tensor
) -> tuple[_Kept, Tensor]:
    """A `_Keep` by top-k, top-p and min-p; `totals` int64 [n, 1] are the summed weights of all
    tokens, for rows without top-k.
    """
    weights = _weigh(rows.scaled[index].gather(1, ids))
    cumulative = weights.cumsum(1)
    top_k = rows.top_k[index]
    limited = top_k > 0
    most = torch.where(limited, top_k, ids.shape[1])
    total = torch.where(limited, cumulative.gather(1, most - 1), totals[index])
    goal = _share(rows.top_p[index], total)
    count = torch.searchsorted(cumulative, goal) + 1
    count = torch.minimum(count, most)
    if rows.has_floor:
        above = (weights >= rows.floor[index]).sum(dim=1, keepdim=True)
        # With NaN logits none may be above it.
        count = torch.minimum(count, above).clamp_(min=1)
    return _Kept(index, ids, cumulative, count), cumulative[:, -1:] >= goal


def _nearest_to_entropy(rows: _Rows, weights: Tensor) -> Iterator[_Kept]:
    """What typical-p keeps of the tokens with a weight: those whose log-probability is nearest to
    its mean, which is minus the entropy, until they have `typical_p` of the mass.

    Log-probabilities are scaled logits minus a constant, so distances are taken of scaled logits.
    """
    scaled = rows.scaled
    total = weights.sum(dim=1, keepdim=True)
    moments = torch.where(weights > 0, scaled, 0.0).double().mul_(weights).long()
    mean = moments.sum(dim=1, keepdim=True) / total
    nearness = (scaled - mean).abs_().neg_().float().masked_fill_(weights == 0, float("-inf"))
    goal = _share(rows.typical_p, total)

    def keep(index: Tensor, ids: Tensor) -> tuple[_Kept, Tensor]:
        cumulative = weights[index].gather(1, ids).cumsum(1)
        count = torch.searchsorted(cumulative, goal[index]) + 1
        settled = count <= ids.shape[1]
        return _Kept(index, ids, cumulative, count.clamp(max=ids.shape[1])), settled

    yield from _widen(nearness, dict.fromkeys(range(len(scaled)), 0), keep, rows.index)


def _share(share: Tensor, total: Tensor) -> Tensor:
    """The least whole weight that is `share` of a total, both [n, 1]; never more than the total."""
    # A total may round down as a float: a share of 1 must not lose the last token.
    return torch.where(share < 1.0, (share * total).ceil().long(), total)


def _widen(
    keys: Tensor,
    first: dict[int, int],
    keep: _Keep,
    to_index: Callable[[Sequence[int]], Tensor],
) -> Iterator[_Kept]:
    """What `keep` keeps of each row of keys [N, V], largest key first.

    `first` maps the wanted rows to how many keys are known to be enough. For a row of 0 that is not
    known: it is tried on the first window, then, where that is too small, on all.
    """

    def kept(rows: Sequence[int], window: int) -> tuple[_Kept, Tensor]:
        index = to_index(rows)
        return keep(index, ordered_topk(keys if len(rows) == len(keys) else keys[index], window))

    few = [i for i, width in first.items() if 0 < width <= _WINDOW]
    many = [i for i, width in first.items() if width > _WINDOW]
    for rows in filter(None, (few, many)):
        yield kept(rows, max(first[i] for i in rows))[0]
    if not (unsure := [i for i, width in first.items() if not width]):
        return
    vocabulary = keys.shape[1]
    window = min(_WINDOW, vocabulary)
    found, settled = kept(unsure, window)
    # Reading whether it is enough waits for the device.
    is_enough = [True] if window == vocabulary else settled.squeeze(1).tolist()
    yield found if all(is_enough) else _only(found, settled.squeeze(1))
    if not all(is_enough):
        yield kept(list(compress(unsure, map(not_, is_enough))), vocabulary)[0]


def _only(kept: _Kept, chosen: Tensor) -> _Kept:
    return _Kept(kept.rows[chosen], kept.ids[chosen], kept.cumulative[chosen], kept.count[chosen])


def ordered_topk(values: Tensor, k: int) -> Tensor:
    """Indices int64 [n, k] of the k largest of values float32 [n, V]: larger first, then lower
    index. No value may be above 0 or NaN, and V not above 2**29.
    """
    # The bits of positive floats, as integers, are in the order of their values, and a double made
    # of a float has 29 zero bits at its end. With the index in these, one integer key has both
    # value and index, and no two keys are equal.
    keys = (0.0 - values).double().view(torch.int64)
    keys += torch.arange(values.shape[1], device=keys.device)
    return _smallest(keys, k) & (2**29 - 1)


def _smallest(keys: Tensor, k: int) -> Tensor:
    """The k smallest of int64 keys [n, V], which are overwritten, in order."""
    if not is_host(keys):
        return keys.topk(k, dim=1, largest=False).values
    # numpy's partition and sort use vector instructions: a tenth of torch's time.
    array = keys.numpy()
    if k < array.shape[1]:
        array.partition(k - 1, axis=1)
    smallest = array[:, :k]
    smallest.sort(axis=1)
    return torch.from_numpy(smallest)
