"""The interface of ops, which compute the parts of decoder layers for one kind of device.

Tensors are contiguous, with the T tokens of a step in one dimension; activations have the `dtype`
of the ops.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import torch
from torch import Tensor

from penstock_shard.attention.base import (
    AttentionBackend,
    AttentionBatch,
    LayerCache,
    LayerSpec,
)
from penstock_shard.checkpoint.codes.codes import Codes

Activation = Literal["silu", "gelu_tanh", "sigmoid", "clamped_swiglu"]
# clamped_swiglu, of gpt-oss, is (up + 1) * gate * sigmoid(SWIGLU_ALPHA * gate), with gate clamped
# to at most SWIGLU_LIMIT, and up to +-SWIGLU_LIMIT.
SWIGLU_ALPHA, SWIGLU_LIMIT = 1.702, 7.0
# `codes`: quantized weights stay as the checkpoint stores them, others are float16.
WeightKind = Literal["float32", "float16", "bfloat16", "int8", "fp8", "int4", "codes"]


class Matrix(Protocol):
    """A weight [N, K], in the layout for its products."""

    @property
    def out_features(self) -> int: ...

    @property
    def in_features(self) -> int: ...

    @property
    def nbytes(self) -> int: ...

    def linear(self, x: Tensor, bias: Tensor | None = None, out: Tensor | None = None) -> Tensor:
        """Return x @ weight.T + bias, [T, N], for x [T, K] and bias [N]."""

    @property
    def has_rows(self) -> bool:
        """True if `rows` is supported."""

    def rows(self, ids: Tensor) -> Tensor:
        """Return a copy [T, K], in the dtype of activations, of the rows at ids int64 [T]."""


class Experts(Protocol):
    """The weights [E, N, K] of a layer's E experts, in the layout for their products."""

    # True if a CUDA graph may capture `grouped`, because it reads offsets only on the device.
    capturable: bool

    @property
    def out_features(self) -> int: ...

    @property
    def in_features(self) -> int: ...

    @property
    def nbytes(self) -> int: ...

    def grouped(self, x: Tensor, offsets: Tensor) -> Tensor:
        """Multiply x [R, K], sorted by expert, by each expert's transposed weight, [R, N]. Expert e
        has rows offsets[e] to offsets[e + 1]; offsets int32 [E + 1], on the device of x.
        """


@dataclass(frozen=True, slots=True)
class RoutingRule:
    """The rule that derives a token's experts and their weights from the router's logits."""

    # Experts of a token.
    top_k: int
    scores: Literal["softmax", "sigmoid"] = "softmax"
    # True if a token's weights are divided by their sum. `scale` multiplies all weights.
    is_normalised: bool = True
    scale: float = 1.0
    # Added to the sum of sigmoids, which may be 0.
    eps: float = 1e-20
    # The experts are divided into `groups` of equal size. A token's experts are in its best
    # `top_groups` groups; a group is ranked by the sum of its two highest scores.
    groups: int = 1
    top_groups: int = 1


@dataclass(frozen=True, slots=True)
class Routing:
    """The k experts of each of a step's T tokens, as R = T * k rows sorted by expert."""

    # The token and the expert of each row, int64 [R]. An expert's rows are in the order of tokens.
    tokens: Tensor
    experts: Tensor
    # int32 [E + 1]: expert e has rows offsets[e] to offsets[e + 1].
    offsets: Tensor
    # Each token's rows, best expert first, int64 [T, k]; and their weights, float32 [T, k].
    rows: Tensor
    weights: Tensor


@dataclass(frozen=True, slots=True)
class Rope:
    """Tables of rotary position embedding, float32 [positions, rotary_dim / 2]. Element i is
    rotated with element i + rotary_dim / 2.
    """

    cos: Tensor
    sin: Tensor
    # Factor for rotated queries, float32 [positions], which the decoder applies.
    temperature: Tensor | None = None

    def of(self, positions: Tensor) -> Rope:
        """Return tables with a row for each token. `positions` int64 has a position for each token,
        [T], or for each token and frequency, [T, rotary_dim / 2].
        """
        if positions.dim() == 1:
            return Rope(self.cos[positions], self.sin[positions])
        return Rope(self.cos.gather(0, positions), self.sin.gather(0, positions))


@dataclass(frozen=True, slots=True)
class HeadNorm:
    """RMSNorm of each query and key head before rotation; weights [D]."""

    query_weight: Tensor
    key_weight: Tensor
    eps: float
    offset: float


class Ops(Protocol):
    """The operations. An implementation may write its result to `out`; use the returned tensor."""

    device: torch.device
    dtype: torch.dtype
    # The form in which `pack` stores a weight.
    weights: WeightKind
    # The attention backend of all layers. Unless `exact`, it is sdpa until a model's layers are
    # known.
    backend: AttentionBackend

    @property
    def exact(self) -> bool:
        """True if a row's bits should depend only on that row and, in attention, on its keys. A
        check at load tests it.
        """

    @property
    def keeps_tensors(self) -> bool:
        """True if a packed weight is an ordinary tensor in the dtype of activations."""

    @property
    def dense_head(self) -> bool:
        """True if the output head is packed `exact`, because rounding it changes results the most.
        The small matrices of latent heads are then also `exact`, for products in one launch.
        """

    def pack(self, parts: Sequence[Tensor], *, exact: bool = False) -> Matrix:
        """Stack weights [N_i, K] of any strides and float dtype into one matrix.

        `exact` keeps the precision of activations, for products on which choices depend, such as a
        router's. Raises ValueError for a value that the kind of weights cannot hold. Callers put a
        tensor's name before the message.
        """

    @property
    def pack_codes(self) -> Callable[[Sequence[Codes]], Matrix] | None:
        """A function that stacks codes into one matrix; None if codes are not supported."""

    def pack_experts(
        self, experts: Iterable[Sequence[Tensor]], count: int, *, exact: bool = False
    ) -> Experts:
        """Pack `count` experts like `pack`. `experts` yields the parts of one expert at a time, to
        bound memory.
        """

    def route(self, logits: Tensor, rule: RoutingRule, bias: Tensor | None = None) -> Routing:
        """Choose each token's experts by logits [T, E]. `bias` float32 [E] is added to the scores
        by which experts are chosen, but not to their weights.
        """

    def combine(self, rows: Tensor, routing: Routing, out: Tensor | None = None) -> Tensor:
        """Return the weighted sum [T, N] of each token's rows of [R, N], in float32, in the order
        of `routing.rows`.
        """

    def set_threads(self, count: int) -> None:
        """Set the number of compute threads on cpu."""

    def look_up(self, table: Tensor, ids: Tensor) -> Tensor:
        """Return rows [T, H] of a table [V, H] at ids int64 [T], in the dtype of activations."""

    def scratch(self, *shape: int) -> Tensor | None:
        """Return memory to pass as `out`; None if these ops do not use it."""

    def add_rms_norm(
        self,
        x: Tensor,
        residual: Tensor | None,
        weight: Tensor,
        eps: float,
        offset: float,
        out: Tensor | None = None,
    ) -> Tensor:
        """Do `residual += x` in place; return the RMSNorm [T, H] of residual, or of x without
        residual, times `offset + weight`. `out` may be x.
        """

    def gated_activation(
        self, gate_up: Tensor, kind: Activation, out: Tensor | None = None
    ) -> Tensor:
        """Return activation(a) * b, [T, I]; each row of gate_up [T, 2I] is a, then b."""

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
        """Norm and rotate queries and keys of qkv [T, (Hq + 2 Hkv) * D], at positions int64 [T].
        Return queries [T, Hq, D]; write keys and values to the cache at slots int64 [T].
        """

    def short_conv(
        self,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        state: Tensor,
        batch: AttentionBatch,
        *,
        silu: bool,
    ) -> Tensor:
        """Return each channel's weighted sum of its last K inputs in x [T, C], or SiLU of the sum,
        [T, C].

        weight float32 [K, C], bias float32 [C]. state float32 [n, K - 1, C] is updated. At
        `block_table[row, 0]`, it has the earlier inputs of the row's sequence, the oldest first.
        """

    def delta_rule(
        self, qkv: Tensor, decay: Tensor, beta: Tensor, state: Tensor, batch: AttentionBatch
    ) -> Tensor:
        """Apply the gated delta rule to qkv [T, 2 Hk D + H Dv]: each token updates the state, then
        its query reads it, [T, H, Dv]. Queries and keys are normalized to length 1.

        decay float32 [T, H], or [T, H, D] for each channel of keys; beta float32 [T, H], the share
        of the correction; state float32 [n, H, D, Dv], indexed as in `short_conv`, is updated.
        """

    def decay(self, x: Tensor, rate: Tensor, bias: Tensor) -> Tensor:
        """Return e^(-rate softplus(x + bias)), float32, of x [T, H] or [T, H, D]. rate float32 [H];
        bias float32 [H] or [H, D].
        """

    def selective_scan(
        self,
        x: Tensor,
        dt: Tensor,
        a: Tensor,
        b: Tensor,
        c: Tensor,
        d: Tensor | None,
        state: Tensor,
        batch: AttentionBatch,
    ) -> Tensor:
        """Scan x [T, H, D] -> [T, H, D]: each head's state decays by e^(dt a), adds dt x b', and is
        read by c; d x is added.

        dt float32 [T, H], positive; a float32 [H], or [H, N] for each column of a state; b and c
        [T, G, N], each for H / G heads; d float32 [H]; state float32 [n, H, D, N], indexed as in
        `short_conv`, is updated.
        """

    def softplus(self, x: Tensor, bias: Tensor, low: float, high: float) -> Tensor:
        """Return softplus(x + bias), float32, clamped to [low, high]. x [T, H], bias float32
        [H].
        """
