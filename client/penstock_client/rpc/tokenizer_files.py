"""Puts the chunks of GetTokenizer together again and checks them."""

from __future__ import annotations

import hashlib
from typing import Protocol

from penstock_client.errors import ShardFailed


class Chunk(Protocol):
    """A piece of a file; `sha256` of the whole file on its last piece."""

    name: str
    data: bytes
    sha256: str


class FileAssembler:
    """Collects chunks; `files` holds those that are complete and whose hash is right."""

    def __init__(self) -> None:
        self.files: dict[str, bytes] = {}
        self._partial: dict[str, bytearray] = {}

    def add(self, chunk: Chunk) -> None:
        """Take one chunk.

        Raises:
            ShardFailed: a completed file does not have the hash the shard announced.
        """
        data = self._partial.setdefault(chunk.name, bytearray())
        data += chunk.data
        if not chunk.sha256:
            return
        whole = bytes(self._partial.pop(chunk.name))
        if hashlib.sha256(whole).hexdigest() != chunk.sha256:
            raise ShardFailed(f"{chunk.name} arrived damaged: its sha256 is not as announced")
        self.files[chunk.name] = whole
