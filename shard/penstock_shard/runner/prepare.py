"""A loaded model -> one that may serve: self-checks, and memory for keys and values.

Knows what is checked and measured and in which order. Knows nothing of how models are loaded.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from penstock_shard.config import ShardConfig
from penstock_shard.models import gate
from penstock_shard.models.attention.base import LayerSpec
from penstock_shard.models.base import CausalModel
from penstock_shard.models.cuda_graphs import Graphs
from penstock_shard.models.errors import ModelError, is_out_of_memory
from penstock_shard.models.ops.base import Ops
from penstock_shard.models.parallel.mirrored import MirroredModel
from penstock_shard.models.transformers_model import TransformersModel
from penstock_shard.request import SamplingParams
from penstock_shard.runner.invariance import first_variance
from penstock_shard.runner.memory import (
    KVShape,
    choose_num_blocks,
    extra_host_bytes,
    free_host_bytes,
    no_room,
)
from penstock_shard.runner.prepare_graphs import GraphPreparation
from penstock_shard.runner.sampler import Sampler, SampleRow
from penstock_shard.runner.trial import Row, TrialSteps, trial_steps

_CHECK_TOKENS = 32
_COSTLY = SamplingParams(top_k=2000, top_p=0.9, min_p=0.01, typical_p=0.9, presence_penalty=0.1)
# What has a way of its own on a device, with a kernel of ours.
_TOP_P = SamplingParams(top_p=0.9)


@dataclass(frozen=True, slots=True)
class Prepared:
    """What was found out and set up."""

    num_blocks: int
    block_size: int
    batch_invariant: bool
    # About how long the largest step takes.
    worst_step_s: float
    # Whether decodes are replayed from graphs.
    has_graphs: bool = False


@dataclass(frozen=True, slots=True)
class Preparation:
    """Makes a loaded model ready."""

    config: ShardConfig
    model: CausalModel
    ops: Ops
    kv_dtype: torch.dtype
    vocab_size: int
    max_model_len: int
    progress: Callable[[str], None]
    # Where decodes may be recorded; None: nowhere.
    graphs: Graphs | None = None
    # What the model wraps, where it is of several ranks.
    part: CausalModel | None = None

    def run(self, threads: int) -> Prepared:
        """Check, measure, allocate; on cpu compute with so many threads afterwards.

        Raises ModelError if the model computes wrongly or does not fit.
        """
        block_size = self._block_size()
        self.progress("checking what the model computes")
        part = self.part or self.model
        if isinstance(part, TransformersModel):
            self._check_attention(part, block_size)
        worst_step_s = self._check_finite(block_size)
        invariant = self.ops.exact and self._is_invariant(block_size, threads)
        self.ops.set_threads(threads)
        graphs = self._graph_preparation(invariant)
        graph_bytes = graphs.measure(block_size) if graphs else None
        num_blocks = self._allocate(block_size, graph_bytes)
        self.progress(f"KV cache: {num_blocks} blocks of {block_size} tokens")
        has_graphs = False
        if graphs is not None and graph_bytes is not None:
            has_graphs = graphs.capture(block_size, num_blocks)
        return Prepared(num_blocks, block_size, invariant, worst_step_s, has_graphs)

    def _graph_preparation(self, is_exact: bool) -> GraphPreparation | None:
        if self.graphs is None:
            return None
        return GraphPreparation(
            self.model,
            self.graphs,
            self.kv_dtype,
            self.vocab_size,
            self.max_model_len,
            self.progress,
            is_exact,
        )

    def _block_size(self) -> int:
        backend = self.ops.backend
        block_size = self.config.block_size or backend.block_multiple
        if block_size % backend.block_multiple:
            raise ModelError(
                f"--block-size {block_size}: attention backend {backend.name} needs a multiple "
                f"of {backend.block_multiple}"
            )
        return block_size

    def _check_attention(self, model: TransformersModel, block_size: int) -> None:
        """Two random sequences in chunks on the paged cache against the model's own attention."""
        length = min(_CHECK_TOKENS, self.max_model_len)
        half = max(1, length // 2)
        num_blocks = 2 * -(-length // block_size)
        paged: list[list[Tensor]] = [[], []]
        with trial_steps(
            self.model, self.vocab_size, block_size, num_blocks, self.ops.dtype
        ) as steps:
            sequences = [steps.sequence(length) for _ in paged]
            for start, end in ((0, half), (half, length)):
                if end > start:
                    rows: list[Row] = [(sequence, start, end - start) for sequence in sequences]
                    for found, part in zip(paged, steps.run(rows).chunk(2), strict=True):
                        found.append(part)
        tokens = torch.tensor([sequence.token_ids for sequence in sequences])
        logits = torch.cat([torch.cat(parts) for parts in paged])
        weights = self.ops.weights
        # Weights of 4 bits are multiplied by activations that are not rounded.
        precision = weights if weights in ("int8", "fp8") else _name(self.ops.dtype)
        if isinstance(self.model, MirroredModel):
            self.model.compute_own(tokens)
        gate.check_logits(model.module, tokens.to(model.device), logits, precision)

    def _check_finite(self, block_size: int) -> float:
        """Some random tokens must give numbers: half precision may not suffice for a model.

        Returns how long the largest step would take if all its tokens took as long as these.
        """
        length = min(_CHECK_TOKENS, self.max_model_len)
        num_blocks = -(-length // block_size)
        with trial_steps(
            self.model, self.vocab_size, block_size, num_blocks, self.kv_dtype
        ) as steps:
            rows = [(steps.sequence(length), 0, length)]
            if self.model.device.type != "cpu":
                # What is made and compiled at first is no part of a step.
                torch.isfinite(steps.run(rows)).all().item()
            started_s = time.perf_counter()
            logits = steps.run(rows)
        # Also waits for the device.
        finite = bool(torch.isfinite(logits).all())
        seconds = time.perf_counter() - started_s
        if not finite:
            kinds = (self.ops.weights, _name(self.kv_dtype))
            full = set(kinds) == {"float32"}
            raise ModelError(
                f"the model gives logits that are no numbers with weights in {kinds[0]} and keys "
                f"and values in {kinds[1]}; "
                + ("its weights are damaged" if full else f"use {self._full_precision()}")
            )
        return seconds * self._most_tokens() / length

    def _full_precision(self) -> str:
        """What to change in the flags to compute in float32 alone."""
        changes = []
        if self.config.quantization is not None:
            changes.append("no --quantization")
        if self.config.dtype != "float32":
            changes.append("--dtype float32")
        if self.config.kv_cache_dtype in ("float16", "fp8"):
            changes.append("--kv-cache-dtype auto")
        return " and ".join(changes)

    def _is_invariant(self, block_size: int, threads: int) -> bool:
        found = first_variance(
            self.model,
            self.vocab_size,
            self.max_model_len,
            block_size,
            self.kv_dtype,
            self.ops.set_threads,
            threads,
        )
        if found is not None:
            line = f"results depend on the batch: {found} changed a bit"
            if self.config.exact:
                raise ModelError(f"--exact: {line}; this model is served without it only")
            self.progress(line)
        return found is None

    def _allocate(self, block_size: int, graph_bytes: int | None) -> int:
        """Memory for keys and values: what the largest step leaves, and graphs if there are to be
        any; these have a block besides.
        """
        shape = KVShape(
            block_size=block_size,
            block_bytes=block_size * _bytes_per_token(self.model.layers, self.kv_dtype),
            max_model_len=self.max_model_len,
            max_num_seqs=self.config.max_num_seqs,
        )
        on_cpu = self.model.device.type == "cpu"
        free = self._least_free_bytes(block_size, on_cpu)
        num_spare = 0 if graph_bytes is None else 1
        free -= (graph_bytes or 0) + num_spare * shape.block_bytes
        num_blocks = choose_num_blocks(shape, self.config, free, on_cpu)
        try:
            self.model.allocate(num_blocks + num_spare, block_size, self.kv_dtype)
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            flag = "--kv-blocks, --kv-memory or --gpu-memory-utilization"
            raise ModelError(no_room(shape, num_blocks, free, flag)) from error
        return num_blocks

    def _least_free_bytes(self, block_size: int, on_cpu: bool) -> int:
        """Over all ranks: what keys and values may take on each."""
        if not isinstance(self.model, MirroredModel):
            return self._free_bytes(block_size, on_cpu)
        self.model.watch_memory()
        free = self._free_bytes(block_size, on_cpu)
        return self.model.least_free(free, self.config.gpu_memory_utilization)

    def _free_bytes(self, block_size: int, on_cpu: bool) -> int:
        """What keys and values may take, found by running the largest step once."""
        tokens = self._most_tokens()
        length = min(tokens, self.max_model_len)
        # Each row writes the same blocks: only the size of the step matters here.
        num_blocks = -(-length // block_size)
        try:
            with (
                self.model.shortened(),
                trial_steps(
                    self.model, self.vocab_size, block_size, num_blocks, self.kv_dtype
                ) as steps,
            ):
                if on_cpu:
                    extra = extra_host_bytes(lambda: self._largest_step(steps, length))
                    return free_host_bytes() - extra
                extra = self._extra_device_bytes(lambda: self._largest_step(steps, length))
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            raise ModelError(
                f"a step of {tokens} tokens does not fit into memory beside the weights; lower "
                "--max-num-batched-tokens or --max-num-seqs"
            ) from error
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info(self.model.device)
        return int(total * self.config.gpu_memory_utilization) - (total - free) - extra

    def _largest_step(self, steps: TrialSteps, length: int) -> None:
        """The most tokens a step may have, and the most rows of logits, with what the sampler makes
        of them.
        """
        tokens = self._most_tokens()
        sequence = steps.sequence(length)
        # Where places for adapters are set aside, a step with any computes all of them.
        sequence.adapter_slot = 1 if self.config.serves_adapters else 0
        rows: list[Row] = [(sequence, 0, length)] * (tokens // length)
        if tokens % length:
            rows.append((sequence, 0, tokens % length))
        logits = steps.run(rows, range(min(self.config.max_step_logits, tokens)))
        if logits.device.type == "cpu":
            torch.softmax(logits, dim=-1, dtype=torch.float64)
            return
        # Each row with penalties, all filters and log-probabilities; then with top-p alone.
        for sampling in (_COSTLY, _TOP_P):
            requests = [
                dataclasses.replace(sequence, sampling=sampling, logprobs=1) for _ in logits
            ]
            Sampler().sample(logits, [SampleRow(request, 0) for request in requests])

    def _most_tokens(self) -> int:
        return self.config.batched_tokens(str(self.model.device))

    def _extra_device_bytes(self, work: Callable[[], None]) -> int:
        device = self.model.device
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        work()
        torch.cuda.synchronize(device)
        return torch.cuda.max_memory_allocated(device) - before


def _bytes_per_token(layers: tuple[LayerSpec, ...], dtype: torch.dtype) -> int:
    return sum(layer.elements_per_token for layer in layers) * dtype.itemsize


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
