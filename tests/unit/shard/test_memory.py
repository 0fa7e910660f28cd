"""How many KV blocks a shard gets, and what it says when they are too few."""

from __future__ import annotations

import pytest

from penstock_shard.config import ShardConfig
from penstock_shard.models.errors import ModelError
from penstock_shard.runner.memory import KVShape, choose_num_blocks, free_host_bytes

MIB = 2**20
# One sequence: 128 blocks of half a MiB.
SHAPE = KVShape(block_size=16, block_bytes=MIB // 2, max_model_len=2048, max_num_seqs=64)


def blocks(
    config: ShardConfig, *, shape: KVShape = SHAPE, free: int = 8192 * MIB, on_cpu: bool = True
) -> int:
    return choose_num_blocks(shape, config, free, on_cpu)


def test_flags_decide() -> None:
    assert blocks(ShardConfig(kv_blocks=200)) == 200
    assert blocks(ShardConfig(kv_memory_bytes=100 * MIB)) == 200


def test_cpu_default_is_modest() -> None:
    assert blocks(ShardConfig()) == 512


def test_cpu_default_holds_one_sequence_of_full_length() -> None:
    long = KVShape(16, MIB // 2, max_model_len=16_384, max_num_seqs=64)
    assert blocks(ShardConfig(), shape=long) == 1024


def test_cpu_default_leaves_half_of_what_is_free() -> None:
    assert blocks(ShardConfig(), free=200 * MIB) == 200


def test_no_more_blocks_than_requests_can_use() -> None:
    small = KVShape(16, 1024, max_model_len=32, max_num_seqs=4)
    assert blocks(ShardConfig(), shape=small) == 8
    assert blocks(ShardConfig(), shape=small, on_cpu=False) == 8


def test_gpu_takes_what_is_free() -> None:
    assert blocks(ShardConfig(), free=1000 * MIB, on_cpu=False) == 2000


@pytest.mark.parametrize(
    ("config", "free", "on_cpu", "flag"),
    [
        (ShardConfig(kv_blocks=100), 8192 * MIB, True, "--kv-blocks"),
        (ShardConfig(kv_memory_bytes=50 * MIB), 8192 * MIB, True, "--kv-memory"),
        (ShardConfig(), 100 * MIB, True, "--kv-memory"),
        (ShardConfig(), 50 * MIB, False, "--gpu-memory-utilization"),
    ],
)
def test_less_than_one_sequence_is_refused_with_what_would_fit(
    config: ShardConfig, free: int, on_cpu: bool, flag: str
) -> None:
    with pytest.raises(ModelError) as caught:
        blocks(config, free=free, on_cpu=on_cpu)
    assert str(caught.value) == (
        "KV cache: 100 blocks of 16 tokens fit (1600 tokens), but one sequence of 2048 tokens "
        f"needs 128; lower --max-model-len to 1600 or raise {flag}"
    )


@pytest.mark.parametrize("free", [0, -5 * MIB])
def test_no_room_at_all_is_refused(free: int) -> None:
    with pytest.raises(ModelError, match="not one block of 16 tokens fits"):
        blocks(ShardConfig(), free=free, on_cpu=False)


def test_free_memory_is_a_plausible_number() -> None:
    assert 2**20 < free_host_bytes() < 2**50
