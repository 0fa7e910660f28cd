"""Values that loads made, in files of a directory that is bounded in bytes.

The files are torch's. They are read as data: of what is in one, nothing is made but tensors and
objects of the types that are named. And a file that somebody else may have written is ignored.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import tempfile
import time
import zipfile
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch

from penstock_shard.device.cache_directory import ensure_safe, replace_file
from penstock_shard.errors import first_line

_SUFFIX = ".load"
_NOT_KEPT = "this load is not kept for the next start"
# What torch raises for a file that is damaged, or that names what is not there.
_DAMAGED = (ArithmeticError, EOFError, LookupError, RuntimeError, TypeError, ValueError)
_OF_ZIP = (zipfile.BadZipFile, zlib.error)
_NOT_OURS = (*_DAMAGED, AttributeError, ImportError, UnpicklingError, *_OF_ZIP)
# No write takes so long: what is left of one that was killed.
_ABANDONED_S = 3600.0


@dataclass(frozen=True, slots=True)
class LoadCache:
    """The files of a directory, of which the least recently used go beyond `max_bytes`. `types` has
    the classes that values may consist of, and functions that make some. `progress` gets a line
    where a file cannot be used.
    """

    directory: Path
    max_bytes: int
    types: Sequence[Callable[..., object]]
    progress: Callable[[str], None]

    def read(self, key: str) -> Any:
        """What is kept under the key; None if nothing usable is. Raises what making it raises, as
        where kernels that it needs cannot be built.
        """
        path = self._path(key)
        try:
            if not ensure_safe(path) or not path.is_file():
                return None
            with zipfile.ZipFile(path) as file:
                # Torch does not look whether bytes of tensors are those that were written.
                if file.testzip() is not None:
                    raise zipfile.BadZipFile
            with torch.serialization.safe_globals(list(self.types)):
                value = torch.load(path, map_location="cpu", weights_only=True)
        except OSError as error:
            self.progress(f"a kept load is not used: {path}: {first_line(error)}")
            return None
        except _NOT_OURS:
            self.progress(f"a kept load is not used: {path}: is damaged, or none of this version")
            return None
        # It may be another's, as root's.
        with contextlib.suppress(OSError):
            os.utime(path)
        return value

    def write(self, key: str, value: object, nbytes: int) -> None:
        """Keep a value of about so many bytes, if there is room for it."""
        if nbytes > self.max_bytes:
            self.progress(f"{_NOT_KEPT}: its {nbytes} bytes are more than --load-cache")
            return
        path = self._path(key)
        try:
            ensure_safe(path)
            self._make_room(nbytes)
            if shutil.disk_usage(self.directory).free < nbytes:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self.directory))
            handle, name = tempfile.mkstemp(dir=self.directory, suffix=f"{_SUFFIX}.part")
            made = Path(name)
            try:
                with os.fdopen(handle, "wb") as file:
                    torch.save(value, file)
                replace_file(made, path)
            finally:
                made.unlink(missing_ok=True)
        # torch raises the second where a disk fills up.
        except (OSError, RuntimeError) as error:
            self.progress(f"{_NOT_KEPT}: {first_line(error)}")

    def _make_room(self, nbytes: int) -> None:
        """Remove files until so many bytes fit, those first that were not read for longest."""
        for path in self.directory.glob("*.part"):
            if time.time() - path.stat().st_mtime > _ABANDONED_S:
                path.unlink(missing_ok=True)
        files = [(path, path.stat()) for path in self.directory.glob(f"*{_SUFFIX}*")]
        files.sort(key=lambda file: file[1].st_mtime)
        total = sum(status.st_size for _, status in files)
        for path, status in files:
            if total + nbytes <= self.max_bytes:
                return
            path.unlink(missing_ok=True)
            total -= status.st_size

    def _path(self, key: str) -> Path:
        return self.directory / f"{key}{_SUFFIX}"
