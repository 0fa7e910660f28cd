"""Loads a model, or one rank's part of it, in the same way on every rank."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from transformers import PreTrainedConfig

from penstock_shard.config import ShardConfig
from penstock_shard.device.cpu_threads import default_threads
from penstock_shard.distributed.collectives import Ranks
from penstock_shard.errors import ModelError, report_faults
from penstock_shard.lora.lora import LoraBank, LoraLimits
from penstock_shard.model_loader.choices.choose_attention import AttentionOptions
from penstock_shard.model_loader.choices.choose_device import resolve_device
from penstock_shard.model_loader.choices.choose_kv_cache_dtype import choose_kv_cache_dtype
from penstock_shard.model_loader.choices.choose_ops import choose_ops
from penstock_shard.model_loader.generation_config import as_ids
from penstock_shard.model_loader.load_model import ModelFiles, ModelPart, load_model
from penstock_shard.model_loader.transformers_loader import load_config
from penstock_shard.models.loaded_model import LoadedModel, ModelFacts
from penstock_shard.models.lora_targets import make_adaptable
from penstock_shard.models.transformers import unsupported
from penstock_shard.models.transformers.sparse_indexers import most_unselected_tokens
from penstock_shard.ops.base import Ops


def load_part(
    config: ShardConfig, model_dir: Path, ranks: Ranks | None, progress: Callable[[str], None]
) -> LoadedModel:
    """Load a model, or with several ranks this rank's part of it, without graphs.

    Raises ModelError if it cannot be loaded or would be served wrongly.
    """
    with report_faults(f"{model_dir}: cannot be loaded"):
        return _load(config, model_dir, ranks, progress)


def _load(
    config: ShardConfig, model_dir: Path, ranks: Ranks | None, progress: Callable[[str], None]
) -> LoadedModel:
    device = resolve_device(config.device)
    hf_config = load_config(model_dir, trust_remote_code=config.trust_remote_code)
    unsupported.check_purpose(hf_config)
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
        # If products are exact, sums over ranks must also have the same bits in any batch.
        ranks.in_order = ops.exact
    # Do this before memory is measured, because adapters take some.
    bank = _open_bank(config, loaded, ops, progress)
    return LoadedModel(
        part=part,
        bank=bank,
        check=loaded.check,
        model=part,
        graphs=None,
        ops=ops,
        kv_dtype=cached_as,
        facts=_facts(hf_config),
        max_model_len=max_model_len,
        threads=threads,
    )


def _facts(config: PreTrainedConfig) -> ModelFacts:
    text = config.get_text_config()
    stated = [as_ids(getattr(place, "eos_token_id", None)) for place in (config, text)]
    eos_token_ids = stated[1] if stated[0] is None else stated[0]
    return ModelFacts(unsupported.architecture_of(config), int(text.vocab_size), eos_token_ids)


def _open_bank(
    config: ShardConfig, loaded: ModelPart, ops: Ops, progress: Callable[[str], None]
) -> LoraBank | None:
    """Allocate memory for adapters in a loaded model; None if none are served. Raises ModelError if
    the model cannot have adapters.
    """
    if not config.serves_adapters:
        return None
    limits = LoraLimits(config.max_loras, config.max_lora_rank)
    bank = LoraBank(limits, ops, stacked=ops.device.type != "cpu", shares=loaded.shares)
    make_adaptable(loaded.model, bank)
    if bank.nbytes:
        progress(f"adapters: {bank.nbytes / 1e6:.0f} MB set aside for {config.max_loras}")
    return bank


def rank_device(config: ShardConfig, index: int) -> torch.device:
    """Return the device of the rank with this index on its machine, and make it torch's current
    device.

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
    """Return --max-model-len, or the positions that the model states, or fewer if longer sequences
    would be served wrongly. Raises ModelError if --max-model-len is more.
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
    """Return the context length after YaRN's extension (Peng et al., 2023); 0 without YaRN. A model
    may state the original length as max_position_embeddings, as documented for Qwen2.5.
    """
    rope = getattr(text, "rope_parameters", None) or {}
    original = rope.get("original_max_position_embeddings")
    if rope.get("rope_type") != "yarn" or not original or not rope.get("factor"):
        return 0
    return int(original * rope["factor"])
