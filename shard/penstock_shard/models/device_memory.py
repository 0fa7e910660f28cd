"""What a GPU's memory holds, what work takes of it at most, and what is left: asked here alone.

torch counts what its tensors take; the device counts all that is taken, by other processes too. On
cpu there is nothing to ask: memory of the host is the system's. Knows nothing of what the memory is
for.
"""

from __future__ import annotations

import torch


class PeakMemory:
    """The most memory that tensors take on a device from when this is made, beyond what they took
    then. One at a time for each device: torch keeps one peak.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._before = 0
        if device.type == "cuda":
            torch.cuda.synchronize(device)
            torch.cuda.reset_peak_memory_stats(device)
            self._before = torch.cuda.memory_allocated(device)

    def extra_bytes(self) -> int:
        """So far, when all work that the device was given is done; on cpu 0."""
        if self._device.type != "cuda":
            return 0
        torch.cuda.synchronize(self._device)
        return torch.cuda.max_memory_allocated(self._device) - self._before


def used_bytes(device: torch.device) -> int:
    """What is taken of the device's memory, by whomever; on cpu 0."""
    if device.type != "cuda":
        return 0
    torch.cuda.synchronize(device)
    free, total = _free_and_total(device)
    return total - free


def free_bytes(device: torch.device, share: float) -> int:
    """What may still be taken on a GPU of whose memory so great a share may be used."""
    free, total = _free_and_total(device)
    return int(total * share) - (total - free)


def empty_caches(device: torch.device) -> None:
    """Give back what torch keeps for later."""
    if device.type == "cuda":
        torch.cuda.empty_cache()


def _free_and_total(device: torch.device) -> tuple[int, int]:
    """In bytes. What torch only keeps for later is free."""
    empty_caches(device)
    return torch.cuda.mem_get_info(device)
