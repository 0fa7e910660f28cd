"""Compares CPU kernels with torch's products, and with the speed of memory.

    python benchmarks/kernels.py [--threads 1 2] [--rows 1 8 64] [--json]

The layer has 768 inputs and 3,072 outputs. Weights alternate, so that they come from memory and not
from a cache. Contenders take turns, because a busy machine is slower for all; medians are printed.
PENSTOCK_CPU_LEVEL=avx2 (or portable) measures a lower level.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import cycle
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
sys.path.insert(0, str(Path(__file__).parent.parent / "shard"))

import torch
from torch import Tensor
from torch.nn import functional

from penstock_shard.kernels.cpu import CpuKernels, KvCache, load_kernels, make_cache
from penstock_shard.kernels.weight_layouts import WEIGHT_KINDS

N, K = 3072, 768
ROWS = (1, 2, 4, 8, 16, 64, 128, 512)
READ_BYTES = 1 << 29
# The least bytes of all contenders' weights, if caches are smaller.
LEAST_ROTATED_BYTES = 1 << 28


@dataclass(frozen=True, slots=True)
class Result:
    what: str
    threads: int
    case: str
    us: float
    gb_s: float
    gflop_s: float

    def __str__(self) -> str:
        return (
            f"{self.threads:>2}  {self.case:<44}{self.what:<15}"
            f"{self.us:>10.0f} us{self.gb_s:>8.1f} GB/s{self.gflop_s:>8.1f} GFLOP/s"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--rows", type=int, nargs="+", default=list(ROWS))
    parser.add_argument("--turns", type=int, default=25)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    kernels = load_kernels()
    if not args.json:
        print(
            f"level {kernels.level}, torch {torch.__version__}, last cache {_cache_bytes()} bytes"
        )
    results = []
    for threads in args.threads:
        torch.set_num_threads(threads)
        kernels.set_threads(threads)
        for result in (
            *_reading(threads, args.turns),
            *_linear(kernels, threads, args.rows, args.turns),
            *_attention(kernels, threads, args.turns),
        ):
            results.append(result)
            if not args.json:
                print(result, flush=True)
    if args.json:
        print(json.dumps({"level": kernels.level, "results": [asdict(r) for r in results]}))


def _reading(threads: int, turns: int) -> Iterator[Result]:
    block = torch.ones(READ_BYTES // 4)
    (seconds,) = _medians([lambda: block.sum()], min(turns, 7))
    yield Result("sum", threads, "reading memory", seconds * 1e6, READ_BYTES / seconds / 1e9, 0)


def _linear(kernels: CpuKernels, threads: int, rows: list[int], turns: int) -> Iterator[Result]:
    contenders = dict(_contenders(kernels))
    for count in rows:
        x = torch.randn(count, K)
        runs = [_rotating(products, x) for _, products in contenders.values()]
        for (name, (size, _)), seconds in zip(
            contenders.items(), _medians(runs, turns), strict=True
        ):
            flops = 2 * count * N * K
            yield Result(
                name,
                threads,
                f"linear {K} x {N}, {count} rows",
                seconds * 1e6,
                size / seconds / 1e9,
                flops / seconds / 1e9,
            )


Product = Callable[[Tensor], object]


def _contenders(kernels: CpuKernels) -> Iterator[tuple[str, tuple[int, list[Product]]]]:
    """Yield names, the bytes of a weight, and more weights than fit into caches."""
    weight = torch.randn(N, K) * K**-0.5
    for kind in WEIGHT_KINDS:
        size = kernels.pack(weight, kind).nbytes
        packed = [kernels.pack(weight, kind) for _ in range(_copies(size))]
        yield kind, (size, _products(kernels.linear, packed))
    copies = [weight.clone() for _ in range(_copies(weight.nbytes))]
    yield "torch float32", (weight.nbytes, _products(functional.linear, copies))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        prepack = torch.ops.quantized.linear_prepack_fp16
        halves = [prepack(weight, None) for _ in range(_copies(weight.nbytes // 2))]
    multiply = torch.ops.quantized.linear_dynamic_fp16
    yield "torch float16", (weight.nbytes // 2, _products(multiply, halves))


def _products(linear: Callable[[Tensor, Any], object], weights: Sequence[object]) -> list[Product]:
    def product(weight: object) -> Product:
        return lambda x: linear(x, weight)

    return [product(weight) for weight in weights]


def _rotating(products: list[Product], x: Tensor) -> Callable[[], object]:
    turn = cycle(products)
    return lambda: next(turn)(x)


def _copies(size: int) -> int:
    # Each of five contenders evicts the others' weights.
    return max(2, 2 * max(_cache_bytes(), LEAST_ROTATED_BYTES) // (5 * size))


def _cache_bytes() -> int:
    """Return the size of the last-level cache; 0 if the kernel does not tell it."""
    sizes = Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size")
    return max((int(size.read_text().strip().rstrip("K")) << 10 for size in sizes), default=0)


@dataclass(frozen=True, slots=True)
class Shape:
    heads: int
    kv_heads: int
    dim: int
    sequences: int
    queries: int
    length: int

    def __str__(self) -> str:
        return (
            f"{self.sequences} x {self.queries} of {self.length}, "
            f"{self.heads}/{self.kv_heads} x {self.dim}"
        )


SHAPES = (
    Shape(12, 4, 64, sequences=1, queries=1, length=4096),
    Shape(12, 4, 64, sequences=16, queries=1, length=160),
    Shape(32, 8, 128, sequences=4, queries=1, length=1024),
    Shape(12, 4, 64, sequences=1, queries=512, length=512),
    Shape(32, 8, 128, sequences=1, queries=256, length=2048),
)


def _attention(kernels: CpuKernels, threads: int, turns: int) -> Iterator[Result]:
    for shape in SHAPES:
        runs, sizes = [], []
        for dtype in (torch.float32, torch.float16):
            run, size = _attending(kernels, shape, dtype)
            runs.append(run)
            sizes.append(size)
        seen = shape.queries * shape.length - shape.queries * (shape.queries - 1) // 2
        flops = 4 * shape.sequences * shape.heads * seen * shape.dim
        for name, size, seconds in zip(
            ("cache float32", "cache float16"), sizes, _medians(runs, turns), strict=True
        ):
            case = f"attention {shape}"
            yield Result(
                name, threads, case, seconds * 1e6, size / seconds / 1e9, flops / seconds / 1e9
            )


def _attending(
    kernels: CpuKernels, shape: Shape, dtype: torch.dtype
) -> tuple[Callable[[], object], int]:
    """Return a call of attention over alternating caches, and the bytes that it reads of one."""
    blocks = shape.sequences * -(-shape.length // 16)
    size = 2 * blocks * 16 * shape.kv_heads * shape.dim * dtype.itemsize
    caches = cycle([_filled(shape, blocks, dtype) for _ in range(_copies(size))])
    query = torch.randn(shape.sequences * shape.queries, shape.heads, shape.dim)
    ends = torch.arange(shape.sequences + 1, dtype=torch.int32) * shape.queries
    lengths = torch.full((shape.sequences,), shape.length, dtype=torch.int32)
    table = torch.randperm(blocks, dtype=torch.int32).view(shape.sequences, -1)
    scale = shape.dim**-0.5

    def run() -> Tensor:
        return kernels.attention(query, next(caches), ends, lengths, table, scale=scale)

    return run, size


def _filled(shape: Shape, blocks: int, dtype: torch.dtype) -> KvCache:
    cache = make_cache(blocks, 16, shape.kv_heads, shape.dim, shape.dim, dtype)
    assert cache.keys is not None
    cache.keys.fill_(0.1)
    cache.values.fill_(0.1)
    return cache


def _medians(runs: list[Callable[[], object]], turns: int) -> list[float]:
    """Return the median seconds of each; they take turns."""
    times: list[list[float]] = [[] for _ in runs]
    for _ in range(turns):
        for run, seconds in zip(runs, times, strict=True):
            started_s = time.perf_counter()
            run()
            seconds.append(time.perf_counter() - started_s)
    return [statistics.median(seconds) for seconds in times]


if __name__ == "__main__":
    main()
