"""An error for each operation that would wait for a device, where there is none."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode


class NoLooks(TorchDispatchMode):
    """A mode in which it is an error to ask for a value, or for a size that depends on values. On a
    device each of these waits.
    """

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.name()
        if name.startswith(("aten::_local_scalar_dense", "aten::nonzero", "aten::masked_select")):
            raise AssertionError(f"{name} waits for the device")
        if name == "aten::index.Tensor" and any(
            index is not None and index.dtype is torch.bool for index in args[1]
        ):
            raise AssertionError("an index of booleans waits for the device")
        return func(*args, **(kwargs or {}))
