"""Loads a runner, and the tokenizer files that a router needs. Imports torch only for a real
model.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from penstock_proto.facts import EmbeddingDefaults
from penstock_proto.types import Pooling
from penstock_shard.checkpoint.model_source import resolve_adapter, resolve_model
from penstock_shard.checkpoint.tokenizer_files import read_tokenizer_files
from penstock_shard.checkpoint.untrusted.files import read_object
from penstock_shard.checkpoint.weight_files import model_shape
from penstock_shard.config import ShardConfig
from penstock_shard.errors import ModelError, first_line
from penstock_shard.ipc.runner_info import RunnerInfo
from penstock_shard.worker.base import Runner
from penstock_shard.worker.fake_kv import FakeKv
from penstock_shard.worker.fake_runner import (
    EMBEDDING_SIZE,
    FAKE_CAPABILITIES,
    FakeAdapters,
    FakeRunner,
)

__all__ = ["LoadedRunner", "ModelError", "load_runner"]

_FAKE_BLOCK_SIZE = 16
# The number of blocks, enough that the fake runner does not preempt by default.
_FAKE_BLOCKS = 65_536
# The fake runner has memory for a sequence of this many tokens, 8 bytes each.
_FAKE_MOST_TOKENS = 2**24
# Ids are below this, several times any vocabulary's size, because the fake runner lists all ids.
_MOST_TOKENS = 2**22


@dataclass(frozen=True, slots=True)
class LoadedRunner:
    """`revision` is the commit of a hub model, else empty."""

    runner: Runner
    tokenizer_files: dict[str, bytes]
    revision: str


def load_runner(config: ShardConfig, progress: Callable[[str], None]) -> LoadedRunner:
    """Load the runner and files that the configuration names.

    Raises:
        ModelError: one line that says what is wrong and what to do.
    """
    source = resolve_model(config, progress=progress)
    template = None if config.chat_template is None else Path(config.chat_template)
    try:
        files = read_tokenizer_files(source.path, template)
    except OSError as error:
        raise ModelError(f"{error.filename}: {error.strerror}") from None
    if config.runner == "fake":
        return LoadedRunner(_fake_runner(config, source.path, files), files, source.revision)
    # Imported here, because importing torch takes seconds and half a gigabyte.
    progress("importing torch, which takes some seconds")
    try:
        from penstock_shard.model_loader.load_model_runner import load_model_runner
    except OSError as error:
        # The device library that torch was built for is missing.
        raise ImportError(str(error), name="torch") from error

    if "tokenizer.json" not in files:
        from penstock_shard.checkpoint.tokenizer_conversion import make_tokenizer_files

        files = make_tokenizer_files(source.path, config.trust_remote_code) | files
    return LoadedRunner(
        load_model_runner(config, source.path, progress=progress), files, source.revision
    )


def _fake_runner(config: ShardConfig, model_dir: Path, files: dict[str, bytes]) -> FakeRunner:
    """Return a runner that generates only the tokenizer's ordinary ids."""
    model_config = read_object(model_dir / "config.json")
    try:
        # A model of images and text has a configuration for each part.
        model_config = (model_config.get("text_config") or {}) | model_config
        ordinary, special = _ids_of(json.loads(files["tokenizer.json"]))
        eos = model_config.get("eos_token_id")
        eos_ids = [
            int(each) for each in (eos if isinstance(eos, list) else [eos]) if each is not None
        ]
        max_model_len = int(
            config.max_model_len or model_config.get("max_position_embeddings", 2048)
        )
    except (AttributeError, KeyError, RecursionError, TypeError, ValueError) as error:
        reason = f"{type(error).__name__}: {first_line(error)[:80]}"
        raise ModelError(
            f"{model_dir}: no usable tokenizer.json and config.json: {reason}"
        ) from error
    if not 1 <= max_model_len <= _FAKE_MOST_TOKENS:
        name = "max_model_len" if config.max_model_len else "max_position_embeddings"
        raise ModelError(
            f"{model_dir}: {name}: {max_model_len} is not from 1 to {_FAKE_MOST_TOKENS}"
        )
    block_size = config.block_size or _FAKE_BLOCK_SIZE
    needed = -(-max_model_len // block_size)
    if config.kv_blocks is not None and config.kv_blocks < needed:
        raise ModelError(
            f"--kv-blocks {config.kv_blocks}: one sequence of {max_model_len} tokens needs {needed}"
        )
    info = RunnerInfo(
        architecture="FakeRunner",
        weights_hash=config.fake_weights,
        vocab_size=max([*ordinary, *special]) + 1,
        max_model_len=max_model_len,
        eos_token_ids=tuple(eos_ids),
        default_sampling={},
        block_size=block_size,
        pools=(config.kv_blocks or max(_FAKE_BLOCKS, needed),),
        dtype="none",
        kv_dtype="none",
        device="none",
        attention_backend="none",
        capabilities=FAKE_CAPABILITIES,
        embedding=_fake_embedding(config),
        batch_invariant=True,
        numerics_fingerprint=config.fake_weights,
        max_steps_ahead=1,
        worst_step_s=config.step_ms / 1000,
        shape=model_shape(model_dir),
    )
    kv = FakeKv(info)
    return FakeRunner(
        dataclasses.replace(info, block_bytes=kv.block_bytes),
        ordinary,
        step_s=config.step_ms / 1000,
        eos_rate=config.fake_eos_rate,
        crash_on=config.fake_crash_on,
        adapters=_fake_adapters(config),
        kv=kv,
    )


def _ids_of(tokenizer: dict[str, Any]) -> tuple[list[int], set[int]]:
    """Return ordinary ids and added tokens' ids. Raises ValueError for values that are not ids."""
    special = {token["id"] for token in tokenizer.get("added_tokens", [])}
    vocab = tokenizer["model"]["vocab"]
    ids = vocab.values() if isinstance(vocab, dict) else range(len(vocab))
    ordinary = sorted(set(ids) - special)
    for token_id in (*ordinary, *special):
        if type(token_id) is not int or not 0 <= token_id < _MOST_TOKENS:
            raise ValueError(f"{token_id!r:.40} is no id below {_MOST_TOKENS}")
    if not ordinary:
        raise ValueError("there are no tokens")
    return ordinary, special


def _fake_adapters(config: ShardConfig) -> FakeAdapters | None:
    if not config.serves_adapters:
        return None
    return FakeAdapters(lambda source: resolve_adapter(source, config))


def _fake_embedding(config: ShardConfig) -> EmbeddingDefaults:
    pooling = Pooling.LAST if config.embeddings == "auto" else Pooling(config.embeddings)
    return EmbeddingDefaults(pooling, normalize=True, size=EMBEDDING_SIZE)
