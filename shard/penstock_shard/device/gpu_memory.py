"""A GPU's memory: used, peak and free. For cpu, see `device.host_memory`.

torch counts its own tensors; the driver counts all processes.
"""

from __future__ import annotations

import torch


class PeakMemory:
    """The peak memory of tensors on a device, minus their memory when this object was made. Use one
    object at a time for each device, because torch keeps only one peak.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._before = 0
        if device.type == "cuda":
            torch.cuda.synchronize(device)
            torch.cuda.reset_peak_memory_stats(device)
            self._before = torch.cuda.memory_allocated(device)

    def extra_bytes(self) -> int:
        """The peak so far, in bytes; 0 on cpu. Waits for the device."""
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
    """The free bytes of a GPU, if at most `share` of its memory may be used."""
    free, total = _free_and_total(device)
    return int(total * share) - (total - free)


def empty_caches(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.empty_cache()


def _free_and_total(device: torch.device) -> tuple[int, int]:
    """Return free and total bytes of a GPU. Unused memory of torch's allocator counts as free."""
    empty_caches(device)
    return torch.cuda.mem_get_info(device)
