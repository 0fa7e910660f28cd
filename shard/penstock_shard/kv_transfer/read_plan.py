"""Which blocks of a prefix to fetch from elsewhere: as far as it can be used when they are here."""

from __future__ import annotations

from collections import abc
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from penstock_shard.kv_cache.prefix_cache import PrefixCache
from penstock_shard.kv_cache.prefix_tree import Prefix

# Whether a place has the block of a group and a chained hash.
HasBlock = Callable[[int, bytes], bool]


@dataclass(frozen=True, slots=True)
class Chain:
    """The full blocks of a sequence without its last token: the root, and each block's chained hash
    and tokens.
    """

    root: bytes
    is_salted: bool
    names: abc.Sequence[tuple[bytes, tuple[int, ...]]]


@dataclass(frozen=True, slots=True)
class ReadPlan:
    """Blocks to fetch, from the shortest prefix on. The last prefix has a user more, who ends with
    `PrefixCache.leave`. There are `num_found` blocks without them, `num_blocks` with them.
    """

    last: Prefix
    blocks: abc.Sequence[tuple[Prefix, int]]
    num_found: int
    num_blocks: int


@dataclass(frozen=True, slots=True)
class _Candidate:
    """A prefix, known here or not."""

    known: Prefix | None
    digest: bytes
    has_block: HasBlock

    def has(self, group: int) -> bool:
        here = self.known is not None and self.known.has(group)
        return here or self.has_block(group, self.digest)


def plan_reads(prefixes: PrefixCache, chain: Chain, has_block: HasBlock) -> ReadPlan | None:
    """None if a prefix is no longer with what `has_block` has."""
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
