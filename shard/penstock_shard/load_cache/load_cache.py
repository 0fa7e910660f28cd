"""Results of loads, in files of a directory that is bounded in bytes.

torch writes the files. Reading one makes only tensors and objects of named types. A file that other
users may have written is ignored.
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
# Errors that torch raises for a file that is damaged or names missing objects.
_DAMAGED = (ArithmeticError, EOFError, LookupError, RuntimeError, TypeError, ValueError)
_OF_ZIP = (zipfile.BadZipFile, zlib.error)
_NOT_OURS = (*_DAMAGED, AttributeError, ImportError, UnpicklingError, *_OF_ZIP)
# No write takes so long, so an older partial file is left from a killed process.
_ABANDONED_S = 3600.0


@dataclass(frozen=True, slots=True)
class LoadCache:
    """Kept values in a directory of at most `max_bytes`. The least recently used are removed.

    `types` has the classes that values may consist of, and functions that make such objects.
    `progress` gets a line if a file cannot be used.
    """

    directory: Path
    max_bytes: int
    types: Sequence[Callable[..., object]]
    progress: Callable[[str], None]

    def read(self, key: str) -> Any:
        """Read the value of a key; None if there is no usable value. Passes on errors of its
        objects, for example if kernels cannot be built.
        """
        path = self._path(key)
        try:
            if not ensure_safe(path) or not path.is_file():
                return None
            with zipfile.ZipFile(path) as file:
                # torch does not check the bytes of tensors.
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
        # The file may belong to root.
        with contextlib.suppress(OSError):
            os.utime(path)
        return value

    def write(self, key: str, value: object, nbytes: int) -> None:
        """Keep a value of about `nbytes` bytes, if it fits."""
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
        # torch raises RuntimeError if the disk fills up.
        except (OSError, RuntimeError) as error:
            self.progress(f"{_NOT_KEPT}: {first_line(error)}")

    def _make_room(self, nbytes: int) -> None:
        """Remove the least recently read files until `nbytes` bytes fit."""
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
