"""Steps with drafts and with adapters that are replayed, as those of plain decodes are."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import MagicMock

import msgspec
import numpy as np
import pytest
import torch
from models.driver import Driver, load, make_sequence
from models.mixed_requests import mixed_requests, serve
from models.no_looks import NoLooks
from models.recorded_graphs import NUM_BLOCKS, NoModel, Pool, allocate, capture_all, graphed
from models.runners import make_runner
from support.adapters import make_adapter
from support.budget import budget, seeded
from support.drafters import FickleOracle, named
from support.plans import batch_of
from torch import Tensor

from penstock_proto.types import EngineSampling, PromptImage
from penstock_shard.attention.sdpa import SdpaBackend
from penstock_shard.distributed import parallel_model
from penstock_shard.distributed.collectives import Ranks
from penstock_shard.distributed.messages import Call, ToRank
from penstock_shard.distributed.parallel_model import MirroredModel
from penstock_shard.ipc.runner_info import CacheGroup
from penstock_shard.lora.lora import LoraBank, LoraLimits
from penstock_shard.models.cuda_graphs import (
    GraphedModel,
    StaticInputs,
)
from penstock_shard.models.decoder.decoder import Decoder
from penstock_shard.models.lora_targets import make_adaptable
from penstock_shard.models.step_inputs import InputLayout
from penstock_shard.models.transformers.transformers_model import TransformersModel
from penstock_shard.ops.torch_ops import TorchOps
from penstock_shard.scheduler.rows import Row
from penstock_shard.worker.image_rows import FeatureSource, ImageRows
from penstock_shard.worker.input_batch import InputBuilder, Inputs
from penstock_shard.worker.model_runner import ModelRunner
from penstock_shard.worker.outputs.draft_verification import Drafts

Directory = Callable[[str], Path]
_REQUESTS = budget(16, 24)


# ---- steps with drafts ----


@contextmanager
def _drafts_replayed(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[bool]]:
    """Yield a list that gets an entry for each pass with drafts: True if it was computed token by
    token, as only graphs do.
    """
    seen: list[bool] = []
    begin = Drafts.begin

    def spy(drafts: Drafts, inputs: Inputs, *passed: Tensor) -> Any:
        if any(inputs.batch.drafts):
            seen.append(inputs.attention[0].num_decodes >= len(inputs.logit_rows))
        return begin(drafts, inputs, *passed)

    with monkeypatch.context() as patch:
        patch.setattr(Drafts, "begin", spy)
        yield seen


@pytest.mark.parametrize(("family", "max_steps_ahead"), [("llama", 1), ("gemma2", 0)])
def test_replayed_drafts_give_what_the_model_gives(
    family: str, max_steps_ahead: int, model_dir: Directory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Right drafts and wrong ones, also of rows whose later tokens are drawn after the next
    forward.
    """
    loaded = load(model_dir(family), kv_blocks=NUM_BLOCKS, max_model_len=120)
    info = dataclasses.replace(loaded.info, max_steps_ahead=max_steps_ahead)
    plain, _ = serve(
        make_runner(loaded.model, info),
        mixed_requests(3, _REQUESTS),
        num_blocks=NUM_BLOCKS,
    )
    tokens: dict[str, Any] = {str(number): found[0] for number, found in enumerate(plain)}
    seed = seeded("replayed drafts").getrandbits(32)

    def drafter() -> FickleOracle:
        return FickleOracle(4, named(tokens), random.Random(seed), 384)

    expected, _ = serve(
        make_runner(loaded.model, info),
        mixed_requests(3, _REQUESTS),
        num_blocks=NUM_BLOCKS,
        drafter=drafter(),
    )
    allocate(loaded.model)
    # As many rows as seven sequences and as many drafts may have.
    graphs = graphed(loaded.model, Pool(), max_rows=14)
    capture_all(graphs)
    with _drafts_replayed(monkeypatch) as replayed:
        found, _ = serve(
            make_runner(graphs, info, graphs=graphs),
            mixed_requests(3, _REQUESTS),
            num_blocks=NUM_BLOCKS,
            drafter=drafter(),
        )
    assert found == expected
    assert [own[0] for own in found] == [own[0] for own in plain]
    assert replayed.count(True) > 5


def test_tokens_that_are_drawn_after_the_next_forward_are_of_their_own_logits(
    model_dir: Directory,
) -> None:
    """The request's draws depend on the tokens before, and are made while another's step runs."""
    loaded = load(model_dir("llama"), kv_blocks=NUM_BLOCKS, max_model_len=120)
    info = dataclasses.replace(loaded.info, max_steps_ahead=1)
    sampling = EngineSampling(temperature=0.0, repetition_penalty=1.3)
    sequence = make_sequence([5, 6, 7], sampling)
    driver = Driver(make_runner(loaded.model, info))
    expected = [driver.step([(sequence, count)])[0].token_id for count in (3, 1, 1, 1)]
    allocate(loaded.model)
    pool = Pool()
    graphs = graphed(loaded.model, pool)
    capture_all(graphs)
    runner = make_runner(graphs, info, graphs=graphs)
    sequence, other = make_sequence([5, 6, 7], sampling), make_sequence([9])
    driver = Driver(runner)
    driver.step([(sequence, 3), (other, 1)])
    drafts = [token for token in expected[1:3] if token is not None]
    driver.launch(Row(sequence, 3, 3, True, drafts=drafts))
    driver.launch(Row(other, 1, 1, True))
    (result,) = runner.collect()
    assert [result.token_id, *result.more_token_ids] == expected[1:]
    assert pool.num_replays == 2
    runner.collect()


def _drafted_batch(graphs: GraphedModel | None) -> Inputs:
    """Return the inputs of a decode whose token is not known yet, and of two rows with drafts."""
    sequences = [make_sequence([1] * length) for length in (20, 33, 40)]
    for slot, sequence in enumerate(sequences):
        sequence.slot = slot
    rows = (
        Row(sequences[0], 20, 1, True),
        Row(sequences[1], 32, 3, True, drafts=(7, 8)),
        Row(sequences[2], 39, 2, True, drafts=(9,)),
    )
    new_blocks = [[range(3 * slot, 3 * slot + 3) for slot in range(3)]]
    builder = InputBuilder(16, torch.device("cpu"), (CacheGroup(),), graphs=graphs)
    with torch.inference_mode():
        return builder.build(batch_of(*rows, new_blocks=new_blocks))


def test_a_step_with_drafts_has_a_row_for_each_token_and_is_else_the_same(
    model_dir: Directory,
) -> None:
    loaded = load(model_dir("llama"), max_model_len=120)
    graphs = graphed(loaded.model, Pool())
    capture_all(graphs)
    batch, plain = _drafted_batch(graphs), _drafted_batch(None)
    count = len(plain.input_ids)
    assert count == 6
    (found,), (expected,) = batch.attention, plain.attention
    assert expected.seq_lens == [21, 35, 41]
    assert found.seq_lens_tensor.tolist() == [21, 33, 34, 35, 40, 41, 1, 1]
    assert found.cu_queries.tolist() == list(range(9))
    assert found.cu_keys.tolist() == [0, 21, 54, 88, 123, 163, 204, 205, 206]
    tables = expected.block_table[[0, 1, 1, 1, 2, 2]]
    assert torch.equal(found.block_table[:count, : tables.shape[1]], tables)
    assert torch.equal(batch.input_ids[:count], plain.input_ids)
    assert torch.equal(batch.positions[:count], plain.positions)
    assert torch.equal(found.slots[:count], expected.slots)
    assert torch.equal(batch.logit_rows, plain.logit_rows)
    assert batch.places.tolist() == plain.places.tolist() == [0, 1, 4]
    assert batch.sampled_logits is not None
    assert batch.sampled_logits.tolist() == [0]
    assert batch.pending is not None
    assert batch.pending.places is not None
    assert batch.pending.places.tolist() == [0]


def test_drafts_that_would_read_too_much_again_are_not_replayed(
    model_dir: Directory, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded = load(model_dir("llama"), max_model_len=120)
    graphs = graphed(loaded.model, Pool())
    capture_all(graphs)
    # 33 and 34 keys of the first row with drafts, 40 of the other.
    for most, is_replayed in ((107, True), (106, False)):
        monkeypatch.setattr("penstock_shard.worker.input_batch._MOST_KEYS_AGAIN", most)
        assert (_drafted_batch(graphs).attention[0].num_decodes == 8) is is_replayed


# ---- steps with images ----


class _Grids:
    """A source whose images are arranged in one row; nothing is computed for them."""

    axis_of_frequencies = (0, 1, 2, 2)
    token_id = 7

    def grid(self, salt: str, image: PromptImage) -> tuple[int, int]:
        return 1, image.num_tokens


def test_a_step_with_the_last_token_of_an_image_is_not_padded_for_a_graph(
    model_dir: Directory,
) -> None:
    """Positions of images are as many as the step's tokens."""
    loaded = load(model_dir("llama"), max_model_len=120)
    graphs = graphed(loaded.model, Pool())
    capture_all(graphs)
    images = ImageRows(cast(FeatureSource, _Grids()), torch.device("cpu"))
    builder = InputBuilder(16, torch.device("cpu"), (CacheGroup(),), graphs=graphs, images=images)
    sequences = [make_sequence([1] * 20) for _ in range(3)]
    ids = [1] * 10 + [7] * 10
    seeing = make_sequence(ids)
    seeing.request = msgspec.structs.replace(seeing.request, images=[PromptImage("", 1, 1, 10, 10)])
    sequences[1] = seeing
    for slot, sequence in enumerate(sequences):
        sequence.slot = slot
    images.admit(seeing)
    with torch.inference_mode():
        for start, is_replayed in ((19, False), (20, True)):
            rows = [Row(sequence, start, 1, True) for sequence in sequences]
            new_blocks = [[range(2 * slot, 2 * slot + 2) for slot in range(3)]]
            inputs = builder.build(batch_of(*rows, new_blocks=new_blocks))
            assert inputs.is_static is is_replayed
            assert len(inputs.input_ids) == (4 if is_replayed else 3)


# ---- steps with adapters ----


@pytest.mark.parametrize(("family", "max_steps_ahead"), [("llama", 0), ("olmo", 1)])
def test_replayed_decodes_with_adapters_give_what_the_model_gives(
    family: str, max_steps_ahead: int, model_dir: Directory, tmp_path: Path
) -> None:
    """Beside rows without any, in our decoder and in transformers' code."""
    settings: dict[str, Any] = {"kv_blocks": NUM_BLOCKS, "max_model_len": 120}
    loaded = load(model_dir(family), enable_lora=True, **settings)
    assert loaded.adapters is not None
    for index in (1, 2):
        path = make_adapter(tmp_path / str(index), seed=index, size=1.0)
        loaded.adapters.place(index, loaded.adapters.read(str(path)))
    info = dataclasses.replace(loaded.info, max_steps_ahead=max_steps_ahead)

    # The last ones have none, and steps of theirs alone are replayed without.
    indices = [0 if number > 16 else number % 3 for number in range(24)]

    def tokens(runner: ModelRunner, indices: list[int]) -> list[Any]:
        said, _ = serve(runner, mixed_requests(3), num_blocks=NUM_BLOCKS, adapter_indices=indices)
        return [own[0] for own in said]

    expected = tokens(make_runner(loaded.model, info), indices)
    assert expected != tokens(make_runner(loaded.model, info), [0] * 24)
    allocate(loaded.model)
    pool = Pool()
    graphs = GraphedModel(loaded.model, 7, 120, lambda: pool, serves_adapters=True)
    capture_all(graphs)
    kinds = []
    inputs = graphs.inputs

    def spy(num_rows: int, num_blocks: int, has_adapters: bool = False) -> StaticInputs | None:
        found = inputs(num_rows, num_blocks, has_adapters)
        assert found is not None
        assert found.layout.has_adapters is has_adapters
        kinds.append(has_adapters)
        return found

    graphs.inputs = spy  # type: ignore[method-assign]
    assert tokens(make_runner(graphs, info, graphs=graphs), indices) == expected
    assert pool.num_replays == len(kinds)
    assert min(kinds.count(False), kinds.count(True)) > 5


def test_rows_of_nobody_have_no_adapter() -> None:
    graphs = GraphedModel(NoModel(), 8, 120, Pool)  # type: ignore[arg-type]
    layout = InputLayout(8, 8, 5, 0, has_adapters=True)
    arrays = layout.arrays(np.full(layout.num_bytes, 77, dtype=np.uint8))
    graphs.pad(arrays, 3)
    assert (arrays.adapters[:3] != 0).all()
    assert (arrays.adapters[3:] == 0).all()


@pytest.mark.parametrize("max_rows", [1, 100, 256, 512])
def test_graphs_with_adapters_are_fewer_and_only_where_some_are_served(max_rows: int) -> None:
    without, both = (
        GraphedModel(NoModel(), max_rows, 131_072, serves_adapters=serves).shapes(16)  # type: ignore[arg-type]
        for serves in (False, True)
    )
    own = [shape for shape in both if shape.has_adapters]
    assert [shape for shape in both if not shape.has_adapters] == without
    assert len(own) <= 40
    if max_rows >= 256:
        assert len(own) < 0.6 * len(without)
    most_rows = max(shape.num_rows for shape in without)
    for rows in range(1, max_rows + 1):
        fitting = min(s for s in own if s.num_rows >= rows and s.num_blocks >= 131_072 // 16)
        assert fitting.num_rows < 2 * rows or fitting.num_rows == most_rows


@pytest.mark.parametrize("family", ["llama", "olmo"])
def test_a_step_with_adapters_as_devices_compute_them_waits_for_nothing(
    family: str, model_dir: Directory
) -> None:
    """A recorded step must not wait."""
    loaded = load(model_dir(family), attention_backend="sdpa")
    assert isinstance(loaded.model, Decoder | TransformersModel)
    ops = TorchOps(torch.device("cpu"), torch.float32, "float32", SdpaBackend())
    make_adaptable(loaded.model, LoraBank(LoraLimits(2, 8), ops, stacked=True))
    graphs = GraphedModel(loaded.model, 2, 120, Pool, serves_adapters=True)
    allocate(loaded.model)
    shapes = [shape for shape in graphs.shapes(16) if shape.has_adapters]
    with NoLooks():
        graphs.capture(shapes, 16, [NUM_BLOCKS])
    assert graphs.num_graphs == len(shapes) == 2


def test_ranks_record_the_shapes_that_they_are_told() -> None:
    shapes = GraphedModel(NoModel(), 8, 120, serves_adapters=True).shapes(16)  # type: ignore[arg-type]
    told: list[Any] = []
    recorded = [MagicMock(spec=GraphedModel, device="cpu") for _ in range(2)]
    followers: Any = SimpleNamespace(tell=told.append)
    MirroredModel(recorded[0], Ranks(0, 2), followers).capture(shapes, 16, [33])
    body = msgspec.msgpack.decode(msgspec.msgpack.encode(told[0]), type=ToRank)
    assert isinstance(body, Call)
    parallel_model._capture(recorded[1], [int(each) for each in body.arguments])
    for model in recorded:
        model.capture.assert_called_once_with(shapes, 16, [33])
