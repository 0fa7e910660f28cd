"""What a decoder layer is computed with: products, norms, rotation, activation, and attention.

Tensors are flat over the T tokens of a step and contiguous; activations are in the `dtype` of the
ops. Knows shapes. Knows nothing of models, requests or of how anything is computed.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import torch
from torch import Tensor

from penstock_shard.models.attention.base import AttentionBackend, LayerCache, LayerSpec

Activation = Literal["silu", "gelu_tanh"]
WeightKind = Literal["float32", "float16", "bfloat16", "int8", "fp8", "int4"]


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


class Experts(Protocol):
    """The weights [E, N, K] of a layer's E experts, kept in the form their products want."""

    # Whether `grouped` may be part of a CUDA graph: it then leaves offsets to the device.
    capturable: bool

    @property
    def out_features(self) -> int: ...

    @property
    def in_features(self) -> int: ...

    @property
    def nbytes(self) -> int: ...

    def grouped(self, x: Tensor, offsets: Tensor) -> Tensor:
        """x [R, K] sorted by expert -> [R, N]: the rows from offsets[e] to offsets[e + 1] times the
        transposed weight of expert e. offsets int32 [E + 1] on the device of x, from 0 to R.
        """


@dataclass(frozen=True, slots=True)
class Routing:
    """Which experts the T tokens of a step go to, k each, as R = T * k rows sorted by expert."""

    # The token of each row, int64 [R]; rows of one expert are in the order of their tokens.
    tokens: Tensor
    # Expert e has the rows from offsets[e] to offsets[e + 1], int32 [E + 1].
    offsets: Tensor
    # The rows of each token, its best expert's first, int64 [T, k], and what they count, float32.
    rows: Tensor
    weights: Tensor


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
    # What layers attend with, kept here alone. Exact ops come with theirs; others have the
    # reference until a model's layers are known, and what serves these from then on.
    backend: AttentionBackend

    @property
    def exact(self) -> bool:
        """A row's bits are meant to depend on that row alone, attention's on its own keys: whether
        they do is tried out at load.
        """

    @property
    def keeps_tensors(self) -> bool:
        """A packed weight is an ordinary tensor in the dtype of activations."""

    @property
    def dense_head(self) -> bool:
        """The matrix that gives logits is to be packed `exact`: it decides the most."""

    def pack(self, parts: Sequence[Tensor], *, exact: bool = False) -> Matrix:
        """Weights [N_i, K] of any strides and float dtype, one below the other, as one matrix.

        `exact` keeps the precision of activations: for small products that decide something.
        Raises ValueError, in words that can follow a tensor's name, for a value that the kind of
        weights cannot hold.
        """

    def pack_experts(self, experts: Iterable[Sequence[Tensor]], count: int) -> Experts:
        """As `pack`, one of `count` experts after the other; each is asked for when the one before
        it is packed.
        """

    def route(self, logits: Tensor, top_k: int, *, normalised: bool) -> Routing:
        """logits [T, E] -> the `top_k` experts of each token, weighted by their probabilities under
        softmax in float32; `normalised` makes those of a token sum to 1.
        """

    def combine(self, rows: Tensor, routing: Routing, out: Tensor | None = None) -> Tensor:
        """rows [R, N] -> the weighted sum of each token's own, [T, N], summed in float32 and in the
        order of `routing.rows`.
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
