"""Host memory with copies of KV blocks: records in slots, each with a name and checksums.

The server makes the memory and each engine maps it, so copies outlive an engine. An engine killed
during a write leaves a record with a wrong checksum, or none.
"""

from __future__ import annotations

import hashlib
import struct
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from penstock_shard.ipc.runner_info import RunnerInfo

# Part of the namespace. Raise it when the meaning of blocks' bytes changes.
_LAYOUT_VERSION = 2
_MAGIC = b"penstock KV\0"
_DIGEST_BYTES = 16
_PREAMBLE_BYTES = 4096
_ALIGNMENT_BYTES = 64
# In order: the slot's state; CRC-32 of the rest of the header; CRC-32 of the block; group; index;
# salted or not; digest; parent's digest.
_FIELDS = struct.Struct(f"<IIIIII{_DIGEST_BYTES}s{_DIGEST_BYTES}s")
_CHECKED_FROM = struct.calcsize("<II")
_TOKEN_BYTES = 4
# No record; a record; a peer's record that may still be wrong.
_EMPTY, _PRESENT, _UNPROVEN = range(3)


@dataclass(frozen=True, slots=True)
class RecordName:
    """The name of a copied block: its cache group, and the prefix that it ends.

    `index` is the number of blocks before it. `digest` is the chained hash of the prefix; `parent`
    is that of the prefix without this block, or of the root. The name is salted if the root is.
    """

    group: int
    index: int
    digest: bytes
    parent: bytes
    token_ids: tuple[int, ...]
    is_salted: bool = False


def namespace_of(info: RunnerInfo) -> bytes:
    """Return a hash of everything, except the name, that determines a block's bytes; empty if some
    of it is unknown.
    """
    if not info.numerics_fingerprint:
        return b""
    named = (info.numerics_fingerprint, info.block_size, info.cache_groups, info.block_bytes)
    packed = repr((_LAYOUT_VERSION, *named)).encode()
    return hashlib.blake2b(packed, digest_size=_DIGEST_BYTES).digest()


class Arena:
    """Slots in a piece of memory, divided among the pools in proportion to their blocks. Where a
    method takes a group, the slot is in that group's pool.
    """

    def __init__(self, memory: memoryview, info: RunnerInfo) -> None:
        """Keep the records in `memory` if they have the same namespace and layout.

        Raises:
            ValueError: `memory` has no room for a block of each pool. The text has the needed size.
        """
        self._memory = memory
        self._block_bytes = info.block_bytes
        self._num_tokens = info.block_size
        header_bytes = _FIELDS.size + _TOKEN_BYTES * info.block_size
        self.header_bytes = _aligned(header_bytes)
        largest = [0] * len(info.pools)
        for group, size in zip(info.cache_groups, info.block_bytes, strict=True):
            largest[group.pool] = max(largest[group.pool], size)
        self._slot_bytes = [self.header_bytes + _aligned(size) for size in largest]
        room = len(memory) - _PREAMBLE_BYTES
        total = sum(map(int.__mul__, info.pools, self._slot_bytes))
        self.num_slots = tuple(room * count // total for count in info.pools)
        if min(self.num_slots) < 1:
            needed = _PREAMBLE_BYTES + total // min(info.pools) + len(info.pools)
            raise ValueError(f"one block of each kind needs {needed} bytes")
        self._starts = [_PREAMBLE_BYTES]
        for count, size in zip(self.num_slots, self._slot_bytes, strict=True):
            self._starts.append(self._starts[-1] + count * size)
        self._pool_of = [group.pool for group in info.cache_groups]
        self._take_over(namespace_of(info))

    def _take_over(self, namespace: bytes) -> None:
        layout = repr((len(self._memory), self.num_slots)).encode()
        preamble = _MAGIC + namespace + hashlib.blake2b(layout, digest_size=_DIGEST_BYTES).digest()
        if self._memory[: len(preamble)] == preamble:
            return
        self._memory[: len(preamble)] = bytes(len(preamble))
        for pool, count in enumerate(self.num_slots):
            for slot in range(count):
                self.clear(pool, slot)
        self._memory[: len(preamble)] = preamble

    def pool_of(self, group: int) -> int:
        return self._pool_of[group]

    def record_in(self, pool: int, slot: int) -> memoryview:
        """Return the bytes of a slot's record; empty if there is none."""
        name = self.name_in(pool, slot)
        return self._memory[:0] if name is None else self.record(slot, name.group)

    def write(self, slot: int, name: RecordName, fill: Callable[[memoryview], None]) -> None:
        """Write a record into a slot. `fill` writes the block's bytes."""
        pool = self._pool_of[name.group]
        self.clear(pool, slot)
        header, block = self._parts(pool, slot, name.group)
        fill(block)
        _FIELDS.pack_into(header, 0, 0, 0, zlib.crc32(block), *_fields(name))
        struct.pack_into(f"<{len(name.token_ids)}I", header, _FIELDS.size, *name.token_ids)
        struct.pack_into("<I", header, 4, zlib.crc32(header[_CHECKED_FROM:]))
        # Written last: until now the slot has no record.
        struct.pack_into("<I", header, 0, _PRESENT)

    def read(self, slot: int, name: RecordName) -> memoryview | None:
        """Return the block in a slot, valid until the slot is written again. None if the record has
        another name or is damaged.
        """
        pool = self._pool_of[name.group]
        if self.name_in(pool, slot) != name:
            return None
        header, block = self._parts(pool, slot, name.group)
        checksum: int = _FIELDS.unpack_from(header)[2]
        return block if zlib.crc32(block) == checksum else None

    def name_in(self, pool: int, slot: int) -> RecordName | None:
        """Return the name of a slot's record; None without a record. Its block may be damaged."""
        name = self.name_of(self._parts(pool, slot)[0])
        return None if name is None or self._pool_of[name.group] != pool else name

    def names(self) -> Iterator[tuple[int, RecordName]]:
        for pool, count in enumerate(self.num_slots):
            for slot in range(count):
                name = self.name_in(pool, slot)
                if name is not None:
                    yield slot, name

    def name_of(self, header: memoryview) -> RecordName | None:
        """Return the name in a record's header; None if there is no record or the header is
        damaged.
        """
        if len(header) < self.header_bytes:
            return None
        state, checksum, _, group, *rest, digest, parent = _FIELDS.unpack_from(header)
        if (
            state not in (_PRESENT, _UNPROVEN)
            or zlib.crc32(header[_CHECKED_FROM : self.header_bytes]) != checksum
        ):
            return None
        if group >= len(self._pool_of):
            return None
        index, is_salted = rest
        token_ids = struct.unpack_from(f"<{self._num_tokens}I", header, _FIELDS.size)
        return RecordName(group, index, digest, parent, token_ids, bool(is_salted))

    def record_bytes(self, group: int) -> int:
        return self.header_bytes + self._block_bytes[group]

    @property
    def most_record_bytes(self) -> int:
        return self.header_bytes + max(self._block_bytes)

    def record(self, slot: int, group: int) -> memoryview:
        """Return a slot's bytes, valid until it is written again."""
        start = self._start(self._pool_of[group], slot)
        return self._memory[start : start + self.record_bytes(group)]

    def checksum(self, slot: int, group: int) -> int:
        """Return the checksum of the block in a slot, which must have a record."""
        checksum: int = _FIELDS.unpack_from(self.record(slot, group))[2]
        return checksum

    def is_whole(self, record: memoryview, name: RecordName) -> bool:
        """Tell whether a record has this name and is undamaged."""
        if len(record) != self.record_bytes(name.group) or self.name_of(record) != name:
            return False
        checksum: int = _FIELDS.unpack_from(record)[2]
        return zlib.crc32(record[self.header_bytes :]) == checksum

    def put(
        self, slot: int, group: int, record: bytes | memoryview, *, is_proven: bool = True
    ) -> None:
        pool = self._pool_of[group]
        self.clear(pool, slot)
        start, end = self._start(pool, slot), self._start(pool, slot) + len(record)
        self._memory[start + 4 : end] = record[4:]
        # Written last: until now the slot has no record.
        self.mark(pool, slot, is_proven=is_proven)

    def clear(self, pool: int, slot: int) -> None:
        struct.pack_into("<I", self._memory, self._start(pool, slot), _EMPTY)

    def mark(self, pool: int, slot: int, *, is_proven: bool) -> None:
        """Mark a slot's record as equal to what this shard computes, or as unchecked."""
        state = _PRESENT if is_proven else _UNPROVEN
        struct.pack_into("<I", self._memory, self._start(pool, slot), state)

    def is_proven(self, pool: int, slot: int) -> bool:
        state: int = struct.unpack_from("<I", self._memory, self._start(pool, slot))[0]
        return state == _PRESENT

    def _start(self, pool: int, slot: int) -> int:
        return self._starts[pool] + slot * self._slot_bytes[pool]

    def _parts(
        self, pool: int, slot: int, group: int | None = None
    ) -> tuple[memoryview, memoryview]:
        start = self._start(pool, slot)
        block = start + self.header_bytes
        size = 0 if group is None else self._block_bytes[group]
        return self._memory[start:block], self._memory[block : block + size]


def _fields(name: RecordName) -> tuple[int, int, bool, bytes, bytes]:
    return name.group, name.index, name.is_salted, name.digest, name.parent


def _aligned(count: int) -> int:
    return -(-count // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
