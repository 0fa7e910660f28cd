"""Turns a model directory into a model that computes: our decoder if it fits, else transformers'
code.

For our decoder, the attention backend is chosen before weights are read. A transformers module must
be loaded first, because only a run of one token shows the attention parameters of its layers.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from penstock_shard.attention.base import LayerSpec
from penstock_shard.checkpoint.gguf_checkpoint import GgufCheckpoint
from penstock_shard.checkpoint.mxfp4_experts import MXFP4_METHOD, Mxfp4Experts
from penstock_shard.checkpoint.quantization_config import (
    QuantizedCheckpoint,
    plain_config,
    scheme_of,
)
from penstock_shard.checkpoint.safetensors import Checkpoint
from penstock_shard.checkpoint.stacked_experts import StackedExperts, has_stacks, refuse_stacks
from penstock_shard.checkpoint.text_config import text_config
from penstock_shard.checkpoint.weight_files import GGUF
from penstock_shard.distributed.collectives import Ranks
from penstock_shard.distributed.divide_decoder import SlicedTensors, local_spec, rank_shares
from penstock_shard.distributed.divide_module import divide_module
from penstock_shard.distributed.division_check import check_division, logits_of_whole
from penstock_shard.distributed.parallel_linear import parallel_weights
from penstock_shard.errors import ModelError
from penstock_shard.lora.lora import Shares
from penstock_shard.model_loader.choices.choose_attention import (
    AttentionOptions,
    choose_backend,
    serves_latents,
)
from penstock_shard.model_loader.transformers_loader import LoadOptions, load_module
from penstock_shard.models.decoder.decoder import Decoder
from penstock_shard.models.decoder.from_config import decoder_spec
from penstock_shard.models.decoder.rope_tables import rope_tables
from penstock_shard.models.decoder.spec import DecoderSpec, NotOurs, check_tensors, tensor_shapes
from penstock_shard.models.decoder.tensor_reader import RandomTensors, TensorSource
from penstock_shard.models.decoder.weights import DecoderWeights, read_weights
from penstock_shard.models.latent_heads import LatentHeads
from penstock_shard.models.loaded_model import no_check
from penstock_shard.models.transformers import unsupported
from penstock_shard.models.transformers.fused_linears import fuse_linears, probing
from penstock_shard.models.transformers.latent_attention import latent_heads
from penstock_shard.models.transformers.packed_weights import pack_weights
from penstock_shard.models.transformers.transformers_model import ATTENTION_NAME, TransformersModel
from penstock_shard.ops.base import Ops, Rope

# Errors for configuration values that our decoder cannot interpret. transformers' code is used
# then: it knows such values or reports them.
_ODD_VALUES = (ArithmeticError, AttributeError, LookupError, TypeError, ValueError)
# Flags with which transformers modules keep their weights as ordinary tensors.
_PLAINEST = "--attention-backend sdpa --dtype float32"
_BEST = AttentionOptions()


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """The model to load, and how to read it."""

    path: Path
    config: PreTrainedConfig
    max_model_len: int
    trust_remote_code: bool = False
    # True for random weights. Then only the configuration is read.
    dummy: bool = False


@dataclass(frozen=True, slots=True)
class ModelPart:
    """A model, or one rank's part of it."""

    model: Decoder | TransformersModel
    # This rank's share of each divided linear layer.
    shares: Shares = field(default_factory=dict)
    # All ranks call this after each has loaded its part. Raises ModelError if the parts do not
    # compute the same as the whole model.
    check: Callable[[], None] = no_check


def load_model(
    files: ModelFiles,
    ops: Ops,
    progress: Callable[[str], None],
    wish: AttentionOptions = _BEST,
    ranks: Ranks | None = None,
) -> ModelPart:
    """Load the weights, and set the ops' attention backend to one that serves the model. With
    `ranks`, load this rank's part. `progress` gets lines. Raises ModelError, with one line, if the
    load fails.
    """
    checkpoint = None if files.dummy else _open(files, ops, progress)
    # From here on, the model is a text model with ordinary weights. `_open` has handled
    # quantization_config, and the other parts of a model of images and text.
    has_head = None if checkpoint is None else "lm_head.weight" in checkpoint.shapes
    config = text_config(plain_config(files.config), has_head=has_head)
    files = dataclasses.replace(files, config=config)
    loading = _Loading(files, checkpoint, ops, wish, ranks, progress)
    try:
        spec = loading.spec()
        ropes = rope_tables(files.config, spec, files.max_model_len, ops.device)
    except (NotOurs, *_ODD_VALUES) as reason:
        _check_not_exact(ops, reason)
        unsupported.check_ours_alone(files.config, reason)
        progress(f"running the code of transformers ({reason})")
        return loading.transformers_model()
    return loading.decoder(spec, ropes)


def _open(files: ModelFiles, ops: Ops, progress: Callable[[str], None]) -> Checkpoint:
    checkpoint = _checkpoint(files, ops, progress)
    if checkpoint.names.leaves_out:
        progress("reading the text model alone from these files, which have more")
    return checkpoint


def _checkpoint(files: ModelFiles, ops: Ops, progress: Callable[[str], None]) -> Checkpoint:
    scheme, stacks = scheme_of(files.config), has_stacks(files.config)
    if scheme is not None:
        progress(scheme.computed_in(ops.weights))
    if (files.path / GGUF).exists():
        return GgufCheckpoint(files.path, plain_config(files.config))
    if scheme is not None and scheme.method == MXFP4_METHOD:
        if not stacks:
            raise ModelError(f"quantization_config: {MXFP4_METHOD} is served of gpt-oss alone")
        return Mxfp4Experts(files.path, files.config)
    if scheme is not None:
        quantized = QuantizedCheckpoint(files.path, scheme, ops.device)
        if stacks:
            refuse_stacks(quantized)
        return quantized
    checkpoint = StackedExperts(files.path, files.config) if stacks else Checkpoint(files.path)
    checkpoint.check_dtypes()
    return checkpoint


def _check_not_exact(ops: Ops, reason: Exception) -> None:
    """Raise ModelError if transformers' code would break the promise of exact ops."""
    # Our exact products need packed weights. torch computes products with ordinary tensors.
    if ops.exact and ops.keeps_tensors:
        raise ModelError(
            f"--exact: this model runs through transformers' code ({reason}), whose results on "
            f"{ops.device.type} depend on the batch; leave out --exact"
        )


@dataclass(frozen=True, slots=True)
class _Loading:
    files: ModelFiles
    # None for random weights.
    checkpoint: Checkpoint | None
    ops: Ops
    wish: AttentionOptions
    ranks: Ranks | None
    progress: Callable[[str], None]

    # ---- our decoder ----

    def spec(self) -> DecoderSpec:
        """Return the spec of the whole model. Raises NotOurs if our decoder does not compute it."""
        files, checkpoint = self.files, self.checkpoint
        spec = decoder_spec(files.config, trust_remote_code=files.trust_remote_code)
        if spec.latent is not None and not serves_latents(self.ops, self.wish):
            raise NotOurs(f"latent attention with --attention-backend {self.wish.backend}")
        if checkpoint is None:
            return spec
        if isinstance(checkpoint, QuantizedCheckpoint):
            checkpoint.leave_out(checkpoint.zero_biases - tensor_shapes(spec).keys())
        if self.ranks is not None and spec.experts is not None and spec.experts.names.has_biases:
            raise NotOurs("biases of experts over several ranks")
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
        weights = self._weights(spec, source, ropes)
        if ranks is not None:
            weights = parallel_weights(weights, ranks, whole.vocab_size)
        return ModelPart(Decoder(spec, weights, ops), shares)

    def _weights(
        self, spec: DecoderSpec, source: TensorSource, ropes: dict[str, Rope]
    ) -> DecoderWeights:
        try:
            return read_weights(spec, source, ropes, self.ops, self.progress)
        except torch.OutOfMemoryError as error:
            raise ModelError(
                f"{self.files.path}: the weights do not fit into memory: {error}"
            ) from error

    # ---- transformers' code ----

    def transformers_model(self) -> ModelPart:
        ops, ranks = self.ops, self.ranks
        module = load_module(self.files.path, self.files.config, self._options())
        unsupported.check_class(module)
        shares: Shares = {}
        check = no_check
        if ranks is not None:
            logits = logits_of_whole(module)
            shares = divide_module(module, ranks)
            check = partial(check_division, module, logits, ops, ranks.size)
            module.to(ops.device)
        module.set_attn_implementation(ATTENTION_NAME)
        latent = latent_heads(module, ops) if serves_latents(ops, self.wish) else {}
        if ops.keeps_tensors:
            fuse_linears(module, ops)
        else:
            pack_weights(module, ops, self.progress)
        model = self._probed(module, latent)
        unsupported.check_layers(module, model.layers, self.files.max_model_len)
        self._choose_backend(model.layers)
        return ModelPart(model, shares, check)

    def _options(self) -> LoadOptions:
        files, ops = self.files, self.ops
        checkpoint = None if self.checkpoint is None else self.checkpoint.for_transformers()
        dtype = ops.dtype
        if ops.device.type == "cpu" and not ops.keeps_tensors:
            # Packing converts weights anyway. Until then, they need no memory besides the mapped
            # file.
            stored = None if checkpoint is None else checkpoint.main_dtype()
            dtype = stored or torch.float32
        # With several ranks the whole model may not fit one device, so it is divided on cpu first.
        device = ops.device if self.ranks is None else torch.device("cpu")
        options = LoadOptions(device, dtype, files.trust_remote_code, files.dummy)
        if checkpoint is None or checkpoint.is_plain:
            return options
        needless = frozenset[str]()
        if isinstance(checkpoint, QuantizedCheckpoint):
            needless = checkpoint.zero_biases
        return dataclasses.replace(
            options, tensors=checkpoint.lazy_tensors(), needless=needless, names=checkpoint.names
        )

    def _probed(
        self, module: PreTrainedModel, latent: Mapping[int, LatentHeads]
    ) -> TransformersModel:
        """Run one token through the module to find its layers' parameters, and return it as a
        model.
        """
        alone = contextlib.nullcontext() if self.ranks is None else self.ranks.apart()
        try:
            with probing(module) as apart, alone:
                model = TransformersModel(module, self.ops, latent)
        except (NotImplementedError, AttributeError, TypeError, ValueError) as error:
            advice = "" if self.ops.keeps_tensors else f"; use {_PLAINEST}"
            raise ModelError(
                f"{type(module).__name__} is computed in a way that is not served here: "
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
    """Change the spec to fit the checkpoint. As in transformers, a head that differs from the
    embedding is not tied to it, and the embedding's scale is rounded to the weights' dtype.
    """
    embedding, head = "model.embed_tokens.weight", "lm_head.weight"
    tied = spec.tied and (head not in checkpoint.shapes or checkpoint.equal(embedding, head))
    scale = torch.tensor(spec.embedding_scale, dtype=checkpoint.dtypes[embedding])
    return dataclasses.replace(spec, tied=tied, embedding_scale=float(scale))
