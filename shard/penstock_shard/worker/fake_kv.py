"""The KV memory of the fake runner: 8 bytes for each token, a hash of all tokens up to it.

A row writes its tokens and then checks what it reads from its blocks. So a sequence notices a block
that is stale, torn, of other tokens or of another cache group.
"""

from __future__ import annotations

import hashlib
from collections import abc
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock_shard.ipc.runner_info import RunnerInfo
from penstock_shard.sequence import Sequence
from penstock_shard.worker.base import Batch
from penstock_shard.worker.slot_state import BlockTable, grown

Names = NDArray[np.uint64]

_NAME_BYTES = 8
_FIRST_CAPACITY = 64
# Constants of splitmix64.
_STEP = np.uint64(0x9E3779B97F4A7C15)
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)


class FakeKv:
    """The memory of a runner's pools, and the block tables of its slots.

    A token's value is the sum, over all tokens up to it, of a hash of the token and its position.
    So all values of a sequence are computed at once and compared with the memory.
    """

    def __init__(self, info: RunnerInfo) -> None:
        self._block_size = info.block_size
        self._groups = info.cache_groups
        self._weights = info.weights_hash
        self._tables = [BlockTable() for _ in self._groups]
        states = {group.pool for group in self._groups if group.has_state}
        self._memory: list[Names] = [
            np.zeros((count, 1 if pool in states else info.block_size), dtype=np.uint64)
            for pool, count in enumerate(info.pools)
        ]
        # For each slot: the hash before its sequence's first token, the hash up to the last written
        # token, the number of written tokens, and whether the sequence ever read a wrong value.
        self._roots: Names = np.zeros(_FIRST_CAPACITY, dtype=np.uint64)
        self._last: Names = np.zeros(_FIRST_CAPACITY, dtype=np.uint64)
        self._num_written = np.zeros(_FIRST_CAPACITY, dtype=np.int64)
        self.misread = np.zeros(_FIRST_CAPACITY, dtype=bool)

    @property
    def block_bytes(self) -> tuple[int, ...]:
        return tuple(self._memory[group.pool].shape[1] * _NAME_BYTES for group in self._groups)

    def admit(self, sequence: Sequence) -> None:
        slot = sequence.slot
        if slot >= len(self._roots):
            self._grow(max(2 * len(self._roots), slot + 1))
        # The hash includes the salt, so that a sequence notices a block of another salt.
        request = sequence.request
        named = repr((self._weights, request.adapter_hash, request.cache_salt)).encode()
        digest = hashlib.blake2b(named, digest_size=_NAME_BYTES).digest()
        self._roots[slot] = self._last[slot] = int.from_bytes(digest, "little")
        self._num_written[slot] = 0
        self.misread[slot] = False
        for table in self._tables:
            table.clear(slot)

    def add_blocks(self, batch: Batch) -> None:
        for table, column in zip(self._tables, batch.new_blocks, strict=True):
            for slot, block_ids in zip(batch.slots, column, strict=True):
                if block_ids:
                    table.append(slot, block_ids)

    def run(self, batch: Batch, tokens_of: Callable[[int], abc.Sequence[int]]) -> None:
        """Copy states, write the tokens of each row, then read the rows' blocks.

        `tokens_of` gives the known tokens of the sequence in a slot. A decode row without a new
        block does not read, because many such reads would take most of the step's time.
        """
        self.copy_states(batch.state_copies)
        going_on: list[int] = []
        others: list[tuple[int, Names]] = []
        for row, (slot, start) in enumerate(zip(batch.slots, batch.starts, strict=True)):
            token_ids = tokens_of(slot)
            if start >= len(token_ids):
                # The previous step gave this sequence an error and no token.
                continue
            if self._goes_on(batch, row):
                going_on.append(row)
            else:
                ids = (*token_ids[: start + batch.counts[row]], *batch.drafts[row])
                others.append((row, self._names(slot, ids)))
        if going_on:
            self._write_tokens(batch, going_on, tokens_of)
        for row, names in others:
            self._write_row(batch, row, names)
        for row, names in others:
            self._read_row(batch, row, names)

    def copy_states(self, copies: abc.Iterable[tuple[int, int]]) -> None:
        for source, target in copies:
            for pool in {group.pool for group in self._groups if group.has_state}:
                self._memory[pool][target] = self._memory[pool][source]

    def read_block(self, group: int, block_id: int, into: memoryview) -> None:
        into[:] = self._block(group, block_id)

    def write_block(self, group: int, block_id: int, data: memoryview) -> None:
        self._block(group, block_id)[:] = data

    def _block(self, group: int, block_id: int) -> memoryview:
        return memoryview(self._memory[self._groups[group].pool][block_id]).cast("B")

    # ---- rows ----

    def _goes_on(self, batch: Batch, row: int) -> bool:
        slot = batch.slots[row]
        if batch.counts[row] != 1 or batch.starts[row] != self._num_written[slot]:
            return False
        return not any(column[row] for column in batch.new_blocks)

    def _write_tokens(
        self, batch: Batch, rows: list[int], tokens_of: Callable[[int], abc.Sequence[int]]
    ) -> None:
        slots = np.array([batch.slots[row] for row in rows])
        starts = np.array([batch.starts[row] for row in rows])
        token_ids = np.array([tokens_of(batch.slots[row])[batch.starts[row]] for row in rows])
        self._last[slots] += _hashes(token_ids, starts)
        self._num_written[slots] += 1
        for index, group in enumerate(self._groups):
            blocks = self._tables[index].blocks
            places = starts // self._block_size, starts % self._block_size
            if group.has_state:
                places = np.zeros_like(slots), np.zeros_like(slots)
            named = self._last[slots] ^ _salt(index)
            self._memory[group.pool][blocks[slots, places[0]], places[1]] = named

    def _write_row(self, batch: Batch, row: int, names: Names) -> None:
        slot, start = batch.slots[row], batch.starts[row]
        for index, group in enumerate(self._groups):
            memory, blocks = self._memory[group.pool], self._tables[index].blocks[slot]
            if group.has_state:
                before = names[start - 1] ^ _salt(index)
                if start and memory[blocks[0], 0] != before:
                    self.misread[slot] = True
                memory[blocks[0], 0] = names[-1] ^ _salt(index)
            else:
                positions = np.arange(start, len(names))
                places = blocks[positions // self._block_size], positions % self._block_size
                memory[places] = names[start:] ^ _salt(index)
        # Unknown after drafts, because later rows overwrite what drafts wrote.
        self._num_written[slot] = -1 if batch.drafts[row] else len(names)
        self._last[slot] = names[-1]

    def _read_row(self, batch: Batch, row: int, names: Names) -> None:
        slot, start = batch.slots[row], batch.starts[row]
        for index, group in enumerate(self._groups):
            if group.has_state:
                continue
            positions = np.arange(group.first_visible(start), len(names))
            blocks = self._tables[index].blocks[slot][positions // self._block_size]
            found = self._memory[group.pool][blocks, positions % self._block_size]
            if not np.array_equal(found, names[positions] ^ _salt(index)):
                self.misread[slot] = True

    def _names(self, slot: int, token_ids: abc.Sequence[int]) -> Names:
        ids = np.asarray(token_ids, dtype=np.uint64)
        names: Names = np.cumsum(_hashes(ids, np.arange(len(ids))), dtype=np.uint64)
        names += self._roots[slot]
        return names

    def _grow(self, capacity: int) -> None:
        for name in ("_roots", "_last", "_num_written", "misread"):
            setattr(self, name, grown(getattr(self, name), capacity))
        for table in self._tables:
            table.grow(capacity)


def _salt(group: int) -> np.uint64:
    """Return a number that differs between cache groups."""
    return np.uint64((group * 0xD6E8FEB86659FD93) % 2**64)


def _hashes(token_ids: NDArray[Any], positions: NDArray[Any]) -> Names:
    """Hash each token and its position (splitmix64, Steele and others, 2014)."""
    mixed: Names = (
        token_ids.astype(np.uint64) + (positions.astype(np.uint64) + np.uint64(1)) * _STEP
    )
    mixed = (mixed ^ (mixed >> np.uint64(30))) * _MIX_1
    mixed = (mixed ^ (mixed >> np.uint64(27))) * _MIX_2
    mixed ^= mixed >> np.uint64(31)
    return mixed
