"""CPU graphs of decode steps: recorded calls of our kernels."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from penstock_shard.kernels.cpu import CpuKernels
from penstock_shard.kernels.recorded_calls import RecordedCalls

# The most rows of recorded steps. In larger ones, Python's time is small beside the kernels'.
MOST_ROWS = 16

_aten = torch.ops.aten
# Operations that only allocate memory or make views.
_NO_WORK = {
    *(_aten.empty, _aten.empty_like, _aten.new_empty, _aten.empty_strided),
    *(_aten.view, _aten._unsafe_view, _aten.reshape, _aten.as_strided, _aten.detach, _aten.alias),
    *(_aten.slice, _aten.select, _aten.split, _aten.split_with_sizes, _aten.t, _aten.transpose),
    *(_aten.unsqueeze, _aten.squeeze, _aten.expand, _aten.permute),
}


class CpuGraph:
    """A `Graph` of recorded calls of `kernels`."""

    def __init__(self, kernels: CpuKernels) -> None:
        self._kernels = kernels
        self._calls: RecordedCalls | None = None

    def capture(self, work: Callable[[], Tensor]) -> Tensor:
        """Record the kernel calls of `work`. Raises RuntimeError if torch computes anything."""
        with self._kernels.recording() as calls, _KernelsAlone():  # type: ignore[no-untyped-call]
            result = work()
        self._calls = calls
        return result

    def replay(self) -> None:
        assert self._calls is not None
        self._calls.make_again()


class _KernelsAlone(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Raises RuntimeError when torch computes anything."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Return False, or torch would import its compiler, which takes 0.5 s."""
        return False

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func.overloadpacket not in _NO_WORK:
            raise RuntimeError(f"torch computes {func}")
        return func(*args, **(kwargs or {}))
