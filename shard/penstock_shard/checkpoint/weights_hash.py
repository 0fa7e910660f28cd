"""A hash of a model's weights: equal hashes mean equal bytes.

It covers the names and contents of config.json, of every *.safetensors file or the GGUF file, and,
if the model's own code runs, of every *.py file. Several threads hash pieces of files, because
hashlib releases the interpreter lock. The result is a hash of these hashes.
"""

from __future__ import annotations

import hashlib
import os
import threading
from collections.abc import Iterator
from concurrent.futures import CancelledError, ThreadPoolExecutor
from pathlib import Path

from penstock_shard.checkpoint.weight_files import GGUF, weight_files

_PIECE_BYTES = 64 * 2**20
_READ_BYTES = 2**20
_DIGEST_BYTES = 16


def hash_weights(
    model_dir: Path,
    *,
    config_only: bool = False,
    with_code: bool = False,
    threads: int | None = None,
    stop: threading.Event | None = None,
) -> str:
    """Return 32 hex digits (blake2b-128). `config_only` is for models without weights on disk,
    `with_code` for models whose own code runs.

    Raises OSError if a file cannot be read, CancelledError soon after `stop` is set.
    """
    stop = stop or threading.Event()
    pieces = list(_pieces(model_dir, config_only, with_code))
    workers = threads or min(8, os.cpu_count() or 1)
    total = hashlib.blake2b(digest_size=_DIGEST_BYTES)
    with ThreadPoolExecutor(max_workers=workers) as pool:
        digests = pool.map(lambda piece: _hash_piece(piece, stop), pieces)
        for (path, offset), digest in zip(pieces, digests, strict=True):
            total.update(f"{path.name}\0{offset}\0".encode())
            total.update(digest)
    return total.hexdigest()


def _pieces(model_dir: Path, config_only: bool, with_code: bool) -> Iterator[tuple[Path, int]]:
    """Yield (file, offset) of each piece: config.json, then weights and code by name."""
    # An index may name files in folders.
    named = [] if config_only else [each for each in weight_files(model_dir) if each.name != GGUF]
    weights = [] if config_only else sorted({*model_dir.glob("*.safetensors"), *named})
    weights += [] if weights or config_only else sorted(model_dir.glob(GGUF))
    code = sorted(model_dir.glob("*.py")) if with_code else []
    for path in (model_dir / "config.json", *weights, *code):
        for offset in range(0, max(1, path.stat().st_size), _PIECE_BYTES):
            yield path, offset


def _hash_piece(piece: tuple[Path, int], stop: threading.Event) -> bytes:
    path, offset = piece
    digest = hashlib.blake2b(digest_size=_DIGEST_BYTES)
    # Read, not mapped, because mapped pages would count as this process's memory.
    with path.open("rb") as file:
        file.seek(offset)
        left = _PIECE_BYTES
        while left and (data := file.read(min(left, _READ_BYTES))):
            if stop.is_set():
                raise CancelledError
            digest.update(data)
            left -= len(data)
    return digest.digest()
