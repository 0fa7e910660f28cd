"""A layer's feed-forward part, dense or a mixture of experts. Written on the ops interface."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from penstock_shard.lora.lora import TokenAdapters
from penstock_shard.models.decoder.linear import Linear
from penstock_shard.ops.base import Activation, Experts, Matrix, Ops, Routing, RoutingRule


@dataclass(frozen=True, slots=True)
class FeedForwardScratch:
    """Memory for intermediate results, [T, ...], which ops may use."""

    gate_up: Tensor | None
    active: Tensor | None
    # For the output of the feed-forward part.
    update: Tensor | None


NO_SCRATCH = FeedForwardScratch(None, None, None)


class FeedForward(Protocol):
    """Normed hidden states [T, H] -> the update of the residual stream [T, H]."""

    @property
    def capturable(self) -> bool:
        """True if a CUDA graph may capture this part."""

    def __call__(
        self,
        hidden: Tensor,
        scratch: FeedForwardScratch,
        adapters: TokenAdapters | None = None,
    ) -> Tensor: ...

    def change(self, change: Callable[[Linear], Linear]) -> FeedForward:
        """Return a copy with each linear layer replaced by `change`."""


@dataclass(frozen=True, slots=True)
class Dense:
    """A gated feed-forward part."""

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

    def change(self, change: Callable[[Linear], Linear]) -> Dense:
        return dataclasses.replace(self, gate_up=change(self.gate_up), down=change(self.down))


@dataclass(frozen=True, slots=True)
class Sparse:
    """Mixture of experts: each token goes to its best experts, and to any shared experts.

    The products of all experts are two calls, on tokens sorted by expert, so that a step reads each
    weight once. The router's weight keeps the precision of activations.
    """

    ops: Ops
    activation: Activation
    rule: RoutingRule
    router: Matrix
    gate_up: Experts
    down: Experts
    # Added to the scores that choose experts, float32 [E].
    bias: Tensor | None = None
    shared: Dense | None = None
    # Gates the shared experts' output, [1, H].
    shared_gate: Matrix | None = None
    # True if the routing weight multiplies an expert's input, not its output.
    scales_inputs: bool = False
    # [H]: multiplies the experts' inputs, but not the router's.
    input_weight: Tensor | None = None
    # Biases of the router's logits, [E], and of each expert's products, [E, 2I] and [E, H].
    router_bias: Tensor | None = None
    gate_up_bias: Tensor | None = None
    down_bias: Tensor | None = None

    @property
    def capturable(self) -> bool:
        return self.gate_up.capturable and self.down.capturable

    def __call__(
        self,
        hidden: Tensor,
        scratch: FeedForwardScratch,
        adapters: TokenAdapters | None = None,
    ) -> Tensor:
        # `adapters` is unused, because `check_fit` refuses adapters for experts.
        ops = self.ops
        routing = ops.route(self.router.linear(hidden, self.router_bias), self.rule, self.bias)
        rows = hidden[routing.tokens]
        if self.input_weight is not None:
            rows = rows * self.input_weight
        if self.scales_inputs:
            rows, routing = _scaled(rows, routing)
        gate_up = self.gate_up.grouped(rows, routing.offsets)
        if self.gate_up_bias is not None:
            gate_up += self.gate_up_bias[routing.experts]
        active = ops.gated_activation(gate_up, self.activation)
        down = self.down.grouped(active, routing.offsets)
        if self.down_bias is not None:
            down += self.down_bias[routing.experts]
        update = ops.combine(down, routing, scratch.update)
        if self.shared is None:
            return update
        shared = self.shared(hidden, NO_SCRATCH, adapters)
        if self.shared_gate is not None:
            gate = self.shared_gate.linear(hidden)
            both = torch.cat((gate, torch.ones_like(gate)), dim=-1)
            shared = shared * ops.gated_activation(both, "sigmoid")
        return update.add_(shared)

    def change(self, change: Callable[[Linear], Linear]) -> Sparse:
        return (
            self
            if self.shared is None
            else dataclasses.replace(self, shared=self.shared.change(change))
        )


@dataclass(frozen=True, slots=True)
class DenseAndSparse:
    """The sum of a dense part and experts, each normed (Gemma 4). Both get the same input, normed
    without weights, times a weight of their own.
    """

    ops: Ops
    dense: Dense
    sparse: FeedForward
    # [H]: multiplies the dense part's input. Then the norms of both outputs, float32 [H].
    input_weight: Tensor
    dense_norm: Tensor
    sparse_norm: Tensor
    norm_eps: float

    @property
    def capturable(self) -> bool:
        return self.sparse.capturable

    def __call__(
        self,
        hidden: Tensor,
        scratch: FeedForwardScratch,
        adapters: TokenAdapters | None = None,
    ) -> Tensor:
        sparse = self.sparse(hidden, NO_SCRATCH)
        dense = self.dense(hidden * self.input_weight, scratch, adapters)
        norm, eps = self.ops.add_rms_norm, self.norm_eps
        dense = norm(dense, None, self.dense_norm, eps, 0.0, dense)
        return dense.add_(norm(sparse, None, self.sparse_norm, eps, 0.0, sparse))

    def change(self, change: Callable[[Linear], Linear]) -> DenseAndSparse:
        return dataclasses.replace(self, dense=self.dense.change(change))


def _scaled(rows: Tensor, routing: Routing) -> tuple[Tensor, Routing]:
    weights = torch.empty(len(rows), device=rows.device)
    weights[routing.rows.flatten()] = routing.weights.flatten()
    even = dataclasses.replace(routing, weights=torch.ones_like(routing.weights))
    return (rows * weights.unsqueeze(1)).to(rows.dtype), even
