"""Facts that an engine tells of what it serves: for GetInfo, and for checking requests."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from penstock_proto.facts import Adapter, EmbeddingDefaults, FieldBound, ModelShape


@dataclass(frozen=True, slots=True)
class CacheGroup:
    """Layers that see the same keys, so that one block table of a sequence serves all of them.

    A query at position p sees all keys up to its own; with a `window` the last so many of them, its
    own included; with a `chunk` those from the last multiple of it on. `pool` is the index of the
    pool that the group's blocks come from. With `bidirectional_images` tokens of an image see all
    of it besides, later ones too: none is computed without the others.
    """

    window: int | None = None
    chunk: int | None = None
    pool: int = 0
    # Layers have a state in place of keys: a sequence has one block, which is its state.
    has_state: bool = False
    bidirectional_images: bool = False

    @property
    def reach(self) -> int | None:
        """The most keys that a query sees; None without a bound."""
        return self.window if self.chunk is None else self.chunk

    def first_visible(self, position: int) -> int:
        """The first position that a query at this one sees."""
        if self.chunk is not None:
            return position // self.chunk * self.chunk
        return 0 if self.window is None else max(0, position - self.window + 1)

    def most_blocks(self, max_chunk_tokens: int, block_size: int) -> int:
        """The most blocks that a sequence needs at once if a step computes so many tokens of it."""
        if self.has_state:
            return 1
        if self.reach is None:
            return 2**31
        return -(-(self.reach + max_chunk_tokens) // block_size) + 1


def pools_for(num_blocks: int, groups: Sequence[CacheGroup]) -> list[int]:
    """The sizes of pools in which each group has so many blocks; of states, none."""
    pools = [0] * (1 + max(group.pool for group in groups))
    for group in groups:
        pools[group.pool] += 0 if group.has_state else num_blocks
    return pools


def blocks_each(pools: Sequence[int], groups: Sequence[CacheGroup]) -> int:
    """Count the blocks each group has, if all have equally many, in pools of these sizes; as many
    as the scarcest pool has.
    """
    one = pools_for(1, groups)
    return min(size // count for size, count in zip(pools, one, strict=True) if count)


@dataclass(frozen=True, slots=True)
class RunnerInfo:
    """Facts of what the runner serves, for GetInfo and for checking sequences."""

    architecture: str
    weights_hash: str
    vocab_size: int
    max_model_len: int
    eos_token_ids: tuple[int, ...]
    # Defaults from the model's generation_config: SamplingParams field names to values.
    default_sampling: dict[str, float]
    block_size: int
    # How many KV blocks there are, of each pool.
    pools: tuple[int, ...]
    dtype: str
    kv_dtype: str
    device: str
    attention_backend: str
    # What requests may ask of this runner; see `penstock_shard.server.validation`.
    capabilities: frozenset[str]
    # How far it honours some of that, and what it does not in requests that bring output.
    bounds: tuple[FieldBound, ...] = ()
    uncontinued: frozenset[str] = frozenset()
    # Set if "embed" is among the capabilities.
    embedding: EmbeddingDefaults | None = None
    batch_invariant: bool = False
    numerics_fingerprint: str = ""
    # How many steps may be launched beyond the oldest that is not collected: 1 keeps a device busy
    # while results are handled, 0 collects each step before the next is scheduled.
    max_steps_ahead: int = 0
    # Prompt tokens of a step whose log-probabilities are wanted, over all rows.
    max_scored_tokens: int = 2**31
    # How long the largest step took in the trial at load; 0 if none was run.
    worst_step_s: float = 0.0
    # Loaded adapters, if "adapter" is among the capabilities.
    adapters: tuple[Adapter, ...] = ()
    # What layers keep of a sequence's tokens.
    cache_groups: tuple[CacheGroup, ...] = (CacheGroup(),)
    # Bytes of a block of each cache group; empty where blocks cannot be copied.
    block_bytes: tuple[int, ...] = ()
    # Where layers have states, these are kept for others every so many tokens.
    state_spacing: int = 512
    # Bytes of keys and values: of a token in all layers, and of a sequence of `max_model_len`; and
    # how many such sequences there is room for. 0 where that is not known.
    kv_bytes_per_token: int = 0
    kv_bytes_per_sequence: int = 0
    kv_sequences: int = 0
    # Where layers have states: bytes of one sequence's.
    state_bytes: int = 0
    shape: ModelShape = field(default_factory=ModelShape)

    @property
    def num_states(self) -> int:
        """Count the states there is room for; 0 where no layer has one."""
        return sum(self.pools[group.pool] for group in self.cache_groups if group.has_state)

    @property
    def num_blocks(self) -> int:
        """KV blocks of each cache group, if all have equally many."""
        return blocks_each(self.pools, self.cache_groups)
