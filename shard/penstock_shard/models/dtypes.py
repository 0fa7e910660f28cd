"""How a dtype is called in messages, flags and fingerprints. Knows nothing else."""

from __future__ import annotations

import torch


def dtype_name(dtype: torch.dtype) -> str:
    """As torch calls it, without "torch."."""
    return str(dtype).removeprefix("torch.")
