"""Binding of the CPU kernels in cpu.c: functions on tensors, and types for packed weights and the
paged cache.

Results have the same bits for any number of rows or threads and at any level, except for bfloat16
with tiles (`uses_tiles`). A result row depends only on its input row (in attention, also on its
sequence). Activations are float32 and contiguous. Calls release the interpreter lock and run one at
a time.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

from penstock_shard.kernels.build_cpu import (
    MODEL_OF_TILES,
    TILES,
    KernelBuildError,
    libraries,
    wanted_levels,
)
from penstock_shard.kernels.c_calls import check, declare, plain, pointer, say
from penstock_shard.kernels.cpu_recurrent import RecurrentKernels
from penstock_shard.kernels.recorded_calls import RECORDABLE, RecordedCalls
from penstock_shard.kernels.weight_layouts import (
    CodeLayout,
    PackedWeight,
    WeightKind,
    bad_weight,
    empty_weight,
    rounding,
)

Activation = Literal["silu", "gelu_tanh", "sigmoid", "clamped_swiglu"]

ACTIVATIONS: tuple[Activation, ...] = ("silu", "gelu_tanh", "sigmoid", "clamped_swiglu")
# Block sizes are multiples of 16, because 16 keys form a tile.
KEY_TILE = 16

_CODES = 3
_SOURCE_TYPES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}


class _CacheStruct(ctypes.Structure):
    _fields_ = (
        ("keys", ctypes.c_void_p),
        ("values", ctypes.c_void_p),
        ("num_blocks", ctypes.c_int64),
        ("block_size", ctypes.c_int64),
        ("kv_heads", ctypes.c_int64),
        ("dim", ctypes.c_int64),
        ("dim_v", ctypes.c_int64),
        ("half", ctypes.c_int64),
    )


@dataclass(frozen=True, slots=True, eq=False)
class KvCache:
    """One layer's paged cache, float32 or float16. Slots are as in `attention.base`.

    keys [num_blocks, Hkv, block_size / 16, D, 16], values [num_blocks, Hkv, block_size, Dv]. If
    values are the first Dv elements of keys, `keys` is None and `values` [..., D] has both.
    """

    keys: Tensor | None
    values: Tensor
    kv_heads: int
    dim: int
    dim_v: int
    block_size: int
    _struct: _CacheStruct = field(repr=False)
    address: int = field(repr=False)

    @property
    def nbytes(self) -> int:
        return self.values.nbytes + (0 if self.keys is None else self.keys.nbytes)


def make_cache(
    num_blocks: int,
    block_size: int,
    kv_heads: int,
    dim: int,
    dim_v: int,
    dtype: torch.dtype,
    *,
    values_in_keys: bool = False,
) -> KvCache:
    """Return an uninitialised cache. The system commits its memory on the first write. With
    `values_in_keys`, values are the first dim_v elements of keys. Raises ValueError for an
    unsupported block size or dtype.
    """
    if block_size < 1 or block_size % KEY_TILE:
        raise ValueError(f"block_size is {block_size}; it must be a multiple of {KEY_TILE}")
    if dtype not in (torch.float32, torch.float16):
        raise ValueError(f"dtype is {dtype}; the CPU cache is float32 or float16")
    keys = None
    if not values_in_keys:
        keys = torch.empty(num_blocks, kv_heads, block_size // KEY_TILE, dim, KEY_TILE, dtype=dtype)
    # The memory has spare elements at its end, because kernels read 16 elements at a time, even
    # past a row's end.
    shape = (num_blocks, kv_heads, block_size, dim if values_in_keys else dim_v)
    room = math.prod(shape)
    values = torch.empty(room + KEY_TILE, dtype=dtype)[:room].view(shape)
    struct = _CacheStruct(
        pointer(keys),
        values.data_ptr(),
        num_blocks,
        block_size,
        kv_heads,
        dim,
        dim_v,
        int(dtype is torch.float16),
    )
    address = ctypes.addressof(struct)
    return KvCache(keys, values, kv_heads, dim, dim_v, block_size, struct, address)


class CpuKernels:
    """The kernels of one level; made by `load_kernels`."""

    def __init__(self, level: str, library: ctypes.CDLL) -> None:
        self.level = level
        self._differs = declare(library, "differs", "", ctypes.c_int64)
        self._set_threads = declare(library, "set_threads", "i", None)
        self._pack = declare(library, "pack", "piipiiipp", ctypes.c_int64)
        self._rows = self._declare(library, "rows")
        self._look_up = self._declare(library, "look_up")
        self._linear = self._declare(library, "linear")
        self._add_rms_norm = self._declare(library, "add_rms_norm")
        self._gated_activation = self._declare(library, "gated_activation")
        self._rope_and_cache = self._declare(library, "rope_and_cache")
        self._write_cache = self._declare(library, "write_cache")
        self._attention = self._declare(library, "attention")
        self._call_again = declare(library, "call_again", "pi", ctypes.c_int64)
        self.recurrent = RecurrentKernels(library)

    def __reduce__(self) -> tuple[object, ...]:
        return load_kernels, (self.level,)

    @staticmethod
    def _declare(library: ctypes.CDLL, name: str) -> Callable[..., Any]:
        result = None if name in ("add_rms_norm", "gated_activation") else ctypes.c_int64
        return declare(library, name, RECORDABLE[name], result)

    @contextmanager
    def recording(self) -> Iterator[RecordedCalls]:
        """Record all calls made in the context, except packing and `recurrent`."""
        recorded = RecordedCalls(self._call_again)
        functions = {name: getattr(self, f"_{name}") for name in RECORDABLE}
        for name, function in functions.items():
            setattr(self, f"_{name}", recorded.noting(name, function))
            setattr(self, name, recorded.holding(getattr(self, name)))
        try:
            yield recorded
        finally:
            for name, function in functions.items():
                setattr(self, f"_{name}", function)
                delattr(self, name)

    @property
    def uses_tiles(self) -> bool:
        """True if bfloat16 products are summed in the order of tile instructions; see tiles.h."""
        return self.level in (TILES, MODEL_OF_TILES)

    def check_instructions(self) -> None:
        """Raise KernelBuildError if this machine's instructions do not give exactly the defined
        results.
        """
        if self._differs():
            raise KernelBuildError(f"{self.level} instructions give other bits than defined")

    def set_threads(self, count: int) -> None:
        """Set the number of compute threads, including the caller. Results do not depend on it."""
        if count < 1:
            raise ValueError(f"threads is {count}; it must be at least 1")
        self._set_threads(count)

    def pack(self, weight: Tensor | Sequence[Tensor], kind: WeightKind) -> PackedWeight:
        """Pack a weight [n, k] of float32, float16 or bfloat16, with any strides.

        int8 has a scale for each row, int4 one for each 32 columns. Weights with the same k are
        stacked without an intermediate copy. Raises ValueError for a value that the kind cannot
        hold: NaN or beyond 65504 in float16, NaN or beyond 3.4e38 in bfloat16, not finite in int8
        and int4.
        """
        parts = (weight,) if isinstance(weight, Tensor) else tuple(weight)
        n, k = sum(part.shape[0] for part in parts), parts[0].shape[1]
        packed = empty_weight(n, k, rounding(kind, k))
        first = 0
        for part in parts:
            self._pack_part(packed, first, part, kind)
            first += part.shape[0]
        return packed

    def _pack_part(self, packed: PackedWeight, first: int, part: Tensor, kind: WeightKind) -> None:
        rows, k = part.shape
        if k != packed.k or part.dtype not in _SOURCE_TYPES:
            raise ValueError(
                f"weight is {say(part)}; it must have {packed.k} columns"
                " and be float32, float16 or bfloat16"
            )
        source = (part.data_ptr(), _SOURCE_TYPES[part.dtype], *part.stride())
        bad = self._pack(packed.address, first, rows, *source, None, None)
        if bad >= 0:
            raise ValueError(bad_weight(part, bad // k, bad % k, kind))

    def pack_codes(
        self, parts: Sequence[tuple[Tensor, Tensor, Tensor | None]], layout: CodeLayout
    ) -> PackedWeight:
        """Pack stacked parts: codes uint8 [n, k], scales and minimums float32 [n, ceil(k / group)].
        Raises ValueError if shapes do not fit together.
        """
        n, k = sum(len(values) for values, _, _ in parts), parts[0][0].shape[1]
        packed = empty_weight(n, k, layout)
        first = 0
        for values, scales, minimums in parts:
            groups = (len(values), -(-k // layout.group))
            fits = (minimums is not None) == layout.has_minimums and values.shape[1] == k
            if not fits or values.dtype is not torch.uint8 or scales.shape != groups:
                raise ValueError(f"codes {say(values)}, scales {say(scales)}, {layout}")
            source = values.contiguous()
            floats = [
                None if each is None else each.float().contiguous() for each in (scales, minimums)
            ]
            self._pack(
                packed.address,
                first,
                len(values),
                source.data_ptr(),
                _CODES,
                k,
                1,
                *map(pointer, floats),
            )
            first += len(values)
        return packed

    def rows(self, weight: PackedWeight, ids: Tensor) -> Tensor:
        """Return rows of the weight at ids int64 [T], float32 [T, k]. Raises IndexError for an id
        out of bounds.
        """
        out = torch.empty(len(ids), weight.k, dtype=torch.float32)
        ids = ids.contiguous()
        check(self._rows(weight.address, ids.data_ptr(), len(ids), out.data_ptr()))
        return out

    def look_up(self, table: Tensor, ids: Tensor) -> Tensor:
        """Return rows of a table [V, H] of float32, float16 or bfloat16 at ids int64 [T], float32
        [T, H]. Raises IndexError for an id out of bounds.
        """
        size, width = table.shape
        if not table.is_contiguous() or ids.dtype is not torch.int64 or not ids.is_contiguous():
            raise ValueError(f"look_up: table {say(table)}, ids {say(ids)}")
        out = torch.empty(len(ids), width, dtype=torch.float32)
        kind = _SOURCE_TYPES[table.dtype]
        check(
            self._look_up(
                table.data_ptr(), kind, size, width, ids.data_ptr(), len(ids), out.data_ptr()
            )
        )
        return out

    def linear(
        self, x: Tensor, weight: PackedWeight, bias: Tensor | None = None, out: Tensor | None = None
    ) -> Tensor:
        """Return x @ weight.T + bias, [T, n], for x [T, k] and bias float32 [n]. x is rounded to
        bfloat16 for a bfloat16 weight, and quantized to int8, with a scale for each row and group,
        for a weight with codes. Rows of `out` may have any stride.

        Raises MemoryError, like rope_and_cache and attention, if there is no scratch memory.
        """
        rows, k = x.shape
        if out is None:
            out = torch.empty(rows, weight.n, dtype=torch.float32)
        fits = out.shape == (rows, weight.n) and out.dtype is torch.float32
        if k != weight.k or not plain(x) or not fits or out.stride(1) != 1:
            raise ValueError(f"linear: x {say(x)}, weight [{weight.n}, {weight.k}], out {say(out)}")
        check(
            self._linear(
                x.data_ptr(), rows, weight.address, pointer(bias), out.data_ptr(), out.stride(0)
            )
        )
        return out

    def add_rms_norm(
        self,
        x: Tensor,
        residual: Tensor | None,
        weight: Tensor,
        eps: float,
        weight_offset: float = 0.0,
        out: Tensor | None = None,
    ) -> Tensor:
        """Return the RMSNorm of `residual += x` (of x if residual is None), times `weight_offset +
        weight`, [T, H]. `out` may be x.
        """
        rows, width = x.shape
        if out is None:
            out = torch.empty_like(x)
        fits = plain(x) and plain(out) and out.shape == x.shape and len(weight) == width
        if not fits or not (residual is None or (plain(residual) and residual.shape == x.shape)):
            raise ValueError(f"add_rms_norm: x {say(x)}, weight {say(weight)}, out {say(out)}")
        self._add_rms_norm(
            x.data_ptr(),
            pointer(residual),
            weight.data_ptr(),
            rows,
            width,
            eps,
            weight_offset,
            out.data_ptr(),
        )
        return out

    def gated_activation(
        self, gate_up: Tensor, kind: Activation, out: Tensor | None = None
    ) -> Tensor:
        """Return activation(a) * b, [T, I]: a and b are the first and second halves of each row of
        gate_up [T, 2I].
        """
        rows, width = gate_up.shape[0], gate_up.shape[1] // 2
        if out is None:
            out = torch.empty(rows, width, dtype=torch.float32)
        if not plain(gate_up) or not plain(out) or out.shape != (rows, width):
            raise ValueError(f"gated_activation: gate_up {say(gate_up)}, out {say(out)}")
        self._gated_activation(
            gate_up.data_ptr(), rows, width, ACTIVATIONS.index(kind), out.data_ptr()
        )
        return out

    def rope_and_cache(
        self,
        qkv: Tensor,
        cache: KvCache,
        positions: Tensor,
        slots: Tensor,
        cos: Tensor | None,
        sin: Tensor | None,
        *,
        q_norm: Tensor | None = None,
        k_norm: Tensor | None = None,
        eps: float = 0.0,
        weight_offset: float = 0.0,
        out: Tensor | None = None,
    ) -> Tensor:
        """Return rotated queries [T, Hq, D] of qkv [T, (Hq + 2 Hkv) * D]; write keys and values to
        the cache.

        positions and slots int64 [T]; slot -1 is not stored. cos and sin float32 [max_positions,
        rotary_dim / 2] rotate the first rotary_dim of D, in pairs (x[i], x[i + rotary_dim / 2]); if
        they are None, nothing is rotated. q_norm and k_norm [D] are weights of an RMSNorm over each
        head, before the rotation. Raises IndexError for a position or slot out of bounds.
        """
        rows = qkv.shape[0]
        heads = qkv.shape[1] // cache.dim - 2 * cache.kv_heads
        if out is None:
            out = torch.empty(rows, heads, cache.dim, dtype=torch.float32)
        if (
            not plain(qkv)
            or not plain(out)
            or qkv.shape[1] != (heads + 2 * cache.kv_heads) * cache.dim
            or cache.dim_v != cache.dim
            or out.shape != (rows, heads, cache.dim)
            or not len(positions) == len(slots) == rows
            or not positions.dtype is slots.dtype is torch.int64
        ):
            raise ValueError(
                f"rope_and_cache: qkv {say(qkv)}, cache of {cache.kv_heads} heads of {cache.dim},"
                f" positions {say(positions)}, slots {say(slots)}, out {say(out)}"
            )
        status = self._rope_and_cache(
            qkv.data_ptr(),
            rows,
            heads,
            cache.address,
            positions.data_ptr(),
            slots.data_ptr(),
            pointer(cos),
            pointer(sin),
            0 if cos is None else cos.shape[0],
            0 if cos is None else cos.shape[1],
            pointer(q_norm),
            pointer(k_norm),
            eps,
            weight_offset,
            out.data_ptr(),
        )
        check(status)
        return out

    def write_cache(self, cache: KvCache, key: Tensor, value: Tensor, slots: Tensor) -> None:
        """Store key [T, Hkv, D] and value [T, Hkv, Dv] at slots int64 [T]; -1 is skipped. If the
        cache has values in its keys, `value` is not read.
        """
        rows = len(slots)
        if (
            not plain(key)
            or not plain(value)
            or key.shape != (rows, cache.kv_heads, cache.dim)
            or value.shape != (rows, cache.kv_heads, cache.dim_v)
            or slots.dtype is not torch.int64
        ):
            raise ValueError(
                f"write_cache: key {say(key)}, value {say(value)}, slots {say(slots)},"
                f" cache of {cache.kv_heads} heads of {cache.dim}, {cache.dim_v}"
            )
        status = self._write_cache(
            cache.address, key.data_ptr(), value.data_ptr(), slots.data_ptr(), rows
        )
        check(status)

    def attention(
        self,
        query: Tensor,
        cache: KvCache,
        cu_queries: Tensor,
        seq_lens: Tensor,
        block_table: Tensor,
        *,
        scale: float,
        window: int | None = None,
        softcap: float | None = None,
        sinks: Tensor | None = None,
        bidirectional: Tensor | None = None,
        out: Tensor | None = None,
    ) -> Tensor:
        """Return attention [T, Hq, Dv] of query [T, Hq, D], causal within each sequence; see
        `attention.base`.

        cu_queries int32 [B + 1], seq_lens int32 [B], block_table int32 [B, M], sinks float32 [Hq],
        bidirectional int32 [B]: 1 if a sequence's queries see later keys too. The cache must have
        this step's keys and values already.
        """
        rows, heads, dim = query.shape
        if out is None:
            out = torch.empty(rows, heads, cache.dim_v, dtype=torch.float32)
        if (
            not plain(query)
            or not plain(out)
            or dim != cache.dim
            or heads % cache.kv_heads
            or out.shape != (rows, heads, cache.dim_v)
            or not len(cu_queries) - 1 == len(seq_lens) == len(block_table)
            or not cu_queries.dtype is seq_lens.dtype is block_table.dtype is torch.int32
            or (bidirectional is not None and bidirectional.shape != seq_lens.shape)
        ):
            raise ValueError(
                f"attention: query {say(query)}, cache of {cache.kv_heads} heads of {cache.dim},"
                f" {cache.dim_v}, seq_lens {say(seq_lens)}, block_table {say(block_table)}"
            )
        status = self._attention(
            query.data_ptr(),
            rows,
            heads,
            cache.address,
            cu_queries.data_ptr(),
            seq_lens.data_ptr(),
            block_table.data_ptr(),
            len(seq_lens),
            block_table.stride(0),
            scale,
            window or 0,
            softcap or 0.0,
            pointer(sinks),
            pointer(bidirectional),
            out.data_ptr(),
        )
        check(status)
        return out


_loaded: dict[str, CpuKernels] = {}


def load_kernels(
    level: str | None = None, progress: Callable[[str], None] = lambda line: None
) -> CpuKernels:
    """Return the kernels of `level`, with one thread. Without `level`, try
    `build_cpu.wanted_levels` in turn. A process loads each level once.

    `progress` gets a line if a better level does not load or the cache cannot be used. Raises
    KernelBuildError with one line if no level loads.
    """
    failures: list[str] = []
    levels = (level,) if level else wanted_levels()
    for candidate in levels:
        try:
            kernels = _loaded.get(candidate) or _load(candidate, progress)
        except KernelBuildError as error:
            # An old compiler may not know the newest instructions, so try the next level.
            failures.append(str(error))
            continue
        if failures:
            progress(f"cpu kernels of level {candidate}, not {levels[0]}: {failures[0]}")
        _loaded[candidate] = kernels
        return kernels
    raise KernelBuildError(failures[-1])


def _load(level: str, progress: Callable[[str], None]) -> CpuKernels:
    failure = ""
    try:
        for library in libraries(level, progress):
            try:
                kernels = CpuKernels(level, ctypes.CDLL(str(library)))
                kernels.check_instructions()
                return kernels
            except OSError as error:
                failure = f"cannot load the {level} kernels: {error}"
                progress(failure)
    except KernelBuildError as error:
        raise KernelBuildError("; ".join(filter(None, (failure, str(error))))) from error
    raise KernelBuildError(failure)
