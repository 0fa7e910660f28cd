"""What a decoder layer is computed with: products, norms, rotation, activation, and attention.

Tensors are flat over the T tokens of a step and contiguous; activations are in the `dtype` of the
ops. Knows shapes. Knows nothing of models, requests or of how anything is computed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import torch
from torch import Tensor

from penstock_shard.models.attention.base import AttentionBackend, LayerCache, LayerSpec

Activation = Literal["silu", "gelu_tanh"]
WeightKind = Literal["float32", "float16", "bfloat16", "int8"]


class Matrix(Protocol):
    """A weight [N, K], kept in the form its products want."""

    @property
    def out_features(self) -> int: ...

    @property
    def in_features(self) -> int: ...

    @property
    def nbytes(self) -> int: ...

    def linear(self, x: Tensor, bias: Tensor | None = None, out: Tensor | None = None) -> Tensor:
        """x [T, K] -> x @ weight.T + bias, [T, N]; bias [N]."""

    @property
    def has_rows(self) -> bool:
        """Whether `rows` can be asked for."""

    def rows(self, ids: Tensor) -> Tensor:
        """Rows of the weight at ids int64 [T]: a new tensor [T, K] in the dtype of activations."""


@dataclass(frozen=True, slots=True)
class Rope:
    """Rotary position embedding over halves: float32 [positions, rotary_dim / 2] each."""

    cos: Tensor
    sin: Tensor


@dataclass(frozen=True, slots=True)
class HeadNorm:
    """RMSNorm over each query and key head, before the rotation; weights [D]."""

    query_weight: Tensor
    key_weight: Tensor
    eps: float
    offset: float


class Ops(Protocol):
    """Implementations may use `out` for a result, which is what is returned in any case."""

    device: torch.device
    # Of activations.
    dtype: torch.dtype
    # What `pack` makes of a weight.
    weights: WeightKind
    backend: AttentionBackend

    @property
    def keeps_tensors(self) -> bool:
        """A packed weight is an ordinary tensor in the dtype of activations."""

    def pack(self, parts: Sequence[Tensor], *, exact: bool = False) -> Matrix:
        """Weights [N_i, K] of any strides and float dtype, one below the other, as one matrix.

        `exact` keeps the precision of activations: for small products that decide something.
        Raises ValueError, in words that can follow a tensor's name, for a value that the kind of
        weights cannot hold.
        """

    def set_threads(self, count: int) -> None:
        """Compute threads on cpu; on other devices nothing."""

    def scratch(self, *shape: int) -> Tensor | None:
        """Memory that can be given as `out`; None if these ops make no use of it."""

    def add_rms_norm(
        self,
        x: Tensor,
        residual: Tensor | None,
        weight: Tensor,
        eps: float,
        offset: float,
        out: Tensor | None = None,
    ) -> Tensor:
        """`residual += x` in place, then its RMSNorm times `offset + weight`, [T, H]; of x alone
        where residual is None. `out` may be x.
        """

    def gated_activation(
        self, gate_up: Tensor, kind: Activation, out: Tensor | None = None
    ) -> Tensor:
        """gate_up [T, 2I] -> activation(first half) * second half, [T, I]."""

    def rope_and_cache(
        self,
        qkv: Tensor,
        layer: LayerSpec,
        cache: LayerCache,
        positions: Tensor,
        slots: Tensor,
        rope: Rope,
        norm: HeadNorm | None = None,
        out: Tensor | None = None,
    ) -> Tensor:
        """qkv [T, (Hq + 2 Hkv) * D] -> normed and rotated queries [T, Hq, D]; keys, treated alike,
        and values go into the cache at slots int64 [T]. positions int64 [T].
        """
