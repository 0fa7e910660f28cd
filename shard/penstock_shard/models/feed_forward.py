"""The feed-forward part of a layer: one for all tokens, or experts that each token chooses among.

Either is one call. Knows what it computes, on the ops interface. Knows nothing of checkpoints,
attention or the residual stream.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from penstock_shard.models.lora import Delta, TokenAdapters
from penstock_shard.models.ops.base import Activation, Experts, Matrix, Ops


@dataclass(frozen=True, slots=True)
class Linear:
    """A matrix and its bias, and where it takes any what adapters add to it."""

    matrix: Matrix
    bias: Tensor | None
    delta: Delta | None = None
    # Where this process has some of the matrix's columns: adds up what all processes give.
    add_up: Callable[[Tensor], Tensor] | None = None

    def __call__(
        self, x: Tensor, out: Tensor | None = None, adapters: TokenAdapters | None = None
    ) -> Tensor:
        # A bias is added once, to the sum, and not by every process.
        product = self.matrix.linear(x, self.bias if self.add_up is None else None, out)
        if adapters is not None and self.delta is not None:
            self.delta.add(x, product, adapters)
        if self.add_up is None:
            return product
        product = self.add_up(product)
        return product if self.bias is None else product.add_(self.bias)


@dataclass(frozen=True, slots=True)
class FeedForwardScratch:
    """Memory for what is computed on the way, [T, ...], which may be used or not."""

    gate_up: Tensor | None
    active: Tensor | None
    # For the result.
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
    """One gated part for all tokens."""

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
    """Several such parts, the experts, of which each token takes the `top_k` best.

    All experts' products are two calls, on tokens sorted by expert, so that each weight is read
    once a step. The router is kept in the precision of activations.
    """

    ops: Ops
    activation: Activation
    router: Matrix
    gate_up: Experts
    down: Experts
    top_k: int
    # A token's weights sum to 1.
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
        # Experts take no adapters: none is let in that has matrices for them.
        ops = self.ops
        logits = self.router.linear(hidden)
        routing = ops.route(logits, self.top_k, normalised=self.normalised)
        gate_up = self.gate_up.grouped(hidden[routing.tokens], routing.offsets)
        active = ops.gated_activation(gate_up, self.activation)
        rows = self.down.grouped(active, routing.offsets)
        return ops.combine(rows, routing, scratch.update)
