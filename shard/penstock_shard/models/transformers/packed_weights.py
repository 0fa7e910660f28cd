"""Replaces a transformers module's weights by packed matrices, like those of our own decoder.

Modelling code keeps calling torch functions on `module.weight`, now a proxy that computes the
product.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from penstock_shard.checkpoint.safetensors import give_back_pages
from penstock_shard.errors import ModelError, cannot_hold
from penstock_shard.models.embedding_table import Embedding
from penstock_shard.models.transformers.fused_linears import Siblings, find_siblings, put_in_place
from penstock_shard.models.transformers.weight_proxies import WeightProxy, product
from penstock_shard.ops.base import Matrix, Ops

_REPORT_S = 3.0
# Names of routers, small products that choose experts: rounding would change the choice.
_ROUTERS = {"gate", "router"}
_DTYPES = {torch.float32, torch.float16, torch.bfloat16}
# Largest error of a packed matrix's product that rounding explains, relative to the product. int8
# loses much in a row of weights with a large outlier. A wrong layout or scale gives 1 or more.
_TOLERANCE = {
    "float32": 1e-3,
    "float16": 0.03,
    "bfloat16": 0.03,
    "int8": 0.5,
    "fp8": 0.5,
    "int4": 0.5,
    # Dequantized codes, kept in float16.
    "codes": 0.03,
}
# Half of float16's smallest step: the rounding error of values near zero.
_SMALLEST = 2.0**-25
_ROWS = 1024


class PackedWeight(WeightProxy):
    """A matrix [N, K] in place of a weight; `transposed` if the weight was [K, N]."""

    def __init__(self, matrix: Matrix, ops: Ops, *, transposed: bool) -> None:
        shape = (matrix.out_features, matrix.in_features)
        ordered = torch.Size(reversed(shape) if transposed else shape)
        super().__init__(ordered, ops.dtype, ops.device)
        self.matrix = matrix
        self.transposed = transposed


class PackedStack(WeightProxy):
    """Several experts' weights in place of one tensor [E, ., .]."""

    def __init__(self, weights: list[PackedWeight], ops: Ops) -> None:
        shape = torch.Size((len(weights), *weights[0].shape))
        super().__init__(shape, ops.dtype, ops.device)
        self._weights = weights

    def __getitem__(self, index: Tensor | int) -> PackedWeight:
        return self._weights[int(index)]


class PackedTable(WeightProxy):
    def __init__(self, embedding: Embedding, ops: Ops) -> None:
        super().__init__(embedding.table.shape, ops.dtype, ops.device)
        self.embedding = embedding


def _linear(x: Tensor, weight: PackedWeight, bias: Tensor | None = None) -> Tensor:
    assert not weight.transposed, "a weight [K, N] in a product with [N, K]"
    return product(x, weight.matrix, bias)


def _matmul(x: Tensor, weight: PackedWeight) -> Tensor:
    assert weight.transposed, "a weight [N, K] in a product with [K, N]"
    return product(x, weight.matrix, None)


def _product_of_columns(x: Tensor, weight: PackedWeight) -> Tensor:
    """weight [N, K] @ x [..., K, T]."""
    return _linear(x.transpose(-1, -2), weight).transpose(-1, -2)


def _addmm(bias: Tensor, x: Tensor, weight: PackedWeight) -> Tensor:
    assert weight.transposed, "a weight [N, K] in a product with [K, N]"
    return product(x, weight.matrix, bias)


def _embedding(ids: Tensor, table: PackedTable, *args: Any, **kwargs: Any) -> Tensor:
    return table.embedding.rows(ids)


PackedWeight.handlers = {
    functional.linear: _linear,
    torch.addmm: _addmm,
    torch.matmul: _matmul,
    torch.Tensor.matmul: _matmul,
    torch.Tensor.__matmul__: _matmul,
    torch.Tensor.__rmatmul__: _product_of_columns,
}
PackedTable.handlers = {functional.embedding: _embedding}


@dataclass(frozen=True, slots=True)
class _WeightUse:
    """A parameter to pack, or sibling layers' parameters to fuse into one matrix."""

    names: tuple[str, ...]
    holders: tuple[nn.Module, ...]
    parameter: str
    siblings: Siblings | None = None
    # True if the weight keeps the precision of activations.
    exact: bool = False

    @property
    def weights(self) -> list[Tensor]:
        return [getattr(holder, self.parameter) for holder in self.holders]

    @property
    def nbytes(self) -> int:
        return sum(weight.nbytes for weight in self.weights)


def pack_weights(module: PreTrainedModel, ops: Ops, progress: Callable[[str], None]) -> None:
    """Replace the module's weights by packed matrices, and convert the rest to the dtype of
    activations.

    Packs linear layers, GPT-2's transposed ones, stacked experts, routers and embeddings. Linear
    layers that share an input become one matrix. Raises ModelError, which names the tensor, for a
    value that the type of weights cannot hold.
    """
    matrices = _Matrices(ops)
    # Pack the largest weight first: packing needs memory, and little else is loaded yet.
    places = sorted(_weight_uses(module, ops), key=lambda place: place.nbytes, reverse=True)
    reported_s = time.monotonic()
    for done, place in enumerate(places):
        _pack(place, matrices)
        if time.monotonic() - reported_s >= _REPORT_S:
            reported_s = time.monotonic()
            progress(f"loading weights: {100 * done // len(places)} %")
    # "eager" loops over experts, with a product for each; other implementations need all experts in
    # one tensor.
    module.set_experts_implementation("eager")
    module.to(ops.dtype)
    for left in module.parameters():
        # Copy other parameters out of the mapped file, which may be overwritten.
        left.data = left.data.clone()
    if next(module.parameters(), None) is None:
        # Modelling code takes the model's dtype from the first parameter.
        empty = torch.empty(0, dtype=ops.dtype, device=ops.device)
        module.register_parameter("dtype_of_activations", nn.Parameter(empty))


class _Matrices:
    """Packs weights. Weights that several modules share (Zamba2's blocks) are packed once."""

    def __init__(self, ops: Ops) -> None:
        self.ops = ops
        self._packed: dict[tuple[object, ...], Matrix] = {}

    def pack(self, parts: list[Tensor], *, exact: bool = False) -> Matrix:
        """Return the weights [N_i, K] as one matrix. Raises ValueError for a value that it cannot
        hold.
        """
        # Pointers identify weights, which stay in memory until each of their modules has its
        # matrix.
        key = (exact, *((part.data_ptr(), part.shape, part.stride()) for part in parts))
        matrix = self._packed.get(key)
        if matrix is None:
            matrix = self._packed[key] = _checked(parts, self.ops, exact=exact)
        return matrix


def _pack(place: _WeightUse, matrices: _Matrices) -> None:
    ops = matrices.ops
    weights = [weight.data for weight in place.weights]
    tensors = ", ".join(f"{name}.{place.parameter}" for name in place.names)
    if weights[0].dtype not in _DTYPES:
        raise ModelError(f"{tensors}: is stored as {weights[0].dtype}, not served here")
    try:
        if place.siblings is not None:
            put_in_place(place.siblings, matrices.pack(weights), ops)
        else:
            (holder,) = place.holders
            packed = _packed(holder, weights[0], matrices, exact=place.exact)
            delattr(holder, place.parameter)
            setattr(holder, place.parameter, packed)
    except ValueError as error:
        raise cannot_hold(tensors, error, ops.weights) from error
    give_back_pages(weights)


def _weight_uses(module: PreTrainedModel, ops: Ops) -> Iterator[_WeightUse]:
    head = module.get_output_embeddings() if ops.dense_head else None
    fused: set[nn.Module] = set()
    for siblings in find_siblings(module):
        fused.update(siblings.linears)
        yield _WeightUse(siblings.names, siblings.linears, "weight", siblings)
    for name, holder in module.named_modules():
        if holder in fused:
            continue
        if isinstance(holder, nn.Linear | Conv1D | nn.Embedding) or _is_router(name, holder):
            exact = name.rpartition(".")[2] in _ROUTERS or (head is not None and holder is head)
            yield _WeightUse((name,), (holder,), "weight", exact=exact)
        elif hasattr(holder, "is_transposed"):
            # Experts' weights have 3 dimensions, their biases 2.
            for parameter, value in list(holder.named_parameters(recurse=False)):
                if value.dim() == 3:
                    yield _WeightUse((name,), (holder,), parameter)


def _is_router(name: str, holder: nn.Module) -> bool:
    weight = getattr(holder, "weight", None)
    return (
        name.rpartition(".")[2] in _ROUTERS
        and not list(holder.children())
        and isinstance(weight, Tensor)
        and weight.dim() == 2
    )


def _packed(holder: nn.Module, weight: Tensor, matrices: _Matrices, *, exact: bool) -> WeightProxy:
    ops = matrices.ops
    if isinstance(holder, nn.Embedding):
        return PackedTable(Embedding(weight, ops), ops)
    if weight.dim() == 3:
        transposed = bool(holder.is_transposed)
        return PackedStack([_pack_matrix(part, matrices, transposed) for part in weight], ops)
    return _pack_matrix(weight, matrices, isinstance(holder, Conv1D), exact=exact)


def _pack_matrix(
    weight: Tensor, matrices: _Matrices, transposed: bool, *, exact: bool = False
) -> PackedWeight:
    rows = weight.T if transposed else weight
    packed = matrices.pack([rows], exact=exact)
    return PackedWeight(packed, matrices.ops, transposed=transposed)


def _checked(parts: list[Tensor], ops: Ops, *, exact: bool = False) -> Matrix:
    """Return the weights [N_i, K] as one matrix, after comparing its product with the weights' own.
    The later comparison with the model's own attention cannot find a wrong matrix: both sides use
    it.
    """
    matrix = ops.pack(parts, exact=exact)
    kind = "float32" if exact and ops.dtype is torch.float32 else ops.weights
    x = torch.randn(1, matrix.in_features, generator=torch.Generator().manual_seed(1))
    x = x.to(ops.device, ops.dtype)
    wide = x.float()
    pieces = (part[start : start + _ROWS] for part in parts for start in range(0, len(part), _ROWS))
    expected = torch.cat([wide @ piece.to(ops.device).float().T for piece in pieces], dim=1)
    error = float((matrix.linear(x).float() - expected).norm())
    tiny = _SMALLEST * float(wide.abs().sum()) * matrix.out_features**0.5
    lost = 0.0 if kind == "float32" else tiny
    bound = _TOLERANCE[kind] * float(expected.norm()) + lost
    if not error <= bound:
        raise ValueError(f"self-check failed: a product is off by {error:.2g} (bound {bound:.2g})")
    return matrix
