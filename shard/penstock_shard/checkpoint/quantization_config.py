"""Reads checkpoints with a `quantization_config` as if their weights were not quantized.

The methods are compressed-tensors, fp8 in blocks, GPTQ and AWQ. A quantized matrix has the name and
shape that it would have in a plain checkpoint. It is dequantized to float32 on its device when it
is read. The tensors in the files decide which matrices are quantized, and in what groups. The
configuration must agree.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedConfig

from penstock_shard.checkpoint.codes.codes import Codes
from penstock_shard.checkpoint.codes.mxfp4 import GROUP
from penstock_shard.checkpoint.codes.stored_matrices import (
    AwqMatrix,
    GptqMatrix,
    PackedMatrix,
    ScaledMatrix,
    StoredMatrix,
)
from penstock_shard.checkpoint.gguf_files import GGUF_METHOD
from penstock_shard.checkpoint.mxfp4_experts import MXFP4_METHOD
from penstock_shard.checkpoint.safetensors import Checkpoint
from penstock_shard.errors import ModelError

_METHODS = ("compressed-tensors", "fp8", "gptq", "awq", MXFP4_METHOD, GGUF_METHOD)
_FP8, _INT8 = "F8_E4M3", "I8"
# The supported formats of compressed-tensors.
_FORMATS = {
    "dense",
    "float-quantized",
    "int-quantized",
    "naive-quantized",
    "pack-quantized",
    "mixed-precision",
}
_STRATEGIES = {"tensor", "channel", "group", "block"}
# Tensors that quantize activations, keys and values. They are ignored: only command-line flags
# decide whether those are quantized.
_FOR_ACTIVATIONS = (
    "input_scale",
    "input_zero_point",
    "input_global_scale",
    "output_scale",
    "output_zero_point",
    "activation_scale",
    "q_scale",
    "k_scale",
    "v_scale",
    "k_zero_point",
    "v_zero_point",
)
# The last parts of names that only quantized matrices have.
_PARTS = {
    "qweight",
    "qzeros",
    "scales",
    "g_idx",
    "weight_packed",
    "weight_scale",
    "weight_scale_inv",
    "weight_shape",
    "weight_zero_point",
    "weight_g_idx",
}


@dataclass(frozen=True, slots=True)
class Scheme:
    """The checked quantization of a checkpoint's configuration."""

    method: str
    # The numbers of bits that occur in stored numbers; 8 for fp8.
    bits: frozenset[int]
    # The group sizes that occur (columns that share a scale).
    groups: frozenset[int]
    # The rows and columns that share a scale; None without blocks.
    block: tuple[int, int] | None = None
    # True if all quantized matrices are fp8.
    is_fp8: bool = False
    # Added to GPTQ's stored zero points; see `GptqMatrix`.
    zero_offset: int = 0
    desc_act: bool = False
    # The names of the matrices' GGUF types.
    types: tuple[str, ...] = ()

    @property
    def has_codes(self) -> bool:
        """True if weights are stored as integers with scales."""
        return not self.is_fp8 and bool(self.bits or self.types)

    def computed_in(self, weights: str) -> str:
        """Say for the log how weights are stored, and in what form they are used."""
        if weights == "codes":
            how = "kept as they are, multiplied by activations in int8"
        elif weights != "fp8":
            how = f"each matrix is dequantized and kept in {weights}"
        elif self.is_fp8 and self.block is None:
            how = "kept in fp8 as they are"
        else:
            how = "each matrix is rounded once more, to fp8 with a scale for each output"
        return f"weights are stored as {self}; {how}"

    def __str__(self) -> str:
        if self.types:
            return f"{self.method}, {' and '.join(self.types)}"
        if not self.bits:
            return f"{self.method}, which has none of the weights"
        bits = "fp8" if self.is_fp8 else " and ".join(f"{each} bits" for each in sorted(self.bits))
        if self.block is not None:
            return f"{self.method}, {bits} in blocks of {self.block[0]} by {self.block[1]}"
        if not self.groups:
            return f"{self.method}, {bits}"
        sizes = " and ".join(str(size) for size in sorted(self.groups))
        return f"{self.method}, {bits} in groups of {sizes}"


def quantization_config(config: PreTrainedConfig) -> dict[str, Any] | None:
    for place in (config, config.get_text_config()):
        found = getattr(place, "quantization_config", None)
        if found is not None:
            return dict(found if isinstance(found, dict) else found.to_dict())
    return None


def scheme_of(config: PreTrainedConfig) -> Scheme | None:
    """Return the model's quantization; None if it is not quantized.

    Raises ModelError, with the field's name, for an unsupported quantization.
    """
    stated = quantization_config(config)
    if stated is None:
        return None
    method = stated.get("quant_method")
    readers = {
        "compressed-tensors": _compressed_scheme,
        "fp8": _fp8_scheme,
        "gptq": _gptq_scheme,
        "awq": _awq_scheme,
        MXFP4_METHOD: _mxfp4_scheme,
        GGUF_METHOD: _gguf_scheme,
    }
    if method not in readers:
        raise _refused("quant_method", method, _METHODS)
    try:
        return readers[method](stated)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ModelError(f"quantization_config: cannot be read: {error!r}") from error


def _refused(field: str, value: object, served: Sequence[object]) -> ModelError:
    choices = ", ".join(str(each) for each in served)
    return ModelError(f"quantization_config: {field} is {value!r}; served are {choices}")


def _compressed_scheme(stated: Mapping[str, Any]) -> Scheme:
    if stated.get("format") not in _FORMATS:
        raise _refused("format", stated.get("format"), sorted(_FORMATS))
    sparsity = (stated.get("sparsity_config") or {}).get("format", "dense")
    if sparsity != "dense":
        raise _refused("sparsity_config.format", sparsity, ["dense"])
    if (stated.get("transform_config") or {}).get("config_groups"):
        raise ModelError("quantization_config: transform_config is not served")
    groups: dict[str, dict[str, Any]] = stated["config_groups"]
    weights = {name: group["weights"] for name, group in groups.items() if group.get("weights")}
    for name, args in weights.items():
        _check_args(f"config_groups.{name}.weights", args)
    strategies = {name: _strategy(args) for name, args in weights.items()}
    blocks = {
        _block(args["block_structure"])
        for name, args in weights.items()
        if strategies[name] == "block"
    }
    if len(blocks) > 1:
        raise ModelError("quantization_config: blocks of several sizes in one model are not served")
    return Scheme(
        method="compressed-tensors",
        bits=frozenset(int(args["num_bits"]) for args in weights.values()),
        groups=frozenset(
            int(args["group_size"]) for name, args in weights.items() if strategies[name] == "group"
        ),
        block=next(iter(blocks), None),
        is_fp8=bool(weights) and all(args["type"] == "float" for args in weights.values()),
    )


def _check_args(field: str, args: Mapping[str, Any]) -> None:
    if _strategy(args) not in _STRATEGIES:
        raise _refused(f"{field}.strategy", args["strategy"], sorted(_STRATEGIES))
    if args["type"] not in ("int", "float"):
        raise _refused(f"{field}.type", args["type"], ["int", "float"])
    bits = (8,) if args["type"] == "float" else (4, 8)
    if args["num_bits"] not in bits:
        raise _refused(f"{field}.num_bits", args["num_bits"], bits)


def _strategy(args: Mapping[str, Any]) -> str:
    stated, group = args.get("strategy"), args.get("group_size")
    if stated is not None:
        return str(stated)
    return "tensor" if group is None else "group" if group > 0 else "channel"


def _block(value: Any) -> tuple[int, int]:
    rows, columns = value.split("x") if isinstance(value, str) else value
    return int(rows), int(columns)


def _fp8_scheme(stated: Mapping[str, Any]) -> Scheme:
    if stated.get("expert_dtype", "fp8") != "fp8":
        raise _refused("expert_dtype", stated["expert_dtype"], ["fp8"])
    block = stated.get("weight_block_size")
    return Scheme(
        method="fp8",
        bits=frozenset({8}),
        groups=frozenset(),
        block=None if block is None else _block(block),
        is_fp8=True,
    )


def _gptq_scheme(stated: Mapping[str, Any]) -> Scheme:
    if stated["bits"] not in (4, 8):
        raise _refused("bits", stated["bits"], (4, 8))
    written = stated.get("checkpoint_format") or stated.get("format") or "gptq"
    if written not in ("gptq", "gptq_v2"):
        raise _refused("checkpoint_format", written, ("gptq", "gptq_v2"))
    return Scheme(
        method="gptq",
        bits=frozenset({stated["bits"]}),
        groups=frozenset({int(stated["group_size"])} - {-1}),
        zero_offset=1 if written == "gptq" else 0,
        desc_act=bool(stated.get("desc_act")),
    )


def _awq_scheme(stated: Mapping[str, Any]) -> Scheme:
    bits = stated.get("bits", stated.get("w_bit"))
    if bits != 4:
        raise _refused("bits", bits, [4])
    version = str(stated.get("version") or stated.get("format") or "gemm").lower()
    if version != "gemm":
        raise _refused("version", version, ["gemm"])
    if not stated.get("zero_point", True):
        raise _refused("zero_point", False, [True])
    group = int(stated.get("group_size", stated.get("q_group_size", 128)))
    return Scheme(method="awq", bits=frozenset({4}), groups=frozenset({group} - {-1}))


def _mxfp4_scheme(stated: Mapping[str, Any]) -> Scheme:
    return Scheme(method=MXFP4_METHOD, bits=frozenset({4}), groups=frozenset({GROUP}))


def _gguf_scheme(stated: Mapping[str, Any]) -> Scheme:
    types = tuple(str(each) for each in stated["types"])
    return Scheme(method=GGUF_METHOD, bits=frozenset(), groups=frozenset(), types=types)


def plain_config(config: PreTrainedConfig) -> PreTrainedConfig:
    """Return the configuration without quantization_config, because weights are read
    dequantized.
    """
    if quantization_config(config) is None:
        return config
    plain = copy.deepcopy(config)
    for place in (plain, plain.get_text_config()):
        if hasattr(place, "quantization_config"):
            del place.quantization_config
    return plain


class QuantizedCheckpoint(Checkpoint):
    """A checkpoint that dequantizes matrices to float32 on a device when they are read."""

    is_plain = False

    def __init__(self, model_dir: Path, scheme: Scheme, device: torch.device) -> None:
        """Raises ModelError, with a tensor's name, for files that do not fit the scheme."""
        super().__init__(model_dir)
        self._device = device
        found = _Finder(scheme, self.shapes, self.stored, self._small(".weight_shape"))
        self._matrices = {f"{module}.weight": found.matrix(module) for module in found.modules()}
        self._show(scheme)
        # Some tools write zero biases for layers that have no bias.
        self.zero_biases = self._zero_biases() if scheme.method in ("gptq", "awq") else frozenset()

    def _small(self, suffix: str) -> dict[str, tuple[int, ...]]:
        names = [name for name in self.shapes if name.endswith(suffix)]
        with super().read(names) as tensors:
            values = [tuple(int(value) for value in tensor) for tensor in tensors]
        return dict(zip(names, values, strict=True))

    def _show(self, scheme: Scheme) -> None:
        """List each dequantized matrix instead of the tensors that it is made of."""
        used = {name for matrix in self._matrices.values() for name in matrix.names}
        used.update(f"{name}_shape" for name in self._matrices)
        for name in list(self.shapes):
            part = name.rpartition(".")[2]
            if name in used or part in _FOR_ACTIVATIONS:
                del self.shapes[name], self.stored[name], self.dtypes[name]
            elif part in _PARTS:
                raise ModelError(
                    f"{name}: the weights lack the rest of this matrix; the files are incomplete "
                    f"or not of the method {scheme.method}"
                )
            elif self.dtypes[name] is None and self.stored[name].startswith(("F8", "I8")):
                raise ModelError(f"{name}: is stored as {self.stored[name]} without scales")
        for name, matrix in self._matrices.items():
            self.shapes[name] = matrix.shape
            self.stored[name] = "F32"
            self.dtypes[name] = torch.float32

    def _zero_biases(self) -> frozenset[str]:
        places = (name.removesuffix("weight") + "bias" for name in self._matrices)
        biases = [name for name in places if name in self.shapes]
        with super().read(biases) as tensors:
            zero = [not bool(tensor.any()) for tensor in tensors]
        return frozenset(name for name, is_zero in zip(biases, zero, strict=True) if is_zero)

    def leave_out(self, names: Iterable[str]) -> None:
        for name in names:
            del self.shapes[name], self.stored[name], self.dtypes[name]

    @contextmanager
    def read(self, names: Sequence[str]) -> Iterator[list[Tensor]]:
        """Read like the base class. Raises ModelError if a matrix's tensors do not fit together."""
        plain = [name for name in names if name not in self._matrices]
        with super().read(plain) as tensors:
            found = dict(zip(plain, tensors, strict=True))
            yield [found[name] if name in found else self._dense(name) for name in names]

    def codes(self, name: str) -> Codes | None:
        """Raises ModelError if the matrix's tensors do not fit together."""
        if name not in self._matrices:
            return None
        with self._parts(name) as parts:
            return self._matrices[name].codes(parts)

    def _dense(self, name: str) -> Tensor:
        with self._parts(name) as parts:
            return self._matrices[name].dense(parts)

    @contextmanager
    def _parts(self, name: str) -> Iterator[list[Tensor]]:
        """Yield a matrix's tensors, on the device. An error inside the context becomes a ModelError
        with the matrix's name.
        """
        with super().read(self._matrices[name].names) as stored:
            try:
                yield [part.to(self._device) for part in stored]
            except (ValueError, RuntimeError) as error:
                raise ModelError(f"{name}: cannot be read: {error}") from error


@dataclass(frozen=True, slots=True)
class _Finder:
    """Finds which matrices are quantized, and how."""

    scheme: Scheme
    shapes: Mapping[str, tuple[int, ...]]
    stored: Mapping[str, str]
    # The values of the `weight_shape` tensors.
    stated_shapes: Mapping[str, tuple[int, ...]]

    def modules(self) -> list[str]:
        wanted = "qweight" if self.scheme.method in ("gptq", "awq") else "weight_packed"
        modules = []
        for name in self.shapes:
            module, _, part = name.rpartition(".")
            is_scaled = part == "weight" and self.stored[name] in (_FP8, _INT8)
            if part == wanted or (wanted == "weight_packed" and is_scaled):
                modules.append(module)
        return modules

    def matrix(self, module: str) -> StoredMatrix:
        if self.scheme.method == "gptq":
            return self._gptq(module)
        if self.scheme.method == "awq":
            return self._awq(module)
        if f"{module}.weight_packed" in self.shapes:
            return self._packed(module)
        return self._scaled(module)

    def _gptq(self, module: str) -> GptqMatrix:
        names = [f"{module}.{part}" for part in ("qweight", "qzeros", "scales")]
        shapes = [self._shape(name, 2) for name in names]
        (bits,) = self.scheme.bits
        words, columns = shapes[0]
        rows = words * 32 // bits
        order = f"{module}.g_idx"
        has_order = order in self.shapes
        if self.scheme.desc_act and not has_order:
            raise _missing(order)
        count, group = shapes[2][0], self._group(names[2], rows, shapes[2][0])
        self._agrees(names[1], shapes[1], (count, columns * bits // 32))
        self._agrees(names[2], shapes[2], (count, columns))
        if has_order:
            self._agrees(order, self._shape(order, 1), (rows,))
            names.append(order)
        offset = self.scheme.zero_offset
        return GptqMatrix(tuple(names), (columns, rows), bits, group, offset, has_order)

    def _awq(self, module: str) -> AwqMatrix:
        names = tuple(f"{module}.{part}" for part in ("qweight", "qzeros", "scales"))
        rows, words = self._shape(names[0], 2)
        zeros, scales = (self._shape(name, 2) for name in names[1:])
        columns, count = words * 8, scales[0]
        self._agrees(names[1], zeros, (count, words))
        self._agrees(names[2], scales, (count, columns))
        return AwqMatrix(names, (columns, rows), self._group(names[2], rows, count))

    def _packed(self, module: str) -> PackedMatrix:
        packed, scale, stated = (
            f"{module}.{part}" for part in ("weight_packed", "weight_scale", "weight_shape")
        )
        if stated not in self.stated_shapes:
            raise _missing(stated)
        if len(self.stated_shapes[stated]) != 2:
            raise ModelError(f"{packed}: stacks of experts in one tensor are not served")
        rows, columns = self.stated_shapes[stated]
        bits = self._bits(packed, rows, columns)
        scales = self._shape(scale, 2)
        self._agrees(scale, scales, (rows, scales[1]))
        group = self._group(scale, columns, scales[1])
        zero, order = f"{module}.weight_zero_point", f"{module}.weight_g_idx"
        has_zeros, has_order = zero in self.shapes, order in self.shapes
        if has_zeros:
            self._agrees(zero, self._shape(zero, 2), (-(-rows * bits // 32), scales[1]))
        if has_order:
            self._agrees(order, self._shape(order, 1), (columns,))
        extras = [name for name in (zero, order) if name in self.shapes]
        names = (packed, scale, *extras)
        return PackedMatrix(names, (rows, columns), bits, group, has_zeros, has_order)

    def _bits(self, packed: str, rows: int, columns: int) -> int:
        """Return the stated number of bits that fits the packed tensor's shape."""
        shape = self._shape(packed, 2)
        for bits in sorted(self.scheme.bits):
            if shape == (rows, -(-columns * bits // 32)):
                return bits
        raise ModelError(
            f"{packed}: has the shape {list(shape)}, which holds no matrix of {rows} by {columns} "
            f"in {self.scheme}"
        )

    def _scaled(self, module: str) -> ScaledMatrix:
        weight, zero = f"{module}.weight", f"{module}.weight_zero_point"
        rows, columns = self._shape(weight, 2)
        scale = f"{module}.weight_scale_inv"
        if scale not in self.shapes:
            scale = f"{module}.weight_scale"
        if scale not in self.shapes:
            raise ModelError(
                f"{weight}: is stored as {self.stored[weight]} without scales; "
                f"{scale} is missing, the files are incomplete"
            )
        if self.stored[scale].startswith("U"):
            raise ModelError(f"{scale}: scales stored as {self.stored[scale]} are not served")
        block = self._block(scale, rows, columns)
        names = [weight, scale]
        if zero in self.shapes:
            self._agrees(zero, self.shapes[zero], self.shapes[scale])
            names.append(zero)
        return ScaledMatrix(tuple(names), (rows, columns), block)

    def _block(self, scale: str, rows: int, columns: int) -> tuple[int, int]:
        """Return the rows and columns that share a scale, from the shape of the scales."""
        shape = self.shapes[scale]
        count = torch.Size(shape).numel()
        if count == 1:
            return rows, columns
        if shape in ((rows,), (rows, 1)):
            return 1, columns
        block = self.scheme.block
        if block is not None and shape == (-(-rows // block[0]), -(-columns // block[1])):
            return block
        if len(shape) == 2 and shape[0] == rows:
            return 1, self._group(scale, columns, shape[1])
        raise ModelError(
            f"{scale}: has the shape {list(shape)}, which does not fit a matrix of {rows} by "
            f"{columns} in {self.scheme}"
        )

    def _group(self, name: str, columns: int, count: int) -> int:
        """Return the stated group size that gives `count` groups."""
        if count == 1:
            return columns
        for group in sorted(self.scheme.groups):
            if -(-columns // group) == count:
                return group
        raise ModelError(
            f"{name}: has {count} groups for {columns} inputs; that is not {self.scheme}"
        )

    def _shape(self, name: str, dims: int) -> tuple[int, ...]:
        shape = self.shapes.get(name)
        if shape is None:
            raise _missing(name)
        if len(shape) != dims:
            raise ModelError(f"{name}: has {len(shape)} dimensions; {dims} are served")
        return shape

    def _agrees(self, name: str, shape: tuple[int, ...], wanted: tuple[int, ...]) -> None:
        if shape != wanted:
            raise ModelError(
                f"{name}: has the shape {list(shape)}; with {self.scheme} it must be {list(wanted)}"
            )


def _missing(name: str) -> ModelError:
    return ModelError(f"{name}: is missing from the weights; the files are incomplete")
