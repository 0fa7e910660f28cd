"""The safetensors files of a model directory, mapped and read tensor by tensor.

Pages that were read count as this process's memory until they are given back. So code that converts
a tensor gives its pages back at once.
"""

from __future__ import annotations

import ctypes
import mmap
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from penstock_shard.checkpoint.codes.codes import Codes
from penstock_shard.checkpoint.text_names import text_names
from penstock_shard.checkpoint.weight_files import WEIGHTS, has_index, weight_files
from penstock_shard.errors import ModelError

# It takes a millisecond to look up where files are mapped. Smaller tensors are not worth that.
_SMALL_BYTES = 1 << 16
# The number of rows that are compared at once.
_ROWS = 1024
_DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


class Checkpoint:
    """Names, shapes and tensors of the text model in a directory."""

    def __init__(self, model_dir: Path) -> None:
        """Raises ModelError if files cannot be read."""
        self._files: dict[str, Any] = {}
        try:
            paths = weight_files(model_dir)
            self._is_unlisted = paths != [model_dir / WEIGHTS] and not has_index(model_dir)
            if not paths:
                raise ModelError(f"{model_dir}: cannot load the weights: there are none")
            for path in paths:
                file = safe_open(path, framework="pt")
                names: list[str] = file.keys()  # type: ignore[no-untyped-call]
                self._files |= dict.fromkeys(names, file)
            self.names = text_names(self._files)
            slices = {name: self._slice(name) for name in self.names.stored}
        except (OSError, ValueError, SafetensorError) as error:
            raise ModelError(f"{model_dir}: cannot load the weights: {error}") from error
        self.shapes = {name: tuple(part.get_shape()) for name, part in slices.items()}
        # Dtypes by the names that safetensors files use.
        self.stored = {name: str(part.get_dtype()) for name, part in slices.items()}
        # None for dtypes other than float32, float16 and bfloat16.
        self.dtypes = {name: _DTYPES.get(stored) for name, stored in self.stored.items()}

    @property
    def is_plain(self) -> bool:
        """True if transformers can read the model from the files by itself."""
        of_text = self.names.root in ("model.", "") and not self.names.leaves_out
        return of_text and not self._is_unlisted

    def for_transformers(self) -> Checkpoint:
        """Return a checkpoint that transformers' code for the model's type can load."""
        return self

    @contextmanager
    def read(self, names: Sequence[str]) -> Iterator[list[Tensor]]:
        """Yield tensors in the file's mapped memory. Copy them before the context ends."""
        tensors = [self._tensor(name) for name in names]
        yield tensors
        give_back_pages(tensors)

    def codes(self, name: str) -> Codes | None:
        """Return the matrix as codes; None if it is not stored as codes."""
        return None

    def _tensor(self, name: str) -> Tensor:
        stored = self.names.stored[name]
        tensor: Tensor = self._files[stored].get_tensor(stored)
        return tensor

    def _slice(self, name: str) -> Any:
        """Return a tensor's handle, which has shape and dtype, and reads a part when sliced."""
        stored = self.names.stored[name]
        return self._files[stored].get_slice(stored)

    def lazy_tensors(self) -> dict[str, LazyTensor]:
        return {name: LazyTensor(self, name) for name in self.shapes}

    def beside_text(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the tensors outside the text model, with their names in the files."""
        text = set(self.names.stored.values())
        for name, file in self._files.items():
            if name not in text:
                yield name, file.get_tensor(name)

    def equal(self, first: str, second: str) -> bool:
        with self.read([first, second]) as (one, other):
            for start in range(0, len(one), _ROWS):
                pieces = [tensor[start : start + _ROWS] for tensor in (one, other)]
                if not torch.equal(*pieces):
                    return False
                give_back_pages(pieces)
        return True

    def check_dtypes(self) -> None:
        """Raise ModelError, with a tensor's name, for weights in int8, or in a float type other
        than float32, float16 and bfloat16.
        """
        for name, stored in self.stored.items():
            if stored not in _DTYPES and (stored == "I8" or stored.startswith("F")):
                raise ModelError(
                    f"{name}: is stored as {stored}; weights of a model without "
                    f"quantization_config must be {', '.join(_DTYPES)}"
                )

    def main_dtype(self) -> torch.dtype | None:
        """Return which of float32, float16 and bfloat16 most weights have; None if none has one of
        them.
        """
        sizes: dict[torch.dtype, int] = {}
        for name, dtype in self.dtypes.items():
            if dtype is not None:
                sizes[dtype] = sizes.get(dtype, 0) + torch.Size(self.shapes[name]).numel()
        return max(sizes, key=lambda dtype: sizes[dtype], default=None)


@dataclass(frozen=True, slots=True)
class LazyTensor:
    """A tensor that is read each time it is sliced."""

    checkpoint: Checkpoint
    name: str

    def __getitem__(self, index: Any) -> Tensor:
        with self.checkpoint.read([self.name]) as (tensor,):
            return tensor[index]


def give_back_pages(tensors: Sequence[Tensor]) -> None:
    """Drop the pages of tensors in a mapped file. They are read again when touched.

    Ignores small tensors, tensors in other memory, and systems other than Linux.
    """
    tensors = [tensor for tensor in tensors if tensor.nbytes > _SMALL_BYTES]
    # A GPU tensor is in no file, but its address could be within a file that the driver maps.
    tensors = [tensor for tensor in tensors if tensor.device.type == "cpu"]
    if sys.platform != "linux" or not tensors:
        return
    mapped = list(_mapped_files())
    for tensor in tensors:
        start = tensor.data_ptr()
        if any(low <= start < high for low, high in mapped):
            # The last page may hold the start of the next tensor, so drop only pages inside this
            # one.
            first = -(-start // mmap.PAGESIZE) * mmap.PAGESIZE
            last = (start + tensor.nbytes) // mmap.PAGESIZE * mmap.PAGESIZE
            if last > first:
                _libc().madvise(first, last - first, mmap.MADV_DONTNEED)


def _libc() -> ctypes.CDLL:
    libc = ctypes.CDLL(None)
    libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    return libc


def _mapped_files() -> Iterator[tuple[int, int]]:
    """Yield address ranges [low, high) of the files mapped into this process."""
    for line in Path("/proc/self/maps").read_text(encoding="utf-8").splitlines():
        addresses, _, _, _, inode = line.split(maxsplit=5)[:5]
        if inode != "0":
            low, high = addresses.split("-")
            yield int(low, 16), int(high, 16)
