"""Proxies that stand in for weights in modelling code and compute their products.

torch hands calls with a proxy argument to the proxy (`__torch_function__`). So modules are not
rewritten, and a use of a weight that no handler covers fails.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor

from penstock_shard.ops.base import Matrix


class WeightProxy:
    """Looks like a parameter in the dtype of activations."""

    # The supported torch functions, and their replacements.
    handlers: ClassVar[dict[Any, Callable[..., Tensor]]] = {}

    is_meta = False
    requires_grad = False

    def __init__(self, shape: torch.Size, dtype: torch.dtype, device: torch.device) -> None:
        self.shape = shape
        self.dtype = dtype
        self.device = device

    def _same(self, *args: Any, **kwargs: Any) -> Any:
        return self

    to = type = float = contiguous = _same

    @classmethod
    def __torch_function__(
        cls,
        function: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Tensor:
        handler = cls.handlers.get(function)
        if handler is None:
            name = getattr(function, "__name__", str(function))
            raise NotImplementedError(f"{name} of a packed weight")
        return handler(*args, **(kwargs or {}))


def product(x: Tensor, matrix: Matrix, bias: Tensor | None) -> Tensor:
    """x [..., K] -> x @ weight.T + bias, [..., N]."""
    if x.shape[-1] != matrix.in_features:
        raise ValueError(f"a product of {tuple(x.shape)} with {matrix.in_features} inputs")
    flat = x.reshape(-1, matrix.in_features).contiguous()
    return matrix.linear(flat, bias).view(*x.shape[:-1], matrix.out_features)
