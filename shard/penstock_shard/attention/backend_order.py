"""The attention backends, best first. `model_loader/choices/choose_attention.py` chooses one for a
model.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from penstock_shard.attention.base import AttentionBackend, NotHere, Unusable
from penstock_shard.attention.flash_attn import (
    make_flash_attention_2,
    make_flash_attention_3,
)
from penstock_shard.attention.sdpa import SdpaBackend
from penstock_shard.attention.torch_varlen import make_torch_varlen
from penstock_shard.device.triton_support import fault_on
from penstock_shard.errors import ModelError

# Device types on which each backend has run correctly. Runs in Triton's interpreter or with
# stand-ins for libraries do not count.
RAN_ON_HARDWARE: dict[str, frozenset[str]] = {
    "cpu": frozenset({"cpu"}),
    "sdpa": frozenset({"cpu"}),
    "triton": frozenset(),
    "flash_attn": frozenset(),
    "torch_varlen": frozenset(),
}

# Backends that let the KV cache have another dtype than queries.
READS_ANY_CACHE = frozenset({"cpu", "sdpa", "triton"})


@dataclass(frozen=True, slots=True)
class Candidate:
    """A backend; `make` raises Unusable if it cannot run."""

    name: str
    make: Callable[[torch.device, torch.dtype], AttentionBackend]


def candidates(name: str, device: torch.device) -> tuple[Candidate, ...]:
    """Return the backends that `name` may mean, best first."""
    if name == "auto":
        return _ALL if device.type == "cuda" else _ALL[-1:]
    return tuple(candidate for candidate in _ALL if candidate.name == name)


def make_backend(name: str, device: torch.device, dtype: torch.dtype) -> AttentionBackend:
    """Return the first candidate that can be made here, without checking the layers that it must
    serve. Raises ModelError if there is none.
    """
    reason = "there is no such backend"
    for candidate in candidates(name, device):
        try:
            return candidate.make(device, dtype)
        except Unusable as error:
            reason = str(error)
    raise ModelError(f"--attention-backend {name}: {reason}, or use sdpa")


def title(backend: AttentionBackend) -> str:
    version = getattr(backend, "version", "")
    return f"{backend.name} {version}".strip()


def describe_backend(backend: AttentionBackend, device: torch.device) -> str:
    """Return the backend's title, and say if it has never run on this type of device."""
    if device.type in RAN_ON_HARDWARE.get(backend.name, ()):
        return title(backend)
    return f"{title(backend)} (untested on {device.type})"


def _make_triton(device: torch.device, dtype: torch.dtype) -> AttentionBackend:
    fault = fault_on(device.type)
    if fault is not None:
        raise NotHere(fault)
    from penstock_shard.attention.triton import TritonBackend

    return TritonBackend()


def _make_sdpa(device: torch.device, dtype: torch.dtype) -> AttentionBackend:
    return SdpaBackend()


_ALL = (
    Candidate("flash_attn", make_flash_attention_3),
    Candidate("flash_attn", make_flash_attention_2),
    Candidate("torch_varlen", make_torch_varlen),
    Candidate("triton", _make_triton),
    Candidate("sdpa", _make_sdpa),
)
