"""Turns a model directory into a `ModelRunner` that is ready."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from penstock_proto.facts import EmbeddingDefaults
from penstock_shard.attention.backend_order import describe_backend
from penstock_shard.checkpoint.pooling_files import pooling_of
from penstock_shard.checkpoint.weight_files import model_shape
from penstock_shard.config import ShardConfig
from penstock_shard.device.dtypes import dtype_name
from penstock_shard.errors import ModelError, first_line, report_out_of_memory
from penstock_shard.images.families import is_served, type_that_sees
from penstock_shard.images.image_encoder import ImageEncoder
from penstock_shard.ipc.runner_info import RunnerInfo
from penstock_shard.model_loader.adapter_store import adapter_store
from penstock_shard.model_loader.fingerprint import fingerprint
from penstock_shard.model_loader.generation_config import generation_defaults
from penstock_shard.model_loader.load_checked import CheckedLoad, load_checked
from penstock_shard.model_loader.prepare_model import PreparedModel, prepare_model
from penstock_shard.models.base import CausalModel
from penstock_shard.models.decoder.decoder import Decoder
from penstock_shard.models.loaded_model import LoadedModel
from penstock_shard.structured_output.matcher_state import MaskFiller
from penstock_shard.worker.capabilities import CAPABILITIES
from penstock_shard.worker.logits_processors.order import every_processor
from penstock_shard.worker.model_runner import ModelRunner
from penstock_shard.worker.outputs.all_outputs import every_output

# The most bytes of logits that a step keeps for prompt log-probabilities, and the rows kept in any
# case.
_SCORED_BYTES = 64 * 2**20
_LEAST_SCORED = 16


@report_out_of_memory("at load")
def load_model_runner(
    config: ShardConfig, model_dir: Path, *, progress: Callable[[str], None]
) -> ModelRunner:
    """Load a model and make it ready to serve.

    `progress` gets one line for each stage. Raises ModelError, with one line that says what to do,
    if the model cannot be loaded, would be served wrongly, or does not fit.
    """
    load = load_checked(config, model_dir, progress)
    loaded = load.loaded
    images = _image_encoder(config, model_dir, loaded, progress)
    with _encoder_errors():
        beside_bytes = 0 if images is None else images.peak_bytes(loaded.model.device)
    prepared = prepare_model(config, loaded, load.checks, beside_bytes, progress)
    info = _info(config, model_dir, load, prepared, progress)
    if images is not None and info.numerics_fingerprint:
        info = dataclasses.replace(info, numerics_fingerprint=_with_images(load, config, images))
    return ModelRunner(
        loaded.model,
        info,
        shaping=every_processor(MaskFiller(info.vocab_size, config.constraint_threads)),
        make_outputs=every_output,
        graphs=loaded.graphs if prepared.has_graphs else None,
        adapters=adapter_store(config, loaded.bank, loaded.model),
        images=images,
    )


def _with_images(load: CheckedLoad, config: ShardConfig, images: ImageEncoder) -> str:
    """Return the fingerprint of a model with an image encoder; empty if images are not always
    encoded to the same bits. Raises ModelError if the encoder fails.
    """
    loaded = load.loaded
    with _encoder_errors():
        encoded = images.fingerprint()
    ranks = config.tensor_parallel_size
    return encoded and fingerprint(load.weights_hash, loaded.ops, loaded.kv_dtype, ranks, encoded)


@contextmanager
def _encoder_errors() -> Iterator[None]:
    """Turn errors in the code of a processor or an encoder into ModelError."""
    try:
        yield
    except (ArithmeticError, IndexError, RuntimeError, TypeError, ValueError) as error:
        raise ModelError(
            f"its image encoder fails: {first_line(error)}; --image-cache-bytes 0 serves text alone"
        ) from error


def _image_encoder(
    config: ShardConfig, model_dir: Path, loaded: LoadedModel, progress: Callable[[str], None]
) -> ImageEncoder | None:
    """Load the image encoder. If images are not served, return None and report why."""
    is_dummy, model_type = config.load_format == "dummy", type_that_sees(model_dir)
    if config.image_cache_bytes == 0 or is_dummy or model_type is None:
        return None
    if not is_served(model_type):
        progress(f"its images are not served: those of models of type {model_type} are not")
        return None
    if config.tensor_parallel_size > 1 or not isinstance(loaded.part, Decoder):
        progress("its images are not served: only our own decoder, on one device, takes them")
        return None
    # Imported here because it imports transformers, which a kept load does not need.
    from penstock_shard.images.load_encoder import load_encoder

    progress("loading the image encoder")
    try:
        return load_encoder(model_dir, loaded.model.device, config.image_cache_bytes)
    except ModelError as error:
        progress(f"its images are not served: {error}")
        return None


def _info(
    config: ShardConfig,
    model_dir: Path,
    load: CheckedLoad,
    prepared: PreparedModel,
    progress: Callable[[str], None],
) -> RunnerInfo:
    loaded, checks, weights_hash = load.loaded, load.checks, load.weights_hash
    model, ops = loaded.model, loaded.ops
    eos_token_ids, defaults = generation_defaults(
        model_dir, loaded.facts.eos_token_ids, loaded.facts.vocab_size, progress
    )
    embedding = _embedding(config, model_dir, model, progress)
    ranks = config.tensor_parallel_size
    return RunnerInfo(
        architecture=loaded.facts.architecture,
        weights_hash=weights_hash,
        vocab_size=loaded.vocab_size,
        max_model_len=loaded.max_model_len,
        eos_token_ids=eos_token_ids,
        default_sampling=defaults,
        block_size=checks.block_size,
        pools=tuple(prepared.pools),
        kv_bytes_per_token=prepared.kv_shape.bytes_per_token,
        kv_bytes_per_sequence=prepared.kv_shape.bytes_per_sequence,
        kv_sequences=prepared.kv_shape.sequences_in(prepared.pools),
        state_bytes=prepared.kv_shape.state_bytes,
        shape=model_shape(model_dir),
        cache_groups=model.cache_layout.groups,
        block_bytes=_block_bytes(model) if ranks == 1 else (),
        state_spacing=config.state_spacing,
        dtype=ops.weights,
        kv_dtype=dtype_name(loaded.kv_dtype),
        device=str(model.device),
        attention_backend=describe_backend(ops.backend, ops.device),
        capabilities=CAPABILITIES | ({"embed"} if embedding else set()),
        embedding=embedding,
        max_scored_tokens=max(_LEAST_SCORED, _SCORED_BYTES // (4 * loaded.vocab_size)),
        # On cpu, preparing the next step would take the processor from the running one.
        max_steps_ahead=0 if model.device.type == "cpu" else 1,
        worst_step_s=checks.worst_step_s,
        batch_invariant=checks.batch_invariant,
        numerics_fingerprint=(
            fingerprint(weights_hash, ops, loaded.kv_dtype, ranks) if checks.batch_invariant else ""
        ),
    )


def _block_bytes(model: CausalModel) -> tuple[int, ...]:
    groups = range(len(model.cache_layout.groups))
    return tuple(sum(part.nbytes for part in model.block_parts(group, 0)) for group in groups)


def _embedding(
    config: ShardConfig, model_dir: Path, model: CausalModel, progress: Callable[[str], None]
) -> EmbeddingDefaults | None:
    """Return the way to make embeddings; None if the model serves none. Raises ModelError if files
    cannot be read, or if the flags ask for embeddings that the model cannot give.
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
