"""What a sequence has of blocks in each cache group, and what is still to be copied into them."""

from __future__ import annotations

from dataclasses import dataclass, field

from penstock_shard.kv_cache.doubt import Doubt
from penstock_shard.kv_cache.kept_states import Boundaries
from penstock_shard.kv_cache.prefix_tree import NO_BLOCK, Prefix


@dataclass(slots=True)
class GroupBlocks:
    """The blocks of one sequence in one group, by index in the order of its tokens. Those below
    `first` were given back, or never taken.
    """

    ids: list[int] = field(default_factory=list)
    first: int = 0


@dataclass(slots=True)
class Load:
    """A copy in host memory that a sequence needs in a block of its own: at `index` in the order of
    its tokens; `block_id` is `NO_BLOCK` until it has one.
    """

    prefix: Prefix
    group: int
    index: int
    slot: int
    block_id: int = NO_BLOCK
    is_done: bool = False


@dataclass(slots=True)
class BlockTable:
    """What one sequence has."""

    groups: list[GroupBlocks]
    # Chained hashes of the full blocks of its tokens, as far as they were needed.
    hashes: list[bytes]
    # Where its states are kept.
    boundaries: Boundaries
    # What is to be copied from host memory before it runs.
    loads: list[Load] = field(default_factory=list)
    # How many of its full blocks are cached, or were found there; and the prefix of these.
    num_cached: int = 0
    prefix: Prefix | None = None
    # Of the blocks that it found.
    doubt: Doubt | None = None
