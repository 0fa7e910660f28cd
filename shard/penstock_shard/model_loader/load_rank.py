"""A model directory -> a loaded model, or one rank's part of it: the same on every rank."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from transformers import PreTrainedConfig

from penstock_shard.config import ShardConfig
from penstock_shard.device.cpu_threads import default_threads
from penstock_shard.distributed.collectives import Ranks
from penstock_shard.errors import ModelError
from penstock_shard.model_loader.adapter_store import open_bank
from penstock_shard.model_loader.choose_attention import AttentionOptions
from penstock_shard.model_loader.choose_kv_cache_dtype import choose_kv_cache_dtype
from penstock_shard.model_loader.choose_ops import choose_ops
from penstock_shard.model_loader.load_model import ModelFiles, load_model
from penstock_shard.model_loader.transformers_loader import load_config, resolve_device
from penstock_shard.models.base import CausalModel
from penstock_shard.models.cpu_graphs import MOST_ROWS, CpuGraph
from penstock_shard.models.cuda_graphs import GraphedModel
from penstock_shard.models.decoder.decoder import Decoder
from penstock_shard.models.loaded_model import LoadedModel
from penstock_shard.models.transformers import unsupported
from penstock_shard.models.transformers.sparse_indexers import most_unselected_tokens
from penstock_shard.ops.base import Ops
from penstock_shard.ops.cpu_ops import CpuOps
from penstock_shard.ops.quantized import captures_fp8


def load_part(
    config: ShardConfig, model_dir: Path, ranks: Ranks | None, progress: Callable[[str], None]
) -> LoadedModel:
    """Load the model of a directory, or with several ranks this rank's part of it.

    Raises ModelError if it cannot be loaded or would be served wrongly.
    """
    device = resolve_device(config.device)
    hf_config = load_config(model_dir, trust_remote_code=config.trust_remote_code)
    max_model_len = _max_model_len(config, hf_config)
    unsupported.check_config(hf_config, max_model_len)
    ops = choose_ops(config, hf_config, device, progress)
    cached_as = choose_kv_cache_dtype(config, ops)
    num_beside = config.tensor_parallel_size // config.nnodes
    threads = config.threads or max(1, default_threads() // num_beside)
    ops.set_threads(threads)
    name = unsupported.architecture_of(hf_config)
    progress(f"loading {name}, weights in {ops.weights}, on {device}")
    dummy = config.load_format == "dummy"
    files = ModelFiles(model_dir, hf_config, max_model_len, config.trust_remote_code, dummy)
    wish = AttentionOptions(config.attention_backend, cached_as, config.block_size)
    loaded = load_model(files, ops, progress, wish, ranks)
    part = loaded.model
    if ranks is not None:
        # With exact products, sums over ranks must have the same bits in any batch too.
        ranks.in_order = ops.exact
    # Before memory is measured, as places for adapters take some.
    bank = open_bank(config, loaded, ops, progress)
    graphs = _graphs(config, part, ops, max_model_len, progress)
    return LoadedModel(
        part=part,
        bank=bank,
        check=loaded.check,
        model=graphs or part,
        graphs=graphs,
        ops=ops,
        kv_dtype=cached_as,
        hf_config=hf_config,
        max_model_len=max_model_len,
        threads=threads,
    )


def _graphs(
    config: ShardConfig,
    part: CausalModel,
    ops: Ops,
    max_model_len: int,
    progress: Callable[[str], None],
) -> GraphedModel | None:
    """The part, wrapped for recording decodes; None if it cannot or must not be."""
    if config.enforce_eager or not ops.backend.capturable:
        return None
    if isinstance(ops, CpuOps):
        return _cpu_graphs(config, part, ops, max_model_len)
    if isinstance(part, Decoder) and not part.capturable:
        progress("CUDA graphs: none, experts are multiplied one after the other")
        return None
    if any(layer.state is not None for layer in part.layers):
        progress("CUDA graphs: none, states are updated one sequence after the other")
        return None
    if ops.weights == "fp8" and not captures_fp8(part.device):
        progress("CUDA graphs: none, products in fp8 need torch 2.12 for them on this GPU")
        return None
    # In a graph, a step with drafts has a row for each of its logits.
    return GraphedModel(
        part, config.max_step_logits, max_model_len, serves_adapters=config.serves_adapters
    )


def _cpu_graphs(
    config: ShardConfig, part: CausalModel, ops: CpuOps, max_model_len: int
) -> GraphedModel | None:
    if not isinstance(part, Decoder) or not part.capturable or config.tensor_parallel_size > 1:
        return None
    most = min(MOST_ROWS, config.max_step_logits)
    pool = partial(CpuGraph, ops.kernels)
    return GraphedModel(part, most, max_model_len, lambda: pool, exact_rows=True)


def rank_device(config: ShardConfig, index: int) -> torch.device:
    """The device of the rank with this index on its machine; sets it as torch's current device.

    Raises ModelError if the machine has too few devices.
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


def _max_model_len(config: ShardConfig, hf_config: PreTrainedConfig) -> int:
    """--max-model-len, or the positions the model states, or fewer where more would not be served
    rightly. Raises ModelError if --max-model-len is more.
    """
    text = hf_config.get_text_config()
    unselected = most_unselected_tokens(text)
    length = _max_positions(config, hf_config, text)
    if unselected is None or length <= unselected:
        return length
    if config.max_model_len is not None:
        raise ModelError(
            f"--max-model-len {length}: beyond {unselected} tokens the indexers of "
            f"{unsupported.architecture_of(hf_config)} select keys, which is not served"
        )
    return unselected


def _max_positions(config: ShardConfig, hf_config: PreTrainedConfig, text: PreTrainedConfig) -> int:
    names = ("max_position_embeddings", "max_seq_len", "seq_length")
    positions = next((value for n in names if (value := getattr(text, n, None) or 0) > 0), None)
    if config.max_model_len is None:
        if positions is None:
            raise ModelError(
                f"{unsupported.architecture_of(hf_config)} states no longest context; "
                "give --max-model-len"
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
    """Context length that YaRN extends the original one to (Peng et al., 2023), 0 without YaRN. A
    model may state the original one as max_position_embeddings, as documented for Qwen2.5.
    """
    rope = getattr(text, "rope_parameters", None) or {}
    original = rope.get("original_max_position_embeddings")
    if rope.get("rope_type") != "yarn" or not original or not rope.get("factor"):
        return 0
    return int(original * rope["factor"])
