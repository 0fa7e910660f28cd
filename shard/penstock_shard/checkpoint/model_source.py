"""--model -> a local directory with a complete model: built in, on disk, or from the hub.

Weights are read only from safetensors and GGUF, because loading a pickle runs code in it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from penstock_shard.checkpoint.adapter_files import CONFIG as ADAPTER_CONFIG
from penstock_shard.checkpoint.gguf_files import is_gguf, unfold
from penstock_shard.checkpoint.hub import fetch_adapter, fetch_model, is_hub_id
from penstock_shard.checkpoint.untrusted.config_bounds import check_config
from penstock_shard.checkpoint.untrusted.files import check_files, read_object
from penstock_shard.checkpoint.weight_files import (
    GGUF,
    INDEX,
    has_index,
    stored_tensors,
    weight_files,
    why_no_weights,
)
from penstock_shard.config import ShardConfig
from penstock_shard.errors import AdapterNotFound, ModelError

BUILTIN_MODEL = Path(__file__).parent.parent / "builtin_model"


@dataclass(frozen=True, slots=True)
class ModelSource:
    """`revision` is the commit of a hub model, else empty."""

    path: Path
    revision: str = ""


def resolve_model(config: ShardConfig, *, progress: Callable[[str], None]) -> ModelSource:
    """Find the model that the configuration names, and download it if necessary.

    Raises ModelError if there is no such model or it is incomplete. The fake runner and
    --load-format dummy need no weights.
    """
    needs_weights = config.runner != "fake" and config.load_format != "dummy"
    path, revision = BUILTIN_MODEL, ""
    if config.model is not None and _is_local(config.model):
        path = Path(config.model).expanduser()
    elif config.model is not None:
        path, revision = fetch_model(config.model, config, needs_weights, progress)
    if is_gguf(path):
        path = unfold(path, keep=config.load_cache_bytes > 0)
    source = ModelSource(path, revision)
    check_directory(source.path, needs_weights=needs_weights)
    return source


def resolve_adapter(source: str, config: ShardConfig) -> Path:
    """Return an adapter's directory, downloaded if `source` is a hub id. Raises ModelError if that
    fails.
    """
    # A local directory that is not an adapter must not hide a hub id, and no error may reveal that
    # the directory exists.
    if _looks_local(source) or ":" in source or os.path.isfile(Path(source) / ADAPTER_CONFIG):
        try:
            return Path(source).expanduser()
        except RuntimeError as error:
            raise AdapterNotFound(f"{source}: there is no such user") from error
    return fetch_adapter(source, config)


def _is_local(model: str) -> bool:
    return _looks_local(model) or Path(model).exists()


def _looks_local(name: str) -> bool:
    return name.startswith(("/", ".", "~")) or not is_hub_id(name)


def check_directory(directory: Path, *, needs_weights: bool = True) -> None:
    """Raise ModelError for a directory without a complete model, for links to other files of this
    machine, and for sizes that no model has.
    """
    try:
        if not directory.exists():
            raise ModelError(f"{directory}: there is no such directory")
        if not directory.is_dir():
            raise ModelError(f"{directory}: is a file; --model wants the model's directory")
        if not (directory / "config.json").exists():
            raise ModelError(f"{directory}: there is no config.json, so this is not a model")
        check_files(directory)
        check_config(directory / "config.json", read_object(directory / "config.json"))
        if needs_weights:
            _check_weights(directory)
    except OSError as error:
        raise ModelError(f"{error.filename}: cannot be read: {error.strerror}") from error


def _check_weights(directory: Path) -> None:
    parts = weight_files(directory)
    if not parts:
        names = [path.name for path in directory.iterdir()]
        raise ModelError(f"{directory}: {why_no_weights(names)}")
    missing = [part for part in parts if not part.exists()]
    if missing:
        raise ModelError(
            f"{directory}: {len(missing)} of {len(parts)} parts of the weights are missing, "
            f"{missing[0].name} for one"
        )
    _check_tensors(directory, [part for part in parts if part.name != GGUF])


def _check_tensors(directory: Path, parts: Sequence[Path]) -> None:
    """Raise ModelError for a part that is cut short, and for a tensor in two parts if no index
    chooses one.
    """
    found: dict[str, Path] = {}
    for part in parts:
        tensors = stored_tensors(part)
        twice = found.keys() & tensors.keys()
        if twice and not has_index(directory):
            name = min(twice)
            raise ModelError(
                f"{directory}: {found[name].name} and {part.name} both have a tensor {name}, and "
                f"there is no {INDEX} to say which is meant"
            )
        found |= dict.fromkeys(tensors, part)
