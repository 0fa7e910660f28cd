"""LoRA adapters: their additions to a model's products, token by token.

An adapter has an index, from 1 on. Each token of a step has its adapter's index, or 0. Two
implementations give equal results. `LoopedDelta` loops over the step's adapters, each on its own
tokens, with the ops' products; it is batch-invariant if these products are. `StackedDelta` keeps
all adapters in two tensors, computes all for every token, and masks out all except the token's own.
Its shapes do not depend on the step's adapters, so the host never waits for the device. The cost is
`adapters * rank` more columns in each product.

With tensor parallelism, a rank with some rows of a weight uses the same rows of B. A rank with some
columns uses the same columns of A, and its addition is part of the sum over ranks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional

from penstock_shard.checkpoint.adapter_files import AdapterFiles
from penstock_shard.errors import ModelError
from penstock_shard.ops.base import Matrix, Ops

# LoRA ranks are padded to a multiple of this, for whole tiles in GPU products.
_RANK_MULTIPLE = 16


@dataclass(frozen=True, slots=True)
class LoraLimits:
    """The most adapters loaded at once, and the highest LoRA rank."""

    max_adapters: int
    max_rank: int


@dataclass(frozen=True, slots=True)
class LowRank:
    """An adapter's addition to a weight [N, K]: `b @ a`; a [r, K], b [N, r], float32. `b` includes
    the scale.
    """

    a: Tensor
    b: Tensor


# An adapter's matrices, by module name.
AdapterWeights = Mapping[str, LowRank]


@dataclass(frozen=True, slots=True)
class Share:
    """A rank's share of a weight [N, K]: ranges of rows, in order, and a range of columns."""

    # N and K of the whole weight.
    shape: tuple[int, int]
    rows: tuple[slice, ...] = (slice(None),)
    columns: slice = field(default_factory=lambda: slice(None))

    def of(self, tensor: Tensor) -> Tensor:
        """Return this share of `tensor`, which is the whole weight or its bias [N]."""
        parts = [tensor[rows] for rows in self.rows]
        part = parts[0] if len(parts) == 1 else torch.cat(parts)
        return part[:, self.columns] if part.dim() == 2 else part

    def of_pair(self, pair: LowRank) -> LowRank:
        """This share's part of a whole model's adapter."""
        return LowRank(pair.a[:, self.columns], Share(self.shape, self.rows).of(pair.b))


# Shares by module name. Modules that are not listed are whole on every rank.
Shares = Mapping[str, Share]


class TokenAdapters:
    """The adapter index of each token of a step: int64 [T], 0 for none. Made once a step."""

    def __init__(self, indices: Tensor) -> None:
        self.indices = indices
        self._masks: dict[tuple[int, int], Tensor] = {}

    @cached_property
    def groups(self) -> list[tuple[int, Tensor]]:
        """The step's adapters, each with its tokens. Waits for the device."""
        present = [index for index in torch.unique(self.indices).tolist() if index]
        return [(index, (self.indices == index).nonzero().squeeze(1)) for index in present]

    def mask(self, num_adapters: int, rank: int) -> Tensor:
        """bool [T, num_adapters * rank]: true where a column is not of the token's adapter."""
        mask = self._masks.get((num_adapters, rank))
        if mask is None:
            columns = torch.arange(num_adapters * rank, device=self.indices.device) // rank + 1
            mask = self._masks[num_adapters, rank] = self.indices.unsqueeze(1) != columns
        return mask

    def of(self, rows: Tensor) -> TokenAdapters:
        return TokenAdapters(self.indices[rows])


@dataclass(frozen=True, slots=True)
class Part:
    """A module in a fused product. Its outputs are the product's columns [start, end)."""

    module: str
    start: int
    end: int


class Delta(Protocol):
    """Adds adapters' results to those of one linear layer."""

    def add(self, x: Tensor, y: Tensor, tokens: TokenAdapters) -> None:
        """Apply each token's adapter to x [T, K], and add the results to y [T, N]."""

    def place(self, index: int, pairs: Mapping[str, LowRank]) -> None:
        """Set the adapter's matrices, by module name. An adapter without matrices for this
        product's modules adds nothing.
        """

    def drop(self, index: int) -> None:
        """Remove an adapter that no token uses any more."""


@dataclass(frozen=True, slots=True)
class _Placed:
    """An adapter's matrices for a product: the A of all parts as one, and each part's B."""

    down: Matrix
    # For each part: its columns in the result of `down`, and its B.
    ups: tuple[tuple[Part, slice, Matrix], ...]


class LoopedDelta:
    """Computes one adapter at a time."""

    def __init__(self, parts: Sequence[Part], ops: Ops) -> None:
        self._parts = parts
        self._ops = ops
        self._placed: dict[int, _Placed] = {}

    def add(self, x: Tensor, y: Tensor, tokens: TokenAdapters) -> None:
        for index, rows in tokens.groups:
            placed = self._placed.get(index)
            if placed is None:
                continue
            down = placed.down.linear(x[rows])
            for part, columns, up in placed.ups:
                added = up.linear(down[:, columns].contiguous())
                y[:, part.start : part.end].index_add_(0, rows, added.to(y.dtype))

    def place(self, index: int, pairs: Mapping[str, LowRank]) -> None:
        held = [(part, pairs[part.module]) for part in self._parts if part.module in pairs]
        if not held:
            self._placed.pop(index, None)
            return
        ups = []
        start = 0
        for part, pair in held:
            end = start + len(pair.a)
            ups.append((part, slice(start, end), self._ops.pack([pair.b], exact=True)))
            start = end
        down = self._ops.pack([pair.a for _, pair in held], exact=True)
        self._placed[index] = _Placed(down, tuple(ups))

    def drop(self, index: int) -> None:
        self._placed.pop(index, None)


class StackedDelta:
    """Computes all adapters at once."""

    def __init__(
        self, parts: Sequence[Part], in_features: int, limits: LoraLimits, ops: Ops
    ) -> None:
        self._parts = parts
        # Exact ops need exact products: a row's bits depend only on that row.
        self._exact = ops.exact
        self._num_adapters = limits.max_adapters
        self._rank = padded_rank(limits.max_rank)
        self._width = self._num_adapters * self._rank

        def zeros(rows: int, columns: int) -> Tensor:
            return torch.zeros(rows, columns, device=ops.device, dtype=ops.dtype)

        self._a = zeros(len(parts) * self._width, in_features)
        self._b = [zeros(part.end - part.start, self._width) for part in parts]

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in (self._a, *self._b))

    def add(self, x: Tensor, y: Tensor, tokens: TokenAdapters) -> None:
        down = self._product(x, self._a).view(len(x), len(self._parts), self._width)
        # Fill with 0 instead of multiplying: another adapter may give NaN or infinity.
        down = down.masked_fill(tokens.mask(self._num_adapters, self._rank).unsqueeze(1), 0.0)
        for number, (part, up) in enumerate(zip(self._parts, self._b, strict=True)):
            if self._exact:
                y[:, part.start : part.end] += self._product(down[:, number], up)
            else:
                y[:, part.start : part.end].addmm_(down[:, number], up.T)

    def _product(self, x: Tensor, weight: Tensor) -> Tensor:
        if not self._exact:
            return functional.linear(x, weight)
        # Needs Triton.
        from penstock_shard.kernels.triton_matmul import fixed_linear

        return fixed_linear(x, weight)

    @torch.no_grad()
    def place(self, index: int, pairs: Mapping[str, LowRank]) -> None:
        columns = self._columns(index)
        for number, (part, up) in enumerate(zip(self._parts, self._b, strict=True)):
            a = self._a[number * self._width :][columns]
            a.zero_()
            up[:, columns].zero_()
            pair = pairs.get(part.module)
            if pair is not None:
                rank = len(pair.a)
                a[:rank].copy_(pair.a)
                up[:, columns][:, :rank].copy_(pair.b)

    def drop(self, index: int) -> None:
        self.place(index, {})

    def _columns(self, index: int) -> slice:
        return slice((index - 1) * self._rank, index * self._rank)


def padded_rank(rank: int) -> int:
    return -(-rank // _RANK_MULTIPLE) * _RANK_MULTIPLE


class LoraBank:
    """A model's products that take adapters, and the adapters."""

    def __init__(
        self, limits: LoraLimits, ops: Ops, *, stacked: bool, shares: Shares | None = None
    ) -> None:
        """Use `StackedDelta` if `stacked`, else `LoopedDelta`. `shares` are this rank's shares of
        divided modules.
        """
        self.limits = limits
        self._shares = shares or {}
        self._ops = ops
        self._stacked = stacked
        # The dtype in which adapters' values must be finite, because other adapters' tokens are
        # multiplied with them too.
        self.dtype = ops.dtype if stacked else torch.float32
        self._deltas: list[Delta] = []
        # This rank's share of each module that takes adapters.
        self._open: dict[str, Share] = {}
        self.nbytes = 0

    def open(self, modules: Sequence[tuple[str, int]], in_features: int) -> Delta:
        """Let a product take adapters. `modules` are the names of its modules and their numbers of
        outputs on this rank.
        """
        parts = []
        start = 0
        for module, size in modules:
            parts.append(Part(module, start, start + size))
            self._open[module] = self._shares.get(module, Share((size, in_features)))
            start += size
        delta: Delta
        if self._stacked:
            delta = StackedDelta(parts, in_features, self.limits, self._ops)
            self.nbytes += delta.nbytes
        else:
            delta = LoopedDelta(parts, self._ops)
        self._deltas.append(delta)
        return delta

    @property
    def modules(self) -> Mapping[str, tuple[int, int]]:
        """(in_features, out_features) of the modules that take adapters, in the whole model."""
        return {module: share.shape[::-1] for module, share in self._open.items()}

    def place(self, index: int, weights: AdapterWeights) -> None:
        """Set a whole model's adapter, which passed `check_fit`, at an unused index."""
        own = {module: self._open[module].of_pair(pair) for module, pair in weights.items()}
        for delta in self._deltas:
            delta.place(index, own)

    def drop(self, index: int) -> None:
        for delta in self._deltas:
            delta.drop(index)


def check_fit(bank: LoraBank, files: AdapterFiles) -> None:
    """Raise ModelError if the model lacks one of the adapter's modules, if shapes differ, or if the
    LoRA rank is over the limit.
    """
    limit, modules = bank.limits.max_rank, bank.modules
    trained_on = repr(files.base_model[:80]) if files.base_model else "another model"
    for pair in files.pairs:
        module, shape = pair.module, modules.get(pair.module)
        if shape is None and "experts" in module.split("."):
            raise ModelError(
                f"{module}: adapters of experts are not served; train one without target_modules "
                "in experts"
            )
        if shape is None:
            kinds = sorted({name.rpartition(".")[2] for name in modules})
            raise ModelError(
                f"{module}: this model has no such module that takes adapters "
                f"(it has {', '.join(kinds)}); is it an adapter of {trained_on}?"
            )
        if shape != (pair.in_features, pair.out_features):
            raise ModelError(
                f"{module}: the adapter is for a matrix of {pair.in_features} inputs and "
                f"{pair.out_features} outputs, the model's has {shape[0]} and {shape[1]}; is it an "
                f"adapter of {trained_on}?"
            )
        if pair.rank > limit:
            raise ModelError(f"{module}: rank {pair.rank} is over --max-lora-rank {limit}")
