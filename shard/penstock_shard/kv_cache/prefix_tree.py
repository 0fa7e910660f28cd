"""The tree of known prefixes: their tokens, and the blocks with their keys and values."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from penstock_shard.kv_cache.doubt import Doubt

# A missing block or slot.
NO_BLOCK = -1


@dataclass(slots=True, eq=False)
class Prefix:
    """The tokens up to the end of a block.

    Hashes may collide or be forged: `digest`, the chained hash, only finds a prefix. The parent
    object and the last block's tokens identify it. For each cache group, `block_ids` has the block
    with the last tokens' keys and values, and `slots` the slot of its copy in host memory, or
    `NO_BLOCK`. A root, the prefix without tokens, has neither.
    """

    digest: bytes
    parent: Prefix | None
    token_ids: tuple[int, ...]
    block_ids: list[int]
    slots: list[int]
    # The number of blocks before the last one.
    index: int
    # True if its root has a salt.
    is_salted: bool = False
    # Doubt about its blocks; None if they are right.
    doubt: Doubt | None = field(default=None, repr=False)
    # Counts children, sequences that may add children, and others that need this prefix.
    num_users: int = field(default=0, repr=False)
    # Counts retained entries that end with this prefix, and its retained children.
    num_retained: int = field(default=0, repr=False)

    def has(self, group: int) -> bool:
        """Tell whether the device or host memory has the prefix's block of a group."""
        return self.block_ids[group] != NO_BLOCK or self.slots[group] != NO_BLOCK

    def chain(self) -> Iterator[Prefix]:
        """Yield this prefix and its ancestors, longest first, without the root."""
        prefix: Prefix | None = self
        while prefix is not None and prefix.parent is not None:
            yield prefix
            prefix = prefix.parent

    @property
    def is_empty(self) -> bool:
        # NO_BLOCK is negative.
        return max(self.block_ids, default=NO_BLOCK) < 0 and max(self.slots, default=NO_BLOCK) < 0


class PrefixTree:
    """Owns the prefixes that have cached or copied blocks, and their ancestors.

    A prefix outlives its blocks while a longer prefix has some: with a window, a sequence that
    continues the longer prefix does not need the early blocks.
    """

    def __init__(self, num_groups: int) -> None:
        self._num_groups = num_groups
        self._by_digest: dict[bytes, Prefix] = {}

    def __len__(self) -> int:
        return len(self._by_digest)

    def find(
        self, parent: Prefix | None, digest: bytes, token_ids: tuple[int, ...] = ()
    ) -> Prefix | None:
        """Find the prefix that adds these tokens to `parent`; without `parent`, a root."""
        prefix = self._by_digest.get(digest)
        if prefix is None or prefix.parent is not parent or prefix.token_ids != token_ids:
            return None
        return prefix

    def named(self, digest: bytes) -> Prefix | None:
        """Find the prefix with this hash, whatever its parent and tokens."""
        return self._by_digest.get(digest)

    def add(
        self,
        parent: Prefix | None,
        digest: bytes,
        token_ids: tuple[int, ...] = (),
        *,
        is_salted: bool = False,
    ) -> Prefix:
        """Add a prefix that `find` does not find. It replaces any other prefix with the same
        hash.
        """
        num_blocks = 0 if parent is None else self._num_groups
        nowhere = [NO_BLOCK] * num_blocks
        index = -1 if parent is None else parent.index + 1
        prefix = Prefix(digest, parent, token_ids, nowhere, nowhere.copy(), index, is_salted)
        if parent is not None:
            parent.num_users += 1
        self._by_digest[digest] = prefix
        return prefix

    def prune(self, prefix: Prefix) -> None:
        """Forget a prefix without users and blocks, and the ancestors that only it used. Call it
        once, when the prefix loses its last user or block.
        """
        while not prefix.num_users and prefix.is_empty:
            if self._by_digest.get(prefix.digest) is prefix:
                del self._by_digest[prefix.digest]
            if prefix.parent is None:
                return
            prefix = prefix.parent
            prefix.num_users -= 1

    def leave(self, prefix: Prefix) -> None:
        prefix.num_users -= 1
        self.prune(prefix)

    def check_integrity(self, users: Iterable[Prefix]) -> None:
        """Recount each prefix's users. `users` has a prefix once for each of its users, except its
        children.

        Raises:
            AssertionError: a prefix has fewer users than were counted, or nothing needs it.
        """
        counted = Counter(map(id, users))
        counted.update(id(each.parent) for each in self._by_digest.values() if each.parent)
        for prefix in self._by_digest.values():
            # A replaced prefix may still be counted as a user of its parent.
            found = counted[id(prefix)]
            assert prefix.num_users >= found, f"{prefix}: {found} users, {prefix.num_users} kept"
            needed = prefix.num_users or not prefix.is_empty
            assert needed, f"{prefix}: is kept for nothing"
