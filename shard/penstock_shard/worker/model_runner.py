"""Computes tokens with a model and a sampler."""

from __future__ import annotations

from collections import abc, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from penstock_shard.device.async_copy import mark, to_device
from penstock_shard.device.gpu_memory import empty_caches
from penstock_shard.errors import first_line, is_out_of_memory
from penstock_shard.ipc.runner_info import RunnerInfo
from penstock_shard.models.base import CausalModel, ImageInputs
from penstock_shard.models.cuda_graphs import Graphs
from penstock_shard.worker.base import (
    AdapterStore,
    Batch,
    ImageEncoder,
    RowResult,
    StepOutOfMemory,
)
from penstock_shard.worker.image_rows import FeatureSource, ImageRows
from penstock_shard.worker.input_batch import InputBuilder, Inputs, PendingTokens, SamplingInputs
from penstock_shard.worker.logits_processors.apply import LogitsShaping
from penstock_shard.worker.outputs.base import PendingOutput, RowOutput
from penstock_shard.worker.sampling.sampler import PendingSamples, Sampler, SampleRows
from penstock_shard.worker.slot_state import Slots

MakeOutputs = Callable[[Slots, Sampler], abc.Sequence[RowOutput]]


@dataclass(slots=True)
class _Pass:
    inputs: Inputs
    # The logits to sample from, until they are sampled.
    logits: Tensor | None = None
    enqueued: PendingSamples | None = None
    # Outputs of rows besides sampled tokens.
    outputs: abc.Sequence[PendingOutput] = ()
    # Inputs from images, and the error of each row that lacks an image.
    images: ImageInputs | None = None
    void_rows: dict[int, str] = field(default_factory=dict)

    @property
    def must_be_sampled(self) -> bool:
        return self.inputs.sampled is not None and self.enqueued is None

    def gives_all_and_nothing_else(self, num_rows: int) -> bool:
        """Tell whether the sampled tokens are the results of all rows."""
        sampled = self.inputs.sampled
        has_others = self.outputs or self.void_rows
        return sampled is not None and len(sampled.rows) == num_rows and not has_others


@dataclass(slots=True)
class _Step:
    """A launched step. It has `results` once it is finished."""

    num_rows: int
    forward: _Pass | None = None
    # Waits until the device has finished the step.
    wait: Callable[[], None] | None = None
    results: list[RowResult] | None = None
    # The out-of-memory error that makes the step void, or empty.
    failure: str = ""


class ModelRunner:
    """A `Runner` (`penstock_shard.worker.base`).

    `launch` gives all work of a step to the device and waits for none of it. The device keeps a
    table of sampled tokens for the next step. If a row's sampling state (penalties, constraints)
    needs such a token on the host, only the forward pass is launched. Sampling follows as soon as
    the previous step is finished, while the pass runs.
    """

    def __init__(
        self,
        model: CausalModel,
        info: RunnerInfo,
        *,
        shaping: LogitsShaping | None = None,
        make_outputs: MakeOutputs | None = None,
        graphs: Graphs | None = None,
        adapters: AdapterStore | None = None,
        images: FeatureSource | None = None,
    ) -> None:
        """`make_outputs` makes the outputs of rows besides sampled tokens. By default there are no
        such outputs, and no logits processors. `graphs`, `adapters` and `images` are the model's,
        if it has any.
        """
        self.model = model
        self._adapters = adapters
        self._images = images
        self._image_rows = None if images is None else ImageRows(images, model.device)
        self._info = info
        self._launched: deque[_Step] = deque()
        groups = info.cache_groups
        self._slots = Slots(len(groups))
        self._inputs = InputBuilder(
            info.block_size, model.device, groups, self._slots, graphs, self._image_rows
        )
        self._sampler = Sampler(shaping)
        self._outputs = () if make_outputs is None else make_outputs(self._slots, self._sampler)
        # The last sampled token in each slot, which the host may not know yet.
        self._last_tokens = torch.zeros(0, dtype=torch.int64, device=model.device)

    @property
    def info(self) -> RunnerInfo:
        return self._info

    @property
    def adapters(self) -> AdapterStore | None:
        return self._adapters

    @property
    def images(self) -> ImageEncoder | None:
        return self._images

    def launch(self, batch: Batch) -> None:
        step = _Step(batch.num_rows)
        # Sample deferred steps now, because this step reads their tokens.
        self._sample_deferred(len(self._launched))
        failure = next((earlier.failure for earlier in self._launched if earlier.failure), "")
        if failure:
            step.failure = failure
        else:
            self._guarded(step, partial(self._launch, step, batch))
        # Append last, so that a launch that raises leaves nothing to collect.
        self._launched.append(step)

    def collect(self) -> abc.Sequence[RowResult]:
        step = self._launched[0]
        self._finish(step)
        self._launched.popleft()
        if step.failure:
            # Later steps may need tokens that were never sampled.
            for later in self._launched:
                later.failure, later.forward = later.failure or step.failure, None
            raise StepOutOfMemory(step.failure)
        self._sample_deferred(1)
        assert step.results is not None
        return step.results

    def release(self, slot: int) -> None:
        self._slots.release(slot)
        if self._image_rows is not None:
            self._image_rows.release(slot)
        self._sampler.release(slot)
        for output in self._outputs:
            output.release(slot)

    def copy_states(self, copies: abc.Sequence[tuple[int, int]]) -> None:
        self.model.copy_states(copies)

    def read_block(self, group: int, block_id: int, into: memoryview) -> None:
        parts = self.model.block_parts(group, block_id)
        if parts:
            torch.frombuffer(into, dtype=torch.uint8).copy_(torch.cat(list(parts)))

    def write_block(self, group: int, block_id: int, data: memoryview) -> None:
        parts = self.model.block_parts(group, block_id)
        if parts:
            sizes = [len(part) for part in parts]
            pieces = torch.split(torch.frombuffer(data, dtype=torch.uint8), sizes)
            for part, piece in zip(parts, pieces, strict=True):
                part.copy_(piece)

    # ---- the device's part of a step ----

    @torch.inference_mode()
    def _guarded(self, step: _Step, work: Callable[[], None]) -> None:
        """If the work runs out of memory, free the step's memory and mark the step as void."""
        try:
            work()
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            step.failure = first_line(error)
        if step.failure:
            # Do this outside of `except`, where the error's traceback keeps tensors of the step
            # alive.
            step.forward = None
            self._sampler.abandon()
            empty_caches(self.model.device)

    def _launch(self, step: _Step, batch: Batch) -> None:
        if batch.state_copies:
            self.model.copy_states(batch.state_copies)
        if self._image_rows is not None:
            for sequence in batch.admitted:
                self._image_rows.admit(sequence)
        step.forward = forward = _Pass(self._inputs.build(batch))
        inputs = forward.inputs
        for sequence in batch.admitted:
            self._sampler.admit(sequence)
        if self._image_rows is not None:
            forward.images, forward.void_rows = self._image_rows.inputs(batch)
        defers = self._defers(inputs)
        logits, hidden = self._forward(forward, prepares=not defers)
        if not defers:
            self._sample(forward)
        if not inputs.is_plain:
            begun = [output.begin(inputs, logits, hidden) for output in self._outputs]
            forward.outputs = [output for output in begun if output is not None]
        step.wait = mark(self.model.device)

    def _defers(self, inputs: Inputs) -> bool:
        """Tell whether sampling depends on tokens that are not on the host yet."""
        if inputs.sampled is None or all(step.results is not None for step in self._launched):
            return False
        return self._sampler.needs_tokens(_sample_rows(inputs.sampled))

    def _forward(self, forward: _Pass, *, prepares: bool) -> tuple[Tensor, Tensor]:
        inputs = forward.inputs
        if inputs.pending is not None:
            self._fill(inputs, inputs.pending)
        if prepares and inputs.sampled is not None:
            self._sampler.prepare(_sample_rows(inputs.sampled))
        logits, hidden = self.model.forward(
            inputs.input_ids,
            inputs.positions,
            inputs.attention,
            inputs.logit_rows,
            inputs.hidden_rows,
            inputs.adapters,
            forward.images,
        )
        forward.logits = logits
        if inputs.sampled_logits is not None:
            sampled = to_device(inputs.sampled_logits, logits.device)
            forward.logits = logits.index_select(0, sampled)
        return logits, hidden

    def _fill(self, inputs: Inputs, pending: PendingTokens) -> None:
        if pending.places is None:
            ids = inputs.input_ids[: len(pending.slots)]
            torch.index_select(self._last_tokens, 0, pending.slots, out=ids)
        else:
            last = self._last_tokens.index_select(0, pending.slots)
            inputs.input_ids.index_copy_(0, pending.places, last)

    def _sample(self, forward: _Pass) -> None:
        sampled, logits = forward.inputs.sampled, forward.logits
        forward.logits = None
        if sampled is None:
            return
        assert logits is not None
        forward.enqueued = self._sampler.enqueue(logits, _sample_rows(sampled))
        missing = self._slots.capacity - len(self._last_tokens)
        if missing > 0:
            self._last_tokens = torch.cat([self._last_tokens, self._last_tokens.new_zeros(missing)])
        self._last_tokens.index_copy_(0, sampled.device_slots, forward.enqueued.tokens)

    def _sample_deferred(self, count: int) -> None:
        """Sample those of the first `count` launched steps that are not sampled yet."""
        for step in list(self._launched)[:count]:
            if step.failure:
                return
            if step.forward is not None and step.forward.must_be_sampled:
                self._finish_before(step)
                self._guarded(step, partial(self._sample_late, step, step.forward))

    def _sample_late(self, step: _Step, forward: _Pass) -> None:
        self._sample(forward)
        step.wait = mark(self.model.device)

    # ---- the host's part ----

    def _finish_before(self, step: _Step) -> None:
        for earlier in self._launched:
            if earlier is step:
                return
            self._finish(earlier)

    def _finish(self, step: _Step) -> None:
        if step.results is not None or step.failure:
            return
        assert step.wait is not None
        assert step.forward is not None
        step.wait()
        forward, step.forward = step.forward, None
        sampled, enqueued = forward.inputs.sampled, forward.enqueued
        found: list[RowResult] = []
        if sampled is not None and enqueued is not None:
            found = enqueued.finish()
            self._slots.append(sampled.slots, enqueued.known_tokens)
        if forward.gives_all_and_nothing_else(step.num_rows):
            step.results = found
            return
        step.results = results = [RowResult() for _ in range(step.num_rows)]
        # Accepting drafts may still draw tokens on the device.
        self._guarded(step, partial(_finish_all, forward.outputs, results))
        if sampled is not None:
            for index, result in zip(sampled.rows.tolist(), found, strict=True):
                if results[index].error is None:
                    result.prompt_logprobs = results[index].prompt_logprobs
                    results[index] = result
        for index, why in forward.void_rows.items():
            results[index] = RowResult(error=why)


def _finish_all(outputs: abc.Sequence[PendingOutput], results: list[RowResult]) -> None:
    for output in outputs:
        output.finish(results)


def _sample_rows(sampled: SamplingInputs) -> SampleRows:
    return SampleRows(sampled.slots, sampled.positions)
