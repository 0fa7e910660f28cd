"""The feed-forward part of a layer: dense, or a mixture of experts.

Both are called alike. Written on the ops interface.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from penstock_shard.lora.lora import Delta, TokenAdapters
from penstock_shard.ops.base import Activation, Experts, Matrix, Ops


@dataclass(frozen=True, slots=True)
class Linear:
    """A linear layer: a matrix, its bias, and what adapters add to the product, if it takes any."""

    matrix: Matrix
    bias: Tensor | None
    delta: Delta | None = None
    # With tensor parallelism over columns: the all-reduce that sums the products of all ranks.
    add_up: Callable[[Tensor], Tensor] | None = None

    def __call__(
        self, x: Tensor, out: Tensor | None = None, adapters: TokenAdapters | None = None
    ) -> Tensor:
        # The bias is added once, to the sum, and not by every rank.
        product = self.matrix.linear(x, self.bias if self.add_up is None else None, out)
        if adapters is not None and self.delta is not None:
            self.delta.add(x, product, adapters)
        if self.add_up is None:
            return product
        product = self.add_up(product)
        return product if self.bias is None else product.add_(self.bias)


@dataclass(frozen=True, slots=True)
class FeedForwardScratch:
    """Memory for intermediate results, [T, ...], which ops may use or not."""

    gate_up: Tensor | None
    active: Tensor | None
    # For the output of the feed-forward part.
    update: Tensor | None


class FeedForward(Protocol):
    """Normed hidden states [T, H] -> what they add to the residual stream, [T, H]."""

    @property
    def capturable(self) -> bool:
        """Whether it may be part of a CUDA graph."""

    def __call__(
        self,
        hidden: Tensor,
        scratch: FeedForwardScratch,
        adapters: TokenAdapters | None = None,
    ) -> Tensor: ...


@dataclass(frozen=True, slots=True)
class Dense:
    """A gated feed-forward part that all tokens go through."""

    ops: Ops
    activation: Activation
    gate_up: Linear
    down: Linear

    @property
    def capturable(self) -> bool:
        return True

    def __call__(
        self,
        hidden: Tensor,
        scratch: FeedForwardScratch,
        adapters: TokenAdapters | None = None,
    ) -> Tensor:
        gate_up = self.gate_up(hidden, scratch.gate_up, adapters)
        active = self.ops.gated_activation(gate_up, self.activation, scratch.active)
        return self.down(active, scratch.update, adapters)


@dataclass(frozen=True, slots=True)
class Sparse:
    """Mixture of experts: each token goes to its `top_k` best.

    The products of all experts are two calls, on tokens sorted by expert, so that a step reads each
    weight once. The router's weight keeps the precision of activations.
    """

    ops: Ops
    activation: Activation
    router: Matrix
    gate_up: Experts
    down: Experts
    top_k: int
    # Whether a token's weights are scaled to sum to 1.
    normalised: bool

    @property
    def capturable(self) -> bool:
        return self.gate_up.capturable and self.down.capturable

    def __call__(
        self,
        hidden: Tensor,
        scratch: FeedForwardScratch,
        adapters: TokenAdapters | None = None,
    ) -> Tensor:
        # No adapters here: `check_fit` refuses those with matrices for experts.
        ops = self.ops
        logits = self.router.linear(hidden)
        routing = ops.route(logits, self.top_k, normalised=self.normalised)
        gate_up = self.gate_up.grouped(hidden[routing.tokens], routing.offsets)
        active = ops.gated_activation(gate_up, self.activation)
        rows = self.down.grouped(active, routing.offsets)
        return ops.combine(rows, routing, scratch.update)
