"""Decodes that are replayed give what the model gives, whatever is recorded and replayed beside.

A graph is played here by a stand-in, which does its work again on the same memory, as a device
does. What only a device shows is in `test_cuda`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import numpy as np
import pytest
import torch
from models.driver import load
from models.mixed_requests import mixed_requests, serve
from support.budget import seeded
from torch import Tensor

from penstock_shard.config import ShardConfig
from penstock_shard.models.base import CausalModel
from penstock_shard.models.cuda_graphs import CudaGraph, Graph, GraphedModel
from penstock_shard.models.decoder import Decoder
from penstock_shard.models.errors import ModelError
from penstock_shard.models.step_inputs import InputLayout
from penstock_shard.runner import create
from penstock_shard.runner.model_runner import ModelRunner
from penstock_shard.runner.prepare_graphs import GraphPreparation
from penstock_shard.runner.trial import TrialSteps

Directory = Callable[[str], Path]
NUM_BLOCKS = 16


class Recorded:
    """A `Graph` without a device. The results of all of a pool lie in the same memory: a replay
    spoils those of the others.
    """

    def __init__(self, pool: Pool) -> None:
        self._pool = pool

    def capture(self, work: Callable[[], Tensor]) -> Tensor:
        self._work = work
        self._result = work().clone()
        self._pool.results.append(self._result)
        return self._result

    def replay(self) -> None:
        self._pool.num_replays += 1
        result = self._work()
        for other in self._pool.results:
            other.fill_(float("nan"))
        self._result.copy_(result)


class Pool:
    """Makes such graphs, and counts what they do."""

    def __init__(self, make: Callable[[Pool], Graph] = Recorded) -> None:
        self.results: list[Tensor] = []
        self.num_replays = 0
        self._make = make

    def __call__(self) -> Graph:
        return self._make(self)


def _graphed(model: CausalModel, pool: Pool, *, max_rows: int = 7) -> GraphedModel:
    return GraphedModel(model, max_rows, 120, lambda: pool)


def _capture_all(graphs: GraphedModel) -> None:
    graphs.capture(graphs.shapes(16), 16, pad_block=NUM_BLOCKS)


@pytest.mark.parametrize("max_steps_ahead", [0, 1])
@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_replayed_decodes_give_what_the_model_gives(
    family: str, max_steps_ahead: int, model_dir: Directory
) -> None:
    """Beside prompts, preemptions, prefix hits and rows of nobody."""
    loaded = load(model_dir(family), kv_blocks=NUM_BLOCKS, max_model_len=120)
    info = dataclasses.replace(loaded.info, max_steps_ahead=max_steps_ahead)
    expected, _ = serve(ModelRunner(loaded.model, info), mixed_requests(3), num_blocks=NUM_BLOCKS)
    loaded.model.allocate(NUM_BLOCKS + 1, 16, torch.float32)
    pool = Pool()
    graphs = _graphed(loaded.model, pool)
    _capture_all(graphs)
    runner = ModelRunner(graphs, info, graphs=graphs)
    found, scheduler = serve(runner, mixed_requests(3), num_blocks=NUM_BLOCKS)
    assert found == expected
    assert pool.num_replays > 20
    assert scheduler.preemptions_total > 0


def test_rows_of_nobody_are_in_their_own_block_and_see_one_token() -> None:
    graphs = GraphedModel(_NoModel(), 8, 120, Pool)  # type: ignore[arg-type]
    graphs.capture([], 16, pad_block=33)
    layout = InputLayout(8, 8, 5, 0)
    arrays = layout.arrays(np.full(layout.num_bytes, 77, dtype=np.uint8))
    before = arrays.block_table[:3].copy()
    arrays.cu_queries[:4] = np.arange(4)
    graphs.pad(arrays, 3)
    assert (arrays.slots[3:] == 33 * 16).all()
    assert (arrays.block_table[3:] == 33).all()
    assert (arrays.seq_lens[3:] == 1).all()
    assert (arrays.cu_queries == np.arange(9)).all()
    assert (arrays.block_table[:3] == before).all()


class _NoModel:
    device = torch.device("cpu")
    layers = ()
    hidden_size = 4


def test_the_parts_of_a_steps_inputs_do_not_overlap() -> None:
    rng = seeded("layouts")
    for _ in range(50):
        layout = InputLayout(*(rng.randint(1, 40) for _ in range(4)))
        buffer = np.zeros(layout.num_bytes, dtype=np.uint8)
        arrays = layout.arrays(buffer)
        names = [field.name for field in dataclasses.fields(arrays)]
        for number, name in enumerate(names, 1):
            getattr(arrays, name)[...] = number
        tensors = layout.tensors(torch.from_numpy(buffer))
        for number, name in enumerate(names, 1):
            assert bool((getattr(tensors, name) == number).all()), name
            assert getattr(tensors, name).data_ptr() % 16 == buffer.ctypes.data % 16
        assert tensors.block_table.shape == (layout.num_rows, layout.num_blocks)


@pytest.mark.parametrize("max_model_len", [50, 2048, 131_072])
@pytest.mark.parametrize("max_rows", [1, 3, 100, 256, 300, 1024])
def test_every_step_of_decodes_finds_a_graph_that_is_not_much_larger(
    max_rows: int, max_model_len: int
) -> None:
    graphs = GraphedModel(_NoModel(), max_rows, max_model_len)  # type: ignore[arg-type]
    shapes = sorted(graphs.shapes(16))
    most_blocks = -(-max_model_len // 16)
    for rows in range(1, max_rows + 1):
        for blocks in {1, min(64, most_blocks), most_blocks}:
            fitting = [s for s in shapes if s.num_rows >= rows and s.num_blocks >= blocks]
            assert fitting, (rows, blocks)
            if blocks <= 64:
                assert fitting[0].num_rows <= max(rows + 7, rows + rows // 4), (rows, blocks)
    assert len(shapes) < 80


def test_no_step_of_decodes_is_beyond_what_is_recorded_nor_smaller_than_it_says(
    model_dir: Directory,
) -> None:
    loaded = load(model_dir("llama"), max_model_len=120)
    graphs = _graphed(loaded.model, Pool())
    assert graphs.inputs(1, 1) is None
    _capture_all(graphs)
    for rows in range(1, 8):
        for blocks in range(1, 9):
            static = graphs.inputs(rows, blocks)
            assert static is not None
            assert static.layout.num_rows >= rows
            assert static.layout.num_blocks >= blocks
    assert graphs.inputs(9, 1) is None
    assert graphs.inputs(1, 9) is None
    graphs.drop()
    assert graphs.inputs(1, 1) is None


def test_inputs_from_elsewhere_are_copied_to_where_the_graph_reads(model_dir: Directory) -> None:
    """As those of a rank that is told a step."""
    loaded = load(model_dir("llama"), max_model_len=120)
    loaded.model.allocate(NUM_BLOCKS + 1, 16, torch.float32)
    pool = Pool()
    graphs = _graphed(loaded.model, pool)
    # Steps without rows of nobody, over tables as wide as they are here.
    graphs.capture([(3, 2)], 16, pad_block=NUM_BLOCKS)  # type: ignore[list-item]
    steps = TrialSteps(loaded.model, 384, 16, NUM_BLOCKS)
    others = TrialSteps(graphs, 384, 16, NUM_BLOCKS)
    sequences = [steps.sequence(length) for length in (20, 5, 31)]
    steps.run([(sequence, 0, len(sequence.token_ids) - 1) for sequence in sequences])
    expected = steps.decode(sequences)
    assert pool.num_replays == 0
    assert torch.equal(others.decode(sequences), expected)
    assert pool.num_replays == 1


class Unrecordable(Recorded):
    def capture(self, work: Callable[[], Tensor]) -> Tensor:
        raise RuntimeError("operation not permitted when stream is capturing\nmore")


class Stale(Recorded):
    """Replays what was recorded, not what is to be computed."""

    def replay(self) -> None:
        self._pool.num_replays += 1


class Rounded(Recorded):
    """Replays what other kernels compute."""

    def replay(self) -> None:
        super().replay()
        self._result *= 1 + 1e-5


class TooLarge(Recorded):
    def capture(self, work: Callable[[], Tensor]) -> Tensor:
        raise RuntimeError("CUDA error: out of memory")


def _preparation(
    model: CausalModel, graphs: GraphedModel, lines: list[str], *, is_exact: bool = False
) -> GraphPreparation:
    return GraphPreparation(model, graphs, torch.float32, 384, 120, lines.append, is_exact)


def test_too_little_memory_for_a_graph_is_said_in_one_line(model_dir: Directory) -> None:
    loaded = load(model_dir("llama"), max_model_len=120)
    graphs = _graphed(loaded.model, Pool(TooLarge))
    with pytest.raises(ModelError, match=r"one of 8 decodes does not fit .* --enforce-eager"):
        _preparation(loaded.model, graphs, []).measure(16)


@pytest.mark.parametrize("is_exact", [False, True])
def test_where_results_are_exact_a_replay_must_be(is_exact: bool, model_dir: Directory) -> None:
    loaded = load(model_dir("llama"), max_model_len=120)
    for make in (Recorded, Rounded):
        graphs = _graphed(loaded.model, Pool(make))
        preparation = _preparation(loaded.model, graphs, [], is_exact=is_exact)
        loaded.model.allocate(NUM_BLOCKS + 1, 16, torch.float32)
        assert preparation.capture(16, NUM_BLOCKS) is (make is Recorded or not is_exact)


class _Cuda:
    """What recording asks of torch; it ends badly, as torch does where the work did."""

    def __init__(self) -> None:
        self.calls: list[object] = []

    def capture_begin(self, **_: object) -> None:
        self.calls.append("begin")

    def capture_end(self) -> None:
        self.calls.append("end")
        raise RuntimeError("operation failed due to a previous error during capture")


def test_a_recording_that_fails_is_ended_and_says_what_failed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cuda, stream = _Cuda(), MagicMock()
    monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: cuda)
    monkeypatch.setattr(torch.cuda, "stream", lambda _: nullcontext())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: stream)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    for name in ("_cuda_endAllocateToPool", "_cuda_releasePool"):
        monkeypatch.setattr(
            torch._C, name, lambda *args, name=name: cuda.calls.append((name, *args)), raising=False
        )
    results = iter([torch.zeros(1)])

    def work() -> Tensor:
        for result in results:
            return result
        raise RuntimeError("operation not permitted when stream is capturing")

    with pytest.raises(RuntimeError, match="not permitted when stream is capturing"):
        CudaGraph((0, 1), stream).capture(work)
    assert cuda.calls == [
        "begin",
        "end",
        ("_cuda_endAllocateToPool", 3, (0, 1)),
        ("_cuda_releasePool", 3, (0, 1)),
    ]


def test_a_model_that_cannot_be_recorded_runs_without_graphs(model_dir: Directory) -> None:
    loaded = load(model_dir("llama"), max_model_len=120)
    lines: list[str] = []
    graphs = _graphed(loaded.model, Pool(Unrecordable))
    assert _preparation(loaded.model, graphs, lines).measure(16) is None
    assert lines == [
        "CUDA graphs: none, the model cannot be recorded: "
        "operation not permitted when stream is capturing"
    ]
    assert graphs.inputs(1, 1) is None


def test_graphs_that_replay_something_else_are_not_used(model_dir: Directory) -> None:
    loaded = load(model_dir("llama"), max_model_len=120)
    for make, is_fine in ((Recorded, True), (Stale, False)):
        lines: list[str] = []
        graphs = _graphed(loaded.model, Pool(make))
        preparation = _preparation(loaded.model, graphs, lines)
        measured = preparation.measure(16)
        assert measured is not None
        assert measured > 0
        loaded.model.allocate(NUM_BLOCKS + 1, 16, torch.float32)
        assert preparation.capture(16, NUM_BLOCKS) is is_fine
        assert (graphs.inputs(1, 1) is not None) is is_fine
        (line,) = lines
        assert line.startswith("CUDA graphs: none, logits differ") is not is_fine


def test_what_replays_are_compared_with_is_no_replay(model_dir: Directory) -> None:
    """Over ranks the model and what replays are one, here with a graph of the check's own shape."""
    loaded = load(model_dir("llama"), max_model_len=25)
    lines: list[str] = []
    for make, is_fine in ((Recorded, True), (Stale, False)):
        pool = Pool(make)
        graphs = GraphedModel(loaded.model, 2, 25, lambda pool=pool: pool)  # type: ignore[misc]
        preparation = GraphPreparation(graphs, graphs, torch.float32, 384, 25, lines.append)
        graphs.allocate(NUM_BLOCKS + 1, 16, torch.float32)
        assert preparation.capture(16, NUM_BLOCKS) is is_fine
        assert pool.num_replays == 1


def test_a_decoder_whose_layers_cannot_be_recorded_has_no_graphs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    decoder = Decoder.__new__(Decoder)
    decoder.device = torch.device("cuda")
    ops: Any = SimpleNamespace(backend=SimpleNamespace(capturable=True))
    config = ShardConfig(model="any")
    lines: list[str] = []
    for capturable in (True, False):
        monkeypatch.setattr(Decoder, "capturable", capturable)
        found = create._graphs(config, decoder, ops, 120, lines.append)
        assert (found is not None) is capturable
    assert lines == ["CUDA graphs: none, experts are multiplied one after the other"]
