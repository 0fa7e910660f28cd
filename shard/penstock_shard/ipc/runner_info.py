"""Facts about what an engine serves: for GetInfo and for checking requests."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from penstock_proto.facts import Adapter, EmbeddingDefaults, FieldBound, ModelShape


@dataclass(frozen=True, slots=True)
class CacheGroup:
    """Layers that see the same keys, so that one block table of a sequence serves all of them.

    A query sees the keys up to its own position. With a `window`, it sees only the last `window` of
    these. With a `chunk`, it sees those from the last multiple of `chunk` on. `pool` is the index
    of the pool with the group's blocks. With `bidirectional_images`, a token of an image also sees
    the image's later tokens, so all of them are computed together.
    """

    window: int | None = None
    chunk: int | None = None
    pool: int = 0
    # True if layers have a state instead of keys: a sequence's only block is its state.
    has_state: bool = False
    bidirectional_images: bool = False

    @property
    def reach(self) -> int | None:
        """The largest number of keys that a query sees; None without a bound."""
        return self.window if self.chunk is None else self.chunk

    def first_visible(self, position: int) -> int:
        """Return the first position that a query at `position` sees."""
        if self.chunk is not None:
            return position // self.chunk * self.chunk
        return 0 if self.window is None else max(0, position - self.window + 1)

    def most_blocks(self, max_chunk_tokens: int, block_size: int) -> int:
        """Return how many blocks a sequence needs at most if a step computes `max_chunk_tokens`."""
        if self.has_state:
            return 1
        if self.reach is None:
            return 2**31
        return -(-(self.reach + max_chunk_tokens) // block_size) + 1


def pools_for(num_blocks: int, groups: Sequence[CacheGroup]) -> list[int]:
    """Return the sizes of pools in which each group has `num_blocks`, and no states."""
    pools = [0] * (1 + max(group.pool for group in groups))
    for group in groups:
        pools[group.pool] += 0 if group.has_state else num_blocks
    return pools


def blocks_each(pools: Sequence[int], groups: Sequence[CacheGroup]) -> int:
    """Count the blocks of each group if all have equally many: as many as the scarcest pool
    allows.
    """
    one = pools_for(1, groups)
    return min(size // count for size, count in zip(pools, one, strict=True) if count)


@dataclass(frozen=True, slots=True)
class RunnerInfo:
    """Facts about what the runner serves, for GetInfo and for checking requests."""

    architecture: str
    weights_hash: str
    vocab_size: int
    max_model_len: int
    eos_token_ids: tuple[int, ...]
    # Defaults from the model's generation_config: names of sampling parameters to values.
    default_sampling: dict[str, float]
    block_size: int
    # The number of blocks in each pool.
    pools: tuple[int, ...]
    dtype: str
    kv_dtype: str
    device: str
    attention_backend: str
    # Features that requests may use; see `penstock_shard.server.validation`.
    capabilities: frozenset[str]
    # Bounds of some features, and features not honoured in requests that bring output.
    bounds: tuple[FieldBound, ...] = ()
    uncontinued: frozenset[str] = frozenset()
    # Set if "embed" is among the capabilities.
    embedding: EmbeddingDefaults | None = None
    batch_invariant: bool = False
    numerics_fingerprint: str = ""
    # How many steps may be launched after the oldest uncollected one. 1 keeps a device busy while
    # results are handled; 0 collects each step before the next is scheduled.
    max_steps_ahead: int = 0
    # The largest number of prompt tokens with log-probabilities in a step.
    max_scored_tokens: int = 2**31
    # Seconds of the largest step in the trial at load; 0 without a trial.
    worst_step_s: float = 0.0
    # Loaded adapters, if "adapter" is a capability.
    adapters: tuple[Adapter, ...] = ()
    cache_groups: tuple[CacheGroup, ...] = (CacheGroup(),)
    # Bytes of a block of each cache group; empty if blocks cannot be copied.
    block_bytes: tuple[int, ...] = ()
    # The number of tokens between states that are cached for other sequences.
    state_spacing: int = 512
    # Bytes of keys and values for a token in all layers, and for a sequence of `max_model_len`; and
    # the number of such sequences that fit. 0 if unknown.
    kv_bytes_per_token: int = 0
    kv_bytes_per_sequence: int = 0
    kv_sequences: int = 0
    # Bytes of a sequence's states; 0 without states.
    state_bytes: int = 0
    shape: ModelShape = field(default_factory=ModelShape)

    @property
    def num_states(self) -> int:
        """Count the states that fit; 0 if no layer has a state."""
        return sum(self.pools[group.pool] for group in self.cache_groups if group.has_state)

    @property
    def num_blocks(self) -> int:
        """Count the KV blocks of each cache group if all have equally many."""
        return blocks_each(self.pools, self.cache_groups)
