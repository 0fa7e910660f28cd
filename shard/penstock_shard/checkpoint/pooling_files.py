"""Reads from sentence-transformers' files whether a model makes embeddings and how it pools them.

`modules.json` lists the modules after the transformer: Pooling (its config.json names the pooling)
and maybe Normalize.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from penstock_proto.types import Pooling
from penstock_shard.checkpoint.untrusted.files import read_json, read_object
from penstock_shard.errors import ModelError

_MODULES = "modules.json"
# Pooling names of sentence-transformers: some up to release 5.3, some of later releases.
_MODES = {"lasttoken": Pooling.LAST, "mean_tokens": Pooling.MEAN, "mean": Pooling.MEAN}
# A module's folder is a name, not a path.
_FOLDER = re.compile(r"\w[\w.-]*")
_PREFIX = "pooling_mode_"


class _NotServed(Exception):
    """The files ask for a pooling that is not supported."""


def pooling_of(
    model_dir: Path, asked: str, progress: Callable[[str], None]
) -> tuple[Pooling, bool] | None:
    """Return the pooling and whether vectors are normalised; None for a model without embeddings.

    `asked` is --embeddings; with "auto", the files choose the pooling. If their pooling is not
    supported, `progress` gets a line. Raises ModelError for files that cannot be read.
    """
    modules = _modules(model_dir)
    normalizes = "Normalize" in modules
    if asked != "auto":
        return Pooling(asked), normalizes
    if not modules:
        return None
    try:
        return _stated(model_dir, modules), normalizes
    except _NotServed as reason:
        progress(f"no embeddings: {reason}; --embeddings last or mean serves them all the same")
        return None


def _modules(model_dir: Path) -> dict[str, str]:
    """Map each module's kind to its folder, in order; empty without modules.json."""
    path = model_dir / _MODULES
    try:
        listed = read_json(path)
        # The type is a dotted path. Its last part, a class name, is the module's kind.
        return {str(each["type"]).rpartition(".")[2]: str(each["path"]) for each in listed}
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise ModelError(f"{path}: is no list of modules: {error}") from error


def _stated(model_dir: Path, modules: Mapping[str, str]) -> Pooling:
    unknown = [kind for kind in modules if kind not in ("Transformer", "Pooling", "Normalize")]
    if unknown:
        raise _NotServed(f"{_MODULES} has a {unknown[0]} module, which is not served")
    if "Pooling" not in modules:
        raise _NotServed(f"{_MODULES} has no Pooling module")
    folder = modules["Pooling"]
    if not _FOLDER.fullmatch(folder):
        raise ModelError(f"{model_dir / _MODULES}: {folder[:80]!r} is no folder beside it")
    path = model_dir / folder / "config.json"
    try:
        config = read_object(path)
    except OSError as error:
        raise ModelError(f"{path}: cannot be read: {error.strerror}") from error
    modes = _modes(config)
    if len(modes) != 1 or modes[0] not in _MODES:
        raise _NotServed(f"pooling {' and '.join(modes) or 'by nothing'} is not served")
    pooling = _MODES[modes[0]]
    if pooling is Pooling.MEAN and config.get("include_prompt") is False:
        raise _NotServed("its mean leaves the instruction's tokens out, which is not served")
    return pooling


def _modes(config: Mapping[str, Any]) -> list[str]:
    """Return the names of the pooling modes. Older releases store a flag for each mode instead."""
    stated = config.get("pooling_mode")
    if stated is not None:
        return list(map(str, stated)) if isinstance(stated, list) else [str(stated)]
    return [
        name.removeprefix(_PREFIX)
        for name, value in config.items()
        if name.startswith(_PREFIX) and value is True
    ]
