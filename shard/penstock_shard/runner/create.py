"""A model directory -> a `ModelRunner` that is ready.

Knows in which order things are loaded and checked, and says so as it goes. Knows nothing of steps.
"""

from __future__ import annotations

import math
import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedConfig

from penstock_shard.config import ShardConfig
from penstock_shard.models import gate
from penstock_shard.models.attention import described
from penstock_shard.models.attention.check import AttentionWish
from penstock_shard.models.base import CausalModel
from penstock_shard.models.cuda_graphs import GraphedModel, Graphs
from penstock_shard.models.decoder import Decoder
from penstock_shard.models.errors import ModelError, out_of_memory_told
from penstock_shard.models.load import ModelFiles, load_model
from penstock_shard.models.ops.base import Ops
from penstock_shard.models.ops.choose import choose_ops, kv_dtype
from penstock_shard.models.parallel.crew import gather_crew
from penstock_shard.models.parallel.ranks import Ranks
from penstock_shard.models.pooling_files import pooling_of
from penstock_shard.models.transformers_loader import (
    generation_defaults,
    load_config,
    resolve_device,
)
from penstock_shard.models.weights_hash import hash_weights
from penstock_shard.runner import cgroup
from penstock_shard.runner.adapters import adapter_store
from penstock_shard.runner.base import EmbeddingDefaults, RunnerInfo
from penstock_shard.runner.fingerprint import fingerprint
from penstock_shard.runner.model_runner import CAPABILITIES, ModelRunner
from penstock_shard.runner.prepare import Preparation
from penstock_shard.validation import usable_defaults


@out_of_memory_told("at load")
def create_runner(
    config: ShardConfig, model_dir: Path, *, progress: Callable[[str], None]
) -> ModelRunner:
    """Load the model of a directory and make it ready to serve.

    `progress` gets one line for each stage. Raises ModelError, with one line that says what to do,
    if the model cannot be loaded, would be served wrongly, or does not fit.
    """
    crew = None
    if config.tensor_parallel_size > 1:
        crew = gather_crew(config, model_dir, rank_device(config, 0), progress)
    stop = threading.Event()
    with ThreadPoolExecutor(max_workers=1) as pool:
        hashing = pool.submit(
            hash_weights,
            model_dir,
            config_only=config.load_format == "dummy",
            with_code=config.trust_remote_code,
            stop=stop,
        )
        try:
            stack = load_stack(config, model_dir, None if crew is None else crew.ranks, progress)
            weights_hash = hashing.result()
        finally:
            # Not to wait for the hash of weights that cannot be loaded.
            stop.set()
    model, ops, hf_config = stack.model, stack.ops, stack.hf_config
    graphs: Graphs | None = stack.graphs
    if crew is not None:
        model = whole = crew.whole(stack.served, ops.backend.name, weights_hash)
        graphs = whole if stack.graphs else None
    text = hf_config.get_text_config()
    adapters = adapter_store(config, stack.model, ops, progress)
    prepared = Preparation(
        config=config,
        model=model,
        ops=ops,
        kv_dtype=stack.kv_dtype,
        vocab_size=int(text.vocab_size),
        max_model_len=stack.max_model_len,
        progress=progress,
        graphs=graphs,
        part=stack.model,
    ).run(stack.threads)
    eos_token_ids, defaults = _generation(model_dir, text, progress)
    embedding = _embedding(config, model_dir, model, progress)
    info = RunnerInfo(
        architecture=gate.architecture_of(hf_config),
        weights_hash=weights_hash,
        vocab_size=int(text.vocab_size),
        max_model_len=stack.max_model_len,
        eos_token_ids=eos_token_ids,
        default_sampling=defaults,
        block_size=prepared.block_size,
        num_blocks=prepared.num_blocks,
        dtype=ops.weights,
        kv_dtype=_dtype_name(stack.kv_dtype),
        device=str(model.device),
        attention_backend=described(ops.backend, ops.device),
        capabilities=CAPABILITIES | ({"embed"} if embedding else set()),
        embedding=embedding,
        # On cpu the step itself needs the processor that would prepare the next one.
        max_steps_ahead=0 if model.device.type == "cpu" else 1,
        worst_step_s=prepared.worst_step_s,
        batch_invariant=prepared.batch_invariant,
        numerics_fingerprint=(
            fingerprint(weights_hash, ops, stack.kv_dtype, config.tensor_parallel_size)
            if prepared.batch_invariant
            else ""
        ),
    )
    graphs = graphs if prepared.has_graphs else None
    threads = config.constraint_threads
    return ModelRunner(
        graphs or model, info, mask_threads=threads, graphs=graphs, adapters=adapters
    )


def _graphs(
    config: ShardConfig,
    model: CausalModel,
    ops: Ops,
    max_model_len: int,
    progress: Callable[[str], None],
) -> GraphedModel | None:
    """Where decodes of the model may be recorded; None where they cannot be or must not."""
    if model.device.type != "cuda" or config.enforce_eager or not ops.backend.capturable:
        return None
    if isinstance(model, Decoder) and not model.capturable:
        progress("CUDA graphs: none, experts are multiplied one after the other")
        return None
    return GraphedModel(model, config.max_num_seqs, max_model_len)


def _generation(
    model_dir: Path, text: PreTrainedConfig, progress: Callable[[str], None]
) -> tuple[tuple[int, ...], dict[str, float]]:
    """Ids that end a sequence, and how tokens are drawn where nobody says."""
    generation = generation_defaults(model_dir)
    eos_token_ids, outside = _eos_token_ids(generation, text)
    if outside:
        progress(f"eos_token_id: {outside} are not in the vocabulary; left out")
    defaults, unusable = usable_defaults(_stated_sampling(generation))
    for line in unusable:
        progress(f"generation_config.json: {line}; left out")
    return eos_token_ids, defaults


def _attention_wish(config: ShardConfig, cached_as: torch.dtype) -> AttentionWish:
    return AttentionWish(config.attention_backend, cached_as, config.block_size, config.exact)


@dataclass(frozen=True, slots=True)
class RankStack:
    """A model, or one rank's part of it, and what it is computed with."""

    model: CausalModel
    ops: Ops
    kv_dtype: torch.dtype
    hf_config: PreTrainedConfig
    max_model_len: int
    threads: int
    # Where its decodes may be recorded.
    graphs: GraphedModel | None

    @property
    def served(self) -> CausalModel:
        """What a rank computes steps with."""
        return self.graphs or self.model


def load_stack(
    config: ShardConfig, model_dir: Path, ranks: Ranks | None, progress: Callable[[str], None]
) -> RankStack:
    """Load the model of a directory, or this rank's part of it: the same for every rank.

    Raises ModelError if it cannot be loaded or would be served wrongly.
    """
    device = resolve_device(config.device)
    hf_config = load_config(model_dir, trust_remote_code=config.trust_remote_code)
    max_model_len = _max_model_len(config, hf_config)
    gate.check_config(hf_config, max_model_len)
    ops = choose_ops(config, hf_config, device, progress)
    cached_as = kv_dtype(config, ops)
    num_beside = config.tensor_parallel_size // config.nnodes
    threads = config.threads or max(1, default_threads() // num_beside)
    ops.set_threads(threads)
    name = gate.architecture_of(hf_config)
    progress(f"loading {name}, weights in {ops.weights}, on {device}")
    dummy = config.load_format == "dummy"
    files = ModelFiles(model_dir, hf_config, max_model_len, config.trust_remote_code, dummy)
    wish = _attention_wish(config, cached_as)
    model = load_model(files, ops, progress, wish, ranks)
    if ranks is not None:
        # Where products have the same bits in any batch, so have sums then.
        ranks.in_order = ops.backend.name == "cpu" or ops.exact
    graphs = _graphs(config, model, ops, max_model_len, progress)
    return RankStack(model, ops, cached_as, hf_config, max_model_len, threads, graphs)


def rank_device(config: ShardConfig, index: int) -> torch.device:
    """The device of the rank with this index on its machine, which becomes the one torch uses.

    Raises ModelError if there are too few.
    """
    device = resolve_device(config.device)
    if device.type == "cuda":
        needed, found = config.tensor_parallel_size // config.nnodes, torch.cuda.device_count()
        if needed > found:
            raise ModelError(
                f"--tensor-parallel-size {config.tensor_parallel_size}: torch finds {found} CUDA "
                f"devices here, and {needed} are needed"
            )
        torch.cuda.set_device(index)
        device = torch.device("cuda", index)
    return device


def _embedding(
    config: ShardConfig, model_dir: Path, model: CausalModel, progress: Callable[[str], None]
) -> EmbeddingDefaults | None:
    """None for a model that serves no embeddings. Raises ModelError if files cannot be read, or if
    they are asked for and cannot be had.
    """
    found = pooling_of(model_dir, config.embeddings, progress)
    if found is None:
        return None
    if model.hidden_size == 0:
        reason = "the model's code does not show its final hidden states"
        if config.embeddings != "auto":
            raise ModelError(f"--embeddings {config.embeddings}: {reason}")
        progress(f"no embeddings: {reason}")
        return None
    pooling, normalize = found
    progress(f"embeddings: {pooling.value} pooling, {model.hidden_size} values")
    return EmbeddingDefaults(pooling, normalize, model.hidden_size)


def default_threads() -> int:
    """Compute threads on cpu: all cores this process may use but one. A quota of its control group
    counts as so many cores: threads beyond it would use it up early and then all stand still.
    """
    if hasattr(os, "sched_getaffinity"):
        cores = len(os.sched_getaffinity(0))
    else:
        cores = os.cpu_count() or 1
    quota = cgroup.cpu_quota()
    if quota is not None:
        cores = min(cores, math.floor(quota))
    return max(1, cores - 1)


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _max_model_len(config: ShardConfig, hf_config: PreTrainedConfig) -> int:
    """--max-model-len, or the positions the model states. Raises ModelError beyond what it has."""
    text = hf_config.get_text_config()
    names = ("max_position_embeddings", "max_seq_len", "seq_length")
    positions = next((value for n in names if (value := getattr(text, n, None) or 0) > 0), None)
    if config.max_model_len is None:
        if positions is None:
            raise ModelError(
                f"{gate.architecture_of(hf_config)} states no longest context; give --max-model-len"
            )
        return int(positions)
    if positions is not None:
        positions = max(int(positions), _yarn_positions(text))
        if config.max_model_len > positions:
            raise ModelError(
                f"--max-model-len {config.max_model_len}: the model has {positions} positions"
            )
    return config.max_model_len


def _yarn_positions(text: PreTrainedConfig) -> int:
    """How far YaRN stretches the original context (Peng et al., 2023), 0 without it. A model may
    state its unstretched context as max_position_embeddings, as Qwen2.5 is documented.
    """
    rope = getattr(text, "rope_parameters", None) or {}
    original = rope.get("original_max_position_embeddings")
    if rope.get("rope_type") != "yarn" or not original or not rope.get("factor"):
        return 0
    return int(original * rope["factor"])


def _eos_token_ids(
    generation: dict[str, Any], text: PreTrainedConfig
) -> tuple[tuple[int, ...], list[int]]:
    """From generation_config.json, else from the configuration; () if neither names one. Apart from
    them those that no token has: banned before min_tokens, they would be no ids of the row.
    """
    value = generation.get("eos_token_id")
    if value is None:
        value = getattr(text, "eos_token_id", None)
    stated = value if isinstance(value, list | tuple) else () if value is None else (int(value),)
    usable = tuple(token_id for token_id in stated if 0 <= token_id < text.vocab_size)
    return usable, [token_id for token_id in stated if token_id not in usable]


def _stated_sampling(generation: dict[str, Any]) -> dict[str, object]:
    """Sampling values that generation_config.json states and this runner honours."""
    names = ("temperature", "top_k", "top_p", "min_p", "typical_p", "repetition_penalty")
    return {name: generation[name] for name in names if generation.get(name) is not None}
