"""A model directory -> a model that computes: our decoder where it fits, else transformers' code.

Knows both ways and which comes first. Knows nothing of steps or memory for keys and values.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import PreTrainedConfig

from penstock_shard.models import gate
from penstock_shard.models.base import CausalModel
from penstock_shard.models.checkpoint import Checkpoint
from penstock_shard.models.decoder import Decoder
from penstock_shard.models.decoder_spec import (
    DecoderSpec,
    NotOurs,
    check_tensors,
    decoder_spec,
    rope_tables,
)
from penstock_shard.models.decoder_weights import DecoderWeights, RandomTensors, read_weights
from penstock_shard.models.errors import ModelError
from penstock_shard.models.ops.base import Ops
from penstock_shard.models.packed_weights import pack_weights
from penstock_shard.models.transformers_loader import LoadOptions, load_module
from penstock_shard.models.transformers_model import ATTENTION_NAME, TransformersModel

# What comes of values in a configuration that mean nothing to us: left to transformers, which
# knows better or says so.
_ODD_VALUES = (ArithmeticError, AttributeError, KeyError, TypeError, ValueError)


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """What is loaded: a directory, its configuration, and how it is to be read."""

    path: Path
    config: PreTrainedConfig
    max_model_len: int
    trust_remote_code: bool = False
    # Random weights; only the configuration is read.
    dummy: bool = False


def load_model(files: ModelFiles, ops: Ops, progress: Callable[[str], None]) -> CausalModel:
    """Load the weights; `progress` gets lines. Raises ModelError, with one line, if that fails."""
    checkpoint = None if files.dummy else Checkpoint(files.path)
    if checkpoint is not None and getattr(files.config, "quantization_config", None) is None:
        checkpoint.check_dtypes()
    try:
        spec = decoder_spec(files.config, trust_remote_code=files.trust_remote_code)
        if checkpoint is not None:
            check_tensors(spec, checkpoint.shapes)
            spec = _as_stored(spec, checkpoint)
        ropes = rope_tables(files.config, spec, files.max_model_len, ops.device)
    except (NotOurs, *_ODD_VALUES) as reason:
        progress(f"running the code of transformers ({reason})")
        return _load_transformers(files, ops, checkpoint, progress)
    return Decoder(spec, _decoder_weights(files, spec, ops, checkpoint, progress), ropes, ops)


def _as_stored(spec: DecoderSpec, checkpoint: Checkpoint) -> DecoderSpec:
    """What transformers takes from the checkpoint over what the configuration says: a head of its
    own makes the embedding not tied, and the embedding's scale has the dtype of the weights.
    """
    embedding, head = "model.embed_tokens.weight", "lm_head.weight"
    tied = spec.tied and (head not in checkpoint.shapes or checkpoint.equal(embedding, head))
    scale = torch.tensor(spec.embedding_scale, dtype=checkpoint.dtypes[embedding])
    return dataclasses.replace(spec, tied=tied, embedding_scale=float(scale))


def _decoder_weights(
    files: ModelFiles,
    spec: DecoderSpec,
    ops: Ops,
    checkpoint: Checkpoint | None,
    progress: Callable[[str], None],
) -> DecoderWeights:
    for layer in spec.layers:
        reason = ops.backend.refusal(layer, ops.dtype)
        if reason:
            raise ModelError(
                f"attention backend {ops.backend.name} {reason}; use --attention-backend sdpa"
            )
    try:
        return read_weights(spec, checkpoint or RandomTensors(spec), ops, progress)
    except torch.OutOfMemoryError as error:
        raise ModelError(f"{files.path}: the weights do not fit into memory: {error}") from error


def _load_transformers(
    files: ModelFiles,
    ops: Ops,
    checkpoint: Checkpoint | None,
    progress: Callable[[str], None],
) -> TransformersModel:
    # What is packed anyway is left as it is on disk, and so in the file's memory.
    stored = checkpoint.main_dtype() if checkpoint is not None else None
    dtype = ops.dtype if ops.keeps_tensors else stored or torch.float32
    options = LoadOptions(ops.device, dtype, files.trust_remote_code, files.dummy)
    module = load_module(files.path, files.config, options)
    gate.check_class(module)
    module.set_attn_implementation(ATTENTION_NAME)
    if not ops.keeps_tensors:
        pack_weights(module, ops, progress)
    try:
        model = TransformersModel(module, ops.backend, ops.device)
    except (NotImplementedError, AttributeError, TypeError) as error:
        flags = "--attention-backend sdpa --dtype float32"
        raise ModelError(
            f"{type(module).__name__} uses its weights in a way that is not served here: {error}"
            + ("" if ops.keeps_tensors else f"; use {flags}")
        ) from error
    gate.check_layers(module, model.layers, ops.backend, files.max_model_len)
    return model
