"""How many KV blocks to have."""

from __future__ import annotations

from dataclasses import dataclass

from penstock_shard.config import ShardConfig
from penstock_shard.errors import ModelError

# Without flags a cpu shard takes this much for KV blocks, more only to hold one sequence of full
# length, and never more than this share of free memory.
_CPU_KV_BYTES = 256 * 2**20
_CPU_SHARE = 0.5
# More are only taken to hold one sequence: the records of a block take half a kilobyte of the host.
_MOST_BLOCKS = 2**20


@dataclass(frozen=True, slots=True)
class KVShape:
    """The size of a KV block, and what sequences need."""

    block_size: int
    block_bytes: int
    max_model_len: int

    @property
    def blocks_per_sequence(self) -> int:
        return -(-self.max_model_len // self.block_size)


def choose_num_blocks(shape: KVShape, config: ShardConfig, free_bytes: int, on_cpu: bool) -> int:
    """Number of KV blocks: what the flags say, else what memory allows. Blocks that no request
    needs keep prefixes.

    `free_bytes` is the most that KV blocks may take. Raises ModelError if not even one sequence of
    max_model_len fits, or on cpu if the flags ask for more than is free: the system gives memory
    only when it is first written, so too large an allocation would get the process killed later.
    """
    needed = shape.blocks_per_sequence
    if config.kv_blocks is not None:
        blocks, flag = config.kv_blocks, "--kv-blocks"
    elif config.kv_memory_bytes is not None:
        blocks, flag = config.kv_memory_bytes // shape.block_bytes, "--kv-memory"
    else:
        budget = free_bytes
        if on_cpu:
            one = needed * shape.block_bytes
            budget = min(max(_CPU_KV_BYTES, one), int(free_bytes * _CPU_SHARE))
        blocks = min(budget // shape.block_bytes, max(_MOST_BLOCKS, needed))
        flag = "--kv-memory" if on_cpu else "--gpu-memory-utilization"
    if blocks < 1:
        raise ModelError(f"KV cache: not one block of {shape.block_size} tokens fits; raise {flag}")
    if blocks < needed:
        fits = blocks * shape.block_size
        raise ModelError(
            f"KV cache: {blocks} blocks of {shape.block_size} tokens fit ({fits} tokens), but one "
            f"sequence of {shape.max_model_len} tokens needs {needed}; lower --max-model-len to "
            f"{fits} or raise {flag}"
        )
    if on_cpu and blocks * shape.block_bytes > free_bytes:
        raise ModelError(no_room(shape, blocks, free_bytes, flag))
    return blocks


def no_room(shape: KVShape, blocks: int, free_bytes: int, flag: str) -> str:
    """The error message for KV blocks that do not fit."""
    most = max(0, free_bytes // shape.block_bytes)
    return (
        f"KV cache: no room for {blocks} blocks ({blocks * shape.block_bytes >> 20} MiB): "
        f"{most} fit; lower {flag}"
    )


def describe_blocks(shape: KVShape, blocks: int, config: ShardConfig, on_cpu: bool) -> str:
    """One line for the log: how much there is, and on cpu how to get more than the default."""
    size = f"{blocks} blocks of {shape.block_size} tokens ({blocks * shape.block_bytes >> 20} MiB)"
    is_default = config.kv_blocks is None and config.kv_memory_bytes is None
    more = (
        "; the default on cpu is small, --kv-memory gives it more" if on_cpu and is_default else ""
    )
    return f"KV cache: {size}{more}"
