"""Blocks that other shards ask for: copied to host memory and kept there until they are read."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import takewhile

from penstock_proto.types import PrefixNames
from penstock_shard.ipc.block_messages import Export, Exported, Slot
from penstock_shard.kv_cache.doubt import is_proven
from penstock_shard.kv_cache.prefix_cache import PrefixCache
from penstock_shard.kv_cache.prefix_tree import NO_BLOCK, Prefix

# An export may pin 1/_SHARE of the slots of a pool.
_SHARE = 4


@dataclass(frozen=True, slots=True)
class _Copied:
    """A prefix as if it had only the blocks whose copies in host memory are known to be right."""

    prefix: Prefix

    def has(self, group: int) -> bool:
        return self.prefix.slots[group] != NO_BLOCK and is_proven(self.prefix.doubt)


class Exports:
    """Answers requests for blocks. Nothing is computed or fetched for another shard."""

    def __init__(
        self, prefixes: PrefixCache, block_size: int, send: Callable[[Exported], None]
    ) -> None:
        self._prefixes = prefixes
        self._block_size = block_size
        self._send = send
        self._waiting: dict[int, Export] = {}
        self._pinned: dict[int, list[Slot]] = {}
        self.exported_total = 0

    def counts(self) -> dict[str, float]:
        return {"kv_exported_blocks_total": self.exported_total}

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    def begin(self, export: Export) -> None:
        """Have the wanted blocks copied. `advance` answers once they are."""
        chain = self._find(export.prefix)
        self._prefixes.use(chain[: self._prefixes.longest(chain)])
        self._waiting[export.number] = export

    def end(self, number: int) -> None:
        """End an export that the peer read, or that no peer will read."""
        self._waiting.pop(number, None)
        for pool, slot in self._pinned.pop(number, ()):
            self._prefixes.unpin(pool, slot)

    def advance(self) -> None:
        """Answer the exports whose blocks are copied."""
        for export in list(self._waiting.values()):
            chain = self._find(export.prefix)
            chain = chain[: self._prefixes.longest(chain)]
            if not self._prefixes.has_wishes_for(chain):
                del self._waiting[export.number]
                self._answer(export, chain)

    def _answer(self, export: Export, chain: list[Prefix]) -> None:
        prefixes = self._prefixes
        # Some blocks may have no copy, if host memory lacks room.
        chain = chain[: self._num_copied(chain)]
        slots = prefixes.slots_of(chain, export.num_known)
        most = prefixes.num_slots
        while chain and any(
            sum(pool == each for pool, _ in slots) > count // _SHARE
            for each, count in enumerate(most)
        ):
            del chain[len(chain) // 2 :]
            del chain[self._num_copied(chain) :]
            slots = prefixes.slots_of(chain, export.num_known)
        for pool, slot in slots:
            prefixes.pin(pool, slot)
        self._pinned[export.number] = slots
        self.exported_total += len(slots)
        self._send(Exported(export.number, slots))

    def _num_copied(self, chain: list[Prefix]) -> int:
        """Count the prefixes of `chain` that are usable by their copies alone."""
        copied = takewhile(self._prefixes.is_useful, map(_Copied, chain))
        return self._prefixes.longest(list(copied))

    def _find(self, names: PrefixNames) -> list[Prefix]:
        return self._prefixes.find(names.root, names_of(names, self._block_size))


def names_of(prefix: PrefixNames, block_size: int) -> list[tuple[bytes, tuple[int, ...]]]:
    """Return the chained hash and the tokens of each block."""
    ids = memoryview(prefix.token_ids).cast("I")
    return [
        (digest, tuple(ids[index * block_size : (index + 1) * block_size]))
        for index, digest in enumerate(prefix.digests)
    ]
