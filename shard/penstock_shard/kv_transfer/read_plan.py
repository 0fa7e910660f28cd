"""Plans which blocks of a prefix to read from disk or a peer, up to the longest usable prefix."""

from __future__ import annotations

from collections import abc
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from penstock_shard.kv_cache.prefix_cache import PrefixCache
from penstock_shard.kv_cache.prefix_tree import Prefix

# Tells whether a place has a block with this group and chained hash.
HasBlock = Callable[[int, bytes], bool]


@dataclass(frozen=True, slots=True)
class Chain:
    """The full blocks before a sequence's last token: the root, and each block's chained hash and
    tokens.
    """

    root: bytes
    is_salted: bool
    names: abc.Sequence[tuple[bytes, tuple[int, ...]]]


@dataclass(frozen=True, slots=True)
class ReadPlan:
    """Blocks to read, shortest prefix first. They lengthen the usable prefix from `num_found` to
    `num_blocks` blocks. The last prefix has one more user, until `PrefixCache.leave`.
    """

    last: Prefix
    blocks: abc.Sequence[tuple[Prefix, int]]
    num_found: int
    num_blocks: int


@dataclass(frozen=True, slots=True)
class _Candidate:
    """A prefix that this shard may know."""

    known: Prefix | None
    digest: bytes
    has_block: HasBlock

    def has(self, group: int) -> bool:
        here = self.known is not None and self.known.has(group)
        return here or self.has_block(group, self.digest)


def plan_reads(prefixes: PrefixCache, chain: Chain, has_block: HasBlock) -> ReadPlan | None:
    """Plan to read the blocks that `has_block` finds; None if that does not lengthen the usable
    prefix.
    """
    found = prefixes.find(chain.root, chain.names)
    num_found = prefixes.longest(found)
    candidates: list[_Candidate] = []
    for index, (digest, _) in enumerate(chain.names[: prefixes.most_copies]):
        known = found[index] if index < len(found) else None
        candidate = _Candidate(known, digest, has_block)
        if not prefixes.is_useful(candidate):
            break
        candidates.append(candidate)
    count = prefixes.longest(candidates)
    if count <= num_found:
        return None
    line = [prefixes.root(chain.root, is_salted=chain.is_salted)]
    for digest, token_ids in chain.names[:count]:
        line.append(prefixes.child(line[-1], digest, token_ids))
    line[-1].num_users += 1
    prefixes.use(line[1:])
    return ReadPlan(line[-1], list(_lacking(prefixes, line[1:])), num_found, count)


def _lacking(prefixes: PrefixCache, line: abc.Sequence[Prefix]) -> Iterator[tuple[Prefix, int]]:
    firsts = [prefixes.first_needed(group, len(line)) for group in range(prefixes.num_groups)]
    for prefix in line:
        for group, first in enumerate(firsts):
            if prefix.index >= first and not prefix.has(group):
                yield prefix, group
