"""The interface of ops, which compute decoder layers: products, norms, rotation, activation,
attention.

Tensors are flat over the T tokens of a step and contiguous; activations have the `dtype` of the
ops.
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
# clamped_swiglu, as in gpt-oss, is (up + 1) * gate * sigmoid(SWIGLU_ALPHA * gate), with gates of at
# most SWIGLU_LIMIT, and ups clamped to +-SWIGLU_LIMIT.
SWIGLU_ALPHA, SWIGLU_LIMIT = 1.702, 7.0
# `codes` stands for the codes that a checkpoint stores, with float16 for other weights.
WeightKind = Literal["float32", "float16", "bfloat16", "int8", "fp8", "int4", "codes"]


class Matrix(Protocol):
    """A weight [N, K], in the layout that its products need."""

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
        """Return rows of the weight at ids int64 [T]: a new tensor [T, K] in the dtype of
        activations.
        """


class Experts(Protocol):
    """The weights [E, N, K] of a layer's E experts, in the layout that their products need."""

    # True if `grouped` may be captured in a CUDA graph, because it reads offsets only on the
    # device.
    capturable: bool

    @property
    def out_features(self) -> int: ...

    @property
    def in_features(self) -> int: ...

    @property
    def nbytes(self) -> int: ...

    def grouped(self, x: Tensor, offsets: Tensor) -> Tensor:
        """Multiply x [R, K], sorted by expert: rows offsets[e] to offsets[e + 1] by the transposed
        weight of expert e -> [R, N]. offsets is int32 [E + 1], ascending from 0 to R, on the device
        of x.
        """


@dataclass(frozen=True, slots=True)
class RoutingRule:
    """The rule that derives a token's experts and their weights from the router's logits."""

    # The number of experts of a token.
    top_k: int
    scores: Literal["softmax", "sigmoid"] = "softmax"
    # True if a token's weights are divided by their sum; and a factor for all weights.
    is_normalised: bool = True
    scale: float = 1.0
    # Added to the sum of sigmoids, which may all be 0.
    eps: float = 1e-20
    # The number of equal groups of experts. A token's experts are in its best `top_groups` groups,
    # by the sum of a group's two highest scores.
    groups: int = 1
    top_groups: int = 1


@dataclass(frozen=True, slots=True)
class Routing:
    """The k experts of each of a step's T tokens, as R = T * k rows sorted by expert."""

    # The token and the expert of each row, int64 [R]; rows of one expert are in the order of their
    # tokens.
    tokens: Tensor
    experts: Tensor
    # int32 [E + 1]: expert e has rows offsets[e] to offsets[e + 1].
    offsets: Tensor
    # Each token's rows, its best expert's row first, int64 [T, k]; and their weights, float32.
    rows: Tensor
    weights: Tensor


@dataclass(frozen=True, slots=True)
class Rope:
    """Tables of rotary position embedding, float32 [positions, rotary_dim / 2] each; element i is
    rotated with element i + rotary_dim / 2.
    """

    cos: Tensor
    sin: Tensor
    # The decoder multiplies rotated queries by this factor, float32 [positions]; None if there is
    # none.
    temperature: Tensor | None = None

    def of(self, positions: Tensor) -> Rope:
        """Return a table with a row for each token, by its position, int64 [T], or by the position
        of each of its frequencies, int64 [T, rotary_dim / 2].
        """
        if positions.dim() == 1:
            return Rope(self.cos[positions], self.sin[positions])
        return Rope(self.cos.gather(0, positions), self.sin.gather(0, positions))


@dataclass(frozen=True, slots=True)
class HeadNorm:
    """RMSNorm of each query and key head, before the rotation; weights [D]."""

    query_weight: Tensor
    key_weight: Tensor
    eps: float
    offset: float


class Ops(Protocol):
    """The operations. `out` is memory that an implementation may use for its result; use the
    returned tensor.
    """

    device: torch.device
    # Dtype of activations.
    dtype: torch.dtype
    # The form in which `pack` stores a weight.
    weights: WeightKind
    # The attention backend of all layers. Exact ops are made with it. Other ops start with sdpa,
    # and get the chosen backend once a model's layers are known.
    backend: AttentionBackend

    @property
    def exact(self) -> bool:
        """True if a row's bits should depend only on that row, and in attention only on its keys. A
        self-check at load tests it.
        """

    @property
    def keeps_tensors(self) -> bool:
        """True if a packed weight is an ordinary tensor in the dtype of activations."""

    @property
    def dense_head(self) -> bool:
        """True if the head is packed `exact`, because rounding the head changes results the most.
        So are the small matrices of latent heads, which are then multiplied in one launch.
        """

    def pack(self, parts: Sequence[Tensor], *, exact: bool = False) -> Matrix:
        """Stack weights [N_i, K] of any strides and float dtype into one matrix.

        `exact` keeps the precision of activations, for products whose result is a choice, such as
        routers. Raises ValueError, with a message that can follow a tensor's name, for a value that
        the kind of weights cannot hold.
        """

    @property
    def pack_codes(self) -> Callable[[Sequence[Codes]], Matrix] | None:
        """A function that stacks codes into one matrix; None if products do not take codes."""

    def pack_experts(
        self, experts: Iterable[Sequence[Tensor]], count: int, *, exact: bool = False
    ) -> Experts:
        """Pack `count` experts like `pack`. `experts` yields the parts of each expert, and is
        advanced only after the previous expert is packed.
        """

    def route(self, logits: Tensor, rule: RoutingRule, bias: Tensor | None = None) -> Routing:
        """Route logits [T, E] to the experts of each token, weighted by their scores in float32.
        `bias` float32 [E] is added to the scores by which experts are chosen.
        """

    def combine(self, rows: Tensor, routing: Routing, out: Tensor | None = None) -> Tensor:
        """Return the weighted sum of each token's rows of [R, N], [T, N], summed in float32 in the
        order of `routing.rows`.
        """

    def set_threads(self, count: int) -> None:
        """Set the number of compute threads on cpu; on other devices, do nothing."""

    def look_up(self, table: Tensor, ids: Tensor) -> Tensor:
        """Return rows of a table [V, H] at ids int64 [T], [T, H] in the dtype of activations."""

    def scratch(self, *shape: int) -> Tensor | None:
        """Return memory to pass as `out`; None if these ops would not use it."""

    def add_rms_norm(
        self,
        x: Tensor,
        residual: Tensor | None,
        weight: Tensor,
        eps: float,
        offset: float,
        out: Tensor | None = None,
    ) -> Tensor:
        """Do `residual += x` in place; return the RMSNorm of residual (of x if residual is None)
        times `offset + weight`, [T, H]. `out` may be x.
        """

    def gated_activation(
        self, gate_up: Tensor, kind: Activation, out: Tensor | None = None
    ) -> Tensor:
        """Return activation(first half) * second half, [T, I], of gate_up [T, 2I]."""

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
        """Return normed and rotated queries [T, Hq, D] of qkv [T, (Hq + 2 Hkv) * D]. Write keys,
        also normed and rotated, and values to the cache at slots int64 [T]. positions int64 [T].
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

        weight float32 [K, C], bias float32 [C]. state float32 [n, K - 1, C] has each sequence's
        earlier inputs at `block_table[row, 0]`, the oldest first, and is updated.
        """

    def delta_rule(
        self, qkv: Tensor, decay: Tensor, beta: Tensor, state: Tensor, batch: AttentionBatch
    ) -> Tensor:
        """Apply the gated delta rule to qkv [T, 2 Hk D + H Dv]: tokens update states, queries read
        them, [T, H, Dv]. Queries and keys are normalized to length 1.

        decay float32 [T, H], or [T, H, D] for each channel of keys; beta float32 [T, H], the share
        of the correction; state float32 [n, H, D, Dv], indexed as in `short_conv`, is updated.
        """

    def decay(self, x: Tensor, rate: Tensor, bias: Tensor) -> Tensor:
        """Return e^(-rate softplus(x + bias)), float32, of x [T, H] or [T, H, D]; rate [H], bias of
        the shape of x without T, float32.
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
        [T, G, N], each of H / G heads; d float32 [H]; state float32 [n, H, D, N], indexed as in
        `short_conv`, is updated.
        """

    def softplus(self, x: Tensor, bias: Tensor, low: float, high: float) -> Tensor:
        """Return softplus(x + bias), clamped to [low, high], float32, of x [T, H]; bias float32
        [H].
        """
