"""KV memory of a loaded model: measures the memory that the largest step leaves free, and allocates
blocks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from penstock_proto.types import EngineSampling
from penstock_shard.config import ShardConfig
from penstock_shard.device.gpu_memory import PeakMemory, free_bytes
from penstock_shard.device.host_memory import extra_host_bytes, free_host_bytes
from penstock_shard.distributed.parallel_model import MirroredModel
from penstock_shard.errors import ModelError, is_out_of_memory
from penstock_shard.model_loader.block_count import (
    KEPT_STATES,
    RECORD_BYTES,
    KVShape,
    choose_pools,
    describe_blocks,
    no_room,
)
from penstock_shard.models.loaded_model import LoadedModel
from penstock_shard.selfcheck.random_steps import (
    RandomSequence,
    RandomSteps,
    Row,
    in_slot,
    random_steps,
)
from penstock_shard.worker.logits_processors.order import every_processor
from penstock_shard.worker.sampling.sampler import Sampler, SampleRows

# The number of sequences whose states get memory before it is divided between states and blocks.
_MOST_STATES = 16
_COSTLY = EngineSampling(top_k=2000, top_p=0.9, min_p=0.01, typical_p=0.9, presence_penalty=0.1)
# Sampling parameters whose kernels are compiled at load. Some sample from the model's logits, some
# from changed copies of rows.
_BY_KERNELS = (EngineSampling(top_p=0.9), EngineSampling(), EngineSampling(presence_penalty=0.1))


@dataclass(frozen=True, slots=True)
class MemoryPreparation:
    config: ShardConfig
    loaded: LoadedModel
    block_size: int

    def allocate(
        self, graph_bytes: int | None, beside_bytes: int, progress: Callable[[str], None]
    ) -> list[int]:
        """Allocate the memory that the largest step leaves, less `beside_bytes`. With graphs, also
        less `graph_bytes` and a padding block of each pool. Return the blocks of each pool.
        `progress` gets a line with their size.

        Raises ModelError if there is too little memory.
        """
        model, shape = self.loaded.model, self.shape()
        num_spare = 0 if graph_bytes is None else 1
        free = self._least_free_bytes() - beside_bytes - (graph_bytes or 0)
        free -= num_spare * sum(shape.block_bytes)
        pools = choose_pools(shape, self.config, free, self._on_cpu)
        with_spare = [num_blocks + num_spare for num_blocks in pools]
        try:
            model.allocate(with_spare, self.block_size, self.loaded.kv_dtype)
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            flag = "--kv-blocks, --kv-memory or --gpu-memory-utilization"
            raise ModelError(no_room(shape, pools, free, flag)) from error
        progress(describe_blocks(shape, pools, self.config, self._on_cpu))
        return pools

    def shape(self) -> KVShape:
        layout, itemsize = self.loaded.model.cache_layout, self.loaded.kv_dtype.itemsize
        return KVShape(
            block_size=self.block_size,
            block_bytes=tuple(
                layout.block_bytes(pool, self.block_size, itemsize) or RECORD_BYTES
                for pool in range(len(layout.planes))
            ),
            max_model_len=self.loaded.max_model_len,
            groups=layout.groups,
            max_chunk_tokens=self._most_tokens,
            num_states=min(self.config.max_num_seqs, _MOST_STATES) + KEPT_STATES,
        )

    @property
    def _on_cpu(self) -> bool:
        return self.loaded.model.device.type == "cpu"

    @property
    def _most_tokens(self) -> int:
        return self.config.batched_tokens(str(self.loaded.model.device))

    def _least_free_bytes(self) -> int:
        """Return the bytes for keys and values: the smallest number of all ranks."""
        model = self.loaded.model
        if not isinstance(model, MirroredModel):
            return self._free_bytes()
        model.watch_memory()
        return model.least_free(self._free_bytes(), self.config.gpu_memory_utilization)

    def _free_bytes(self) -> int:
        """Return the bytes for keys and values on this rank, measured by running the largest step
        once.
        """
        loaded = self.loaded
        length = min(self._most_tokens, loaded.max_model_len)
        # Each row writes the same blocks, because only the size of the step matters here.
        num_blocks = -(-length // self.block_size)
        args = (loaded.vocab_size, self.block_size, num_blocks, loaded.kv_dtype)
        try:
            with loaded.model.shortened(), random_steps(loaded.model, *args) as steps:
                if self._on_cpu:
                    extra = extra_host_bytes(lambda: self._largest_step(steps, length))
                    return free_host_bytes() - extra
                peak = PeakMemory(loaded.model.device)
                self._largest_step(steps, length)
                extra = peak.extra_bytes()
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            raise ModelError(
                f"a step of {self._most_tokens} tokens does not fit into memory beside the "
                "weights; lower --max-num-batched-tokens or --max-num-seqs"
            ) from error
        return free_bytes(loaded.model.device, self.config.gpu_memory_utilization) - extra

    def _largest_step(self, steps: RandomSteps, length: int) -> None:
        """Compute a step with the most tokens and the most rows of logits, and sample from
        these.
        """
        tokens = self._most_tokens
        sequence = steps.sequence(length)
        # If adapters are served, a step with any adapter computes with all of them.
        sequence.adapter_index = 1 if self.config.serves_adapters else 0
        rows: list[Row] = [(sequence, 0, length)] * (tokens // length)
        if tokens % length:
            rows.append((sequence, 0, tokens % length))
        logits = steps.run(rows, range(min(self.config.max_step_logits, tokens)))
        if logits.device.type == "cpu":
            torch.softmax(logits, dim=-1, dtype=torch.float64)
            return
        one_token = RandomSequence([0], [])
        # Sample first with penalties, all filters and log-probabilities, then with cheaper
        # parameters.
        for sampling in (_COSTLY, *_BY_KERNELS):
            sampler = Sampler(every_processor())
            for slot in range(len(logits)):
                sampler.admit(in_slot(slot, one_token, sampling, logprobs=1))
            slots = np.arange(len(logits))
            sampler.sample(logits, SampleRows(slots, np.zeros_like(slots)))
