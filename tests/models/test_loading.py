"""Weights are never in memory twice; memory or a compiler that is missing is told in one line."""

from __future__ import annotations

import mmap
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from model_maker import make_model
from models.driver import Driver, load, make_sequence
from safetensors.torch import load_file, save_file
from support.budget import budget, in_soak
from torch import Tensor

from penstock_proto.types import EngineSampling
from penstock_shard.attention.cpu import CpuBackend
from penstock_shard.checkpoint import safetensors as checkpoint_module
from penstock_shard.checkpoint import weights_hash
from penstock_shard.checkpoint.safetensors import Checkpoint
from penstock_shard.config import ShardConfig
from penstock_shard.device.host_memory import extra_host_bytes
from penstock_shard.distributed.messages import Join
from penstock_shard.distributed.start_ranks import RankSpec
from penstock_shard.errors import ModelError
from penstock_shard.model_loader import load_model_runner as create
from penstock_shard.model_loader import load_rank, load_whole, prepare_kv_memory, rank_main
from penstock_shard.model_loader.block_count import KVShape, choose_pools
from penstock_shard.model_loader.load_model_runner import load_model_runner
from penstock_shard.model_loader.prepare_kv_memory import MemoryPreparation
from penstock_shard.models.base import ForwardOutput
from penstock_shard.models.decoder import tensor_reader
from penstock_shard.models.decoder.decoder import Decoder
from penstock_shard.selfcheck.random_steps import RandomSequence
from penstock_shard.sequence import Sequence
from penstock_shard.worker.logits_processors.apply import LogitsShaping
from penstock_shard.worker.sampling.sampler import SampleRows

Directory = Callable[[str], Path]

# Large enough that what a process takes besides weights is small.
MEDIUM: dict[str, Any] = {
    "vocab_size": 16000,
    "hidden_size": 512,
    "intermediate_size": 1536,
    "ffn_dim": 2048,
    "word_embed_proj_dim": 512,
    "num_hidden_layers": 6,
    "num_attention_heads": 8,
}

# For each line it reads, loads each directory but the first in a process of its own; the first to
# have all code in memory, where it must be again after a fork.
PEAKS = """
import os
import sys
from pathlib import Path

import torch

from penstock_shard.config import ShardConfig
from penstock_shard.model_loader.load_model import ModelFiles, load_model
from penstock_shard.model_loader.transformers_loader import load_config
from penstock_shard.model_loader.choices.choose_ops import choose_ops


def status_bytes(name):
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(name)).split()[1]) * 1024


def load(directory):
    path = Path(directory)
    hf_config = load_config(path, trust_remote_code=False)
    ops = choose_ops(ShardConfig(device="cpu"), hf_config, torch.device("cpu"), lambda line: None)
    return load_model(ModelFiles(path, hf_config, 64), ops, lambda line: None)


def in_fork(work, *arguments):
    child = os.fork()
    if child == 0:
        work(*arguments)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0


def measure(warm, directory):
    load(warm)
    Path("/proc/self/clear_refs").write_text("5")
    before = status_bytes("VmRSS")
    model = load(directory)
    print(status_bytes("VmHWM") - before, flush=True)


def measure_all(warm, *directories):
    load(warm)
    for directory in directories:
        in_fork(measure, warm, directory)


for line in sys.stdin:
    in_fork(measure_all, *line.split())
"""


@pytest.fixture(scope="module")
def measure_peaks() -> Iterator[Callable[..., list[int]]]:
    """Bytes that loading each directory but the first takes at most. Importing all that loads one
    takes longer than to load it: done once.
    """
    command = [sys.executable, "-c", PEAKS]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, env=env) as loader:
        lines, peaks = loader.stdin, loader.stdout
        assert lines is not None
        assert peaks is not None

        def measure(*directories: Path) -> list[int]:
            print(*directories, file=lines, flush=True)
            return [int(peaks.readline()) for _ in directories[1:]]

        yield measure
        lines.close()
        assert loader.wait(10) == 0


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize(
    ("family", "large", "tied"),
    [
        in_soak("llama", "llama-130m", False),
        ("llama", "llama-130m", True),
        ("opt", "opt-125m", True),
    ],
)
def test_loading_takes_little_more_than_the_packed_weights(
    family: str,
    large: str,
    tied: bool,
    tmp_path: Path,
    model_dir: Directory,
    measure_peaks: Callable[..., list[int]],
) -> None:
    directory = tmp_path / "float32"
    if budget(0, 1):
        make_model(directory, large, tie_word_embeddings=tied)
    else:
        make_model(directory, family, tie_word_embeddings=tied, **MEDIUM)
    tensors = load_file(directory / "model.safetensors")
    # Two bytes an element. In transformers' code a table that is tied is kept twice, as rows and as
    # the head's matrix.
    packed = 2 * sum(tensor.numel() for tensor in tensors.values())
    if family == "opt":
        (table,) = [name for name in tensors if name.endswith("embed_tokens.weight")]
        packed += 2 * tensors[table].numel()
    half = tmp_path / "bfloat16"
    half.mkdir()
    (half / "config.json").write_bytes((directory / "config.json").read_bytes())
    half_tensors = {name: tensor.bfloat16() for name, tensor in tensors.items()}
    save_file(half_tensors, half / "model.safetensors", {"format": "pt"})
    peaks = measure_peaks(model_dir(family), directory, half)
    # Code that only a large load touches is read into memory too.
    room = 32 * 2**20
    assert max(peaks) < 1.3 * packed + room, f"{peaks} for {packed}"


def test_a_failed_load_does_not_wait_for_the_hash(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = make_model(tmp_path, "llama")
    started, waited = threading.Event(), threading.Event()

    class SlowDigest:
        """The digest of a file that takes a minute."""

        def update(self, data: bytes) -> None:
            started.set()
            time.sleep(0.05)

        def digest(self) -> bytes:
            waited.set()
            return b""

    def fail(*args: object) -> None:
        assert started.wait(10)
        raise ModelError("cannot be loaded")

    monkeypatch.setattr(weights_hash, "_READ_BYTES", 100)
    monkeypatch.setattr("hashlib.blake2b", lambda **options: SlowDigest())
    monkeypatch.setattr(load_rank, "load_model", fail)
    start_s = time.monotonic()
    with pytest.raises(ModelError, match="cannot be loaded"):
        load(directory)
    assert time.monotonic() - start_s < 10
    assert not waited.is_set()


def test_progress_is_told_in_percent(model_dir: Directory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensor_reader, "_REPORT_S", 0.0)
    lines: list[str] = []
    load_model_runner(
        ShardConfig(device="cpu", kv_blocks=64), model_dir("llama"), progress=lines.append
    )
    percents = [int(line.split()[-2]) for line in lines if line.endswith("%")]
    assert percents == sorted(percents)
    assert percents[-1] == 100


def test_a_mapped_tensor_is_read_again_after_its_pages_were_given_back(
    model_dir: Directory,
) -> None:
    checkpoint = Checkpoint(model_dir("llama"))
    with checkpoint.read(["lm_head.weight"]) as (tensor,):
        copy = tensor.clone()
    assert torch.equal(tensor, copy)
    assert checkpoint.main_dtype() is torch.float32


def test_addresses_of_a_device_are_not_taken_for_those_of_files(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def never() -> None:
        raise AssertionError("files are looked for")

    monkeypatch.setattr(checkpoint_module, "_mapped_files", never)
    checkpoint_module.give_back_pages([torch.empty(2**20, device="meta")])


@pytest.mark.parametrize(
    ("family", "flags", "expected"),
    [
        ("llama", {}, ("float16", "float32", "sdpa")),
        ("opt", {}, ("float16", "float32", "sdpa")),
        ("opt", {"dtype": "float32"}, ("float32", "float32", "sdpa")),
        ("llama", {"dtype": "bfloat16"}, ("bfloat16", "bfloat16", "sdpa")),
    ],
)
def test_without_a_compiler_torch_computes_and_the_reason_is_told(
    family: str,
    flags: dict[str, object],
    expected: tuple[str, str, str],
    model_dir: Directory,
    no_kernels: None,
) -> None:
    lines: list[str] = []
    settings: dict[str, object] = {"device": "cpu", "threads": 1, "kv_blocks": 64, **flags}
    config = ShardConfig(**settings)  # type: ignore[arg-type]
    runner = load_model_runner(config, model_dir(family), progress=lines.append)
    info = runner.info
    assert (info.dtype, info.kv_dtype, info.attention_backend) == expected
    assert not info.batch_invariant
    assert any("without cpu kernels (no C compiler" in line for line in lines)
    sequence = make_sequence(list(range(9, 30)))
    assert Driver(runner).step([(sequence, 21)])[0].token_id is not None


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        ({"quantization": "int8"}, "--quantization int8: only the cpu kernels"),
        ({"attention_backend": "cpu"}, "--attention-backend cpu: no C compiler"),
    ],
)
def test_what_needs_kernels_is_refused_without_them(
    flags: dict[str, str], reason: str, model_dir: Directory, no_kernels: None
) -> None:
    with pytest.raises(ModelError, match=reason):
        load(model_dir("llama"), **flags)


@pytest.fixture
def no_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine without a compiler."""
    from penstock_shard.kernels.build_cpu import KernelBuildError
    from penstock_shard.model_loader.choices import choose_ops

    def fail(**_: object) -> None:
        raise KernelBuildError("no C compiler: none of cc, gcc, clang is there")

    monkeypatch.setattr(choose_ops, "load_kernels", fail)


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        ({"dtype": "float32", "attention_backend": "sdpa", "quantization": "int8"}, "int8: only"),
        ({"kv_blocks": 10**9}, r"no room for 1000000000 blocks .* fit; lower --kv-blocks"),
    ],
)
def test_what_cannot_be_had_is_refused_in_one_line(
    flags: dict[str, object], reason: str, model_dir: Directory
) -> None:
    with pytest.raises(ModelError, match=reason) as caught:
        load(model_dir("llama"), **flags)
    assert "\n" not in str(caught.value)


def test_a_step_that_does_not_fit_names_the_flags(
    model_dir: Directory, monkeypatch: pytest.MonkeyPatch
) -> None:
    good = Decoder.forward

    def forward(self: Decoder, input_ids: torch.Tensor, *args: Any, **others: Any) -> ForwardOutput:
        if len(input_ids) == 700:
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried ...")
        return good(self, input_ids, *args, **others)

    monkeypatch.setattr(Decoder, "forward", forward)
    with pytest.raises(ModelError, match=r"a step of 700 tokens .* lower --max-num-batched-tokens"):
        load(model_dir("llama"), max_num_batched_tokens=700)
    assert load(model_dir("llama"), max_num_batched_tokens=699).info.num_blocks == 64


def test_a_cache_that_cannot_be_allocated_names_what_fits(
    model_dir: Directory, monkeypatch: pytest.MonkeyPatch
) -> None:
    good = CpuBackend.make_cache

    def make_cache(self: CpuBackend, spec: object, num_blocks: int, *args: object) -> object:
        if num_blocks == 555:
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried ...")
        return good(self, spec, num_blocks, *args)  # type: ignore[arg-type]

    monkeypatch.setattr(CpuBackend, "make_cache", make_cache)
    with pytest.raises(ModelError, match=r"no room for 555 blocks .*: \d+ fit; lower --kv-blocks"):
        load(model_dir("llama"), kv_blocks=555)


def test_blocks_leave_room_for_the_largest_step() -> None:
    shape = KVShape(block_size=16, block_bytes=(2**20,), max_model_len=64)
    config = ShardConfig()
    # On a GPU all that is free.
    assert choose_pools(shape, config, 10 * 2**20, on_cpu=False) == [10]
    assert choose_pools(shape, config, 100 * 2**20, on_cpu=False) == [100]
    # On cpu half of it at most.
    assert choose_pools(shape, config, 20 * 2**20, on_cpu=True) == [10]
    with pytest.raises(ModelError, match="lower --max-model-len to 48"):
        choose_pools(shape, config, 3 * 2**20, on_cpu=False)


def test_the_largest_step_on_a_device_draws_in_every_way_that_takes_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    drawn = list[EngineSampling]()

    class Draws:
        def __init__(self, shaping: LogitsShaping) -> None:
            self._sampling: dict[int, EngineSampling] = {}

        def admit(self, sequence: Sequence) -> None:
            self._sampling[sequence.slot] = sequence.request.sampling

        def sample(self, logits: Tensor, rows: SampleRows) -> None:
            assert len(rows.slots) == len(rows.positions) == len(logits)
            drawn.extend(self._sampling[slot] for slot in rows.slots.tolist())

    monkeypatch.setattr(prepare_kv_memory, "Sampler", Draws)
    sequence = RandomSequence([1], [[0]])
    steps: Any = SimpleNamespace(
        sequence=lambda length: sequence,
        run=lambda rows, wanted: torch.empty(len(wanted), 9, device="meta"),
    )
    config = ShardConfig(max_num_batched_tokens=4)
    loaded: Any = SimpleNamespace(model=SimpleNamespace(device="cuda"))
    MemoryPreparation(config, loaded, 16)._largest_step(steps, 4)
    assert any(p.top_k and p.typical_p < 1 and p.presence_penalty for p in drawn)
    # What the drawing kernels are for, of rows with logits of their own too.
    assert EngineSampling(top_p=0.9) in drawn
    assert EngineSampling() in drawn
    assert EngineSampling(presence_penalty=0.1) in drawn


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_memory_that_work_takes_for_a_while_is_seen() -> None:
    size = 64 * 2**20

    def fill() -> None:
        # Not from the heap, which may have as much at hand.
        with mmap.mmap(-1, size) as memory:
            for _ in range(64):
                memory.write(bytes(2**20))

    assert extra_host_bytes(fill) > size * 0.9
    assert extra_host_bytes(lambda: None) < size // 8


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_memory_of_the_process_that_started_this_one_is_not_its_own() -> None:
    code = (
        "from penstock_shard.device.host_memory import extra_host_bytes\n"
        "print(extra_host_bytes(lambda: None))"
    )
    # Written to, so that it is the test's own memory while it starts the other.
    ballast = b"\1" * (128 * 2**20)
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert int(result.stdout) < len(ballast) // 8


@pytest.mark.parametrize(
    ("where", "name"),
    [(load_whole, "load_part"), (create, "adapter_store"), (create, "_embedding")],
)
def test_memory_that_ends_anywhere_at_load_is_one_line(
    where: ModuleType, name: str, model_dir: Directory, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise torch.OutOfMemoryError("Tried to allocate 2 GiB.\nMore about it")

    monkeypatch.setattr(where, name, fail)
    with pytest.raises(ModelError, match=r"^out of memory at load: Tried .*--max-num-seqs") as told:
        load(model_dir("llama"))
    assert "More about it" not in str(told.value)


def test_memory_that_ends_while_a_rank_loads_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise torch.OutOfMemoryError("Tried to allocate 2 GiB.")

    monkeypatch.setattr(load_rank, "rank_device", fail)
    join = Join(ShardConfig(device="cpu", tensor_parallel_size=2), str(tmp_path), 0)
    nobody: Any = None
    with pytest.raises(ModelError, match=r"^out of memory at load: Tried .*--max-num-seqs"):
        rank_main._load(nobody, join, RankSpec(1, 2, 1, 2), "127.0.0.1")
