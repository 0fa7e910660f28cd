"""Shards as they were when the wire had its first revision, from this repository's history."""

from __future__ import annotations

import io
import subprocess
import tarfile
from pathlib import Path

import pytest

_ROOT = Path(__file__).parent.parent.parent
# The last commit with schema revision 1.
_REVISION_1 = "5764763b2067f8474a252bf62436fabedd88dcab"
_FOLDERS = ("proto", "client", "shard")


def revision_1(folder: Path) -> str:
    """A PYTHONPATH of the older packages; skips the test where there is no history."""
    archive = subprocess.run(
        ["git", "-C", str(_ROOT), "archive", _REVISION_1, *_FOLDERS],
        capture_output=True,
        check=False,
    )
    if archive.returncode:
        pytest.skip("the history of this repository is not here")
    with tarfile.open(fileobj=io.BytesIO(archive.stdout)) as files:
        files.extractall(folder, filter="data")
    return ":".join(str(folder / name) for name in _FOLDERS)
