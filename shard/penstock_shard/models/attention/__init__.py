"""The attention backends there are, the best first. Knows how each is made and what it is called,
not how they work; which one a model gets is decided in `choose`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from penstock_shard.models.attention.base import AttentionBackend, NotHere, Unusable
from penstock_shard.models.attention.flash_attn import (
    make_flash_attention_2,
    make_flash_attention_3,
)
from penstock_shard.models.attention.sdpa import SdpaBackend
from penstock_shard.models.attention.torch_varlen import make_torch_varlen
from penstock_shard.models.errors import ModelError
from penstock_shard.models.triton_here import fault_on

# The kinds of device on which each backend has run and given right results. What ran in an
# interpreter or against a stand-in for its library is not named.
RAN_ON_HARDWARE: dict[str, frozenset[str]] = {
    "cpu": frozenset({"cpu"}),
    "sdpa": frozenset({"cpu"}),
    "triton": frozenset(),
    "flash_attn": frozenset(),
    "torch_varlen": frozenset(),
}

# Those whose cache may have another dtype than queries.
READS_ANY_CACHE = frozenset({"cpu", "sdpa", "triton"})


@dataclass(frozen=True, slots=True)
class Candidate:
    """A backend that is not made yet; `make` raises Unusable where it cannot be had."""

    name: str
    make: Callable[[torch.device, torch.dtype], AttentionBackend]


def candidates(name: str, device: torch.device) -> tuple[Candidate, ...]:
    """Those that `name` means, the best first; for "auto" all that are meant for such a device."""
    if name == "auto":
        return _ALL if device.type == "cuda" else _ALL[-1:]
    return tuple(candidate for candidate in _ALL if candidate.name == name)


def make_backend(name: str, device: torch.device, dtype: torch.dtype) -> AttentionBackend:
    """The first candidate that can be made here, whatever layers it serves.

    Raises ModelError where there is none.
    """
    reason = "there is no such backend"
    for candidate in candidates(name, device):
        try:
            return candidate.make(device, dtype)
        except Unusable as error:
            reason = str(error)
    raise ModelError(f"--attention-backend {name}: {reason}, or use sdpa")


def title(backend: AttentionBackend) -> str:
    """The backend's name, with the version of the library it stands on."""
    version = getattr(backend, "version", "")
    return f"{backend.name} {version}".strip()


def described(backend: AttentionBackend, device: torch.device) -> str:
    """The title, and whether the backend has never run on such a device."""
    if device.type in RAN_ON_HARDWARE.get(backend.name, ()):
        return title(backend)
    return f"{title(backend)} (untested on {device.type})"


def _make_triton(device: torch.device, dtype: torch.dtype) -> AttentionBackend:
    fault = fault_on(device.type)
    if fault is not None:
        raise NotHere(fault)
    from penstock_shard.models.attention.triton import TritonBackend

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
