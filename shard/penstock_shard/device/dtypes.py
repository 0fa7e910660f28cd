"""The name of a dtype in messages, flags and fingerprints."""

from __future__ import annotations

import torch


def dtype_name(dtype: torch.dtype) -> str:
    """Return torch's name without the prefix "torch."."""
    return str(dtype).removeprefix("torch.")
