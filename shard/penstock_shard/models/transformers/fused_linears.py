"""Fuses a transformers module's linear layers that share an input into one product.

Modelling code calls the query, key and value projections one after the other, and likewise gate and
up. Here the first call computes all, and later calls get their parts of the result. Probing the
model checks that the layers really share an input; otherwise each gets its own matrix again.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from penstock_shard.models.transformers.weight_proxies import WeightProxy, product
from penstock_shard.ops.base import Matrix, Ops

# Children that are fused if a module has all of them.
_SIBLINGS = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))


@dataclass(frozen=True, slots=True)
class Siblings:
    """Linear layers that may be fused, with their full names."""

    names: tuple[str, ...]
    linears: tuple[nn.Linear, ...]

    @property
    def weights(self) -> list[Tensor]:
        return [linear.weight.data for linear in self.linears]


def find_siblings(module: nn.Module) -> Iterator[Siblings]:
    for prefix, parent in module.named_modules():
        children = dict(parent.named_children())
        for names in _SIBLINGS:
            linears = [children[name] for name in names if type(children.get(name)) is nn.Linear]
            plain = [linear for linear in linears if isinstance(linear, nn.Linear)]
            if len(plain) == len(names) and _fit(plain):
                yield Siblings(tuple(f"{prefix}.{name}" for name in names), tuple(plain))


def _fit(linears: Sequence[nn.Linear]) -> bool:
    kinds = {
        (linear.in_features, linear.weight.dtype, linear.bias is None)
        for linear in linears
        if isinstance(linear.weight, Tensor)
    }
    shared = {linear.weight.data_ptr() for linear in linears}
    return len(kinds) == 1 and len(shared) == len(linears)


class FusedProduct:
    """A matrix for several layers. Keeps its last result until each layer has taken its part."""

    def __init__(self, siblings: Siblings, matrix: Matrix, ops: Ops) -> None:
        self.names = siblings.names
        self._ops = ops
        self._biases = [linear.bias for linear in siblings.linears]
        self._bias = _joined(self._biases, ops)
        bounds = [0]
        for linear in siblings.linears:
            bounds.append(bounds[-1] + linear.out_features)
        self._bounds = bounds
        self._matrix = matrix
        # Each layer's own matrix, if the layers turned out not to share their input.
        self._apart: list[Matrix] = []
        self._input: Tensor | None = None
        self._result: Tensor | None = None
        # Layers that have not yet taken their part of the result.
        self._open: set[int] = set()
        # True while the model is probed; a copy of the input; true if all layers saw this input.
        self._watched = False
        self._before: Tensor | None = None
        self._shared = True

    def part(self, index: int, x: Tensor, bias: Tensor | None) -> Tensor:
        """The product of layer `index` with x [..., K]."""
        if bias is not self._biases[index]:
            raise NotImplementedError("a product with another bias")
        if self._apart:
            return product(x, self._apart[index], bias)
        if index not in self._open or not self._is_input(x):
            self._compute(x)
        assert self._result is not None
        part = self._result[..., self._bounds[index] : self._bounds[index + 1]]
        self._open.discard(index)
        if not self._open:
            self._input = self._result = self._before = None
        return part

    def _compute(self, x: Tensor) -> None:
        if self._watched:
            # A layer that has not taken its part of the last result has another input.
            self._shared = self._shared and not self._open
            self._before = x.clone()
        self._result = product(x, self._matrix, self._bias)
        # Keep the input's memory from reuse, so that `_is_input` may compare addresses.
        self._input = x
        self._open = set(range(len(self._biases)))

    def _is_input(self, x: Tensor) -> bool:
        held = self._input
        if held is None:
            return False
        same = x is held or (
            x.data_ptr() == held.data_ptr()
            and x.shape == held.shape
            and x.stride() == held.stride()
            and x.dtype is held.dtype
        )
        if same and self._before is not None:
            self._shared = self._shared and torch.equal(x, self._before)
        return same

    def watch(self) -> None:
        """Check, until `settle`, that the layers share their input."""
        self._watched, self._shared = True, True

    def settle(self) -> bool:
        """True if the layers share their input. If not, split the matrix into one per layer. If
        that is not possible, each layer computes the whole matrix, which is slow but correct.
        """
        shared = self._shared and not self._open
        self._watched = False
        self._input = self._result = self._before = None
        self._open = set()
        if not shared and self._matrix.has_rows:
            self._apart = [self._rows(start, end) for start, end in self._ranges()]
        return shared

    def _ranges(self) -> Iterator[tuple[int, int]]:
        yield from itertools.pairwise(self._bounds)

    def _rows(self, start: int, end: int) -> Matrix:
        ids = torch.arange(start, end, device=self._ops.device)
        return self._ops.pack([self._matrix.rows(ids)])


def _joined(biases: Sequence[Tensor | None], ops: Ops) -> Tensor | None:
    found = [bias.data.to(ops.device, ops.dtype) for bias in biases if bias is not None]
    return torch.cat(found) if found else None


class FusedPart(WeightProxy):
    """Stands in for one layer's weight [N, K]."""

    def __init__(self, fused: FusedProduct, index: int, linear: nn.Linear, ops: Ops) -> None:
        super().__init__(linear.weight.shape, ops.dtype, ops.device)
        self.fused = fused
        self.index = index


def _linear(x: Tensor, weight: FusedPart, bias: Tensor | None = None) -> Tensor:
    return weight.fused.part(weight.index, x, bias)


FusedPart.handlers = {functional.linear: _linear}


def put_in_place(siblings: Siblings, matrix: Matrix, ops: Ops) -> None:
    """Replace the layers' weights by parts of `matrix`, which was made from them."""
    fused = FusedProduct(siblings, matrix, ops)
    for index, linear in enumerate(siblings.linears):
        part = FusedPart(fused, index, linear, ops)
        del linear.weight
        # Bypass nn.Module.__setattr__: the proxy is no parameter.
        object.__setattr__(linear, "weight", part)


def fuse_linears(module: nn.Module, ops: Ops) -> None:
    """Fuse all sets of layers whose weights are ordinary tensors in the dtype of activations.

    Fuse one set at a time, so that only one set's weights are in memory twice.
    """
    for siblings in find_siblings(module):
        put_in_place(siblings, ops.pack(siblings.weights), ops)


@contextmanager
def probing(module: nn.Module) -> Iterator[list[str]]:
    """Wrap one forward of all layers. Afterwards the list names the first layer of each set whose
    layers do not share their input.
    """
    parts = (getattr(linear, "weight", None) for linear in module.modules())
    sets = list(dict.fromkeys(part.fused for part in parts if isinstance(part, FusedPart)))
    apart: list[str] = []
    for fused in sets:
        fused.watch()
    yield apart
    apart.extend(fused.names[0] for fused in sets if not fused.settle())
