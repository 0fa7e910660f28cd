from __future__ import annotations

import torch
from torch import Tensor

from penstock_shard.checkpoint.safetensors import give_back_pages
from penstock_shard.ops.base import Ops

_ROWS = 1024
# Beside these kinds of weights a table in float32 would be large.
_SMALL = ("float16", "int8", "int4", "codes")


class Embedding:
    """A table [V, H]. Look-ups return rows in the dtype of the ops."""

    def __init__(self, table: Tensor, ops: Ops) -> None:
        """Copy the table. Raises ValueError for a value that float16 cannot hold."""
        self.table = torch.empty(table.shape, dtype=_stored_dtype(table, ops), device=ops.device)
        self._ops = ops
        # Copy in pieces, so that the mapped file and the copy are never both in memory.
        for start in range(0, len(table), _ROWS):
            piece = table[start : start + _ROWS]
            copy = self.table[start : start + _ROWS].copy_(piece)
            if copy.dtype is torch.float16 and not bool(torch.isfinite(copy).all()):
                raise ValueError("has a value beyond 65504, where float16 ends")
            give_back_pages([piece])

    def rows(self, ids: Tensor) -> Tensor:
        """Return rows [..., H] of ids int64 [...]."""
        return self._ops.look_up(self.table, ids.reshape(-1)).view(*ids.shape, -1)


def _stored_dtype(table: Tensor, ops: Ops) -> torch.dtype:
    """Return the ops' dtype if it is not float32; otherwise the checkpoint's dtype, but float16
    instead of float32 if the other weights are float16 or smaller.
    """
    if ops.dtype is not torch.float32:
        return ops.dtype
    if ops.weights in _SMALL and table.dtype is torch.float32:
        return torch.float16
    return table.dtype
