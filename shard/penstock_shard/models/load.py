"""A model directory -> a model that computes: our decoder where it fits, else transformers' code.

Our decoder's layers are known from the configuration, so their attention is chosen before weights
are read; a transformers module has to be whole, and is asked what its layers call.

Knows both ways and which comes first. Knows nothing of steps or memory for keys and values.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from penstock_shard.models import gate
from penstock_shard.models.attention.base import LayerSpec
from penstock_shard.models.attention.choose import AttentionWish, choose_backend
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
from penstock_shard.models.lora import Shares
from penstock_shard.models.ops.base import Ops, Rope
from penstock_shard.models.packed_weights import pack_weights
from penstock_shard.models.parallel.division_check import check_division, logits_of_whole
from penstock_shard.models.parallel.matrices import parallel_weights
from penstock_shard.models.parallel.module_division import divide_module
from penstock_shard.models.parallel.ranks import Ranks
from penstock_shard.models.parallel.slices import SlicedTensors, local_spec, rank_shares
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
# Flags with which modules keep their weights as they are.
_PLAINEST = "--attention-backend sdpa --dtype float32"
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


def _nothing() -> None:
    """There is nothing to check."""


@dataclass(frozen=True, slots=True)
class ModelPart:
    """A model, or one rank's part of it."""

    model: Decoder | TransformersModel
    # What a rank has of each linear layer that is divided.
    shares: Shares = field(default_factory=dict)
    # To be called by all ranks, once each has its part. Raises ModelError.
    check: Callable[[], None] = _nothing


def load_model(
    files: ModelFiles,
    ops: Ops,
    progress: Callable[[str], None],
    wish: AttentionWish = _BEST,
    ranks: Ranks | None = None,
) -> ModelPart:
    """Load the weights, and give the ops the attention backend that serves the model; `progress`
    gets lines. Of several ranks each loads its part. Raises ModelError, with one line, if that
    fails.
    """
    checkpoint = None if files.dummy else _open(files, ops, progress)
    # What it says of quantization is dealt with.
    files = dataclasses.replace(files, config=plain_config(files.config))
    loading = _Loading(files, checkpoint, ops, wish, ranks, progress)
    try:
        spec = loading.spec()
        ropes = rope_tables(files.config, spec, files.max_model_len, ops.device)
    except (NotOurs, *_ODD_VALUES) as reason:
        _check_not_exact(ops, reason)
        progress(f"running the code of transformers ({reason})")
        return loading.transformers_model()
    return loading.decoder(spec, ropes)


def _open(files: ModelFiles, ops: Ops, progress: Callable[[str], None]) -> Checkpoint:
    scheme = scheme_of(files.config)
    if scheme is not None:
        progress(scheme.computed_in(ops.weights))
        return QuantizedCheckpoint(files.path, scheme, ops.device)
    checkpoint = Checkpoint(files.path)
    checkpoint.check_dtypes()
    return checkpoint


def _check_not_exact(ops: Ops, reason: Exception) -> None:
    """Raises ModelError where the code of transformers would not keep what exact ops promise."""
    # Its products are ours where weights are packed, and torch's where they stay tensors.
    if ops.exact and ops.keeps_tensors:
        raise ModelError(
            f"--exact: this model runs through transformers' code ({reason}), whose results on "
            f"{ops.device.type} depend on the batch; leave out --exact"
        )


@dataclass(frozen=True, slots=True)
class _Loading:
    """What either way goes by."""

    files: ModelFiles
    # None for random weights.
    checkpoint: Checkpoint | None
    ops: Ops
    wish: AttentionWish
    ranks: Ranks | None
    progress: Callable[[str], None]

    # ---- our decoder ----

    def spec(self) -> DecoderSpec:
        """Of the whole model. Raises NotOurs for one that our decoder does not compute."""
        files, checkpoint = self.files, self.checkpoint
        spec = decoder_spec(files.config, trust_remote_code=files.trust_remote_code)
        if checkpoint is None:
            return spec
        if isinstance(checkpoint, QuantizedCheckpoint):
            checkpoint.leave_out(checkpoint.zero_biases - tensor_shapes(spec).keys())
        check_tensors(spec, checkpoint.shapes)
        return _as_stored(spec, checkpoint)

    def decoder(self, whole: DecoderSpec, ropes: dict[str, Rope]) -> ModelPart:
        ops, ranks = self.ops, self.ranks
        source: TensorSource = self.checkpoint or RandomTensors(whole, ops.device)
        spec = whole
        shares: Shares = {}
        if ranks is not None:
            spec = local_spec(whole, ranks.size)
            shares = rank_shares(whole, ranks.rank, ranks.size)
            source = SlicedTensors(source, whole, ranks.rank, ranks.size)
        self._choose_backend(spec.layers)
        weights = self._weights(spec, source)
        if ranks is not None:
            weights = parallel_weights(weights, ranks, whole.vocab_size)
        return ModelPart(Decoder(spec, weights, ropes, ops), shares)

    def _weights(self, spec: DecoderSpec, source: TensorSource) -> DecoderWeights:
        try:
            return read_weights(spec, source, self.ops, self.progress)
        except torch.OutOfMemoryError as error:
            raise ModelError(
                f"{self.files.path}: the weights do not fit into memory: {error}"
            ) from error

    # ---- transformers' code ----

    def transformers_model(self) -> ModelPart:
        ops, ranks = self.ops, self.ranks
        module = load_module(self.files.path, self.files.config, self._options())
        gate.check_class(module)
        shares: Shares = {}
        check = _nothing
        if ranks is not None:
            logits = logits_of_whole(module)
            shares = divide_module(module, ranks)
            check = partial(check_division, module, logits, ops, ranks.size)
            module.to(ops.device)
        module.set_attn_implementation(ATTENTION_NAME)
        if ops.keeps_tensors:
            fuse_linears(module, ops)
        else:
            pack_weights(module, ops, self.progress)
        model = self._probed(module)
        gate.check_layers(module, model.layers, self.files.max_model_len)
        self._choose_backend(model.layers)
        return ModelPart(model, shares, check)

    def _options(self) -> LoadOptions:
        """How transformers is to load the module."""
        files, checkpoint, ops = self.files, self.checkpoint, self.ops
        dtype = ops.dtype
        if ops.device.type == "cpu" and not ops.keeps_tensors:
            # What is packed anyway is left as it is on disk, and so in the file's memory.
            stored = None if checkpoint is None else checkpoint.main_dtype()
            dtype = stored or torch.float32
        # A whole model may be too much for one device of several: there it is cut first.
        device = ops.device if self.ranks is None else torch.device("cpu")
        options = LoadOptions(device, dtype, files.trust_remote_code, files.dummy)
        if not isinstance(checkpoint, QuantizedCheckpoint):
            return options
        tensors, needless = checkpoint.lazy_tensors(), checkpoint.zero_biases
        return dataclasses.replace(options, tensors=tensors, needless=needless)

    def _probed(self, module: PreTrainedModel) -> TransformersModel:
        """The module as a model: one token runs through it, which shows what its layers call."""
        alone = contextlib.nullcontext() if self.ranks is None else self.ranks.apart()
        try:
            with probing(module) as apart, alone:
                model = TransformersModel(module, self.ops)
        except (NotImplementedError, AttributeError, TypeError) as error:
            advice = "" if self.ops.keeps_tensors else f"; use {_PLAINEST}"
            raise ModelError(
                f"{type(module).__name__} uses its weights in a way that is not served here: "
                f"{error}{advice}"
            ) from error
        for name in apart:
            self.progress(
                f"{name} is computed by itself: it does not share its input with those beside it"
            )
        return model

    def _choose_backend(self, layers: Sequence[LayerSpec]) -> None:
        self.ops.backend = choose_backend(self.ops, layers, self.wish, self.progress)


def _as_stored(spec: DecoderSpec, checkpoint: Checkpoint) -> DecoderSpec:
    """What transformers takes from the checkpoint over what the configuration says: a head of its
    own makes the embedding not tied, and the embedding's scale has the dtype of the weights.
    """
    embedding, head = "model.embed_tokens.weight", "lm_head.weight"
    tied = spec.tied and (head not in checkpoint.shapes or checkpoint.equal(embedding, head))
    scale = torch.tensor(spec.embedding_scale, dtype=checkpoint.dtypes[embedding])
    return dataclasses.replace(spec, tied=tied, embedding_scale=float(scale))
