"""The feed-forward part of a layer: dense, or a mixture of experts.

Both are called alike. Written on the ops interface.
"""

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
    """Memory for intermediate results, [T, ...], which ops may use or not."""

    gate_up: Tensor | None
    active: Tensor | None
    # For the output of the feed-forward part.
    update: Tensor | None


NO_SCRATCH = FeedForwardScratch(None, None, None)


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

    def change(self, change: Callable[[Linear], Linear]) -> FeedForward:
        """The same with each of its linear layers changed."""


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

    def change(self, change: Callable[[Linear], Linear]) -> Dense:
        return dataclasses.replace(self, gate_up=change(self.gate_up), down=change(self.down))


@dataclass(frozen=True, slots=True)
class Sparse:
    """Mixture of experts: each token goes to its best, and to the shared ones if there are any.

    The products of all experts are two calls, on tokens sorted by expert, so that a step reads each
    weight once. The router's weight keeps the precision of activations.
    """

    ops: Ops
    activation: Activation
    rule: RoutingRule
    router: Matrix
    gate_up: Experts
    down: Experts
    # Added to the scores that experts are chosen by, float32 [E].
    bias: Tensor | None = None
    shared: Dense | None = None
    # Gates what the shared ones give, [1, H].
    shared_gate: Matrix | None = None
    # Whether an expert's input is multiplied by its weight, and not its output.
    scales_inputs: bool = False
    # What the inputs of experts, but not the router's, are multiplied by, [H].
    input_weight: Tensor | None = None
    # What is added to the router's logits, [E], and to the products of each expert, [E, 2I] and
    # [E, H].
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
        # No adapters for what is routed: `check_fit` refuses those with matrices for experts.
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
    """The sum of a dense part and of experts, each normed (Gemma 4). Their inputs are one norm
    without weights, times weights of each.
    """

    ops: Ops
    dense: Dense
    sparse: FeedForward
    # What the dense part's input is multiplied by, [H]; and the norms of both outputs, float32 [H].
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
        dense = self.ops.add_rms_norm(dense, None, self.dense_norm, self.norm_eps, 0.0)
        return dense.add_(self.ops.add_rms_norm(sparse, None, self.sparse_norm, self.norm_eps, 0.0))

    def change(self, change: Callable[[Linear], Linear]) -> DenseAndSparse:
        return dataclasses.replace(self, dense=self.dense.change(change))


def _scaled(rows: Tensor, routing: Routing) -> tuple[Tensor, Routing]:
    """Each row times its weight; and the routing with weights of 1."""
    weights = torch.empty(len(rows), device=rows.device)
    weights[routing.rows.flatten()] = routing.weights.flatten()
    even = dataclasses.replace(routing, weights=torch.ones_like(routing.weights))
    return (rows * weights.unsqueeze(1)).to(rows.dtype), even
