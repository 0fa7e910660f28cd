"""A model directory -> a `ModelRunner` that is ready: load, gate, self-check, KV memory.

Knows in which order things are loaded and checked, and says so as it goes. Knows nothing of steps.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel

from penstock_shard.config import ShardConfig
from penstock_shard.models import gate
from penstock_shard.models.attention import choose_backend
from penstock_shard.models.attention.base import AttentionBackend, LayerSpec
from penstock_shard.models.errors import ModelError
from penstock_shard.models.loader import (
    LoadOptions,
    generation_defaults,
    load_config,
    load_module,
    resolve_device,
    resolve_dtype,
)
from penstock_shard.models.transformers_model import ATTENTION_NAME, TransformersModel
from penstock_shard.models.weights_hash import hash_weights
from penstock_shard.request import Request, SamplingParams
from penstock_shard.runner.base import RunnerInfo, ScheduledRequest, StepPlan
from penstock_shard.runner.batch import build_batches
from penstock_shard.runner.memory import KVShape, choose_num_blocks, free_host_bytes
from penstock_shard.runner.model_runner import CAPABILITIES, ModelRunner

_CHECK_TOKENS = 32


def create_runner(
    config: ShardConfig, model_dir: Path, *, progress: Callable[[str], None]
) -> ModelRunner:
    """Load the model of a directory and make it ready to serve.

    `progress` gets one line for each stage. Raises ModelError, with one line that says what to do,
    if the model cannot be loaded, would be served wrongly, or does not fit.
    """
    device = resolve_device(config.device)
    if device.type == "cpu":
        torch.set_num_threads(config.threads or default_threads())
    hf_config = load_config(model_dir, trust_remote_code=config.trust_remote_code)
    max_model_len = _max_model_len(config, hf_config)
    gate.check_config(hf_config, max_model_len)
    dtype = resolve_dtype(config.dtype, hf_config, device)
    backend = choose_backend(config.attention_backend, device, dtype)
    dummy = config.load_format == "dummy"
    name = gate.architecture_of(hf_config)
    progress(f"loading {name} as {_dtype_name(dtype)} on {device}")
    options = LoadOptions(device, dtype, config.trust_remote_code, dummy)
    with ThreadPoolExecutor(max_workers=1) as pool:
        hashing = pool.submit(hash_weights, model_dir, config_only=dummy)
        module = load_module(model_dir, hf_config, options)
        weights_hash = hashing.result()
    loaded = _Loaded(config, module, backend, device, max_model_len)
    progress("checking attention against the model's own")
    num_blocks, block_size = loaded.prepare()
    progress(f"KV cache: {num_blocks} blocks of {block_size} tokens")
    text = hf_config.get_text_config()
    generation = generation_defaults(model_dir)
    info = RunnerInfo(
        architecture=name,
        weights_hash=weights_hash,
        vocab_size=int(text.vocab_size),
        max_model_len=max_model_len,
        eos_token_ids=_eos_token_ids(generation, text),
        default_sampling=_default_sampling(generation),
        block_size=block_size,
        num_blocks=num_blocks,
        dtype=_dtype_name(dtype),
        kv_dtype=_dtype_name(dtype),
        device=str(device),
        attention_backend=backend.name,
        capabilities=CAPABILITIES,
        # On cpu the step itself needs the processor that would prepare the next one.
        max_steps_ahead=0 if device.type == "cpu" else 1,
    )
    return ModelRunner(loaded.model, info)


def default_threads() -> int:
    """Compute threads on cpu: all cores this process may use but one."""
    if hasattr(os, "sched_getaffinity"):
        cores = len(os.sched_getaffinity(0))
    else:
        cores = os.cpu_count() or 1
    return max(1, cores - 1)


class _Loaded:
    """A module in memory on its way to being served."""

    def __init__(
        self,
        config: ShardConfig,
        module: PreTrainedModel,
        backend: AttentionBackend,
        device: torch.device,
        max_model_len: int,
    ) -> None:
        self._config = config
        self._module = module
        self._backend = backend
        self._device = device
        self._max_model_len = max_model_len
        gate.check_class(module)
        module.set_attn_implementation(ATTENTION_NAME)
        self.model = TransformersModel(module, backend, device)

    @torch.inference_mode()
    def prepare(self) -> tuple[int, int]:
        """Gate, self-check and KV memory; returns number of blocks and block size."""
        specs = self.model.probe()
        gate.check_layers(self._module, specs, self._backend, self._max_model_len)
        block_size = self._block_size()
        self._self_check(specs, block_size)
        shape = KVShape(
            block_size=block_size,
            block_bytes=block_size * _bytes_per_token(specs, self.model.dtype),
            max_model_len=self._max_model_len,
            max_num_seqs=self._config.max_num_seqs,
        )
        on_cpu = self._device.type == "cpu"
        free = free_host_bytes() if on_cpu else self._free_device_bytes(specs, block_size)
        num_blocks = choose_num_blocks(shape, self._config, free, on_cpu)
        try:
            self.model.allocate(specs, num_blocks, block_size)
        except (torch.OutOfMemoryError, RuntimeError) as error:
            size = num_blocks * shape.block_bytes / 2**20
            raise ModelError(
                f"KV cache: cannot allocate {num_blocks} blocks ({size:.0f} MiB); "
                "lower --kv-blocks, --kv-memory or --gpu-memory-utilization"
            ) from error
        return num_blocks, block_size

    def _block_size(self) -> int:
        multiple = self._backend.block_multiple
        block_size = self._config.block_size or multiple
        if block_size % multiple:
            raise ModelError(
                f"--block-size {block_size}: attention backend {self._backend.name} needs a "
                f"multiple of {multiple}"
            )
        return block_size

    def _self_check(self, specs: Sequence[LayerSpec], block_size: int) -> None:
        """Two random sequences in chunks on the paged cache against the model's own attention."""
        text = self._module.config.get_text_config()
        generator = torch.Generator().manual_seed(1)
        length = min(_CHECK_TOKENS, self._max_model_len)
        tokens = torch.randint(0, int(text.vocab_size), (2, length), generator=generator).tolist()
        blocks = -(-length // block_size)
        self.model.allocate(specs, 2 * blocks, block_size)
        # Blocks of the two alternate, so that an unread block table shows.
        requests = [
            _plain_request(ids, list(range(i, 2 * blocks, 2))) for i, ids in enumerate(tokens)
        ]
        half = max(1, length // 2)
        paged: list[list[Tensor]] = [[], []]
        for start, end in ((0, half), (half, length)):
            rows = [ScheduledRequest(r, start, end - start, False) for r in requests if end > start]
            if rows:
                for found, part in zip(paged, self._all_logits(rows, block_size), strict=True):
                    found.append(part)

        def own() -> Tensor:
            ids = torch.tensor(tokens, device=self._device)
            logits: Tensor = self._module(input_ids=ids, use_cache=False).logits
            return logits.flatten(0, 1)

        gate.check_logits(self._module, own, torch.cat([torch.cat(parts) for parts in paged]))
        self.model.free()

    def _all_logits(self, rows: Sequence[ScheduledRequest], block_size: int) -> tuple[Tensor, ...]:
        """Logits [count, V] of every token of each row, run as one step."""
        (batch,) = build_batches(StepPlan(tuple(rows)), block_size, self._device, 1)
        every = torch.arange(len(batch.input_ids), device=self._device)
        logits = self.model.forward(batch.input_ids, batch.positions, batch.attention, every)
        return torch.split(logits, [row.count for row in rows])

    def _free_device_bytes(self, specs: Sequence[LayerSpec], block_size: int) -> int:
        """What is left of --gpu-memory-utilization after the largest step has run once."""
        tokens = self._config.batched_tokens(self._device.type)
        length = min(tokens, self._max_model_len)
        needed = -(-length // block_size)
        self.model.allocate(specs, needed, block_size)
        torch.cuda.reset_peak_memory_stats(self._device)
        before = torch.cuda.memory_allocated(self._device)
        request = _plain_request([0] * length, list(range(needed)))
        # Each row writes the same blocks: only the size of the step matters here.
        rows = [ScheduledRequest(request, 0, length, True)] * max(1, tokens // length)
        (batch,) = build_batches(StepPlan(tuple(rows)), block_size, self._device, 1)
        self.model.forward(batch.input_ids, batch.positions, batch.attention, batch.logit_rows)
        torch.cuda.synchronize(self._device)
        peak = torch.cuda.max_memory_allocated(self._device) - before
        self.model.free()
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info(self._device)
        text = self._module.config.get_text_config()
        # Logits and what the sampler makes of them, in float32 and float64.
        sampling = self._config.max_num_seqs * int(text.vocab_size) * 32
        used = total - free
        return int(total * self._config.gpu_memory_utilization) - used - peak - sampling


def _plain_request(token_ids: list[int], block_ids: list[int]) -> Request:
    return Request(
        request_id="self-check",
        attempt=0,
        token_ids=token_ids,
        num_prompt_tokens=len(token_ids),
        num_delivered=0,
        sampling=SamplingParams(temperature=0.0),
        max_tokens=1,
        stop_token_ids=frozenset(),
        block_ids=block_ids,
    )


def _bytes_per_token(specs: Sequence[LayerSpec], dtype: torch.dtype) -> int:
    return sum(spec.elements_per_token for spec in specs) * dtype.itemsize


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _max_model_len(config: ShardConfig, hf_config: PreTrainedConfig) -> int:
    """--max-model-len, or all positions the model has. Raises ModelError beyond those."""
    text = hf_config.get_text_config()
    names = ("max_position_embeddings", "max_seq_len", "seq_length")
    positions = next((value for n in names if (value := getattr(text, n, None))), None)
    if config.max_model_len is None:
        if positions is None:
            raise ModelError(
                f"{gate.architecture_of(hf_config)} states no longest context; give --max-model-len"
            )
        return int(positions)
    if positions is not None and config.max_model_len > positions:
        raise ModelError(
            f"--max-model-len {config.max_model_len}: the model has {positions} positions"
        )
    return config.max_model_len


def _eos_token_ids(generation: dict[str, Any], text: PreTrainedConfig) -> tuple[int, ...]:
    """From generation_config.json, else from the configuration; () if neither names one."""
    value = generation.get("eos_token_id")
    if value is None:
        value = getattr(text, "eos_token_id", None)
    if value is None:
        return ()
    return tuple(value) if isinstance(value, list | tuple) else (int(value),)


def _default_sampling(generation: dict[str, Any]) -> dict[str, float]:
    """Sampling values that generation_config.json states and this runner honours."""
    names = ("temperature", "top_k", "top_p", "min_p")
    return {name: generation[name] for name in names if generation.get(name) is not None}
