"""Draws tokens that are ordered by likelihood: with top-k or top-p, and min-p.

A token's weight is exp((logit - largest) / temperature) as an integer, because sums of integers are
the same in any order. So a row's token does not depend on the batch, the number of threads, or the
width of the window (the most likely tokens, which are sorted).
"""

from __future__ import annotations

from collections import abc
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import compress
from operator import not_
from typing import NamedTuple, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from penstock_shard.device.async_copy import is_host, to_device
from penstock_shard.device.triton_support import fault_on

Floats: TypeAlias = NDArray[np.float64]

# The weight of the most likely token. The sum of a million such weights fits into 63 bits. A token
# that is less likely by this factor is never drawn.
ONE = 2.0**42
# Filters other than top-k first try this many tokens, then all. For rows with top-k, the window is
# the largest k among rows with at most this k; rows with a larger k form another group.
_WINDOW = 1024
# Dividing float32 by a smaller temperature gives infinity. At this temperature the largest logit
# always wins unless another is within 3e-5.
MIN_TEMPERATURE = 1e-6


class Columns(NamedTuple):
    """Parameters of rows, and their uniform numbers, float64 [n] each."""

    temperature: Floats
    top_k: Floats
    top_p: Floats
    min_p: Floats
    typical_p: Floats
    uniform: Floats

    def only(self, index: NDArray[np.intp] | slice) -> Columns:
        return Columns(*(column[index] for column in self))


class Rows:
    """Rows of the same `_Route`, and columns [n, 1] of parameters."""

    def __init__(
        self, logits: Tensor, best: Tensor, index: NDArray[np.intp], columns: Columns
    ) -> None:
        """Take the rows `index` of logits float [N, V]."""
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
        # Subtract the largest, so that values are at most 0 and a small temperature gives no NaN.
        self.scaled = scaled.sub_(best.float().unsqueeze(1))
        self.scaled.div_(temperature.clamp(min=MIN_TEMPERATURE).float())
        self.top_k = top_k.long()
        self.top_p, self.typical_p, self.uniform = top_p, typical_p, random
        # The smallest weight that min-p keeps.
        self.floor = (min_p * ONE).ceil().long()

    @property
    def ranked(self) -> list[int]:
        return np.flatnonzero((self.columns.top_k > 0) | (self.columns.top_p < 1.0)).tolist()

    @property
    def has_floor(self) -> bool:
        return bool((self.columns.min_p > 0).any())

    def index(self, rows: abc.Sequence[int]) -> Tensor:
        return to_device(np.array(rows, dtype=np.int64), self.scaled.device)


def weigh(scaled: Tensor) -> Tensor:
    return scaled.exp().mul_(ONE).long()


@dataclass(frozen=True, slots=True)
class FilteredTokens:
    """The tokens that the filters keep in `rows` (int64 [n]) of a chunk: the first `count` [n, 1]
    of `ids` [n, w]. `cumulative` [n, w] are running sums of weights.
    """

    rows: Tensor
    ids: Tensor
    cumulative: Tensor
    count: Tensor


# Rows of the chunk and their first ids [n, w] -> the ids that the filters keep, and bool [n, 1]:
# true if the filters keep no later id.
Keep = Callable[[Tensor, Tensor], tuple[FilteredTokens, Tensor]]


def has_kernels(logits: Tensor) -> bool:
    """Tell whether the logits are on a device that Triton runs on."""
    return not is_host(logits) and fault_on(logits.device.type) is None


def draw_by_rank(rows: Rows) -> Tensor:
    return draw_filtered(rows, most_likely(rows, range(len(rows.scaled))))


def draw_filtered(rows: Rows, groups: Iterator[FilteredTokens]) -> Tensor:
    tokens = torch.empty(len(rows.scaled), dtype=torch.int64, device=rows.scaled.device)
    for kept in groups:
        total = kept.cumulative.gather(1, kept.count - 1)
        place = pick(kept.cumulative, total, rows.uniform[kept.rows])
        tokens[kept.rows] = kept.ids.gather(1, place).squeeze(1)
    return tokens


def pick(cumulative: Tensor, total: Tensor, uniform: Tensor) -> Tensor:
    """Return the first column whose cumulative weight exceeds uniform times total, all [n, 1]."""
    # A uniform number has 53 bits, so its product with a whole number rounds to less than that
    # number.
    place = torch.searchsorted(cumulative, (uniform * total).long(), right=True)
    # Only rows with NaN logits exceed the range; their index must still be valid.
    return place.clamp_(max=cumulative.shape[1] - 1)


def most_likely(rows: Rows, chosen: abc.Sequence[int]) -> Iterator[FilteredTokens]:
    """Yield the tokens of the chosen rows that top-k, then top-p (of what top-k left), then min-p
    keep.
    """
    # For a row with top-k, the first window is enough.
    first = {i: int(rows.columns.top_k[i]) for i in chosen}
    totals = torch.zeros_like(rows.top_k)
    if whole := [i for i in chosen if not first[i]]:
        index = rows.index(whole)
        totals[index] = weigh(rows.scaled[index]).sum(dim=1, keepdim=True)

    keep = partial(_keep_most_likely, rows, totals)
    yield from widen(rows.scaled, first, keep, rows.index)


def _keep_most_likely(
    rows: Rows, totals: Tensor, index: Tensor, ids: Tensor
) -> tuple[FilteredTokens, Tensor]:
    """A `Keep` by top-k, top-p and min-p. `totals` int64 [n, 1] are the summed weights of all
    tokens, for rows without top-k.
    """
    weights = weigh(rows.scaled[index].gather(1, ids))
    cumulative = weights.cumsum(1)
    top_k = rows.top_k[index]
    limited = top_k > 0
    most = torch.where(limited, top_k, ids.shape[1])
    total = torch.where(limited, cumulative.gather(1, most - 1), totals[index])
    goal = share(rows.top_p[index], total)
    count = torch.searchsorted(cumulative, goal) + 1
    count = torch.minimum(count, most)
    if rows.has_floor:
        above = (weights >= rows.floor[index]).sum(dim=1, keepdim=True)
        # With NaN logits it can be that no weight qualifies.
        count = torch.minimum(count, above).clamp_(min=1)
    return FilteredTokens(index, ids, cumulative, count), cumulative[:, -1:] >= goal


def share(share: Tensor, total: Tensor) -> Tensor:
    """Return the smallest whole weight that is at least `share` of a total, but not above the
    total.
    """
    # The float total may round down, but a share of 1 must not lose the last token.
    return torch.where(share < 1.0, (share * total).ceil().long(), total)


def widen(
    keys: Tensor,
    first: dict[int, int],
    keep: Keep,
    to_index: Callable[[abc.Sequence[int]], Tensor],
) -> Iterator[FilteredTokens]:
    """Yield what `keep` keeps of each row of keys [N, V], largest key first.

    `first` gives how many keys are enough for each wanted row. If this is 0 (unknown), the row is
    tried on the first window, and if that is too small, on all keys.
    """

    def kept(rows: abc.Sequence[int], window: int) -> tuple[FilteredTokens, Tensor]:
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
    # This waits for the device.
    is_enough = [True] if window == vocabulary else settled.squeeze(1).tolist()
    yield found if all(is_enough) else _only(found, settled.squeeze(1))
    if not all(is_enough):
        yield kept(list(compress(unsure, map(not_, is_enough))), vocabulary)[0]


def _only(kept: FilteredTokens, chosen: Tensor) -> FilteredTokens:
    return FilteredTokens(
        kept.rows[chosen], kept.ids[chosen], kept.cumulative[chosen], kept.count[chosen]
    )


def ordered_topk(values: Tensor, k: int) -> Tensor:
    """Return indices int64 [n, k] of the k largest of values float32 [n, V]: larger first, then
    lower index. No value may be NaN or above 0; V is at most 2**29.
    """
    # The bits of positive floats, as integers, are in the order of their values. A double made from
    # a float ends in 29 zero bits, which take the index. So an integer key holds value and index,
    # and all keys differ.
    keys = (0.0 - values).double().view(torch.int64)
    keys += torch.arange(values.shape[1], device=keys.device)
    return _smallest(keys, k) & (2**29 - 1)


def _smallest(keys: Tensor, k: int) -> Tensor:
    """Return the k smallest of int64 keys [n, V], in order. The keys are overwritten."""
    if not is_host(keys):
        return keys.topk(k, dim=1, largest=False).values
    # numpy's partition and sort use vector instructions, and take a tenth of torch's time.
    array = keys.numpy()
    if k < array.shape[1]:
        array.partition(k - 1, axis=1)
    smallest = array[:, :k]
    smallest.sort(axis=1)
    return torch.from_numpy(smallest)
