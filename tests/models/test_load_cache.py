"""Loads that are kept for the next start: they give the same bits, or are made anew."""

from __future__ import annotations

import functools
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from models.driver import Driver, load, make_sequence
from models.tiny_families import make_family
from support.budget import in_soak

from penstock_shard.config import ShardConfig
from penstock_shard.device.cache_directory import cache_directory
from penstock_shard.kernels import cpu
from penstock_shard.kernels.build_cpu import KernelBuildError
from penstock_shard.kernels.cpu import CpuKernels, load_kernels
from penstock_shard.load_cache import load_key as key_module
from penstock_shard.load_cache.load_cache import LoadCache
from penstock_shard.load_cache.load_key import load_key
from penstock_shard.model_loader import load_checked as load_checked_module
from penstock_shard.model_loader import load_whole
from penstock_shard.model_loader.choices import choose_ops
from penstock_shard.model_loader.load_checked import load_checked
from penstock_shard.model_loader.load_runner import load_runner
from penstock_shard.worker.model_runner import ModelRunner

Directory = Callable[[str], Path]
# Families of our decoder with every kind of layer, and others.
KINDS = ("llama", "gpt_oss", "deepseek_v3")
OTHERS = ("mistral", "ministral3", "gemma2", "gemma3", "gemma4", "mixtral", "qwen3_moe", "llama4")
WITH_STATES = ("qwen3_next", in_soak("lfm2"))
FROM_EARLIER = "weights, and what the checks found, are from an earlier start"
NOT_KEPT = "this load is not kept for the next start"
PROMPT = [3, 1, 4, 1, 5, 9, 2, 6, 5]


@pytest.fixture
def nothing_kept() -> None:
    """Here loads are kept."""


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache with this machine's kernels, and where in it loads are."""
    load_kernels()
    directory = tmp_path / "cache"
    directory.mkdir(mode=0o700)
    for library in cache_directory().glob("*.so"):
        shutil.copy(library, directory)
    monkeypatch.setenv("PENSTOCK_CACHE", str(directory))
    return directory / "loads"


def start(directory: Path, **settings: object) -> tuple[ModelRunner, bool]:
    """A runner, and whether its load was an earlier start's."""
    loads: list[object] = []
    whole = load_whole.load_whole

    def count(*arguments: Any) -> Any:
        loads.append(arguments)
        return whole(*arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(load_whole, "load_whole", count)
        values = {"dtype": "auto", "load_cache_bytes": 2**30, "enforce_eager": False, **settings}
        return load(directory, **values), not loads


def outputs(runner: ModelRunner) -> list[tuple[int | None, object]]:
    """Tokens and log-probabilities of a sequence, whose prompt comes in two chunks."""
    driver = Driver(runner)
    sequence = make_sequence(PROMPT, max_tokens=12, logprobs=1)
    driver.step([(sequence, 5)])
    results = [driver.step([(sequence, sequence.num_uncomputed)])[0] for _ in range(12)]
    return [(result.token_id, result.logprobs) for result in results]


@pytest.mark.parametrize("family", [*KINDS, *map(in_soak, OTHERS)])
def test_a_kept_load_gives_the_same_bits(family: str, model_dir: Directory, cache: Path) -> None:
    check_bits(model_dir(family))


@pytest.mark.parametrize("family", WITH_STATES)
def test_so_does_one_with_states(family: str, tmp_path: Path, cache: Path) -> None:
    check_bits(make_family(tmp_path / "model", family))


def check_bits(directory: Path, **settings: object) -> None:
    first, was_kept = start(directory, **settings)
    assert not was_kept
    again, was_kept = start(directory, **settings)
    assert was_kept
    assert again.info == first.info
    assert outputs(again) == outputs(first)


@pytest.mark.parametrize("settings", [in_soak({"quantization": "int8"}), {"quantization": "int4"}])
def test_so_does_one_of_codes(
    settings: dict[str, object], model_dir: Directory, cache: Path
) -> None:
    check_bits(model_dir("qwen3"), **settings)


def test_a_start_from_a_kept_load_imports_no_transformers(
    model_dir: Directory, cache: Path
) -> None:
    """The earlier start is in this process, where all of it is imported already."""
    program = """
import sys
from penstock_shard.config import ShardConfig
from penstock_shard.model_loader.load_runner import load_runner
lines = []
load_runner(ShardConfig(model=sys.argv[1], device="cpu", threads=1), lines.append)
print(lines[1:-1])
print(sorted({"transformers", "torch._dynamo"} & set(sys.modules)))
"""
    first: list[str] = []
    directory = str(model_dir("llama"))
    load_runner(ShardConfig(model=directory, device="cpu", threads=1), first.append)
    command = [sys.executable, "-c", program, directory]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert not result.stderr
    again, imported = result.stdout.splitlines()
    assert imported == "[]"
    # The same notes, and one of where they come from.
    expected = str(first[1:-1])
    assert again == expected.replace("checking what the model computes", FROM_EARLIER) != expected


# ---- what a load depends on --------------------------------------------------------------------


def test_a_file_that_changed_makes_another_load(model_dir: Directory, tmp_path: Path) -> None:
    directory = tmp_path / "model"
    shutil.copytree(model_dir("llama"), directory)
    config = ShardConfig(model=str(directory))
    keys = {load_key(config, directory)}
    weights = directory / "model.safetensors"
    status = weights.stat()
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    # As tools do that copy times too.
    os.utime(weights, ns=(status.st_atime_ns, status.st_mtime_ns))
    keys.add(load_key(config, directory))
    (directory / "config.json").touch()
    keys.add(load_key(config, directory))
    assert len(keys) == 3


@pytest.mark.parametrize(
    ("flags", "is_another"),
    [
        ({"quantization": "int8"}, True),
        ({"dtype": "float32"}, True),
        ({"max_model_len": 64}, True),
        ({"block_size": 32}, True),
        ({"exact": True}, True),
        ({"threads": 3}, True),
        ({"port": 9}, False),
        ({"aging_s": 9.0}, True),
        ({"log_level": "debug"}, False),
        ({"constraint_threads": 2}, True),
        ({"speculative_tokens": 4}, True),
        ({"host": "0.0.0.0"}, False),
    ],
)
def test_flags_that_a_load_reads_make_another(
    flags: dict[str, Any], is_another: bool, model_dir: Directory
) -> None:
    directory = model_dir("llama")
    keys = {load_key(ShardConfig(), directory), load_key(ShardConfig(**flags), directory)}
    assert len(keys) == 1 + is_another


def test_another_processor_level_or_version_makes_another(
    model_dir: Directory, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory, config = model_dir("llama"), ShardConfig()
    keys = [load_key(config, directory)]
    for name, value in (
        ("_processor", lambda: "another"),
        ("code_hash", lambda: "another"),
        ("kernel_hash", lambda: "another"),
        ("wanted_levels", lambda: ("portable",)),
        ("default_threads", lambda: 99),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(key_module, name, value)
            keys.append(load_key(config, directory))
    assert len(set(keys)) == len(keys)


@pytest.mark.parametrize(
    "settings",
    [{"load_format": "dummy"}, {"trust_remote_code": True}, {"enable_lora": True}],
)
def test_some_loads_are_not_kept(
    settings: dict[str, object], model_dir: Directory, cache: Path
) -> None:
    start(model_dir("llama"), **settings)
    assert not cache.exists()


# ---- files that are not used -------------------------------------------------------------------


def lines_of(directory: Path) -> list[str]:
    lines: list[str] = []
    config = ShardConfig(device="cpu", threads=1, load_cache_bytes=2**30)
    load_checked(config, directory, lines.append)
    return lines


def test_a_damaged_file_is_left_and_replaced(model_dir: Directory, cache: Path) -> None:
    lines_of(model_dir("llama"))
    [file] = cache.iterdir()
    whole = file.read_bytes()
    middle = len(whole) // 2
    turned = bytes(byte ^ 255 for byte in whole[middle : middle + 64])
    # The compression of a file in it.
    method = whole.find(b"PK\x01\x02") + 10
    packed = whole[:method] + b"\x08" + whole[method + 1 :]
    for damaged in (b"", whole[:1000], whole[:middle] + turned + whole[middle + 64 :], packed):
        file.write_bytes(damaged)
        lines = lines_of(model_dir("llama"))
        assert any(line.startswith(f"a kept load is not used: {file}") for line in lines)
        assert lines_of(model_dir("llama"))[-1] == FROM_EARLIER


def test_what_others_may_write_is_not_read(model_dir: Directory, cache: Path) -> None:
    lines_of(model_dir("llama"))
    [file] = cache.iterdir()
    for path, mode in ((file, 0o622), (cache, 0o777)):
        was = path.stat().st_mode
        path.chmod(mode)
        line = f"a kept load is not used: {file}: {path} has mode {mode:o}"
        assert any(said.startswith(line) for said in lines_of(model_dir("llama")))
        path.chmod(was)


def test_a_load_whose_kernels_are_gone_is_made_anew(
    model_dir: Directory, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines_of(model_dir("llama"))

    @functools.wraps(load_kernels)
    def fail(*_: object, **__: object) -> CpuKernels:
        raise KernelBuildError("no C compiler")

    # The name by which a kept load makes them, and the one by which a load does.
    monkeypatch.setattr(cpu, "load_kernels", fail)
    monkeypatch.setattr(load_checked_module, "load_kernels", fail)
    monkeypatch.setattr(choose_ops, "load_kernels", fail)
    lines = lines_of(model_dir("llama"))
    assert any(line.startswith("without cpu kernels (no C compiler)") for line in lines)
    assert FROM_EARLIER not in lines


def test_what_root_keeps_for_all_is_read_though_its_time_cannot_be_set(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines: list[str] = []
    kept = LoadCache(tmp_path / "loads", 2**20, [], lines.append)
    kept.write("a", {"x": 1}, 10)

    def fail(*_: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "utime", fail)
    assert kept.read("a") == {"x": 1}
    assert not lines


def test_nothing_but_the_named_types_is_made_of_a_file(tmp_path: Path) -> None:
    lines: list[str] = []
    cache = LoadCache(tmp_path / "loads", 2**20, [], lines.append)
    cache.write("a", {"file": Path("x")}, 10)
    assert cache.read("a") is None
    assert lines[0].endswith("a.load: is damaged, or none of this version")
    cache.write("b", {"tensor": torch.arange(3)}, 10)
    assert cache.read("b")["tensor"].tolist() == [0, 1, 2]


def test_a_full_cache_loses_what_was_not_read_for_longest(tmp_path: Path) -> None:
    lines: list[str] = []
    cache = LoadCache(tmp_path / "loads", 3 * 10_000, [], lines.append)
    for age, name in enumerate("cba"):
        cache.write(name, torch.zeros(2000), 9_000)
        os.utime(tmp_path / "loads" / f"{name}.load", (age, age))
    assert cache.read("c") is not None
    cache.write("d", torch.zeros(2000), 9_000)
    found = {file.stem for file in (tmp_path / "loads").iterdir()}
    assert found == {"a", "c", "d"}
    assert not lines
    cache.write("e", torch.zeros(2), 40_000)
    assert not (tmp_path / "loads" / "e.load").exists()
    assert lines == [f"{NOT_KEPT}: its 40000 bytes are more than --load-cache"]


def test_a_full_disk_costs_a_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines: list[str] = []
    cache = LoadCache(tmp_path / "loads", 2**20, [], lines.append)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=9))
    cache.write("a", torch.zeros(2), 10)
    assert lines == [f"{NOT_KEPT}: [Errno 28] No space left on device: '{tmp_path / 'loads'}'"]
    assert not list((tmp_path / "loads").iterdir())


def test_a_cache_that_cannot_be_written_costs_a_line(tmp_path: Path) -> None:
    lines: list[str] = []
    (tmp_path / "loads").touch()
    cache = LoadCache(tmp_path / "loads", 2**20, [], lines.append)
    cache.write("a", torch.zeros(2), 10)
    assert cache.read("a") is None
    assert lines[0].startswith("this load is not kept for the next start: ")
    assert lines[1].startswith("a kept load is not used: ")
