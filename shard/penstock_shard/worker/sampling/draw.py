"""Logits -> tokens drawn at random, by temperature, top-k, top-p, min-p and typical-p.

One uniform number for each row is looked up in the row's cumulative distribution. Its order depends
only on the row's own parameters. With top-k or top-p, the most likely tokens come first
(`top_k_top_p.py`). With typical-p, the tokens nearest to the row's entropy come first
(`typical_p.py`). Otherwise tokens are ordered by id. Among equal tokens the lower id comes first,
also at the cut-off of a filter.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from penstock_shard.device.async_copy import is_host, to_device
from penstock_shard.worker.sampling.top_k_top_p import (
    MIN_TEMPERATURE,
    ONE,
    Columns,
    Rows,
    draw_by_rank,
    has_kernels,
    pick,
    weigh,
)
from penstock_shard.worker.sampling.typical_p import draw_typical

# The number of logits that are processed together; on cpu they fit into the cache.
_CHUNK_LOGITS_CPU = 2**19
_CHUNK_LOGITS_DEVICE = 2**24

# Logits [N, V], the largest logit of each row [N], the indices of the rows to draw, and their
# parameters -> a token for each of these rows, int64 [n].
_Route = Callable[[Tensor, Tensor, NDArray[np.intp], Columns], Tensor]


def draw(logits: Tensor, best: Tensor, index: NDArray[np.intp], columns: Columns) -> Tensor:
    """Draw a token for each of the n rows `index` of logits [N, V]. Return int64 [n] on their
    device. `best` float32 [N] is the largest logit of each row. No row is greedy.

    A row whose largest logit is not finite gets an arbitrary token. The host waits for the device
    only for rows with typical-p and, without Triton, for rows with top-p and no top-k.
    """
    vocabulary = logits.shape[1]
    columns = columns._replace(top_k=np.where(columns.top_k < vocabulary, columns.top_k, 0.0))
    parts: list[tuple[NDArray[np.intp], Tensor]] = []
    for chosen, route in _routes(columns, with_kernels=has_kernels(logits)):
        if chosen.any():
            places = np.flatnonzero(chosen)
            parts.append((places, route(logits, best, index[places], columns.only(places))))
    if len(parts) == 1:
        return parts[0][1]
    order = np.argsort(np.concatenate([places for places, _ in parts]))
    tokens = torch.cat([drawn for _, drawn in parts])
    return tokens.index_select(0, to_device(order, tokens.device))


def _routes(columns: Columns, *, with_kernels: bool) -> list[tuple[NDArray[np.bool_], _Route]]:
    """Return pairs: the rows to draw, as bool [n], and the way to draw them."""
    typical = columns.typical_p < 1.0
    has_k = columns.top_k > 0
    by_p = (columns.top_p < 1.0) & ~has_k
    by_id = ~typical & ~has_k & ~by_p
    routes: list[tuple[NDArray[np.bool_], _Route]] = [(typical, partial(_in_parts, draw_typical))]
    if with_kernels:
        return [*routes, (by_id, _draw_by_id_there), (~typical & ~by_id, _draw_by_rank_there)]
    by_rank = partial(_in_parts, draw_by_rank)
    # Top-p without top-k is a separate group, because only top-k tells the host how many tokens are
    # kept.
    routes += [(~typical & has_k, by_rank), (~typical & by_p, by_rank)]
    return [*routes, (by_id, partial(_in_parts, _draw_by_id))]


def _in_parts(
    route: Callable[[Rows], Tensor],
    logits: Tensor,
    best: Tensor,
    index: NDArray[np.intp],
    columns: Columns,
) -> Tensor:
    """A `_Route` that calls `route` on chunks of rows, to copy fewer logits at once."""
    most = _CHUNK_LOGITS_CPU if is_host(logits) else _CHUNK_LOGITS_DEVICE
    step = max(1, most // logits.shape[1])
    parts = [slice(start, start + step) for start in range(0, len(index), step)]
    drawn = [route(Rows(logits, best, index[part], columns.only(part))) for part in parts]
    return drawn[0] if len(drawn) == 1 else torch.cat(drawn)


def _draw_by_id_there(
    logits: Tensor, best: Tensor, index: NDArray[np.intp], columns: Columns
) -> Tensor:
    """A `_Route` that copies no logits. It equals `_draw_by_id`, except for the last bits of an
    exponential.
    """
    # Imported here: Triton is not always installed, and takes long to import.
    from penstock_shard.kernels.triton_draw import draw_by_id

    temperature = np.maximum(columns.temperature, MIN_TEMPERATURE)
    floor = np.ceil(columns.min_p * ONE)
    settings = np.stack((index, temperature, floor, columns.uniform), axis=1)
    return draw_by_id(logits, best, to_device(settings, logits.device), ONE)


def _draw_by_rank_there(
    logits: Tensor, best: Tensor, index: NDArray[np.intp], columns: Columns
) -> Tensor:
    """A `_Route` like `draw_by_rank`, with the same weights."""
    # Imported here, as in `_draw_by_id_there`.
    from penstock_shard.kernels.triton_rank import draw_ranked

    temperature = np.maximum(columns.temperature, MIN_TEMPERATURE)
    floor = np.ceil(columns.min_p * ONE)
    limits = (columns.top_k, columns.top_p, floor, columns.uniform)
    settings = to_device(np.stack((index, temperature, *limits), axis=1), logits.device)
    step = max(1, _CHUNK_LOGITS_DEVICE // logits.shape[1])
    drawn = [
        draw_ranked(logits, best, settings[start : start + step], ONE)
        for start in range(0, len(settings), step)
    ]
    return drawn[0] if len(drawn) == 1 else torch.cat(drawn)


def _draw_by_id(rows: Rows) -> Tensor:
    weights = weigh(rows.scaled)
    if rows.has_floor:
        weights *= weights >= rows.floor
    cumulative = weights.cumsum(1)
    return pick(cumulative, cumulative[:, -1:], rows.uniform).squeeze(1)
