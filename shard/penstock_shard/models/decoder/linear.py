"""A linear layer: a product, a bias, adapters' deltas, and the all-reduce over ranks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from penstock_shard.lora.lora import Delta, TokenAdapters
from penstock_shard.ops.base import Matrix


@dataclass(frozen=True, slots=True)
class Linear:
    """A matrix, its bias, and the delta of its adapters, if it takes any."""

    matrix: Matrix
    bias: Tensor | None
    # The checkpoint's modules whose rows the matrix stacks: names and numbers of rows.
    modules: tuple[tuple[str, int], ...] = ()
    delta: Delta | None = None
    # With tensor parallelism over columns, the all-reduce that sums the ranks' products.
    add_up: Callable[[Tensor], Tensor] | None = None

    def __call__(
        self, x: Tensor, out: Tensor | None = None, adapters: TokenAdapters | None = None
    ) -> Tensor:
        # Add the bias once, to the sum, not on every rank.
        product = self.matrix.linear(x, self.bias if self.add_up is None else None, out)
        if adapters is not None and self.delta is not None:
            self.delta.add(x, product, adapters)
        if self.add_up is None:
            return product
        product = self.add_up(product)
        return product if self.bias is None else product.add_(self.bias)
