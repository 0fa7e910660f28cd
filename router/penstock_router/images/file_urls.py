"""Reads file: URLs below the allowed folder, if any."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from yarl import URL

from penstock_router.images.image import ImageRefused
from penstock_router.images.pieces import PIECE_BYTES, check_size

# All failures have the same text, which tells nothing about other folders.
_NO_FILE = "it is no file that can be read below --allowed-media-folder"


def read_file(url: str, folder: str | None, max_bytes: int) -> list[bytes]:
    """Read a file in pieces. Call this in a thread: disks may be slow.

    Raises `ImageRefused`.
    """
    if folder is None:
        raise ImageRefused("file URLs are not served: this router has no --allowed-media-folder")
    try:
        descriptor = os.open(_path_of(url, folder), os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW)
        with open(descriptor, "rb", buffering=0) as file:
            status = os.fstat(descriptor)
            if not stat.S_ISREG(status.st_mode):
                raise ImageRefused(_NO_FILE)
            check_size(status.st_size, max_bytes)
            # One byte beyond the limit shows that a file has grown.
            return _pieces(file.fileno(), max_bytes + 1)
    except (OSError, ValueError):
        raise ImageRefused(_NO_FILE) from None


def _path_of(url: str, folder: str) -> Path:
    """Return the file of a URL. Raises `ImageRefused`, `OSError` or `ValueError` if it is not below
    the folder.
    """
    parsed = URL(url)
    if parsed.raw_host not in (None, "", "localhost") or parsed.raw_query_string:
        raise ImageRefused(_NO_FILE)
    path = Path(parsed.path).resolve(strict=True)
    if not path.is_relative_to(Path(folder).resolve(strict=True)):
        raise ImageRefused(_NO_FILE)
    return path


def _pieces(descriptor: int, max_bytes: int) -> list[bytes]:
    pieces: list[bytes] = []
    while max_bytes > 0 and (piece := os.read(descriptor, min(PIECE_BYTES, max_bytes))):
        pieces.append(piece)
        max_bytes -= len(piece)
    return pieces
