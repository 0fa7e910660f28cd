"""Names of prefixes: which tokens follow which, and in which blocks their keys and values are."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from penstock_shard.kv_cache.doubt import Doubt

# Stands for a block where there is none.
NO_BLOCK = -1


@dataclass(slots=True, eq=False)
class Prefix:
    """All tokens up to the end of a block.

    Hashes may collide or be forged, so what identifies a prefix is its parent, as an object, and
    the tokens of its last block; `digest`, the chained hash, only finds it. `block_ids` has for
    each cache group the block with the keys and values of these last tokens, or `NO_BLOCK`, and
    `slots` where host memory has a copy. One without tokens, where a chain begins, has neither.
    """

    digest: bytes
    parent: Prefix | None
    token_ids: tuple[int, ...]
    block_ids: list[int]
    slots: list[int]
    # The number of blocks before its last.
    index: int
    # Whether its root has a salt.
    is_salted: bool = False
    # Whether its blocks are right; None: they are.
    doubt: Doubt | None = field(default=None, repr=False)
    # Longer prefixes that have it as their parent, and sequences that may add such.
    num_users: int = field(default=0, repr=False)

    def has(self, group: int) -> bool:
        """Whether its last tokens' keys and values of this group are anywhere."""
        return self.block_ids[group] != NO_BLOCK or self.slots[group] != NO_BLOCK

    @property
    def is_empty(self) -> bool:
        """Whether there are none at all."""
        # NO_BLOCK is below all others.
        return max(self.block_ids, default=NO_BLOCK) < 0 and max(self.slots, default=NO_BLOCK) < 0


class PrefixTree:
    """Owns the prefixes of which blocks are cached or copied, and those that lead to them.

    A prefix outlives its own blocks while a longer one has some: with a window, early blocks are
    not needed to go on behind later ones.
    """

    def __init__(self, num_groups: int) -> None:
        self._num_groups = num_groups
        self._by_digest: dict[bytes, Prefix] = {}

    def __len__(self) -> int:
        return len(self._by_digest)

    def find(
        self, parent: Prefix | None, digest: bytes, token_ids: tuple[int, ...] = ()
    ) -> Prefix | None:
        """The prefix of these tokens behind `parent`; without one, where a chain begins."""
        prefix = self._by_digest.get(digest)
        if prefix is None or prefix.parent is not parent or prefix.token_ids != token_ids:
            return None
        return prefix

    def named(self, digest: bytes) -> Prefix | None:
        """The prefix of this hash, whatever leads to it."""
        return self._by_digest.get(digest)

    def add(
        self,
        parent: Prefix | None,
        digest: bytes,
        token_ids: tuple[int, ...] = (),
        *,
        is_salted: bool = False,
    ) -> Prefix:
        """Add a prefix that `find` does not find, in place of any other of its hash."""
        num_blocks = 0 if parent is None else self._num_groups
        nowhere = [NO_BLOCK] * num_blocks
        index = -1 if parent is None else parent.index + 1
        prefix = Prefix(digest, parent, token_ids, nowhere, nowhere.copy(), index, is_salted)
        if parent is not None:
            parent.num_users += 1
        self._by_digest[digest] = prefix
        return prefix

    def prune(self, prefix: Prefix) -> None:
        """Forget it, and what led to it alone, if it has neither users nor blocks. Called once when
        it loses the last of either.
        """
        while not prefix.num_users and prefix.is_empty:
            if self._by_digest.get(prefix.digest) is prefix:
                del self._by_digest[prefix.digest]
            if prefix.parent is None:
                return
            prefix = prefix.parent
            prefix.num_users -= 1

    def leave(self, prefix: Prefix) -> None:
        """A user is gone."""
        prefix.num_users -= 1
        self.prune(prefix)

    def check_integrity(self, users: Iterable[Prefix]) -> None:
        """Recount users: those given, and longer prefixes.

        Raises:
            AssertionError: a prefix has fewer than were counted, or nothing needs it.
        """
        counted = Counter(map(id, users))
        counted.update(id(each.parent) for each in self._by_digest.values() if each.parent)
        for prefix in self._by_digest.values():
            # One that was replaced may still be counted by its parent.
            found = counted[id(prefix)]
            assert prefix.num_users >= found, f"{prefix}: {found} users, {prefix.num_users} kept"
            needed = prefix.num_users or not prefix.is_empty
            assert needed, f"{prefix}: is kept for nothing"
