"""Products of a transformers module on packed matrices: one family of products for every model.

Modelling code keeps calling torch on `module.weight`; what stands there then is no tensor but an
object that torch hands the call to (its `__torch_function__` protocol). So nothing of the modules
is rewritten, and a use of a weight that is not foreseen fails instead of going another way.

Knows how transformers' modules hold weights. Knows nothing of attention or requests.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from penstock_shard.models.checkpoint import give_back_pages
from penstock_shard.models.embedding import Embedding
from penstock_shard.models.errors import ModelError, cannot_hold
from penstock_shard.models.ops.base import Matrix, Ops, WeightKind

_REPORT_S = 3.0
# Names of the small products that choose experts: rounding them would change the choice.
_ROUTERS = {"gate", "router"}
_DTYPES = {torch.float32, torch.float16, torch.bfloat16}
# Error of a packed matrix's product that rounding explains, relative to the product: a row of
# weights with a large outlier loses much in int8. A wrong layout or scale gives 1 or more.
_TOLERANCE = {"float32": 1e-3, "float16": 0.03, "bfloat16": 0.03, "int8": 0.5}
# Half of float16's smallest step: what values that are nearly zero may lose.
_SMALLEST = 2.0**-25
# Rows of weights compared at once.
_ROWS = 1024


class _Stand:
    """What all stands for a weight share: they look like a float32 parameter."""

    dtype = torch.float32
    device = torch.device("cpu")
    is_meta = False
    requires_grad = False
    shape: torch.Size

    def _same(self, *args: Any, **kwargs: Any) -> Any:
        return self

    to = type = float = contiguous = _same

    @classmethod
    def __torch_function__(
        cls,
        function: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Tensor:
        handler = _HANDLERS.get(function)
        if handler is None:
            name = getattr(function, "__name__", str(function))
            raise NotImplementedError(f"{name} of a packed weight")
        return handler(*args, **(kwargs or {}))


class PackedWeight(_Stand):
    """A matrix [N, K] in the place of a weight; `transposed` if the weight was [K, N]."""

    def __init__(self, matrix: Matrix, *, transposed: bool) -> None:
        self.matrix = matrix
        self.transposed = transposed
        shape = (matrix.out_features, matrix.in_features)
        self.shape = torch.Size(reversed(shape) if transposed else shape)


class PackedStack(_Stand):
    """The weights of several experts in the place of one tensor."""

    def __init__(self, weights: list[PackedWeight]) -> None:
        self._weights = weights
        self.shape = torch.Size((len(weights), *weights[0].shape))

    def __getitem__(self, index: Tensor | int) -> PackedWeight:
        return self._weights[int(index)]


class PackedTable(_Stand):
    """An embedding table."""

    def __init__(self, embedding: Embedding) -> None:
        self.embedding = embedding
        self.shape = embedding.table.shape


def _linear(x: Tensor, weight: PackedWeight, bias: Tensor | None = None) -> Tensor:
    assert not weight.transposed, "a weight [K, N] in a product with [N, K]"
    return _product(x, weight.matrix, bias)


def _matmul(x: Tensor, weight: PackedWeight) -> Tensor:
    assert weight.transposed, "a weight [N, K] in a product with [K, N]"
    return _product(x, weight.matrix, None)


def _addmm(bias: Tensor, x: Tensor, weight: PackedWeight) -> Tensor:
    assert weight.transposed, "a weight [N, K] in a product with [K, N]"
    return _product(x, weight.matrix, bias)


def _product(x: Tensor, matrix: Matrix, bias: Tensor | None) -> Tensor:
    if x.shape[-1] != matrix.in_features:
        raise ValueError(f"a product of {tuple(x.shape)} with {matrix.in_features} inputs")
    flat = x.reshape(-1, matrix.in_features).contiguous()
    return matrix.linear(flat, bias).view(*x.shape[:-1], matrix.out_features)


def _embedding(ids: Tensor, table: PackedTable, *args: Any, **kwargs: Any) -> Tensor:
    return table.embedding.rows(ids)


_HANDLERS: dict[Any, Callable[..., Tensor]] = {
    functional.linear: _linear,
    torch.addmm: _addmm,
    torch.matmul: _matmul,
    torch.Tensor.matmul: _matmul,
    torch.Tensor.__matmul__: _matmul,
    functional.embedding: _embedding,
}


def pack_weights(module: PreTrainedModel, ops: Ops, progress: Callable[[str], None]) -> None:
    """Put packed matrices in the place of the module's weights, and the rest into float32.

    Packed are linear layers, GPT-2's transposed ones, stacked experts, routers and embeddings.
    Raises ModelError, naming the tensor, for a value that the kind of weights cannot hold.
    """
    # The largest first, while little else is in memory.
    holders = sorted(_holders(module), key=_size, reverse=True)
    reported_s = time.monotonic()
    for done, (name, holder, parameter) in enumerate(holders):
        weight: Tensor = getattr(holder, parameter)
        if weight.dtype not in _DTYPES:
            raise ModelError(f"{name}.{parameter}: is stored as {weight.dtype}, not served here")
        try:
            packed = _packed(name, holder, weight, ops)
        except ValueError as error:
            raise cannot_hold(f"{name}.{parameter}", error, ops.weights) from error
        delattr(holder, parameter)
        setattr(holder, parameter, packed)
        give_back_pages([weight.data])
        if time.monotonic() - reported_s >= _REPORT_S:
            reported_s = time.monotonic()
            progress(f"loading weights: {100 * done // len(holders)} %")
    # The models' own loops over experts, each a product; the others want all experts in one tensor.
    module.set_experts_implementation("eager")
    module.float()
    for left in module.parameters():
        # What needs no packing still lies in the file's memory, which may be written to.
        left.data = left.data.clone()
    if next(module.parameters(), None) is None:
        # Modelling code asks the first parameter for the model's dtype, even where none is left.
        module.register_parameter("dtype_of_activations", nn.Parameter(torch.empty(0)))


def _holders(module: PreTrainedModel) -> Iterator[tuple[str, nn.Module, str]]:
    """Name of a module, the module, and the name of its parameter to pack."""
    for name, holder in module.named_modules():
        if isinstance(holder, nn.Linear | Conv1D | nn.Embedding) or _is_router(name, holder):
            yield name, holder, "weight"
        elif hasattr(holder, "is_transposed"):
            # What transformers marks as experts: parameters [experts, ...], biases have two.
            for parameter, value in list(holder.named_parameters(recurse=False)):
                if value.dim() == 3:
                    yield name, holder, parameter


def _size(place: tuple[str, nn.Module, str]) -> int:
    _, holder, parameter = place
    weight: Tensor = getattr(holder, parameter)
    return weight.nbytes


def _is_router(name: str, holder: nn.Module) -> bool:
    weight = getattr(holder, "weight", None)
    return (
        name.rpartition(".")[2] in _ROUTERS
        and not list(holder.children())
        and isinstance(weight, Tensor)
        and weight.dim() == 2
    )


def _packed(name: str, holder: nn.Module, weight: Tensor, ops: Ops) -> _Stand:
    data = weight.data
    if isinstance(holder, nn.Embedding):
        return PackedTable(Embedding(data, ops))
    if data.dim() == 3:
        transposed = bool(holder.is_transposed)
        return PackedStack([_pack_matrix(part, ops, transposed) for part in data])
    exact = name.rpartition(".")[2] in _ROUTERS
    return _pack_matrix(data, ops, isinstance(holder, Conv1D), exact=exact)


def _pack_matrix(
    weight: Tensor, ops: Ops, transposed: bool, *, exact: bool = False
) -> PackedWeight:
    rows = weight.T if transposed else weight
    matrix = ops.pack([rows], exact=exact)
    _check_product(rows, matrix, "float32" if exact else ops.weights)
    return PackedWeight(matrix, transposed=transposed)


def _check_product(weight: Tensor, matrix: Matrix, kind: WeightKind) -> None:
    """Compare one product with that of the weight [N, K] as it was: what is compared later with the
    model's own attention has these matrices on both sides.
    """
    x = torch.randn(1, weight.shape[1], generator=torch.Generator().manual_seed(1))
    pieces = (weight[start : start + _ROWS] for start in range(0, len(weight), _ROWS))
    expected = torch.cat([x @ piece.float().T for piece in pieces], dim=1)
    error = float((matrix.linear(x) - expected).norm())
    lost = 0.0 if kind == "float32" else _SMALLEST * float(x.abs().sum()) * len(weight) ** 0.5
    bound = _TOLERANCE[kind] * float(expected.norm()) + lost
    # Not `error > bound`: a NaN must not pass.
    if not error <= bound:
        raise ValueError(f"self-check failed: a product is off by {error:.2g} (bound {bound:.2g})")
