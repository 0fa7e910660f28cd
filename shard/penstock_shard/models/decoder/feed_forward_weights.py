"""A layer's tensors -> its feed-forward part."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch
from torch import Tensor

from penstock_shard.models.decoder.feed_forward import Dense, DenseAndSparse, Sparse
from penstock_shard.models.decoder.spec import (
    EXPERT_NORMS,
    DecoderSpec,
    ExpertsSpec,
    bias_of,
)
from penstock_shard.models.decoder.tensor_reader import TensorReader


class FeedForwardWeights:
    def __init__(self, spec: DecoderSpec, reader: TensorReader) -> None:
        self._spec = spec
        self._reader = reader

    def dense(self, module: str) -> Dense:
        spec = self._spec
        names = spec.names
        gate_up = ["gate_up_proj"] if spec.fused_gates else [names.gate, names.up]
        return Dense(
            self._reader.ops,
            spec.activation,
            gate_up=self._reader.linear([f"{module}.{name}" for name in gate_up], spec.mlp_bias),
            down=self._reader.linear([f"{module}.{names.down}"], spec.mlp_bias),
        )

    def dense_and_sparse(
        self, experts: ExpertsSpec, prefix: str, input_weight: Tensor
    ) -> DenseAndSparse:
        norms = [
            self._reader.vector(f"{prefix}{name}.weight")
            for name in ("post_feedforward_layernorm_1", *EXPERT_NORMS)
        ]
        own = self._reader.vector(f"{prefix}router.scale")
        sparse = self.sparse(
            experts,
            prefix,
            router_scale=own * self._spec.hidden_size**-0.5,
            scales=self._reader.vector(f"{prefix}router.per_expert_scale").tolist(),
        )
        return DenseAndSparse(
            self._reader.ops,
            self.dense(prefix + self._spec.names.feed_forward),
            dataclasses.replace(sparse, input_weight=norms[1].to(self._reader.ops.dtype)),
            input_weight=input_weight.to(self._reader.ops.dtype),
            dense_norm=norms[0],
            sparse_norm=norms[2],
            norm_eps=self._spec.norm_eps,
        )

    def sparse(
        self,
        experts: ExpertsSpec,
        prefix: str,
        *,
        router_scale: Tensor | None = None,
        scales: Sequence[float] | None = None,
    ) -> Sparse:
        """Read experts. `router_scale` [H] multiplies the router's inputs, `scales` each expert's
        output. Both are folded into the matrices.
        """
        names = experts.names
        bias, router_bias = (
            None if name is None else self._reader.vector(prefix + name)
            for name in (names.bias, names.router_bias)
        )
        gate_up_bias, down_bias = None, None
        if names.has_biases:
            gate_up_bias = self._biases(experts, prefix, (names.gate, names.up))
            down_bias = self._biases(experts, prefix, (names.down,))
        return Sparse(
            self._reader.ops,
            self._spec.activation,
            experts.rule,
            router=self._reader.matrix([prefix + names.router], exact=True, scale=router_scale),
            bias=bias,
            gate_up=self._reader.experts(prefix, experts.num_experts, (names.gate, names.up)),
            down=self._reader.experts(prefix, experts.num_experts, (names.down,), scales),
            shared=None if names.shared is None else self.dense(prefix + names.shared),
            shared_gate=None
            if names.shared_gate is None
            else self._reader.matrix([prefix + names.shared_gate], exact=True),
            scales_inputs=experts.scales_inputs,
            router_bias=router_bias,
            gate_up_bias=gate_up_bias,
            down_bias=down_bias,
        )

    def _biases(self, experts: ExpertsSpec, prefix: str, patterns: Sequence[str]) -> Tensor:
        """Read the biases of these weights, concatenated for each expert: [E, N] in the dtype of
        activations.
        """
        biases = [
            torch.cat([self._reader.vector(prefix + bias_of(each.format(e))) for each in patterns])
            for e in range(experts.num_experts)
        ]
        return torch.stack(biases).to(self._reader.ops.dtype)
