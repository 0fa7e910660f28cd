"""Facts and free memory of the devices that vLLM computes on."""

from __future__ import annotations

import contextlib
import importlib.metadata
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

_PATIENCE_S = 30.0
_LOOK_S = 0.5
# The niceness of this process's session (see Linux's autogroups).
_AUTOGROUP = Path("/proc/self/autogroup")
_NICENESS = 10

# Returns the free share of each device's memory; empty if vLLM computes on no GPU.
FreeShares = Callable[[], Sequence[float]]


def wait_for_memory(
    wanted: float,
    progress: Callable[[str], None],
    free_shares: FreeShares,
    patience_s: float = _PATIENCE_S,
) -> None:
    """Wait until this share of each device is free, at most `patience_s`: drivers free an engine's
    memory some time after its processes are gone. vLLM itself reports too little memory.
    """
    end_s = time.monotonic() + patience_s
    was_told = False
    while (least := min(free_shares(), default=1.0)) < wanted and time.monotonic() < end_s:
        if not was_told:
            progress(f"waiting for GPU memory: {least:.0%} is free, {wanted:.0%} is wanted")
            was_told = True
        time.sleep(min(_LOOK_S, patience_s))


def give_way_on_processors() -> None:
    """If vLLM computes on CPUs, lower the priority of this session, with the core and its workers.
    While they wait, they spin on cores that requests need. Does nothing if the kernel shares time
    by container.
    """
    from vllm.platforms import current_platform

    if current_platform.is_cpu():
        with contextlib.suppress(OSError):
            _AUTOGROUP.write_text(str(_NICENESS))


def device_facts(num_devices: int) -> dict[str, Any]:
    """Return facts of machine and software that decide the bits of results."""
    from vllm.platforms import current_platform

    return {
        "device": current_platform.get_device_name(),
        "num_devices": num_devices,
        # It includes the version of CUDA.
        "torch": importlib.metadata.version("torch"),
    }


def free_shares(num_devices: int) -> list[float]:
    """Return the free share of each GPU's memory; empty if vLLM uses other devices, or the memory
    cannot be read.
    """
    from vllm.platforms import current_platform
    from vllm.third_party import pynvml

    if not current_platform.is_cuda():
        return []
    try:
        pynvml.nvmlInit()
        try:
            devices = map(current_platform.device_id_to_physical_device_id, range(num_devices))
            handles = map(pynvml.nvmlDeviceGetHandleByIndex, devices)
            infos = list(map(pynvml.nvmlDeviceGetMemoryInfo, handles))
            return [each.free / each.total for each in infos]
        finally:
            pynvml.nvmlShutdown()
    except pynvml.NVMLError:
        return []
