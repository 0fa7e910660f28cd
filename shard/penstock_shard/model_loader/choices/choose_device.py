"""Finds the torch device that --device names."""

from __future__ import annotations

import torch

from penstock_shard.errors import ModelError


def resolve_device(name: str) -> torch.device:
    """Raises ModelError if there is no CUDA device."""
    has_cuda = torch.cuda.is_available()
    if name == "cuda" and not has_cuda:
        raise ModelError("--device cuda: torch finds no CUDA device here")
    if name == "cpu" or not has_cuda:
        return torch.device("cpu")
    return torch.device("cuda", torch.cuda.current_device())
