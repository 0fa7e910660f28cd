"""The wheel of this tree."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

_ROOT = Path(__file__).parents[2]


def build_wheel(folder: Path) -> Path:
    """Build the wheel in a folder that holds no other; with what is installed here, if it can."""
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps"]
    if importlib.util.find_spec("hatchling"):
        command.append("--no-build-isolation")
    subprocess.run([*command, f"--wheel-dir={folder}", str(_ROOT)], check=True, timeout=110)
    (path,) = folder.glob("*.whl")
    return path
