"""The number of KV blocks in each pool."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from penstock_shard.config import ShardConfig
from penstock_shard.errors import ModelError
from penstock_shard.ipc.runner_info import CacheGroup, blocks_each, pools_for

# Without flags, a cpu shard takes this many bytes for KV blocks, or more if one sequence of full
# length needs more, but at most this share of free memory.
_CPU_KV_BYTES = 256 * 2**20
_CPU_SHARE = 0.5
# A pool gets more blocks than this only if one sequence needs them. A block without layers takes no
# memory except the host's records of 512 bytes, so its pool needs a bound.
_MOST_BLOCKS = 2**20
RECORD_BYTES = 512
# Pools are sized for equally many sequences, each this many times as long as the widest window.
# With longer sequences, short ones would run out of blocks first; with shorter sequences, long ones
# would. A state counts as a window of the step's own tokens.
_REFERENCE_WINDOWS = 4
# Each sequence that pools are sized for has room for its own state and this many kept states.
KEPT_STATES = 2


@dataclass(frozen=True, slots=True)
class KVShape:
    """The size of a KV block in each pool, and the blocks that sequences need."""

    block_size: int
    # The bytes of a block, for each pool.
    block_bytes: tuple[int, ...]
    max_model_len: int
    groups: tuple[CacheGroup, ...] = (CacheGroup(),)
    max_chunk_tokens: int = 2**31
    # The number of states that layers get before the rest of the memory goes to KV blocks.
    num_states: int = 1

    def blocks_for(self, num_tokens: int) -> list[int]:
        """Return the most blocks of each pool that a sequence of `num_tokens` tokens has at
        once.
        """
        counts = [0] * len(self.block_bytes)
        for group in self.groups:
            most = group.most_blocks(self.max_chunk_tokens, self.block_size)
            counts[group.pool] += min(-(-num_tokens // self.block_size), most)
        return counts

    def bytes_of(self, pools: Sequence[int]) -> int:
        return sum(count * size for count, size in zip(pools, self.block_bytes, strict=True))

    @property
    def bytes_per_token(self) -> int:
        """The bytes of one token in all groups."""
        return self.bytes_of(pools_for(1, self.groups)) // self.block_size

    @property
    def bytes_per_sequence(self) -> int:
        """The bytes of a sequence of full length."""
        return self.bytes_of(self.blocks_for(self.max_model_len))

    def sequences_in(self, pools: Sequence[int]) -> int:
        """Return how many sequences of full length fit into pools of these sizes."""
        one = self.blocks_for(self.max_model_len)
        return min(size // count for size, count in zip(pools, one, strict=True))

    def tokens_in(self, num_bytes: int) -> int:
        """Return the length of the longest sequence of whole blocks that fits into `num_bytes`."""
        fits, too_long = 0, -(-self.max_model_len // self.block_size) + 1
        while too_long - fits > 1:
            middle = (fits + too_long) // 2
            if self.bytes_of(self.blocks_for(middle * self.block_size)) <= num_bytes:
                fits = middle
            else:
                too_long = middle
        return fits * self.block_size

    @property
    def state_bytes(self) -> int:
        """The bytes of one sequence's states."""
        return self.bytes_of([0 if count else 1 for count in pools_for(1, self.groups)])

    def divide(self, num_bytes: int, *, only_blocks: bool = False) -> list[int]:
        """Divide `num_bytes`, which suffice for one sequence of full length, into blocks of each
        pool. After that sequence, at most `num_states` states get memory. The rest is divided as
        for a reference sequence, or only among KV blocks.
        """
        pools, length = self.blocks_for(self.max_model_len), self.max_model_len
        left = num_bytes - self.bytes_of(pools)
        states = min(self.num_states - 1, left // self.state_bytes) if self.state_bytes else 0
        left -= states * self.state_bytes
        reaches = [group.reach or 0 for group in self.groups if group.most_blocks(1, 1) < 2**31]
        if reaches:
            length = min(length, _REFERENCE_WINDOWS * (max(reaches) + self.max_chunk_tokens))
        reference = self.blocks_for(length)
        for group in self.groups:
            if group.has_state:
                pools[group.pool] += states
                reference[group.pool] = 0 if only_blocks else 1 + KEPT_STATES
        each = self.bytes_of(reference)
        return [count + left * more // each for count, more in zip(pools, reference, strict=True)]


def choose_pools(shape: KVShape, config: ShardConfig, free_bytes: int, on_cpu: bool) -> list[int]:
    """Return the number of KV blocks of each pool, from the flags or else from memory. Blocks that
    requests do not need keep prefixes.

    KV blocks may take at most `free_bytes`. Raises ModelError if not even one sequence of
    max_model_len fits. On cpu it also raises if the flags ask for more than is free: the system
    commits memory only on the first write, and would kill the process then.
    """
    one = shape.bytes_per_sequence
    more_states = max(0, shape.num_states - 1) * shape.state_bytes
    block = shape.bytes_of(pools_for(1, shape.groups))
    if config.kv_blocks is not None:
        budget, flag = config.kv_blocks * block + shape.state_bytes, "--kv-blocks"
    elif config.kv_memory_bytes is not None:
        budget, flag = config.kv_memory_bytes, "--kv-memory"
    else:
        budget = free_bytes
        if on_cpu:
            budget = min(max(_CPU_KV_BYTES, one + more_states), int(free_bytes * _CPU_SHARE))
        budget = min(budget, max(_MOST_BLOCKS * block, one + more_states))
        flag = "--kv-memory" if on_cpu else "--gpu-memory-utilization"
    if budget < block:
        raise ModelError(f"KV cache: not one block of {shape.block_size} tokens fits; raise {flag}")
    if budget < one:
        raise ModelError(_too_short(shape, budget, flag))
    if config.kv_blocks is not None:
        budget += more_states
    pools = shape.divide(budget, only_blocks=config.kv_blocks is not None)
    if on_cpu and shape.bytes_of(pools) > free_bytes:
        raise ModelError(no_room(shape, pools, free_bytes, flag))
    return pools


def _too_short(shape: KVShape, num_bytes: int, flag: str) -> str:
    fits = shape.tokens_in(num_bytes)
    if not fits and shape.state_bytes:
        return (
            f"KV cache: {num_bytes} bytes are too few for one sequence: its states take "
            f"{shape.state_bytes}; raise {flag}"
        )
    needed = -(-shape.max_model_len // shape.block_size)
    return (
        f"KV cache: {fits // shape.block_size} blocks of {shape.block_size} tokens fit "
        f"({fits} tokens), but one sequence of {shape.max_model_len} tokens needs {needed}; "
        f"lower --max-model-len to {fits} or raise {flag}"
    )


def no_room(shape: KVShape, pools: Sequence[int], free_bytes: int, flag: str) -> str:
    most = max(0, free_bytes // shape.bytes_of(pools_for(1, shape.groups)))
    num_blocks, mebibytes = blocks_each(pools, shape.groups), shape.bytes_of(pools) >> 20
    return f"KV cache: no room for {num_blocks} blocks ({mebibytes} MiB): {most} fit; lower {flag}"


def describe_blocks(shape: KVShape, pools: Sequence[int], config: ShardConfig, on_cpu: bool) -> str:
    """Return one line for the log: the size, and on cpu how to get more than the default."""
    num_blocks, mebibytes = blocks_each(pools, shape.groups), shape.bytes_of(pools) >> 20
    size = f"{num_blocks} blocks of {shape.block_size} tokens"
    states = [pools[group.pool] for group in shape.groups if group.has_state]
    size += f" and {states[0]} states ({mebibytes} MiB)" if states else f" ({mebibytes} MiB)"
    is_default = config.kv_blocks is None and config.kv_memory_bytes is None
    more = (
        "; the default on cpu is small, --kv-memory gives it more" if on_cpu and is_default else ""
    )
    return f"KV cache: {size}{more}"
