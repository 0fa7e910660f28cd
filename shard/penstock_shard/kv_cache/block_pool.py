"""A pool of KV blocks of one size: free blocks, references, and cached contents."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable
from typing import NamedTuple

from penstock_shard.kv_cache.prefix_tree import Prefix


class CachedBlock(NamedTuple):
    """A block's contents: the last tokens of a prefix, for the layers of a group. `insertion` is
    the block's number in the order in which blocks were cached.
    """

    prefix: Prefix
    group: int
    insertion: int


class BlockPool:
    """Gives out blocks 0 .. num_blocks - 1. A block is free or referenced, and stays cached until
    it is reused. Blocks in which nothing is cached are reused first, then the least recently freed,
    and retained blocks last.
    """

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.cached: dict[int, CachedBlock] = {}
        self._references = [0] * num_blocks
        # Free blocks in the order of reuse (an ordered set).
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_blocks))
        # Free retained blocks in the order of reuse; and all retained blocks.
        self._free_retained: OrderedDict[int, None] = OrderedDict()
        self._retained: set[int] = set()
        self.retained_taken_total = 0

    @property
    def num_free(self) -> int:
        return len(self._free) + len(self._free_retained)

    @property
    def num_free_unretained(self) -> int:
        return len(self._free)

    @property
    def num_retained(self) -> int:
        return len(self._retained)

    def is_retained(self, block_id: int) -> bool:
        return block_id in self._retained

    def retain(self, block_id: int) -> None:
        """Have a block reused only after all blocks that are not retained, until `let_go`."""
        self._retained.add(block_id)
        if block_id in self._free:
            del self._free[block_id]
            self._free_retained[block_id] = None

    def let_go(self, block_id: int) -> None:
        """End a block's retention, as if it had been freed now."""
        self._retained.discard(block_id)
        if block_id in self._free_retained:
            del self._free_retained[block_id]
            self._free[block_id] = None

    def uncache(self, block_id: int) -> None:
        del self.cached[block_id]
        self._retained.discard(block_id)
        if block_id in self._free_retained:
            del self._free_retained[block_id]
            self._free[block_id] = None
        if block_id in self._free:
            self._free.move_to_end(block_id, last=False)

    def take(self) -> tuple[int, CachedBlock | None]:
        """Take a free block. Returns it, and what was cached in it."""
        if self._free:
            block_id, _ = self._free.popitem(last=False)
        else:
            block_id, _ = self._free_retained.popitem(last=False)
            self.retained_taken_total += 1
        self._retained.discard(block_id)
        self._references[block_id] = 1
        return block_id, self.cached.pop(block_id, None)

    def refer(self, block_id: int) -> None:
        """Add a reference to a block, which may be free."""
        if self._references[block_id] == 0:
            free = self._free if block_id in self._free else self._free_retained
            del free[block_id]
        self._references[block_id] += 1

    def touch(self, block_id: int) -> None:
        """Move a free block to the end of its queue, so that it is reused last."""
        for free in (self._free, self._free_retained):
            if block_id in free:
                free.move_to_end(block_id)

    def num_references(self, block_id: int) -> int:
        return self._references[block_id]

    def release(self, block_ids: Iterable[int]) -> None:
        for block_id in block_ids:
            self._references[block_id] -= 1
            if self._references[block_id] == 0:
                if block_id not in self.cached:
                    self._retained.discard(block_id)
                    self._free[block_id] = None
                    self._free.move_to_end(block_id, last=False)
                elif block_id in self._retained:
                    self._free_retained[block_id] = None
                else:
                    self._free[block_id] = None

    def check_integrity(
        self,
        counted: list[int],
        places_of: Callable[[Prefix], list[int]] = lambda prefix: prefix.block_ids,
    ) -> None:
        """Compare references with `counted`, the counts from the block tables, and cached blocks
        with their prefixes.

        Raises:
            AssertionError: the counts do not agree. The text has the numbers.
        """
        wrong = [i for i in range(self.num_blocks) if counted[i] != self._references[i]]
        assert not wrong, (
            f"blocks {wrong[:8]}: counted {[counted[i] for i in wrong[:8]]} references, "
            f"kept {[self._references[i] for i in wrong[:8]]}"
        )
        referenced = sum(1 for count in counted if count)
        assert referenced + self.num_free == self.num_blocks, (
            f"{referenced} referenced + {self.num_free} free != {self.num_blocks} blocks"
        )
        assert self._free_retained.keys() <= self._retained, "blocks are set apart for nothing"
        assert self._retained <= self.cached.keys(), "blocks are retained that hold nothing"
        misnamed = [
            block_id
            for block_id, (prefix, group, _) in self.cached.items()
            if places_of(prefix)[group] != block_id
        ]
        assert not misnamed, f"blocks {misnamed[:8]} are cached under prefixes that have others"
