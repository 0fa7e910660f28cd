"""Steps that are launched ahead: the same tokens, no look too early, memory that is short."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
from models.drawer import Drawer, SampleRow
from models.driver import Driver, load, make_sequence
from models.mixed_requests import mixed_requests, serve
from models.no_looks import NoLooks
from models.runners import make_runner
from models.sampling_reference import KINDS, OUTPUT, PROMPT, sampling_request
from support.budget import in_soak
from torch import Tensor

from penstock_proto.types import Constraint, EngineSampling
from penstock_shard.attention.base import AttentionBatch
from penstock_shard.models.base import CausalModel, ForwardOutput, ImageInputs
from penstock_shard.scheduler.rows import Row
from penstock_shard.worker.base import StepOutOfMemory
from penstock_shard.worker.model_runner import ModelRunner

Directory = Callable[[str], Path]
NUM_BLOCKS = 10


def _ahead(loaded: ModelRunner, model: Any = None) -> ModelRunner:
    info = dataclasses.replace(loaded.info, max_steps_ahead=1)
    return make_runner(model or loaded.model, info)


@pytest.mark.parametrize("seed", [1, in_soak(2)])
def test_requests_of_every_kind_get_the_tokens_they_get_step_by_step(
    seed: int, model_dir: Directory
) -> None:
    loaded = load(model_dir("qwen3"), kv_blocks=NUM_BLOCKS, max_model_len=120)
    expected, _ = serve(loaded, mixed_requests(seed), num_blocks=NUM_BLOCKS)
    found, scheduler = serve(_ahead(loaded), mixed_requests(seed), num_blocks=NUM_BLOCKS)
    assert found == expected
    assert scheduler.preemptions_total > 0


# ---- what the host looks at while it enqueues ----


@contextmanager
def _as_on_a_device(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Compute here as on a device, and fail where the host looks at a value."""

    def look(*_: object, **__: object) -> None:
        raise AssertionError("a look waits for the device")

    to_numpy = torch.Tensor.numpy

    def buffers_only(tensor: Tensor) -> Any:
        assert tensor.dtype is torch.uint8, "a look waits for the device"
        return to_numpy(tensor)

    with monkeypatch.context() as patch, NoLooks():
        for module in (
            *("sampling.draw", "sampling.top_k_top_p", "sampling.sampler"),
            *("sampling.token_scores", "logits_processors.constraint_mask"),
        ):
            patch.setattr(f"penstock_shard.worker.{module}.is_host", lambda _: False)
        for name in ("tolist", "item", "cpu"):
            patch.setattr(torch.Tensor, name, look)
        patch.setattr(torch.Tensor, "numpy", buffers_only)
        yield


UNSETTLED = {"typical_p", "filters", "everything"}


# There Triton compiles for the device, and these tensors are the host's.
@pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are interpreted")
@pytest.mark.parametrize("vocabulary", [24, 3000])
def test_nothing_that_the_device_computes_is_looked_at(
    vocabulary: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Filters that may need more than the first window are left out for the large vocabulary. Rows
    that are enqueued as on a device give what is sampled here.
    """
    kinds = {
        name: fields for name, fields in KINDS.items() if vocabulary == 24 or name not in UNSETTLED
    }
    kinds = {**kinds, "greedy": {"temperature": 0.0}, "wide": {"top_k": 2000, "top_p": 0.9}}
    sequences = [
        sampling_request(PROMPT, OUTPUT, **{**fields, "seed": seed, "logprobs": seed % 3 or None})
        for seed, fields in enumerate(kinds.values())
    ]
    logits = torch.randn(len(sequences), vocabulary, generator=torch.Generator().manual_seed(2)) * 2
    logits[3] = float("nan")
    rows = [SampleRow(sequence, len(OUTPUT)) for sequence in sequences]
    expected = Drawer().sample(logits, rows)
    drawer = Drawer()
    own = drawer.rows(rows)
    with _as_on_a_device(monkeypatch):
        enqueued = drawer.sampler.enqueue(logits, own)
    assert enqueued.finish() == expected
    assert [result.token_id for result in expected].count(None) == 1


def test_a_look_would_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the test above would hold for any sampler."""
    logits = torch.randn(1, 3000)
    sequence = sampling_request(PROMPT, OUTPUT, typical_p=0.9)
    with _as_on_a_device(monkeypatch), pytest.raises(AssertionError, match="waits"):
        Drawer().sample(logits, [SampleRow(sequence, len(OUTPUT))])


def test_a_launch_looks_at_nothing(model_dir: Directory, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second launch is of a step whose tokens are still to be sampled."""
    runner = _ahead(load(model_dir("llama")), _Shapes())
    sequence, other = make_sequence([5, 6, 7], max_tokens=9), make_sequence([9], max_tokens=9)
    driver = Driver(runner)
    with _as_on_a_device(monkeypatch):
        driver.launch(Row(other, 0, 1, True), Row(sequence, 0, 3, True))
        driver.launch(Row(other, 1, 1, True), Row(sequence, 3, 1, True))
    first, second = runner.collect(), runner.collect()
    # The model says what it was given.
    assert [result.token_id for result in first] == [9 + 1, 7 + 1]
    assert [result.token_id for result in second] == [9 + 2, 7 + 2]


class _Shapes:
    """A model whose next token is the last one and one more."""

    device = torch.device("cpu")
    layers = ()
    hidden_size = 4

    def forward(
        self,
        input_ids: Tensor,
        positions: Tensor,
        batch: AttentionBatch,
        logit_rows: Tensor,
        hidden_rows: Tensor | None = None,
        adapters: Tensor | None = None,
        images: ImageInputs | None = None,
    ) -> ForwardOutput:
        last = input_ids.index_select(0, logit_rows)
        logits = torch.nn.functional.one_hot(last + 1, 384).float()
        return ForwardOutput(logits, logits[:0])


# ---- memory ----


class _Short:
    """A model on a device whose memory does not hold some of its steps."""

    def __init__(self, model: CausalModel, failing: set[int]) -> None:
        self._model = model
        self._failing = failing
        self.num_steps = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def forward(self, *args: Any) -> ForwardOutput:
        self.num_steps += 1
        if self.num_steps in self._failing:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9 GiB\nmore")
        return self._model.forward(*args)


@pytest.mark.parametrize("max_steps_ahead", [0, 1])
def test_a_step_without_memory_is_computed_again(
    max_steps_ahead: int, model_dir: Directory
) -> None:
    loaded = load(model_dir("llama"), kv_blocks=40, max_model_len=120)
    info = dataclasses.replace(loaded.info, max_steps_ahead=max_steps_ahead)
    expected, _ = serve(make_runner(loaded.model, info), mixed_requests(4), num_blocks=40)
    short = _Short(loaded.model, {4, 5, 20, 33, 60})
    runner = make_runner(short, info)
    found, _ = serve(runner, mixed_requests(4), num_blocks=40)
    assert found == expected
    assert short.num_steps > 60


def test_steps_behind_one_that_failed_are_void_and_later_ones_run(model_dir: Directory) -> None:
    loaded = load(model_dir("llama"))
    runner = _ahead(loaded, _Short(loaded.model, {2}))
    driver = Driver(runner)
    sequence, fine = make_sequence([5, 6, 7], max_tokens=9), make_sequence([8, 9], max_tokens=9)
    driver.launch(Row(sequence, 0, 3, True))
    driver.launch(Row(sequence, 3, 1, True))
    (first,) = runner.collect()
    assert first.token_id is not None
    sequence.token_ids.append(first.token_id)
    driver.launch(Row(sequence, 4, 1, True))
    for _ in range(2):
        with pytest.raises(StepOutOfMemory, match=r"CUDA out of memory\. Tried to allocate 9 GiB$"):
            runner.collect()
    (again,) = driver.step([(fine, 2)])
    assert again.token_id is not None


def test_a_step_is_void_whose_predecessor_fails_when_it_is_collected(
    model_dir: Directory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The failure shows only when the step's results are taken, as where drafts are verified one
    after the other.
    """
    runner = _ahead(load(model_dir("llama")))
    sequence = make_sequence([5, 6, 7], EngineSampling(presence_penalty=0.5), max_tokens=9)
    driver = Driver(runner)
    for start, count in ((0, 3), (3, 1)):
        driver.launch(Row(sequence, start, count, True))
    finish = runner._finish

    def short(step: Any) -> None:
        finish(step)
        step.failure = "CUDA out of memory"

    with monkeypatch.context() as patch:
        patch.setattr(runner, "_finish", short)
        with pytest.raises(StepOutOfMemory):
            runner.collect()
    with pytest.raises(StepOutOfMemory):
        runner.collect()


def test_masks_that_are_being_filled_are_waited_for_without_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    waited = []

    class Masks:
        def start(self, states: Any) -> Any:
            return lambda: waited.append(len(states))

    class Following:
        error = ""

        def move_to(self, output: Any) -> None:
            pass

    def short(_: Tensor) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr("penstock_shard.worker.sampling.sampler._largest", short)
    sequence = make_sequence([5, 6], constraint=Constraint("json_object"))
    sequence.constraint = Following()  # type: ignore[assignment]
    sampler = Drawer(Masks())  # type: ignore[arg-type]
    with pytest.raises(torch.OutOfMemoryError):
        sampler.sample(torch.zeros(1, 9), [SampleRow(sequence, 0)])
    sampler.sampler.abandon()
    assert waited == [1]


def test_steps_behind_one_whose_sampling_failed_late_are_void(
    model_dir: Directory, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = _ahead(load(model_dir("llama")))
    sequence = sampling_request([5, 6, 7], [], repetition_penalty=1.3)
    driver = Driver(runner)
    driver.launch(Row(sequence, 0, 3, True))
    # What it draws from is known when the step before is collected.
    driver.launch(Row(sequence, 3, 1, True))

    def enqueue(*_: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9 GiB")

    with monkeypatch.context() as patch:
        patch.setattr(runner._sampler, "enqueue", enqueue)
        driver.launch(Row(sequence, 4, 1, True))
    (first,) = runner.collect()
    assert first.token_id is not None
    for _ in range(2):
        with pytest.raises(StepOutOfMemory, match="9 GiB"):
            runner.collect()


def test_other_failures_are_raised_as_they_are(model_dir: Directory) -> None:
    class Broken(_Short):
        def forward(self, *args: Any) -> ForwardOutput:
            raise RuntimeError("device-side assert")

    loaded = load(model_dir("llama"))
    runner = _ahead(loaded, Broken(loaded.model, set()))
    with pytest.raises(RuntimeError, match="device-side assert"):
        Driver(runner).step([(make_sequence([5]), 1)])


def test_of_a_step_that_was_not_launched_nothing_is_collected(
    model_dir: Directory, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = _ahead(load(model_dir("llama")))
    driver = Driver(runner)
    expected = driver.step([(make_sequence([5, 6]), 2)])
    with monkeypatch.context() as patch:
        # As when a test takes too long: no exception of a library.
        patch.setattr(runner._inputs, "build", MagicMock(side_effect=KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            driver.step([(make_sequence([5, 6]), 2)])
    again = driver.step([(make_sequence([5, 6]), 2)])
    assert [result.token_id for result in again] == [result.token_id for result in expected]
