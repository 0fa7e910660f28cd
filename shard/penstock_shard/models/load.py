"""A model directory -> a model that computes: our decoder where it fits, else transformers' code.

Knows both ways and which comes first. Knows nothing of steps or memory for keys and values.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from transformers import PreTrainedConfig

from penstock_shard.models import gate
from penstock_shard.models.attention.check import AttentionWish, settle_backend
from penstock_shard.models.base import CausalModel
from penstock_shard.models.checkpoint import Checkpoint
from penstock_shard.models.decoder import Decoder
from penstock_shard.models.decoder_spec import (
    DecoderSpec,
    NotOurs,
    check_tensors,
    decoder_spec,
    rope_tables,
    tensor_shapes,
)
from penstock_shard.models.decoder_weights import (
    DecoderWeights,
    RandomTensors,
    TensorSource,
    read_weights,
)
from penstock_shard.models.errors import ModelError
from penstock_shard.models.fused_linears import fuse_linears, probing
from penstock_shard.models.ops.base import Ops
from penstock_shard.models.packed_weights import pack_weights
from penstock_shard.models.parallel.division_check import check_division, logits_of_whole
from penstock_shard.models.parallel.matrices import parallel_weights
from penstock_shard.models.parallel.modules import divide_module
from penstock_shard.models.parallel.ranks import Ranks
from penstock_shard.models.parallel.slices import SlicedTensors, local_spec
from penstock_shard.models.quantized_checkpoint import (
    QuantizedCheckpoint,
    plain_config,
    scheme_of,
)
from penstock_shard.models.transformers_loader import LoadOptions, load_module
from penstock_shard.models.transformers_model import ATTENTION_NAME, TransformersModel

# What comes of values in a configuration that mean nothing to us: left to transformers, which
# knows better or says so.
_ODD_VALUES = (ArithmeticError, AttributeError, KeyError, TypeError, ValueError)


_BEST = AttentionWish()


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """What is loaded: a directory, its configuration, and how it is to be read."""

    path: Path
    config: PreTrainedConfig
    max_model_len: int
    trust_remote_code: bool = False
    # Random weights; only the configuration is read.
    dummy: bool = False


def load_model(
    files: ModelFiles,
    ops: Ops,
    progress: Callable[[str], None],
    wish: AttentionWish = _BEST,
    ranks: Ranks | None = None,
) -> CausalModel:
    """Load the weights, after the ops have got the attention backend that serves the model;
    `progress` gets lines. Of several ranks each loads its part. Raises ModelError, with one line,
    if that fails.
    """
    checkpoint = None if files.dummy else _open(files, ops, progress)
    # What it says of quantization is dealt with.
    files = dataclasses.replace(files, config=plain_config(files.config))
    try:
        spec = decoder_spec(files.config, trust_remote_code=files.trust_remote_code)
        if checkpoint is not None:
            if isinstance(checkpoint, QuantizedCheckpoint):
                checkpoint.leave_out(checkpoint.zero_biases - tensor_shapes(spec).keys())
            check_tensors(spec, checkpoint.shapes)
            spec = _as_stored(spec, checkpoint)
        ropes = rope_tables(files.config, spec, files.max_model_len, ops.device)
    except (NotOurs, *_ODD_VALUES) as reason:
        _check_not_exact(ops, reason)
        progress(f"running the code of transformers ({reason})")
        return _load_transformers(files, ops, checkpoint, progress, wish, ranks)
    source: TensorSource = checkpoint or RandomTensors(spec, ops.device)
    part = spec
    if ranks is not None:
        part = local_spec(spec, ranks.size)
        source = SlicedTensors(source, spec, ranks.rank, ranks.size)
    settle_backend(ops, part.layers, wish, progress)
    weights = _decoder_weights(files, part, ops, source, progress)
    if ranks is not None:
        weights = parallel_weights(weights, ranks, spec.vocab_size)
    return Decoder(part, weights, ropes, ops)


def _open(files: ModelFiles, ops: Ops, progress: Callable[[str], None]) -> Checkpoint:
    scheme = scheme_of(files.config)
    if scheme is not None:
        progress(scheme.computed_in(ops.weights))
        return QuantizedCheckpoint(files.path, scheme, ops.device)
    checkpoint = Checkpoint(files.path)
    checkpoint.check_dtypes()
    return checkpoint


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
    source: TensorSource,
    progress: Callable[[str], None],
) -> DecoderWeights:
    try:
        return read_weights(spec, source, ops, progress)
    except torch.OutOfMemoryError as error:
        raise ModelError(f"{files.path}: the weights do not fit into memory: {error}") from error


def _check_not_exact(ops: Ops, reason: Exception) -> None:
    """Raises ModelError where the code of transformers would not keep what exact ops promise."""
    # Its products are ours where weights are packed, and torch's where they stay tensors.
    if ops.exact and ops.keeps_tensors:
        raise ModelError(
            f"--exact: this model runs through transformers' code ({reason}), whose results on "
            f"{ops.device.type} depend on the batch; leave out --exact"
        )


def _load_transformers(
    files: ModelFiles,
    ops: Ops,
    checkpoint: Checkpoint | None,
    progress: Callable[[str], None],
    wish: AttentionWish,
    ranks: Ranks | None,
) -> TransformersModel:
    # What is packed anyway is left as it is on disk, and so in the file's memory.
    stored = checkpoint.main_dtype() if checkpoint is not None else None
    on_cpu = ops.device.type == "cpu"
    dtype = stored or torch.float32 if on_cpu and not ops.keeps_tensors else ops.dtype
    # A whole model may be too much for one device of several: there it is cut first.
    device = ops.device if ranks is None else torch.device("cpu")
    options = LoadOptions(device, dtype, files.trust_remote_code, files.dummy)
    if isinstance(checkpoint, QuantizedCheckpoint):
        options = dataclasses.replace(
            options, tensors=checkpoint.lazy_tensors(), needless=checkpoint.zero_biases
        )
    module = load_module(files.path, files.config, options)
    gate.check_class(module)
    whole = None
    if ranks is not None:
        whole = logits_of_whole(module)
        divide_module(module, ranks)
        module.to(ops.device)
    module.set_attn_implementation(ATTENTION_NAME)
    if ops.keeps_tensors:
        fuse_linears(module, ops)
    else:
        pack_weights(module, ops, progress)
    try:
        alone = contextlib.nullcontext() if ranks is None else ranks.apart()
        with probing(module) as apart, alone:
            model = TransformersModel(module, ops.backend, ops.device)
    except (NotImplementedError, AttributeError, TypeError) as error:
        flags = "--attention-backend sdpa --dtype float32"
        raise ModelError(
            f"{type(module).__name__} uses its weights in a way that is not served here: {error}"
            + ("" if ops.keeps_tensors else f"; use {flags}")
        ) from error
    for name in apart:
        progress(f"{name} is computed by itself: it does not share its input with those beside it")
    gate.check_layers(module, model.layers, files.max_model_len)
    settle_backend(ops, model.layers, wish, progress)
    model.backend = ops.backend
    if ranks is not None and whole is not None:
        ranks.checks.append(partial(check_division, module, whole, ops, ranks.size))
    return model
