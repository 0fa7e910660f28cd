"""Finds the GPUs that this process may use, from the environment or nvidia-smi, without torch."""

from __future__ import annotations

import os
import subprocess

from penstock_common.child_environment import child_environment

_TIMEOUT_S = 10.0


def visible_gpus() -> list[str]:
    """Return names for CUDA_VISIBLE_DEVICES, one for each GPU; empty without GPUs."""
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    if chosen is not None:
        return [name.strip() for name in chosen.split(",") if name.strip() not in ("", "-1")]
    # UUIDs, because CUDA and the driver number GPUs differently.
    command = ["nvidia-smi", "--query-gpu=uuid", "--format=csv,noheader"]
    try:
        found = subprocess.run(
            command,
            capture_output=True,
            text=True,
            timeout=_TIMEOUT_S,
            check=True,
            env=child_environment(),
        )
    except (OSError, subprocess.SubprocessError):
        return []
    return found.stdout.split()
