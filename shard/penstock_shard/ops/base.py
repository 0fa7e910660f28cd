"""The interface of ops, with which decoder layers are computed: products, norms, rotation,
activation, attention.

Tensors are flat over the T tokens of a step and contiguous; activations are in the `dtype` of the
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
# Of the last, which is gpt-oss's: (up + 1) * gate * sigmoid(SWIGLU_ALPHA * gate), with gates of at
# most SWIGLU_LIMIT and ups within it.
SWIGLU_ALPHA, SWIGLU_LIMIT = 1.702, 7.0
# `codes`: those that a checkpoint stores, and float16 for what it does not.
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
        """x [T, K] -> x @ weight.T + bias, [T, N]; bias [N]."""

    @property
    def has_rows(self) -> bool:
        """Whether `rows` is supported."""

    def rows(self, ids: Tensor) -> Tensor:
        """Rows of the weight at ids int64 [T]: a new tensor [T, K] in the dtype of activations."""


class Experts(Protocol):
    """The weights [E, N, K] of a layer's E experts, in the layout that their products need."""

    # Whether `grouped` may be part of a CUDA graph: it then reads offsets on the device only.
    capturable: bool

    @property
    def out_features(self) -> int: ...

    @property
    def in_features(self) -> int: ...

    @property
    def nbytes(self) -> int: ...

    def grouped(self, x: Tensor, offsets: Tensor) -> Tensor:
        """x [R, K] sorted by expert -> [R, N]: rows offsets[e] to offsets[e + 1] are multiplied by
        the transposed weight of expert e. offsets int32 [E + 1], ascending from 0 to R, on the
        device of x.
        """


@dataclass(frozen=True, slots=True)
class RoutingRule:
    """How a token's experts and their weights follow from its logits."""

    # Experts of a token.
    top_k: int
    scores: Literal["softmax", "sigmoid"] = "softmax"
    # Whether a token's weights are divided by their sum; and what all are multiplied by then.
    is_normalised: bool = True
    scale: float = 1.0
    # What is added to the sum of sigmoids, which may all be 0.
    eps: float = 1e-20
    # Experts lie in so many groups of one size. A token's are in the best `top_groups` of them, by
    # the sum of a group's two highest scores.
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
    # The rows of each token, its best expert's first, int64 [T, k]; and their weights, float32.
    rows: Tensor
    weights: Tensor


@dataclass(frozen=True, slots=True)
class Rope:
    """Tables of rotary position embedding, float32 [positions, rotary_dim / 2] each; element i is
    rotated with element i + rotary_dim / 2.
    """

    cos: Tensor
    sin: Tensor
    # What the decoder multiplies rotated queries by, float32 [positions]; None: nothing.
    temperature: Tensor | None = None

    def of(self, positions: Tensor) -> Rope:
        """A table with a row for each token, by its position, int64 [T]; or by that of each of its
        frequencies, int64 [T, rotary_dim / 2].
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
    """`out` is memory that an implementation may use for its result; use what it returns."""

    device: torch.device
    # Dtype of activations.
    dtype: torch.dtype
    # The form in which `pack` stores a weight.
    weights: WeightKind
    # The attention backend of all layers. Exact ops are made with theirs; others start with sdpa,
    # and get the chosen backend once a model's layers are known.
    backend: AttentionBackend

    @property
    def exact(self) -> bool:
        """Whether a row's bits are meant to depend on that row alone, and those of attention on
        the row's own keys. A self-check at load tells whether they do.
        """

    @property
    def keeps_tensors(self) -> bool:
        """Whether a packed weight is an ordinary tensor in the dtype of activations."""

    @property
    def dense_head(self) -> bool:
        """Whether the head is packed `exact`, since rounding it changes results the most; and the
        small matrices of heads that attend to latents, which are multiplied in one launch then.
        """

    def pack(self, parts: Sequence[Tensor], *, exact: bool = False) -> Matrix:
        """Weights [N_i, K] of any strides and float dtype, one below the other, as one matrix.

        `exact` keeps the precision of activations, for small products such as routers whose result
        is a choice. Raises ValueError, with a message that can follow a tensor's name, for a value
        that the kind of weights cannot hold.
        """

    @property
    def pack_codes(self) -> Callable[[Sequence[Codes]], Matrix] | None:
        """Packs codes, one below the other, as one matrix; None where products do not take them."""

    def pack_experts(
        self, experts: Iterable[Sequence[Tensor]], count: int, *, exact: bool = False
    ) -> Experts:
        """Like `pack`, for `count` experts: `experts` gives the parts of each, and is advanced only
        once the expert before is packed.
        """

    def route(self, logits: Tensor, rule: RoutingRule, bias: Tensor | None = None) -> Routing:
        """logits [T, E] -> the experts of each token, weighted by their scores in float32. `bias`
        float32 [E] is added to the scores that experts are chosen by.
        """

    def combine(self, rows: Tensor, routing: Routing, out: Tensor | None = None) -> Tensor:
        """rows [R, N] -> the weighted sum of each token's rows, [T, N], summed in float32 in the
        order of `routing.rows`.
        """

    def set_threads(self, count: int) -> None:
        """Set the number of compute threads on cpu; no effect on other devices."""

    def look_up(self, table: Tensor, ids: Tensor) -> Tensor:
        """Rows of a table [V, H] at ids int64 [T], [T, H] in the dtype of activations."""

    def scratch(self, *shape: int) -> Tensor | None:
        """Memory to pass as `out`; None if these ops would not use it."""

    def add_rms_norm(
        self,
        x: Tensor,
        residual: Tensor | None,
        weight: Tensor,
        eps: float,
        offset: float,
        out: Tensor | None = None,
    ) -> Tensor:
        """`residual += x` in place, then the RMSNorm of residual times `offset + weight`, [T, H];
        the RMSNorm of x where residual is None. `out` may be x.
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
        """qkv [T, (Hq + 2 Hkv) * D] -> normed and rotated queries [T, Hq, D]. Keys, normed and
        rotated too, and values are written to the cache at slots int64 [T]. positions int64 [T].
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
        """x [T, C] -> each channel's weighted sum of its last K inputs, or SiLU of it, [T, C].

        weight float32 [K, C], bias float32 [C]; state float32 [n, K - 1, C] has the inputs before,
        the oldest first, of each sequence at `block_table[row, 0]`, and is updated.
        """

    def delta_rule(
        self, qkv: Tensor, decay: Tensor, beta: Tensor, state: Tensor, batch: AttentionBatch
    ) -> Tensor:
        """qkv [T, 2 Hk D + H Dv] -> [T, H, Dv]: what queries find in the states that their tokens
        update, with queries and keys of length 1.

        decay float32 [T, H], or [T, H, D] for each channel of keys; beta float32 [T, H], how much
        is corrected; state float32 [n, H, D, Dv], indexed as in `short_conv`, is updated.
        """

    def decay(self, x: Tensor, rate: Tensor, bias: Tensor) -> Tensor:
        """x [T, H] or [T, H, D] -> e^(-rate softplus(x + bias)), float32; rate [H], bias of the
        shape of x without T, float32.
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
        """x [T, H, D] -> [T, H, D]: each head's state decays by e^(dt a) and takes in dt x b', and
        c reads it; d x is added.

        dt float32 [T, H], positive; a float32 [H], or [H, N] for each column of a state; b and c
        [T, G, N], each of H / G heads; d float32 [H]; state float32 [n, H, D, N], indexed as in
        `short_conv`, is updated.
        """

    def softplus(self, x: Tensor, bias: Tensor, low: float, high: float) -> Tensor:
        """x [T, H] -> softplus(x + bias) between two bounds, float32; bias float32 [H]."""
