"""The adapters that were loaded while a shard ran, in a file by which its next process has them.

The file's name is a hash of what a shard is known by: the host's name, the address that it listens
on, and its model. So shards may share a directory, and one of another model at the same port does
not find the list. The server alone reads and writes it; engines are told what to load.
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
# More than the most adapters with the longest names and sources take.
_MOST_BYTES = 16 * 2**20
# Lists of shards in one directory; the least recently used go beyond that.
_MOST_LISTS = 1024


class KeptAdapter(msgspec.Struct, frozen=True):
    """An adapter to load again, if its files have this hash."""

    name: str
    source: str
    content_hash: str


class _Content(msgspec.Struct):
    """The file, as JSON. `shard` is for people: what its name is a hash of."""

    shard: str
    adapters: list[KeptAdapter]


_CONTENTS = msgspec.json.Decoder(_Content)


class AdapterList:
    """The file of one shard. What cannot be read or written is a line in the log."""

    def __init__(self, path: Path, shard: str) -> None:
        self.path = path
        self._shard = shard
        # What the file says; None if that is not known.
        self._written: list[KeptAdapter] | None = None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="adapter-list")

    def read(self) -> list[KeptAdapter]:
        """The adapters that the shard had. Before it serves, as this waits for the disk."""
        try:
            # A directory is only made when there is something to put into it.
            if not self.path.exists():
                self._written = []
            elif ensure_safe(self.path):
                self._written = self._read()
                # It is in use; root's cannot be told so.
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
        """Raises OSError, or ValueError for what is no list."""
        if not self.path.is_file():
            raise ValueError("no regular file")
        with self.path.open("rb") as file:
            content = file.read(_MOST_BYTES + 1)
        if len(content) > _MOST_BYTES:
            raise ValueError(f"over {_MOST_BYTES} bytes")
        return _CONTENTS.decode(content).adapters

    def save(self, adapters: list[KeptAdapter]) -> asyncio.Future[None]:
        """Done when the file says so, or a line in the log does not; in the order of calls."""
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
    """Open the list of this shard; None where no adapters are served or kept, or nothing says which
    shard this is.
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
    # Another shard may do the same.
    with contextlib.suppress(FileNotFoundError):
        lists = sorted(directory.glob(f"*{_SUFFIX}"), key=lambda path: -path.stat().st_mtime)
        for path in lists[_MOST_LISTS:]:
            path.unlink()
