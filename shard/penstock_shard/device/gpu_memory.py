"""A GPU's memory: used, peak and free. The only module that asks.

torch counts the memory of its own tensors; the driver counts all, that of other processes too. On
cpu these functions give 0 or do nothing: `device.host_memory` knows the host's memory.
"""

from __future__ import annotations

import torch


class PeakMemory:
    """Peak memory of tensors on a device since this object was made, beyond what they took then.
    Use one at a time for each device: torch keeps a single peak.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._before = 0
        if device.type == "cuda":
            torch.cuda.synchronize(device)
            torch.cuda.reset_peak_memory_stats(device)
            self._before = torch.cuda.memory_allocated(device)

    def extra_bytes(self) -> int:
        """The peak so far, in bytes. Waits for the device to finish its work; 0 on cpu."""
        if self._device.type != "cuda":
            return 0
        torch.cuda.synchronize(self._device)
        return torch.cuda.max_memory_allocated(self._device) - self._before


def used_bytes(device: torch.device) -> int:
    """Bytes taken of the device's memory, by all processes; 0 on cpu."""
    if device.type != "cuda":
        return 0
    torch.cuda.synchronize(device)
    free, total = _free_and_total(device)
    return total - free


def free_bytes(device: torch.device, share: float) -> int:
    """Bytes that may still be taken on a GPU, if at most `share` of its memory may be used."""
    free, total = _free_and_total(device)
    return int(total * share) - (total - free)


def empty_caches(device: torch.device) -> None:
    """Release memory that torch's caching allocator holds unused."""
    if device.type == "cuda":
        torch.cuda.empty_cache()


def _free_and_total(device: torch.device) -> tuple[int, int]:
    """Free and total bytes. What torch's allocator holds unused counts as free."""
    empty_caches(device)
    return torch.cuda.mem_get_info(device)
