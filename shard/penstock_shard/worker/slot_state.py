"""A runner's state of the sequence in each slot, in arrays indexed by slot."""

from __future__ import annotations

from collections import abc
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from penstock_proto.types import Pooling
from penstock_shard.sequence import Sequence

Integers = NDArray[np.int64]
TokenIds = NDArray[np.uint32]
Item = TypeVar("Item", bound=np.generic)

_FIRST_CAPACITY = 64
_FIRST_WIDTH = 16
# Values of `Slots.pooling`.
LAST, MEAN = 1, 2
_POOLINGS = {None: 0, Pooling.LAST: LAST, Pooling.MEAN: MEAN}


class BlockTable:
    """The KV blocks of the sequence in each slot, in one cache group."""

    def __init__(self) -> None:
        self._counts = _zeros()
        # int32 [slots, most blocks of a sequence]: each row has a sequence's blocks, then zeros.
        self.blocks: NDArray[np.int32] = np.zeros((_FIRST_CAPACITY, _FIRST_WIDTH), dtype=np.int32)

    def clear(self, slot: int) -> None:
        self._counts[slot] = 0
        self.blocks[slot] = 0

    def append(self, slot: int, block_ids: abc.Sequence[int]) -> None:
        known = int(self._counts[slot])
        count = known + len(block_ids)
        if count > self.blocks.shape[1]:
            wider = max(count, 2 * self.blocks.shape[1])
            self.blocks = np.pad(self.blocks, ((0, 0), (0, wider - self.blocks.shape[1])))
        self.blocks[slot, known:count] = block_ids
        self._counts[slot] = count

    def grow(self, capacity: int) -> None:
        self._counts, self.blocks = grown(self._counts, capacity), grown(self.blocks, capacity)


class Slots:
    """Arrays with one entry for each slot below `capacity`, which grows."""

    def __init__(self, num_groups: int = 1) -> None:
        self.num_prompt_tokens = _zeros()
        # The number of tokens at admission, the number that the host knows now, and the last known
        # token.
        self.num_admitted = _zeros()
        self.num_known = _zeros()
        self.last_token = _zeros()
        self.adapter_index = _zeros()
        # 0 without pooling; else LAST or MEAN.
        self.pooling = _zeros()
        # The number of best log-probabilities wanted at each prompt token.
        self.prompt_logprobs = _zeros()
        self.tables = [BlockTable() for _ in range(num_groups)]
        # The tokens at sequence.
        self.token_ids: dict[int, TokenIds] = {}

    @property
    def capacity(self) -> int:
        return len(self.num_known)

    def admit(self, sequence: Sequence) -> None:
        slot, ids = sequence.slot, np.array(sequence.token_ids, dtype=np.uint32)
        if slot >= self.capacity:
            self._grow(max(2 * self.capacity, slot + 1))
        self.num_prompt_tokens[slot] = sequence.num_prompt_tokens
        self.num_admitted[slot] = self.num_known[slot] = len(ids)
        self.last_token[slot] = ids[-1]
        self.adapter_index[slot] = sequence.adapter_index
        self.pooling[slot] = _POOLINGS[sequence.request.pooling]
        self.prompt_logprobs[slot] = sequence.request.prompt_logprobs or 0
        for table in self.tables:
            table.clear(slot)
        self.token_ids[slot] = ids

    def release(self, slot: int) -> None:
        self.token_ids.pop(slot, None)

    def append(self, slots: Integers, token_ids: Integers) -> None:
        """Record one more known token of each sequence. No slot may occur twice."""
        self.num_known[slots] += 1
        self.last_token[slots] = token_ids

    def extend(self, slot: int, token_ids: abc.Sequence[int]) -> None:
        self.num_known[slot] += len(token_ids)
        self.last_token[slot] = token_ids[-1]

    def _grow(self, capacity: int) -> None:
        for name in (
            *("num_prompt_tokens", "num_admitted", "num_known", "last_token", "adapter_index"),
            *("pooling", "prompt_logprobs"),
        ):
            setattr(self, name, grown(getattr(self, name), capacity))
        for table in self.tables:
            table.grow(capacity)


def _zeros() -> Integers:
    return np.zeros(_FIRST_CAPACITY, dtype=np.int64)


def grown(array: NDArray[Item], capacity: int) -> NDArray[Item]:
    if len(array) >= capacity:
        return array
    larger: NDArray[Any] = np.zeros((capacity, *array.shape[1:]), dtype=array.dtype)
    larger[: len(array)] = array
    return larger
