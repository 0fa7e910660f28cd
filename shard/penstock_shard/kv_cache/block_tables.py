"""A sequence's blocks in each cache group, and the copies still to be loaded into them."""

from __future__ import annotations

from dataclasses import dataclass, field

from penstock_shard.kv_cache.doubt import Doubt
from penstock_shard.kv_cache.kept_states import Boundaries
from penstock_shard.kv_cache.prefix_tree import NO_BLOCK, Prefix


@dataclass(slots=True)
class GroupBlocks:
    """One sequence's blocks in one group, in the order of its tokens. Blocks below index `first`
    were given back, or never taken.
    """

    ids: list[int] = field(default_factory=list)
    first: int = 0


@dataclass(slots=True)
class Load:
    """A copy in host memory, to load into the sequence's block number `index`. `block_id` is
    `NO_BLOCK` until the sequence has that block.
    """

    prefix: Prefix
    group: int
    index: int
    slot: int
    block_id: int = NO_BLOCK
    is_done: bool = False


@dataclass(slots=True)
class BlockTable:
    groups: list[GroupBlocks]
    # Chained hashes of the sequence's full blocks, computed when needed.
    hashes: list[bytes]
    boundaries: Boundaries
    loads: list[Load] = field(default_factory=list)
    # The number of cached full blocks of the sequence, and the prefix that they make.
    num_cached: int = 0
    prefix: Prefix | None = None
    # Doubt about cached blocks that the sequence uses.
    doubt: Doubt | None = None
