"""The wheel of this tree."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

_ROOT = Path(__file__).parents[2]


def build_wheel(folder: Path) -> Path:
    """Build the wheel in a folder that holds no other; with what is installed here, if it can."""
    if importlib.util.find_spec("hatchling"):
        # What pip would call, in half of its time.
        arguments = ["hatchling", "build", "-t", "wheel", "-d", str(folder)]
    else:
        arguments = ["pip", "wheel", "--quiet", "--no-deps", f"--wheel-dir={folder}", str(_ROOT)]
    command = [sys.executable, "-m", *arguments]
    subprocess.run(command, cwd=_ROOT, capture_output=True, check=True, timeout=110)
    (path,) = folder.glob("*.whl")
    return path
