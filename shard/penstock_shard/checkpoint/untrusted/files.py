"""Reads files that a model's or an adapter's author made. They must be regular files of a bounded
size.

Routers get their content, and error messages quote it. So a link may lead only within the directory
or into the blobs of a hub's cache. Weights are not published, so they may be anywhere.
"""

from __future__ import annotations

import errno
import json
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from penstock_shard.errors import ModelError

# Bounds on a file's bytes. The largest models' files have a third of this.
_MOST_BYTES = 16 * 2**20
_MOST_OF_LARGE_BYTES = 64 * 2**20
_LARGE = ("tokenizer.json", "tekken.json", "model.safetensors.index.json")
# The largest depth of nested lists and objects.
_DEEPEST = 64
_WEIGHTS = (
    ".safetensors",
    ".gguf",
    ".bin",
    ".pt",
    ".pth",
    ".h5",
    ".msgpack",
    ".onnx",
    ".onnx_data",
)
# A hub's cache: models--OWNER--NAME/snapshots/REVISION has links to models--OWNER--NAME/blobs.
_SNAPSHOTS, _BLOBS, _OF_HUB = "snapshots", "blobs", "models--"


def check_files(directory: Path) -> None:
    """Check the directory and its subdirectories. Raises ModelError, with the path, for a file that
    is not regular, or that links out of the directory and does not hold weights.
    """
    for path in _files(directory):
        check_file(directory, path)


def check_file(directory: Path, path: Path) -> None:
    """Apply `check_files` to one path; a path that does not exist is fine."""
    if not path.exists():
        return
    if not path.is_file():
        raise ModelError(f"{path}: is no regular file")
    found = path.resolve()
    if path.suffix not in _WEIGHTS and not any(map(found.is_relative_to, _allowed(directory))):
        raise ModelError(
            f"{path}: leads out of its directory, so that what is published of it could be the "
            "host's; put a copy in its place"
        )


def check_names(directory: Path, name: str) -> None:
    """Raise ModelError if a string in a JSON file names a file outside of the model, because
    libraries open the files that settings name, and publish their content.
    """
    if not (directory / name).exists():
        return
    for text in _texts(read_json(directory / name)):
        # Try the string as a path of its own, and as a path within the directory.
        for place in (text, os.path.join(directory, text)):
            if os.path.exists(place) and not os.path.isdir(place):
                found = Path(place).resolve()
                if not any(map(found.is_relative_to, _allowed(directory))):
                    raise ModelError(
                        f"{directory / name}: names a file outside of the directory: {text[:80]!r}"
                    )


def _texts(value: Any) -> set[str]:
    found, left = set(), [value]
    while left:
        each = left.pop()
        if isinstance(each, str):
            found.add(each)
        elif isinstance(each, dict | list):
            left += _within(each)
    return found


def _allowed(directory: Path) -> list[Path]:
    own = directory.resolve()
    hub = own.parent.parent
    is_cached = own.parent.name == _SNAPSHOTS and hub.name.startswith(_OF_HUB)
    return [own, hub / _BLOBS] if is_cached else [own]


def _files(directory: Path) -> Iterator[Path]:
    for path in sorted(directory.iterdir()):
        if not path.is_dir():
            yield path
        elif not path.name.startswith("."):
            yield from (each for each in sorted(path.iterdir()) if not each.is_dir())


def open_regular(path: Path) -> BinaryIO:
    """Open a file. Raises ModelError if it is not regular, because reading could wait for ever;
    OSError if the system refuses.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    mode = os.fstat(descriptor).st_mode
    if stat.S_ISREG(mode):
        return os.fdopen(descriptor, "rb")
    os.close(descriptor)
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    raise ModelError(f"{path}: is no regular file")


def read_bounded(path: Path) -> bytes:
    """Read a whole file. Raises ModelError if it is too large or not regular, OSError if the system
    refuses.
    """
    most = _MOST_OF_LARGE_BYTES if path.name in _LARGE else _MOST_BYTES
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        content = b"" if size > most else file.read(most + 1)
    if max(size, len(content)) > most:
        raise ModelError(f"{path}: has {size} bytes; {most} are served")
    return content


def read_json(path: Path) -> Any:
    """Read a JSON file. Raises ModelError if it is not JSON, OSError if it cannot be read."""
    try:
        value = json.loads(read_bounded(path).decode("utf-8"))
    except ValueError as error:
        raise ModelError(f"{path}: is not valid JSON: {error}") from error
    except RecursionError as error:
        raise ModelError(f"{path}: is nested too deeply") from error
    level = [value]
    for _ in range(_DEEPEST):
        level = [low for each in level for low in _within(each) if isinstance(low, dict | list)]
        if not level:
            return value
    raise ModelError(f"{path}: is nested too deeply: more than {_DEEPEST} levels")


def _within(value: Any) -> Any:
    return value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()


def read_object(path: Path) -> dict[str, Any]:
    """Read a JSON object. Raises ModelError if there is none, OSError if reading fails."""
    value = read_json(path)
    if not isinstance(value, dict):
        raise ModelError(f"{path}: is not a JSON object")
    return value
