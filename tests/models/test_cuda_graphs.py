"""Decodes that are replayed give what the model gives, whatever is recorded and replayed beside.

A graph is played here by a stand-in, which does its work again on the same memory, as a device
does. What only a device shows is in `test_cuda`.
"""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections import Counter
from collections.abc import Callable, Sequence
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
from models.recorded_graphs import (
    NUM_BLOCKS,
    NoModel,
    Pool,
    Recorded,
    Stale,
    allocate,
    capture_all,
    graphed,
)
from models.runners import make_runner
from support.budget import in_soak, seeded
from torch import Tensor

from penstock_shard.attention.base import AttentionBatch, StateSpec
from penstock_shard.config import ShardConfig
from penstock_shard.errors import ModelError
from penstock_shard.model_loader.choices import choose_graphs as choose
from penstock_shard.model_loader.prepare_cuda_graphs import GraphPreparation
from penstock_shard.models.base import CausalModel
from penstock_shard.models.cuda_graphs import (
    CudaGraph,
    GraphedModel,
    GraphShape,
)
from penstock_shard.models.decoder.decoder import Decoder
from penstock_shard.models.step_inputs import InputLayout, StepInputs
from penstock_shard.selfcheck.random_steps import RandomSteps

Directory = Callable[[str], Path]


@pytest.mark.parametrize(
    ("family", "max_steps_ahead"),
    [in_soak("llama", 0), ("llama", 1), ("gemma2", 0), in_soak("gemma2", 1)],
)
def test_replayed_decodes_give_what_the_model_gives(
    family: str, max_steps_ahead: int, model_dir: Directory
) -> None:
    """Beside prompts, preemptions, prefix hits and rows of nobody."""
    loaded = load(model_dir(family), kv_blocks=NUM_BLOCKS, max_model_len=120)
    info = dataclasses.replace(loaded.info, max_steps_ahead=max_steps_ahead)
    expected, _ = serve(
        make_runner(loaded.model, info),
        mixed_requests(3),
        num_blocks=NUM_BLOCKS,
    )
    allocate(loaded.model)
    pool = Pool()
    graphs = graphed(loaded.model, pool)
    capture_all(graphs)
    runner = make_runner(graphs, info, graphs=graphs)
    found, scheduler = serve(runner, mixed_requests(3), num_blocks=NUM_BLOCKS)
    assert found == expected
    assert pool.num_replays > 20
    assert scheduler.preemptions_total > 0


def test_rows_of_nobody_are_in_their_own_block_and_see_one_token() -> None:
    graphs = GraphedModel(NoModel(), 8, 120, Pool)  # type: ignore[arg-type]
    graphs.capture([], 16, pad_blocks=[33])
    layout = InputLayout(8, 8, 5, 0)
    arrays = layout.arrays(np.full(layout.num_bytes, 77, dtype=np.uint8))
    before = arrays.block_table[0][:3].copy()
    arrays.cu_queries[:4] = np.arange(4)
    graphs.pad(arrays, 3)
    assert (arrays.kv_indices[0][3:] == 33 * 16).all()
    assert (arrays.block_table[0][3:] == 33).all()
    assert (arrays.seq_lens[0][3:] == 1).all()
    assert (arrays.cu_queries == np.arange(9)).all()
    assert (arrays.block_table[0][:3] == before).all()


def test_the_parts_of_a_steps_inputs_do_not_overlap() -> None:
    rng = seeded("layouts")
    for _ in range(50):
        tokens, rows, blocks, extra = (rng.randint(1, 40) for _ in range(4))
        layout = InputLayout(tokens, rows, blocks, extra, rng.random() < 0.5, rng.randint(1, 3))
        buffer = np.zeros(layout.num_bytes, dtype=np.uint8)
        arrays = layout.arrays(buffer)
        for number, part in enumerate(_parts(arrays), 1):
            part[...] = number
        tensors = layout.tensors(torch.from_numpy(buffer))
        for number, part in enumerate(_parts(tensors), 1):
            assert bool((part == number).all()), number
            assert part.data_ptr() % 16 == buffer.ctypes.data % 16
        shapes = {tuple(table.shape) for table in tensors.block_table}
        assert shapes == {(layout.num_rows, layout.num_blocks)}
        assert len(tensors.block_table) == layout.num_groups


def _parts(inputs: StepInputs[Any]) -> list[Any]:
    fields = [getattr(inputs, field.name) for field in dataclasses.fields(inputs)]
    return [part for each in fields for part in (each if isinstance(each, list) else [each])]


@pytest.mark.parametrize("max_model_len", [50, 2048, 131_072])
@pytest.mark.parametrize("max_rows", [1, 3, 100, 256, 300, 1024])
def test_every_step_of_decodes_finds_a_graph_that_is_not_much_larger(
    max_rows: int, max_model_len: int
) -> None:
    graphs = GraphedModel(NoModel(), max_rows, max_model_len)  # type: ignore[arg-type]
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
    graphs = graphed(loaded.model, Pool())
    assert graphs.inputs(1, 1) is None
    capture_all(graphs)
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
    """The inputs are not where the graph reads, like those of a rank that is told a step."""
    loaded = load(model_dir("llama"), max_model_len=120)
    allocate(loaded.model)
    pool = Pool()
    graphs = graphed(loaded.model, pool)
    # The graph has no rows beyond the steps', and its tables are as wide as theirs.
    graphs.capture([GraphShape(3, 2)], 16, pad_blocks=[NUM_BLOCKS])
    steps = RandomSteps(loaded.model, 384, 16, NUM_BLOCKS)
    others = RandomSteps(graphs, 384, 16, NUM_BLOCKS)
    sequences = [steps.sequence(length) for length in (20, 5, 31)]
    steps.run([(sequence, 0, len(sequence.token_ids) - 1) for sequence in sequences])
    expected = steps.decode(sequences)
    assert pool.num_replays == 0
    assert torch.equal(others.decode(sequences), expected)
    assert pool.num_replays == 1


class Unrecordable(Recorded):
    def capture(self, work: Callable[[], Tensor]) -> Tensor:
        raise RuntimeError("operation not permitted when stream is capturing\nmore")


class Rounded(Recorded):
    """Replays what other kernels compute."""

    def replay(self) -> None:
        super().replay()
        self._result *= 1 + 1e-5


class TooLarge(Recorded):
    def capture(self, work: Callable[[], Tensor]) -> Tensor:
        raise RuntimeError("CUDA error: out of memory")


def _preparation(
    graphs: GraphedModel, lines: list[str], *, is_exact: bool = False
) -> GraphPreparation:
    return GraphPreparation(graphs, torch.float32, 384, 120, lines.append, is_exact)


def test_too_little_memory_for_a_graph_is_said_in_one_line(model_dir: Directory) -> None:
    loaded = load(model_dir("llama"), max_model_len=120)
    graphs = graphed(loaded.model, Pool(TooLarge))
    with pytest.raises(ModelError, match=r"one of 8 tokens does not fit .* --enforce-eager"):
        _preparation(graphs, []).measure(16)


def test_graphs_with_adapters_are_measured_for_themselves(
    model_dir: Directory, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded = load(model_dir("llama"), max_model_len=120, enable_lora=True)
    graphs = GraphedModel(loaded.model, 7, 120, Pool, serves_adapters=True)
    counts = Counter(shape.has_adapters for shape in graphs.shapes(16))

    def used(_: torch.device) -> int:
        return sum(7 << 20 if shape.has_adapters else 3 << 20 for shape in graphs._captured)

    monkeypatch.setattr("penstock_shard.model_loader.prepare_cuda_graphs.used_bytes", used)
    expected = (7 << 20) * counts[True] + (3 << 20) * counts[False]
    assert _preparation(graphs, []).measure(16) == expected


@pytest.mark.parametrize("is_exact", [False, True])
def test_where_results_are_exact_a_replay_must_be(is_exact: bool, model_dir: Directory) -> None:
    loaded = load(model_dir("llama"), max_model_len=120)
    for make in (Recorded, Rounded):
        graphs = graphed(loaded.model, Pool(make))
        preparation = _preparation(graphs, [], is_exact=is_exact)
        allocate(loaded.model)
        assert preparation.capture(16, [NUM_BLOCKS]) is (make is Recorded or not is_exact)


class _Cuda:
    """A stand-in for torch's recording, whose end raises an error, as torch's does after failed
    work.
    """

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
    graphs = graphed(loaded.model, Pool(Unrecordable))
    assert _preparation(graphs, lines).measure(16) is None
    assert lines == [
        "CUDA graphs: none, the model cannot be recorded: "
        "operation not permitted when stream is capturing"
    ]
    assert graphs.inputs(1, 1) is None


class WrongBeyond(Recorded):
    """Replays something else where a row has more keys than one program sees."""

    def __init__(self, pool: Pool, model: _LongestRow) -> None:
        super().__init__(pool)
        self._model = model

    def replay(self) -> None:
        super().replay()
        self._result += float(self._model.longest > 256)


class _LongestRow:
    """A model, and the keys of the longest row it computed last."""

    def __init__(self, model: CausalModel) -> None:
        self._model = model
        self.longest = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def forward(
        self,
        ids: Tensor,
        positions: Tensor,
        batches: Sequence[AttentionBatch],
        *rest: Any,
        **named: Any,
    ) -> Any:
        self.longest = int(batches[0].seq_lens_tensor.max())
        return self._model.forward(ids, positions, batches, *rest, **named)


@pytest.mark.parametrize(("max_model_len", "num_blocks"), [(299, 40), (400, 22), (400, 40)])
def test_replays_are_compared_beyond_what_one_program_sees_where_there_is_room(
    max_model_len: int, num_blocks: int, model_dir: Directory, tmp_path: Path
) -> None:
    directory = Path(shutil.copytree(model_dir("llama"), tmp_path / "long"))
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 400}))
    model: Any = _LongestRow(load(directory, max_model_len=max_model_len).model)
    pool = Pool(lambda pool: WrongBeyond(pool, model))
    graphs = GraphedModel(model, 4, max_model_len, lambda: pool)
    preparation = GraphPreparation(
        graphs, torch.float32, 384, max_model_len, lambda line: None, is_exact=True
    )
    model.allocate([num_blocks + 1], 16, torch.float32)
    # 300, 40, 7 and 23 tokens take 25 blocks.
    is_seen = max_model_len >= 300 and num_blocks >= 25
    assert preparation.capture(16, [num_blocks]) is not is_seen


def test_graphs_with_adapters_that_replay_something_else_are_not_used(
    model_dir: Directory,
) -> None:
    loaded = load(model_dir("llama"), max_model_len=120, enable_lora=True)
    for stale, is_fine in ((Recorded, True), (Stale, False)):
        pool = Pool()
        graphs = GraphedModel(loaded.model, 7, 120, lambda pool=pool: pool, serves_adapters=True)  # type: ignore[misc]
        # They are recorded in this order.
        makes = iter([stale if shape.has_adapters else Recorded for shape in graphs.shapes(16)])
        pool.make = lambda pool, makes=makes: next(makes)(pool)  # type: ignore[misc]
        allocate(loaded.model)
        assert _preparation(graphs, []).capture(16, [NUM_BLOCKS]) is is_fine


def test_graphs_that_replay_something_else_are_not_used(model_dir: Directory) -> None:
    loaded = load(model_dir("llama"), max_model_len=120)
    for make, is_fine in ((Recorded, True), (Stale, False)):
        lines: list[str] = []
        graphs = graphed(loaded.model, Pool(make))
        preparation = _preparation(graphs, lines)
        measured = preparation.measure(16)
        assert measured is not None
        assert measured > 0
        allocate(loaded.model)
        assert preparation.capture(16, [NUM_BLOCKS]) is is_fine
        assert (graphs.inputs(1, 1) is not None) is is_fine
        (line,) = lines
        assert line.startswith("CUDA graphs: none, logits differ") is not is_fine


def test_what_replays_are_compared_with_is_no_replay(model_dir: Directory) -> None:
    """Here with a graph of the check's own shape."""
    loaded = load(model_dir("llama"), max_model_len=25)
    lines: list[str] = []
    for make, is_fine in ((Recorded, True), (Stale, False)):
        pool = Pool(make)
        graphs = GraphedModel(loaded.model, 2, 25, lambda pool=pool: pool)  # type: ignore[misc]
        preparation = GraphPreparation(graphs, torch.float32, 384, 25, lines.append)
        allocate(graphs)
        assert preparation.capture(16, [NUM_BLOCKS]) is is_fine
        assert pool.num_replays == 1


def test_a_decoder_whose_layers_cannot_be_recorded_has_no_graphs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    decoder: Any = Decoder.__new__(Decoder)
    decoder.device = torch.device("cuda")
    attends, has_state = SimpleNamespace(state=None), SimpleNamespace(state=StateSpec(8, 4))
    monkeypatch.setattr(Decoder, "layers", (attends,))
    ops: Any = SimpleNamespace(backend=SimpleNamespace(capturable=True), weights="bfloat16")
    config = ShardConfig(model="any")
    loaded: Any = SimpleNamespace(part=decoder, ops=ops, max_model_len=120)
    lines: list[str] = []
    for capturable in (True, False):
        monkeypatch.setattr(Decoder, "capturable", capturable)
        found = choose.choose_graphs(config, loaded, lines.append)
        assert (found is not None) is capturable
    monkeypatch.setattr(Decoder, "capturable", True)
    monkeypatch.setattr(Decoder, "layers", (attends, has_state))
    assert choose.choose_graphs(config, loaded, lines.append) is None
    monkeypatch.setattr(Decoder, "layers", (attends,))
    monkeypatch.setattr(choose, "captures_fp8", lambda device: False)
    assert choose.choose_graphs(config, loaded, lines.append) is not None
    ops.weights = "fp8"
    assert choose.choose_graphs(config, loaded, lines.append) is None
    assert lines == [
        "CUDA graphs: none, experts are multiplied one after the other",
        "CUDA graphs: none, they were not tried with layers that keep a state",
        "CUDA graphs: none, products in fp8 need torch 2.12 for them on this GPU",
    ]
