"""Reads a LoRA adapter saved by peft.

An adapter adds `scale * B @ A` to matrices of a model (Hu et al., 2021, "LoRA"). The scale is
lora_alpha / rank, or lora_alpha / sqrt(rank) if the adapter is rank-stabilised (Kalajdzievski,
2023). For any other setting that would change results, an error names the setting.
"""

from __future__ import annotations

import hashlib
import math
import re
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from penstock_shard.checkpoint.text_names import text_module
from penstock_shard.checkpoint.untrusted.files import check_file, open_regular, read_object
from penstock_shard.checkpoint.untrusted.module_patterns import ModulePatterns, PatternUnreadable
from penstock_shard.checkpoint.weight_files import stored_tensors
from penstock_shard.errors import AdapterNotFound, ModelError

CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"

_TENSOR = re.compile(r"base_model\.model\.(?P<module>.+)\.lora_(?P<half>[AB])\.weight")
_HASHED_BYTES = 1 << 24
# The most characters of a tensor's name. Error messages contain such names.
_LONGEST_NAME = 400
# Ranks and lora_alpha are below this, so that they fit into a float.
_MOST = 1e300
_DTYPES = {"F32", "F16", "BF16"}
# Ways to initialize an adapter that do not change the model's own weights.
_PLAIN_BEGINNINGS = (None, True, False, "gaussian", "eva", "orthogonal")
# Fields that are read below, fields about training, and fields about the choice of modules (the
# tensors' names show it).
_KNOWN = {
    "peft_type",
    "r",
    "lora_alpha",
    "use_rslora",
    "rank_pattern",
    "alpha_pattern",
    "init_lora_weights",
    "bias",
    "task_type",
    "auto_mapping",
    "peft_version",
    "base_model_name_or_path",
    "revision",
    "inference_mode",
    "lora_dropout",
    "target_modules",
    "exclude_modules",
    "layers_to_transform",
    "layers_pattern",
    "megatron_core",
    "loftq_config",
    "eva_config",
    "corda_config",
    "lora_ga_config",
    "velora_config",
    "runtime_config",
    "qalora_group_size",
}
_WITHOUT_MEANING: tuple[object, ...] = (None, False, "", [], {})


@dataclass(frozen=True, slots=True)
class LowRankPair:
    """The two matrices that change one weight: A [rank, in_features] and B [out_features, rank]."""

    # The module's name in the text model, such as model.layers.0.self_attn.q_proj.
    module: str
    rank: int
    in_features: int
    out_features: int
    scale: float
    name_a: str
    name_b: str


@dataclass(frozen=True, slots=True)
class AdapterFiles:
    """An adapter's configuration and tensors. `content_hash` covers both files."""

    path: Path
    content_hash: str
    # The base model that the configuration names. Only a hint, because paths differ between
    # machines.
    base_model: str
    pairs: tuple[LowRankPair, ...]

    @property
    def rank(self) -> int:
        return max(pair.rank for pair in self.pairs)


def read_adapter_files(path: Path) -> AdapterFiles:
    """Read and check the adapter in a directory. Raises ModelError, with a one-line message, if the
    adapter is incomplete or not supported; AdapterNotFound if the directory has none.
    """
    config, weights = path / CONFIG, path / WEIGHTS
    try:
        _check_there(path)
        check_file(path, config)
        told = read_object(config)
        shapes = _read_shapes(weights)
        content_hash = _hash_of(config, weights)
        _check_config(config, told)
        pairs = _pairs(config, weights, told, shapes)
        base_model = str(told.get("base_model_name_or_path") or "")
    except OSError as error:
        raise AdapterNotFound(f"{error.filename}: cannot be read: {error.strerror}") from error
    except RecursionError as error:
        raise ModelError(f"{path}: what its files say is nested too deeply") from error
    return AdapterFiles(path, content_hash, base_model, pairs)


def _check_there(path: Path) -> None:
    if not path.is_dir():
        raise AdapterNotFound(f"{path}: there is no such directory")
    if not (path / CONFIG).is_file():
        raise AdapterNotFound(f"{path}: there is no {CONFIG}, so this is no adapter of peft's")
    if not (path / WEIGHTS).exists():
        pickled = (path / "adapter_model.bin").exists()
        why = "has its weights only as pickle, which can run code when it is read; " * pickled
        raise ModelError(f"{path}: {why}there is no {WEIGHTS}")


def _check_config(path: Path, told: Mapping[str, Any]) -> None:
    """Raise ModelError for unsupported settings that would change results."""
    kind = told.get("peft_type")
    if kind != "LORA":
        raise ModelError(f"{path}: peft_type: {str(kind)[:80]!r} is not served; only LORA is")
    if told.get("bias", "none") != "none":
        raise ModelError(f"{path}: bias: {str(told['bias'])[:80]!r} is not served; only 'none' is")
    beginning = told.get("init_lora_weights")
    if beginning not in _PLAIN_BEGINNINGS:
        raise ModelError(
            f"{path}: init_lora_weights: {str(beginning)[:80]!r} changes the model's own weights, "
            "which is not served; convert the adapter to an ordinary one, as peft's "
            "save_pretrained can"
        )
    for name, value in told.items():
        if name not in _KNOWN and value not in _WITHOUT_MEANING:
            raise ModelError(f"{path}: {name}: {str(value)[:80]!r} is not served")


def _read_shapes(path: Path) -> dict[str, tuple[int, ...]]:
    tensors = stored_tensors(path)
    for name, tensor in tensors.items():
        if len(name) > _LONGEST_NAME or not name.isprintable():
            raise ModelError(
                f"{path}: {name[:80]!r}: names have printable characters, {_LONGEST_NAME} at most"
            )
        if tensor.dtype not in _DTYPES:
            odd, served = tensor.dtype[:80], ", ".join(sorted(_DTYPES))
            raise ModelError(f"{path}: {name} is of {odd!r}; an adapter's tensors are {served}")
    return {name: tuple(tensor.shape) for name, tensor in tensors.items()}


def _hash_of(*paths: Path) -> str:
    digest = hashlib.sha256()
    for path in paths:
        digest.update(struct.pack("<Q", path.stat().st_size))
        with open_regular(path) as file:
            while piece := file.read(_HASHED_BYTES):
                digest.update(piece)
    return digest.hexdigest()


def _pairs(
    config: Path, weights: Path, told: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]]
) -> tuple[LowRankPair, ...]:
    halves: dict[str, dict[str, str]] = {}
    for name, shape in shapes.items():
        match = _TENSOR.fullmatch(name)
        if match is None or len(shape) != 2:
            raise ModelError(
                f"{weights}: {name} is no matrix of a LoRA adapter, so it is not served"
            )
        halves.setdefault(match["module"], {})[match["half"]] = name
    if not halves:
        raise ModelError(f"{weights}: there are no tensors in it")
    ranks = _Stated(config, told, "r", "rank_pattern", len(halves))
    alphas = _Stated(config, told, "lora_alpha", "alpha_pattern", len(halves))
    return tuple(
        _pair(weights, shapes, ranks, alphas, bool(told.get("use_rslora")), *each)
        for each in sorted(halves.items())
    )


def _pair(
    weights: Path,
    shapes: Mapping[str, tuple[int, ...]],
    ranks: _Stated,
    alphas: _Stated,
    is_stabilised: bool,
    module: str,
    halves: Mapping[str, str],
) -> LowRankPair:
    if len(halves) != 2:
        missing = "AB".replace(next(iter(halves)), "")
        raise ModelError(f"{weights}: lora_{missing} of {module} is missing")
    rank, in_features = shapes[halves["A"]]
    out_features, inner = shapes[halves["B"]]
    stated = ranks.value(module)
    if not 1 <= rank == inner == stated:
        raise ModelError(
            f"{weights}: {module} has lora_A of rank {rank} and lora_B of rank {inner}; "
            f"{CONFIG} says {stated:g}"
        )
    scale = alphas.value(module) / (math.sqrt(rank) if is_stabilised else rank)
    return LowRankPair(
        text_module(module), rank, in_features, out_features, scale, halves["A"], halves["B"]
    )


class _Stated:
    """A number for each module. The first pattern that matches the end of the module's name gives
    it, as in peft; without a match, the default applies.
    """

    def __init__(
        self, config: Path, told: Mapping[str, Any], field: str, pattern: str, num_modules: int
    ) -> None:
        self._where = f"{config}: {field}"
        self._for_all = told.get(field)
        stated = told.get(pattern) or {}
        if not isinstance(stated, dict):
            raise ModelError(f"{config}: {pattern}: {str(stated)[:80]!r} is no object of patterns")
        try:
            self._patterns = ModulePatterns(stated, num_modules)
        except PatternUnreadable as error:
            raise ModelError(f"{config}: {pattern}: cannot be read: {error}") from error

    def value(self, module: str) -> float:
        """Raises ModelError if the module's value is not a number."""
        value = self._patterns.value(module, self._for_all)
        if isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < _MOST:
            return float(value)
        raise ModelError(f"{self._where}: {str(value)[:80]!r} is no number that is served")
