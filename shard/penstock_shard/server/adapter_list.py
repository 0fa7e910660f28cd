"""A file that lists the loaded adapters, so that the shard's next process loads them again.

The file's name is a hash of the shard's host name, listening address and model. So shards may share
a directory, and a shard of another model at the same port does not find the list. Only the server
reads and writes the file.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import os
import socket
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec

from penstock_shard.config import ShardConfig
from penstock_shard.device.cache_directory import ensure_safe, replace_file, state_directory

logger = logging.getLogger(__name__)

_SUFFIX = ".json"
# Larger than the longest possible list.
_MOST_BYTES = 16 * 2**20
# The largest number of lists in one directory. The oldest are deleted.
_MOST_LISTS = 1024


class KeptAdapter(msgspec.Struct, frozen=True):
    """An adapter to load again if its files still have this hash."""

    name: str
    source: str
    content_hash: str


class _Content(msgspec.Struct):
    """The file's JSON. `shard` is for people; the file's name is its hash."""

    shard: str
    adapters: list[KeptAdapter]


_CONTENTS = msgspec.json.Decoder(_Content)


class AdapterList:
    """The list of one shard. Failures to read or write are logged."""

    def __init__(self, path: Path, shard: str) -> None:
        self.path = path
        self._shard = shard
        # The file's content; None if unknown.
        self._written: list[KeptAdapter] | None = None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="adapter-list")

    def read(self) -> list[KeptAdapter]:
        """Return the listed adapters. Waits for the disk, so call it before serving."""
        try:
            if not self.path.exists():
                self._written = []
            elif ensure_safe(self.path):
                self._written = self._read()
                # Mark the list as used. This fails if root owns the file.
                with contextlib.suppress(PermissionError):
                    os.utime(self.path)
        except OSError as error:
            logger.warning("adapters of before are not loaded: %s", error)
        except (ValueError, msgspec.DecodeError, RecursionError) as error:
            logger.warning(
                "adapters of before are not loaded: %s: is damaged: %s", self.path, error
            )
        return self._written or []

    def _read(self) -> list[KeptAdapter]:
        """Read the list. Raises OSError, or ValueError if the file is not a list."""
        if not self.path.is_file():
            raise ValueError("no regular file")
        with self.path.open("rb") as file:
            content = file.read(_MOST_BYTES + 1)
        if len(content) > _MOST_BYTES:
            raise ValueError(f"over {_MOST_BYTES} bytes")
        return _CONTENTS.decode(content).adapters

    def save(self, adapters: list[KeptAdapter]) -> asyncio.Future[None]:
        """Save the list, after earlier calls. The future is done once the list is written, or a
        failure is logged.
        """
        return asyncio.get_running_loop().run_in_executor(self._thread, self._save, adapters)

    def _save(self, adapters: list[KeptAdapter]) -> None:
        if adapters == self._written:
            return
        self._written = None
        try:
            self._write(adapters)
        except OSError as error:
            logger.warning("the next start will not know which adapters are loaded: %s", error)
        else:
            self._written = adapters

    def _write(self, adapters: Sequence[KeptAdapter]) -> None:
        ensure_safe(self.path)
        if not adapters:
            self.path.unlink(missing_ok=True)
            return
        made = self.path.with_suffix(".part")
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC
        with os.fdopen(os.open(made, flags, 0o600), "wb") as file:
            file.write(msgspec.json.encode(_Content(self._shard, list(adapters))))
        replace_file(made, self.path)
        _make_room(self.path.parent)


def open_adapter_list(config: ShardConfig) -> AdapterList | None:
    """Return this shard's list; None if adapters are not served or not kept, or the shard has no
    fixed port.
    """
    if not (config.serves_adapters and config.keep_loras and config.port):
        return None
    shard = _known_as(config)
    name = hashlib.blake2b(shard.encode(), digest_size=16).hexdigest()
    try:
        return AdapterList(state_directory() / "adapters" / (name + _SUFFIX), shard)
    except OSError as error:
        logger.warning("the next start will not know which adapters are loaded: %s", error)
        return None


def _known_as(config: ShardConfig) -> str:
    model = config.model or ""
    if os.path.exists(model):
        model = os.path.abspath(model)
    revision = f" {config.revision}" if config.revision else ""
    return f"{socket.gethostname()} {config.host}:{config.port} {model}{revision}"


def _make_room(directory: Path) -> None:
    # Another shard may do the same at once.
    with contextlib.suppress(FileNotFoundError):
        lists = sorted(directory.glob(f"*{_SUFFIX}"), key=lambda path: -path.stat().st_mtime)
        for path in lists[_MOST_LISTS:]:
            path.unlink()
