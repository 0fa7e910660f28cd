"""The number of KV blocks that a shard gets, and what it says when they are too few."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import pytest

from penstock_shard.config import ShardConfig
from penstock_shard.device import cgroup, host_memory
from penstock_shard.device.host_memory import extra_host_bytes, free_host_bytes
from penstock_shard.errors import ModelError
from penstock_shard.ipc.runner_info import CacheGroup
from penstock_shard.model_loader.block_count import KVShape, choose_pools, describe_blocks

MIB = 2**20
# One sequence: 128 blocks of half a MiB.
SHAPE = KVShape(block_size=16, block_bytes=(MIB // 2,), max_model_len=2048)


def blocks(
    config: ShardConfig, *, shape: KVShape = SHAPE, free: int = 8192 * MIB, on_cpu: bool = True
) -> int:
    (num_blocks,) = choose_pools(shape, config, free, on_cpu)
    return num_blocks


def test_flags_decide() -> None:
    assert blocks(ShardConfig(kv_blocks=200)) == 200
    assert blocks(ShardConfig(kv_memory_bytes=100 * MIB)) == 200


def test_cpu_default_is_modest() -> None:
    assert blocks(ShardConfig()) == 512


def test_cpu_default_holds_one_sequence_of_full_length() -> None:
    long = KVShape(16, (MIB // 2,), max_model_len=16_384)
    assert blocks(ShardConfig(), shape=long) == 1024


def test_cpu_default_leaves_half_of_what_is_free() -> None:
    assert blocks(ShardConfig(), free=200 * MIB) == 200


@pytest.mark.parametrize("on_cpu", [True, False])
def test_few_sequences_leave_the_memory_to_the_prefix_cache(on_cpu: bool) -> None:
    one = ShardConfig(max_num_seqs=1)
    assert blocks(one, on_cpu=on_cpu) == blocks(ShardConfig(), on_cpu=on_cpu) > 128


def test_blocks_of_a_tiny_model_are_bounded_in_number() -> None:
    tiny = KVShape(16, (1024,), max_model_len=2048)
    assert blocks(ShardConfig(), shape=tiny, free=100_000 * MIB, on_cpu=False) == 2**20
    long = KVShape(1, (64,), max_model_len=2**21)
    assert blocks(ShardConfig(), shape=long, free=100_000 * MIB, on_cpu=False) == 2**21


def test_the_log_says_how_much_memory_and_how_to_give_it_more() -> None:
    text = describe_blocks(SHAPE, [512], ShardConfig(), on_cpu=True)
    assert text.startswith("KV cache: 512 blocks of 16 tokens (256 MiB); ")
    assert "--kv-memory" in text
    for config, on_cpu in ((ShardConfig(kv_blocks=512), True), (ShardConfig(), False)):
        assert "--kv" not in describe_blocks(SHAPE, [512], config, on_cpu)


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


def test_a_system_that_does_not_reset_the_peak_is_not_asked_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # As where /proc may not be written to: opening it fails.
    monkeypatch.setattr(host_memory, "_CLEAR_REFS", tmp_path)
    done: list[bool] = []
    assert extra_host_bytes(lambda: done.append(True)) == 0
    assert done == [True]


# ---- Control groups --------------------------------------------------------------------------


class Groups:
    """The files of control groups, below a folder."""

    def __init__(self, folder: Path) -> None:
        self.mount, self.own = folder / "mount", folder / "own"

    def are(self, own: str, files: Mapping[str, str]) -> None:
        self.own.write_text(own)
        for name, text in files.items():
            path = self.mount / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text + "\n")


@pytest.fixture
def groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Groups:
    made = Groups(tmp_path)
    monkeypatch.setattr(cgroup, "_MOUNT", made.mount)
    monkeypatch.setattr(cgroup, "_OWN_GROUPS", made.own)
    return made


def test_without_control_groups_nothing_is_bounded(groups: Groups) -> None:
    assert (cgroup.memory_left(), cgroup.cpu_quota()) == (None, None)
    groups.are("0::/\n", {"memory.max": "max", "memory.current": "5", "cpu.max": "max 100000"})
    assert (cgroup.memory_left(), cgroup.cpu_quota()) == (None, None)


def test_pages_of_files_count_as_free(groups: Groups) -> None:
    stat = "anon 300\ninactive_file 400\nactive_file 200"
    files = {"memory.max": "1000", "memory.current": "950", "memory.stat": stat}
    groups.are("0::/\n", files)
    assert cgroup.memory_left() == 650
    files["memory.current"] = "1100"
    groups.are("0::/\n", {**files, "memory.stat": "anon 1100"})
    assert cgroup.memory_left() == 0


def test_the_tightest_group_on_the_way_up_decides(groups: Groups) -> None:
    files = {
        "pod/box/memory.max": "1000",
        "pod/box/memory.current": "100",
        "pod/memory.max": "2000",
        "pod/memory.current": "1700",
        "pod/box/cpu.max": "max 100000",
        "pod/cpu.max": "250000 100000",
        "other/memory.max": "1",
        "other/memory.current": "1",
        "other/cpu.max": "1 100000",
    }
    groups.are("0::/pod/box\n", files)
    assert (cgroup.memory_left(), cgroup.cpu_quota()) == (300, 2.5)


def test_version_1_is_read_too(groups: Groups) -> None:
    files = {
        "memory/box/memory.limit_in_bytes": "1000",
        "memory/box/memory.usage_in_bytes": "900",
        "memory/box/memory.stat": "inactive_file 1\ntotal_inactive_file 90\ntotal_active_file 10",
        "memory/memory.limit_in_bytes": "9223372036854771712",
        "memory/memory.usage_in_bytes": "5000",
        "cpu/box/cpu.cfs_quota_us": "150000",
        "cpu/box/cpu.cfs_period_us": "50000",
        "cpu/cpu.cfs_quota_us": "-1",
        "cpu/cpu.cfs_period_us": "100000",
    }
    groups.are("5:memory:/box\n4:cpu,cpuacct:/box\n1:name=systemd:/elsewhere\n", files)
    assert (cgroup.memory_left(), cgroup.cpu_quota()) == (200, 3.0)


@pytest.mark.parametrize("own", ["0::/docker/0123\n", "0::/../other\n"])
def test_a_group_that_is_mounted_elsewhere_is_the_mount_itself(groups: Groups, own: str) -> None:
    files = {"memory.max": "1000", "memory.current": "400", "cpu.max": "50000 100000"}
    groups.are(own, files)
    assert (cgroup.memory_left(), cgroup.cpu_quota()) == (600, 0.5)


def test_the_name_of_a_group_may_have_any_bytes(groups: Groups) -> None:
    own = os.fsdecode(b"diens\xff\xc3\xbc")
    groups.are("0::/\n", {f"{own}/memory.max": "1000", f"{own}/memory.current": "100"})
    groups.own.write_bytes(b"0::/" + os.fsencode(own) + b"\n")
    assert cgroup.memory_left() == 900


def test_a_group_bounds_what_the_machine_has(groups: Groups) -> None:
    groups.are("0::/\n", {"memory.max": "1000", "memory.current": "400"})
    assert free_host_bytes() == 600


# ---- Pools of several sizes ------------------------------------------------------------------

WINDOWED = KVShape(
    16,
    (MIB // 4, MIB),
    max_model_len=32_768,
    groups=(CacheGroup(window=1024), CacheGroup(pool=1)),
    max_chunk_tokens=512,
)


def test_a_long_sequence_takes_a_window_and_a_chunk_of_layers_that_see_no_more() -> None:
    assert WINDOWED.blocks_for(32_768) == [97, 2048]
    assert WINDOWED.blocks_for(1024) == [64, 64]
    assert WINDOWED.bytes_per_token == (MIB + MIB // 4) // 16
    assert WINDOWED.bytes_per_sequence == 97 * MIB // 4 + 2048 * MIB


def test_pools_hold_equally_many_sequences_of_some_windows_and_one_of_full_length() -> None:
    config = ShardConfig(kv_memory_bytes=8000 * MIB)
    windows, others = choose_pools(WINDOWED, config, 9000 * MIB, on_cpu=False)
    assert 7990 * MIB < WINDOWED.bytes_of([windows, others]) <= 8000 * MIB
    assert WINDOWED.sequences_in([windows, others]) == others // 2048 == 3
    # Beyond one of full length, four windows and their chunks: 384 blocks for 97.
    assert (others - 2048) / (windows - 97) == pytest.approx(384 / 97, rel=0.01)


def test_too_little_for_one_sequence_names_the_length_that_fits() -> None:
    config = ShardConfig(kv_memory_bytes=1000 * MIB)
    with pytest.raises(ModelError, match="lower --max-model-len to 15600 or raise --kv-memory"):
        choose_pools(WINDOWED, config, 9000 * MIB, on_cpu=False)
    assert WINDOWED.bytes_of(WINDOWED.blocks_for(15_600)) <= 1000 * MIB
    assert WINDOWED.bytes_of(WINDOWED.blocks_for(15_616)) > 1000 * MIB
