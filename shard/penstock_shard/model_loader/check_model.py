"""Self-checks of a loaded model: its results are right, and the same in any batch."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch
from torch import Tensor

from penstock_shard.config import ShardConfig
from penstock_shard.device.dtypes import dtype_name
from penstock_shard.distributed.parallel_model import MirroredModel
from penstock_shard.errors import ModelError
from penstock_shard.models.base import WithOwnAttention
from penstock_shard.models.loaded_model import LoadedModel
from penstock_shard.selfcheck.batch_invariance import first_variance
from penstock_shard.selfcheck.own_attention import check_logits
from penstock_shard.selfcheck.random_steps import RandomSteps, Row, random_steps

_CHECK_TOKENS = 32


@dataclass(frozen=True, slots=True)
class CheckResults:
    # The number of tokens of a KV block.
    block_size: int
    batch_invariant: bool
    # The estimated duration of the largest step.
    worst_step_s: float


def check_model(
    config: ShardConfig, loaded: LoadedModel, progress: Callable[[str], None]
) -> CheckResults:
    """Raises ModelError if the model computes wrongly, or does not fit the flags."""
    block_size = _block_size(config, loaded)
    checks = _Checks(config, loaded, block_size, progress)
    checks.attention()
    worst_step_s = checks.numbers()
    is_invariant = checks.invariance()
    # The last check changed the number of threads.
    loaded.ops.set_threads(loaded.threads)
    return CheckResults(block_size, is_invariant, worst_step_s)


def _block_size(config: ShardConfig, loaded: LoadedModel) -> int:
    backend = loaded.ops.backend
    block_size = config.block_size or backend.block_multiple
    if block_size % backend.block_multiple:
        raise ModelError(
            f"--block-size {block_size}: attention backend {backend.name} needs a multiple "
            f"of {backend.block_multiple}"
        )
    for group in loaded.model.cache_layout.groups:
        if group.has_state and config.state_spacing % block_size:
            raise ModelError(
                f"--state-spacing {config.state_spacing}: states are kept at the ends of blocks, "
                f"so it must be a multiple of --block-size {block_size}"
            )
        if group.has_state and config.speculative_tokens:
            raise ModelError(
                f"--speculative-tokens {config.speculative_tokens}: layers of this model have "
                "states, which cannot go back behind a rejected draft; use 0"
            )
        if group.chunk is not None and group.chunk % block_size:
            raise ModelError(
                f"--block-size {block_size}: the model attends within chunks of {group.chunk} "
                "tokens, which must be a multiple of it"
            )
    return block_size


@dataclass(frozen=True, slots=True)
class _Checks:
    config: ShardConfig
    loaded: LoadedModel
    block_size: int
    progress: Callable[[str], None]

    def attention(self) -> None:
        """Compare the model's own attention, if its code has one, with our paged attention, on two
        random sequences in chunks.
        """
        model, part = self.loaded.model, self.loaded.part
        if not isinstance(part, WithOwnAttention):
            return
        length = min(_CHECK_TOKENS, self.loaded.max_model_len)
        half = max(1, length // 2)
        paged: list[list[Tensor]] = [[], []]
        # The cache has the activations' dtype, because the model's own attention does not round
        # keys and values.
        with self._steps(2, length, self.loaded.ops.dtype) as steps:
            sequences = [steps.sequence(length) for _ in paged]
            for start, end in ((0, half), (half, length)):
                if end > start:
                    rows: list[Row] = [(sequence, start, end - start) for sequence in sequences]
                    for found, logits in zip(paged, steps.run(rows).chunk(2), strict=True):
                        found.append(logits)
        tokens = torch.tensor([sequence.token_ids for sequence in sequences])
        if isinstance(model, MirroredModel):
            model.compute_own(tokens)
        found_logits = torch.cat([torch.cat(chunks) for chunks in paged])
        own_logits = part.own_logits(tokens.to(model.device)).flatten(0, 1)
        name = self.loaded.facts.architecture
        check_logits(name, own_logits, found_logits, self._precision())

    def _precision(self) -> str:
        weights = self.loaded.ops.weights
        # Products with these weights round activations too.
        if weights in ("int8", "int4", "fp8", "bfloat16"):
            return weights
        return dtype_name(self.loaded.ops.dtype)

    def numbers(self) -> float:
        """Check that random tokens give finite logits, because half precision overflows in some
        models.

        Returns the time of the largest step, estimated from the time of these tokens.
        """
        length = min(_CHECK_TOKENS, self.loaded.max_model_len)
        device = self.loaded.model.device
        with self._steps(1, length, self.loaded.kv_dtype) as steps:
            rows = [(steps.sequence(length), 0, length)]
            if device.type != "cpu":
                # Warm up, because only the first run allocates and compiles.
                torch.isfinite(steps.run(rows)).all().item()
            started_s = time.perf_counter()
            logits = steps.run(rows)
        # This also waits for the device.
        are_finite = bool(torch.isfinite(logits).all())
        seconds = time.perf_counter() - started_s
        if not are_finite:
            raise ModelError(self._no_numbers())
        return seconds * self.config.batched_tokens(str(device)) / length

    def _no_numbers(self) -> str:
        weights, cached_as = self.loaded.ops.weights, dtype_name(self.loaded.kv_dtype)
        full = weights == cached_as == "float32"
        return (
            f"the model gives logits that are no numbers with weights in {weights} and keys "
            f"and values in {cached_as}; "
            + ("its weights are damaged" if full else f"use {self._full_precision()}")
        )

    def _full_precision(self) -> str:
        """Return the flags to change so that everything is computed in float32."""
        changes = []
        if self.config.quantization is not None:
            changes.append("no --quantization")
        if self.config.dtype != "float32":
            changes.append("--dtype float32")
        if self.config.kv_cache_dtype in ("float16", "fp8"):
            changes.append("--kv-cache-dtype auto")
        return " and ".join(changes)

    def invariance(self) -> bool:
        """True if results do not depend on the batch. False without a test if ops are not exact."""
        loaded = self.loaded
        if not loaded.ops.exact:
            return False
        found = first_variance(
            loaded.model,
            loaded.vocab_size,
            loaded.max_model_len,
            self.block_size,
            loaded.kv_dtype,
            loaded.ops.set_threads,
            loaded.threads,
        )
        if found is not None:
            line = f"results depend on the batch: {found} changed a bit"
            if self.config.exact:
                raise ModelError(f"--exact: {line}; this model is served without it only")
            self.progress(line)
        return found is None

    def _steps(
        self, count: int, length: int, kv_dtype: torch.dtype
    ) -> AbstractContextManager[RandomSteps]:
        loaded = self.loaded
        num_blocks = count * -(-length // self.block_size)
        return random_steps(loaded.model, loaded.vocab_size, self.block_size, num_blocks, kv_dtype)
