"""The blocks of one size: which are free, who refers to how many, and what is cached in them."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable
from typing import NamedTuple

from penstock_shard.kv_cache.prefix_tree import Prefix


class CachedBlock(NamedTuple):
    """What a block holds: the last tokens of a prefix, for the layers of a group.

    `insertion` counts all that was ever cached.
    """

    prefix: Prefix
    group: int
    insertion: int


class BlockPool:
    """Gives out the blocks 0 .. num_blocks - 1. A block is free (nobody refers to it) or
    referenced. What is cached in it is found after it is freed too, until its memory is needed:
    blocks in which nothing is cached are reused first, then the least recently freed.
    """

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.cached: dict[int, CachedBlock] = {}
        self._references = [0] * num_blocks
        # Free blocks, the next to be reused first. Values are unused.
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_blocks))

    @property
    def num_free(self) -> int:
        return len(self._free)

    def take(self) -> tuple[int, CachedBlock | None]:
        """A free block, and what was cached in it until now."""
        block_id, _ = self._free.popitem(last=False)
        self._references[block_id] = 1
        return block_id, self.cached.pop(block_id, None)

    def refer(self, block_id: int) -> None:
        """One more refers to a block, which may be free."""
        if self._references[block_id] == 0:
            del self._free[block_id]
        self._references[block_id] += 1

    def touch(self, block_id: int) -> None:
        """Of those to which nobody refers, it is reused last."""
        if block_id in self._free:
            self._free.move_to_end(block_id)

    def num_references(self, block_id: int) -> int:
        """How many refer to a block."""
        return self._references[block_id]

    def release(self, block_ids: Iterable[int]) -> None:
        """One less refers to each of them."""
        for block_id in block_ids:
            self._references[block_id] -= 1
            if self._references[block_id] == 0:
                self._free[block_id] = None
                if block_id not in self.cached:
                    # It holds nothing that anybody could find.
                    self._free.move_to_end(block_id, last=False)

    def check_integrity(
        self,
        counted: list[int],
        places_of: Callable[[Prefix], list[int]] = lambda prefix: prefix.block_ids,
    ) -> None:
        """Compare with references counted from the block tables, and names with what prefixes have.

        Raises:
            AssertionError: the counts do not agree; the text has the numbers.
        """
        wrong = [i for i in range(self.num_blocks) if counted[i] != self._references[i]]
        assert not wrong, (
            f"blocks {wrong[:8]}: counted {[counted[i] for i in wrong[:8]]} references, "
            f"kept {[self._references[i] for i in wrong[:8]]}"
        )
        referenced = sum(1 for count in counted if count)
        assert referenced + len(self._free) == self.num_blocks, (
            f"{referenced} referenced + {len(self._free)} free != {self.num_blocks} blocks"
        )
        misnamed = [
            block_id
            for block_id, (prefix, group, _) in self.cached.items()
            if places_of(prefix)[group] != block_id
        ]
        assert not misnamed, f"blocks {misnamed[:8]} are cached under prefixes that have others"
