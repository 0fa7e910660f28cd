"""A GPU's memory: used, peak and free. Only this module queries it.

torch counts its own tensors; the driver counts all processes. On cpu these functions return 0 or do
nothing: see `device.host_memory`.
"""

from __future__ import annotations

import torch


class PeakMemory:
    """The peak memory of tensors on a device after this object was made, beyond the memory at that
    time. Use one object at a time for each device, because torch keeps a single peak.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._before = 0
        if device.type == "cuda":
            torch.cuda.synchronize(device)
            torch.cuda.reset_peak_memory_stats(device)
            self._before = torch.cuda.memory_allocated(device)

    def extra_bytes(self) -> int:
        """The peak so far, in bytes; 0 on cpu. Waits for the device to finish its work."""
        if self._device.type != "cuda":
            return 0
        torch.cuda.synchronize(self._device)
        return torch.cuda.max_memory_allocated(self._device) - self._before


def used_bytes(device: torch.device) -> int:
    """The bytes of device memory that all processes take; 0 on cpu."""
    if device.type != "cuda":
        return 0
    torch.cuda.synchronize(device)
    free, total = _free_and_total(device)
    return total - free


def free_bytes(device: torch.device, share: float) -> int:
    """The bytes of a GPU that may still be taken, if at most `share` of its memory may be used."""
    free, total = _free_and_total(device)
    return int(total * share) - (total - free)


def empty_caches(device: torch.device) -> None:
    """Release unused memory that torch's caching allocator holds."""
    if device.type == "cuda":
        torch.cuda.empty_cache()


def _free_and_total(device: torch.device) -> tuple[int, int]:
    """Return free and total bytes. Unused memory of torch's allocator counts as free."""
    empty_caches(device)
    return torch.cuda.mem_get_info(device)
