"""Finds the files that hold weights, reads their headers, and computes the model's size from
headers and configuration. Imports no torch.
"""

from __future__ import annotations

import math
import os
import re
import struct
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Annotated, Any

import msgspec

from penstock_proto.facts import ModelShape
from penstock_shard.checkpoint.untrusted.files import open_regular, read_object
from penstock_shard.errors import ModelError, first_line

WEIGHTS = "model.safetensors"
# The link to a GGUF file that `unfold` makes.
GGUF = "model.gguf"
INDEX = "model.safetensors.index.json"

_PICKLES = (".bin", ".pt", ".pth")
_PART = re.compile(r"(.+)-(\d{1,6})-of-(\d{1,6})\.safetensors")
_MOST_PARTS = 10_000
# Prefixes of weights without an index. The first prefix that any file has chooses the files.
_NAMES = ("model", "weights", "")
# Names of adapters, of copies of the weights, and of training state.
_BESIDE = re.compile(r"adapter_|consolidated|(.*_)?(optimizer|scheduler|ema)(?![a-z])")

# Bound on a header's bytes. The largest models have a quarter of this in one file.
_MOST_HEADER_BYTES = 32 * 2**20
_MOST_DIMENSIONS = 16

_Size = Annotated[int, msgspec.Meta(ge=0)]


class StoredTensor(msgspec.Struct):
    """The entry of a safetensors header for one tensor. Offsets count from the header's end."""

    dtype: str
    shape: Annotated[list[_Size], msgspec.Meta(max_length=_MOST_DIMENSIONS)]
    data_offsets: tuple[_Size, _Size]


_HEADERS = msgspec.json.Decoder(dict[str, msgspec.Raw])
_STORED_TENSORS = msgspec.json.Decoder(StoredTensor)


def weight_files(directory: Path) -> list[Path]:
    """Return the files with weights, as transformers chooses them: model.safetensors, else the
    files of the index, else the GGUF file, else weights without an index, else [].

    Raises ModelError for an index that cannot be read, OSError if the system refuses.
    """
    if (directory / WEIGHTS).exists():
        return [directory / WEIGHTS]
    if not has_index(directory):
        gguf = directory / GGUF
        names = [path.name for path in directory.iterdir()]
        return [gguf] if gguf.exists() else [directory / name for name in unlisted(names)]
    weight_map = read_object(directory / INDEX).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ModelError(f"{directory / INDEX}: names no weights")
    listed = list(weight_map.values())
    for name in listed:
        if not isinstance(name, str) or not _is_beside(name):
            raise ModelError(
                f"{directory / INDEX}: {str(name)[:80]!r} is no name of a file beside it"
            )
    return [directory / name for name in sorted(set(listed))]


def _is_beside(name: str) -> bool:
    """Tell whether a name can only mean a file in the index's own directory."""
    return name.isprintable() and not {"/", "\\"} & set(name) and name not in ("", ".", "..")


def has_index(directory: Path) -> bool:
    return (directory / INDEX).exists()


def unlisted(names: Iterable[str]) -> list[str]:
    """Choose the weights without an index among file names: those that begin with "model"; else
    those that begin with "weights"; else all except adapters, copies and training state. If one
    part of a set exists, return all its parts, so that a missing part is noticed.
    """
    files = [name for name in names if name.endswith(".safetensors") and "/" not in name]
    own = [name for name in files if not _BESIDE.match(name)]
    sets = ([name for name in own if name.startswith(begin)] for begin in _NAMES)
    chosen = next(filter(None, sets), [])
    return sorted({part for name in chosen for part in _set_of(name, files)})


def _set_of(name: str, files: Sequence[str]) -> list[str]:
    """Return the parts of the set that a file belongs to, or its name alone."""
    part = _PART.fullmatch(name)
    if part is None or int(part[3]) > _MOST_PARTS:
        return [name]
    prefix, number, total = part.groups()
    names = [
        f"{prefix}-{each:0{len(number)}}-of-{total}.safetensors" for each in range(int(total) + 1)
    ]
    # Some sets count from 0.
    return names[:-1] if names[0] in files else names[1:]


def stored_tensors(path: Path) -> dict[str, StoredTensor]:
    """Return by name the tensors in a safetensors file's header.

    Format: 8 bytes little-endian length, that many bytes of JSON, then the tensors' bytes. Raises
    ModelError if the header is invalid, or the file is shorter than the header says.
    """
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        start = file.read(8)
        length = struct.unpack("<Q", start)[0] if len(start) == 8 else size
        if 8 + length > size:
            raise ModelError(f"{path}: is cut short or is no safetensors file")
        if length > _MOST_HEADER_BYTES:
            raise ModelError(
                f"{path}: has a header of {length} bytes; {_MOST_HEADER_BYTES} are served"
            )
        try:
            header = _HEADERS.decode(file.read(length))
            header.pop("__metadata__", None)
            tensors = {name: _STORED_TENSORS.decode(stated) for name, stated in header.items()}
        except RecursionError as error:
            raise ModelError(f"{path}: is nested too deeply") from error
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            why = first_line(error)[:80]
            raise ModelError(f"{path}: is no safetensors file: {why}") from error
    end = max((tensor.data_offsets[1] for tensor in tensors.values()), default=0)
    if size < (expected := 8 + length + end):
        raise ModelError(f"{path}: is cut short: {size} of {expected} bytes")
    return tensors


def model_shape(directory: Path) -> ModelShape:
    """Return a model's size. Raises ModelError for files that cannot be understood, OSError if the
    system refuses.
    """
    config = read_object(directory / "config.json")
    text = config.get("text_config")
    # A model of images and text has a configuration for each part.
    of_text = {**config, **text} if isinstance(text, dict) else config
    heads = _count_in(of_text, "num_attention_heads", "n_head", "num_heads")
    num_parameters, weight_bytes = _count_weights(directory)
    return ModelShape(
        model_type=str(config.get("model_type") or ""),
        # In quantized files, one stored number may hold several weights.
        num_parameters=0 if config.get("quantization_config") else num_parameters,
        weight_bytes=weight_bytes,
        num_layers=_count_in(of_text, "num_hidden_layers", "n_layer", "num_layers"),
        hidden_size=_count_in(of_text, "hidden_size", "n_embd", "d_model"),
        num_heads=heads,
        num_kv_heads=_kv_heads(of_text, heads),
    )


def _kv_heads(config: dict[str, Any], heads: int) -> int:
    """Return the number of key heads; by default it is the number of query heads."""
    names = ("num_key_value_heads", "num_kv_heads", "multi_query")
    stated = [config[name] for name in names if config.get(name) not in (None, False)]
    return _count_in(config, *names) if stated else heads


def _count_in(config: dict[str, Any], *names: str) -> int:
    """Return the first number under these names; 0 if there is none."""
    values = (config.get(name) for name in names)
    return next((each for each in values if type(each) is int and 0 < each < 2**31), 0)


def _count_weights(directory: Path) -> tuple[int, int]:
    """Return the number of values in the weights (0 if unknown) and their number of bytes."""
    paths = [path for path in weight_files(directory) if path.exists()]
    if any(path.name == GGUF for path in paths):
        return 0, sum(path.stat().st_size for path in paths)
    tensors = [tensor for path in paths for tensor in stored_tensors(path).values()]
    num_bytes = sum(tensor.data_offsets[1] - tensor.data_offsets[0] for tensor in tensors)
    return sum(math.prod(tensor.shape) for tensor in tensors), num_bytes


def why_no_weights(names: Sequence[str]) -> str:
    """Say in one line why the files hold no usable weights."""
    pickles = sorted(name for name in names if name.endswith(_PICKLES))
    if pickles:
        return (
            f"has its weights only as pickle ({pickles[0]}), which can run code when it is read; "
            "only safetensors are loaded (a hub model may have a converted --revision refs/pr/N)"
        )
    beside = sorted(name for name in names if name.endswith(".safetensors") and "/" not in name)
    other = f", and {beside[0]} is not the model's in the form of transformers" if beside else ""
    return f"there are no weights ({WEIGHTS} or {INDEX}){other}"
