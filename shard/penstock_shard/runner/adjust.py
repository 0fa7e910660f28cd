"""Changes to logits before a token is drawn: penalties, biases, bans and constraint masks.

Each is one pass over all rows that have it; `sampler` documents the order. Knows nothing of
distributions. An element is computed from its own row alone, with operations that round the same
way everywhere.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from penstock_shard.runner.device import is_host, to_device
from penstock_shard.runner.token_state import TokenCounts, TokenState

_LARGEST_LOGIT = torch.finfo(torch.float32).max


def adjust(logits: Tensor, states: Sequence[TokenState]) -> None:
    """Change logits float32 [n, V], contiguous, in place: row i as `states[i]` says."""
    _penalize(logits, [(i, s, s.counts) for i, s in enumerate(states) if s.counts is not None])
    _add_bias(logits, [(i, s) for i, s in enumerate(states) if s.bias_ids.size])
    _allow_only(logits, [(i, s.allowed_ids) for i, s in enumerate(states) if s.allowed_ids.size])
    _ban(logits, [(i, np.array(s.banned_ids)) for i, s in enumerate(states) if s.banned_ids])
    _mask(logits, [(i, s.constraint.mask) for i, s in enumerate(states) if s.constraint])


def _penalize(logits: Tensor, rows: Sequence[tuple[int, TokenState, TokenCounts]]) -> None:
    if not rows:
        return
    elements = _elements(logits, [(i, counts.ids) for i, _, counts in rows])
    repetition = np.repeat(
        np.array([s.sampling.repetition_penalty for _, s, _ in rows], dtype=np.float32),
        [len(counts.ids) for _, _, counts in rows],
    )
    subtracted = np.concatenate([_subtracted(s, counts.counts) for _, s, counts in rows])
    factor = to_device(repetition, logits.device)
    flat = logits.view(-1)
    values = flat.index_select(0, elements)
    values = torch.where(values > 0, values / factor, values * factor)
    # Division by a tiny penalty gives infinity.
    values = values.clamp(max=_LARGEST_LOGIT) - to_device(subtracted, logits.device)
    flat.index_copy_(0, elements, values)


def _subtracted(state: TokenState, counts: NDArray[np.int64]) -> NDArray[np.float32]:
    sampling = state.sampling
    penalty = sampling.presence_penalty * (counts > 0) + sampling.frequency_penalty * counts
    return penalty.astype(np.float32)


def _add_bias(logits: Tensor, rows: Sequence[tuple[int, TokenState]]) -> None:
    if not rows:
        return
    elements = _elements(logits, [(i, state.bias_ids) for i, state in rows])
    bias = np.concatenate([state.bias for _, state in rows])
    logits.view(-1).index_add_(0, elements, to_device(bias, logits.device))


def _allow_only(logits: Tensor, rows: Sequence[tuple[int, NDArray[np.int64]]]) -> None:
    if not rows:
        return
    elements = _elements(logits, rows)
    flat = logits.view(-1)
    allowed = flat.index_select(0, elements)
    logits.index_fill_(0, _index([i for i, _ in rows], logits), float("-inf"))
    flat.index_copy_(0, elements, allowed)


def _ban(logits: Tensor, rows: Sequence[tuple[int, NDArray[np.int64]]]) -> None:
    if rows:
        logits.view(-1).index_fill_(0, _elements(logits, rows), float("-inf"))


def _mask(logits: Tensor, rows: Sequence[tuple[int, NDArray[np.int32] | None]]) -> None:
    """Ban what the masks do not allow. In a row without one, whose constraint failed, ban all."""
    for i, mask in rows:
        if mask is None:
            logits[i] = float("-inf")
    masked = [(i, mask) for i, mask in rows if mask is not None]
    if not masked:
        return
    masks = np.stack([mask for _, mask in masked])
    if is_host(logits):
        # Row by row on this thread: torch would use its thread pool, which is already computing.
        values, forbidden = logits.numpy(), unpacked(~masks, logits.shape[1])
        for (i, _), row in zip(masked, forbidden, strict=True):
            np.copyto(values[i], -np.inf, where=row)
        return
    # One bit a token is copied to the device, not one byte.
    index = _index([i for i, _ in masked], logits)
    rest = forbidden_bits(to_device(masks, logits.device), logits.shape[1])
    logits.index_copy_(0, index, logits[index].masked_fill_(rest, float("-inf")))


def unpacked(masks: NDArray[np.int32], vocab_size: int) -> NDArray[np.bool_]:
    """Masks [n, words] as bool [n, V]."""
    packed = masks.view(np.uint8)
    return np.unpackbits(packed, axis=1, count=vocab_size, bitorder="little").view(np.bool_)


def forbidden_bits(packed: Tensor, vocabulary: int) -> Tensor:
    """bool [n, vocabulary]: the ids that masks int32 [n, words] do not allow, on their device."""
    ids = torch.arange(vocabulary, device=packed.device)
    return (packed[:, ids >> 5] >> (ids & 31)) & 1 == 0


def _elements(logits: Tensor, rows: Sequence[tuple[int, NDArray[np.int64]]]) -> Tensor:
    """Indices in the flat logits of each row's ids, row after row."""
    vocabulary = logits.shape[1]
    places = np.concatenate([i * vocabulary + ids for i, ids in rows])
    return to_device(places, logits.device)


def _index(rows: Sequence[int], logits: Tensor) -> Tensor:
    return to_device(np.array(rows, dtype=np.int64), logits.device)
