"""Measures reads of a cache of latents by a decode step, and blocks of a long context with windows.

    python benchmarks/caches.py
    python benchmarks/caches.py --context-tokens 32768 --threads 2 --kv-dtype float32

First, a decode step of one layer of latent attention, with the sizes of DeepSeek-V2-Lite, on the
CPU kernels: over cached latents, as served (absorbed), and over cached keys and values of all heads
(naive). Both write the new token's, compute the products with `kv_b_proj`, and must give the same
values. They take turns over several caches, so that these come from memory. Prints medians of time,
and of CPU time in all threads, because a busy machine makes the time longer. Then, the blocks of
one sequence in the block manager, for layers with a window and for layers that see everything.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

import torch
from support.engines import make_sequence
from torch import Tensor

from penstock_shard.ipc.runner_info import CacheGroup
from penstock_shard.kernels.cpu import CpuKernels, KvCache, load_kernels, make_cache
from penstock_shard.kv_cache.block_manager import BlockManager
from penstock_shard.models.latent_heads import LatentHeads
from penstock_shard.ops.cpu_ops import CpuOps

HEADS, RANK, ROTATED, PLAIN, VALUE = 16, 512, 64, 128, 128
BLOCK_TOKENS = 16
# The least bytes of one way's caches, several times the processor's cache.
LEAST_ROTATED_BYTES = 1 << 28


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--context-tokens", type=int, default=8192)
    parser.add_argument("--kv-dtype", choices=("float16", "float32"), default="float16")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--turns", type=int, default=51)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    show_reads(args)
    show_held(window=1024, context_tokens=32_000, chunk_tokens=512)


# ---- reads of a step ---------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Way:
    """A way to attend: the bytes of cache that a step reads, and the step, which returns [1, H,
    V].
    """

    name: str
    read_bytes: int
    step: Callable[[], Tensor]


def show_reads(args: argparse.Namespace) -> None:
    layer = LatentLayer(args.context_tokens, getattr(torch, args.kv_dtype), args.threads)
    ways = (layer.absorbed(), layer.naive())
    absorbed, naive = ways[0].step(), ways[1].step()
    assert (absorbed - naive).abs().max() < 0.02 * naive.std(), "the two ways differ"
    print(
        f"one decode step at {args.context_tokens:,} tokens of context, a layer of {HEADS} heads, "
        f"KV cache {args.kv_dtype}, threads {args.threads}"
    )
    times = median_times_s(ways, args.turns)
    for way, (elapsed_s, cpu_s) in zip(ways, times, strict=True):
        share, cpu_share = way.read_bytes / ways[1].read_bytes, cpu_s / times[1][1]
        print(
            f"  {way.name:<9} reads {way.read_bytes / 1e6:6.1f} MB, {share:5.3f} of naive; "
            f"takes {elapsed_s * 1e3:6.2f} ms, CPU time {cpu_s * 1e3:6.2f} ms, "
            f"{cpu_share:4.2f} of naive"
        )


def median_times_s(ways: tuple[Way, ...], turns: int) -> list[tuple[float, float]]:
    """Return the median seconds and CPU seconds of a step of each way; ways take turns."""
    times: list[list[tuple[float, float]]] = [[] for _ in ways]
    for _ in range(turns):
        for way, taken in zip(ways, times, strict=True):
            started_s, cpu_started_s = time.perf_counter(), time.process_time()
            way.step()
            taken.append((time.perf_counter() - started_s, time.process_time() - cpu_started_s))
    return [
        (statistics.median(elapsed), statistics.median(cpu))
        for elapsed, cpu in (zip(*taken, strict=True) for taken in times)
    ]


class LatentLayer:
    """Computes the last token of a sequence, step by step, in a layer of random weights."""

    def __init__(self, num_tokens: int, dtype: torch.dtype, threads: int) -> None:
        self._kernels: CpuKernels = load_kernels()
        self._kernels.set_threads(threads)
        self._ops = CpuOps(self._kernels, "float16")
        self._dtype = dtype
        # kv_b_proj: makes keys, without the rotated part, and values of a latent.
        self._weight = torch.randn(HEADS * (PLAIN + VALUE), RANK) * RANK**-0.5
        self._matrix = self._ops.pack([self._weight])
        self._query = torch.randn(1, HEADS, PLAIN + ROTATED)
        self._rows = torch.randn(num_tokens, 1, RANK + ROTATED)
        self._num_blocks = -(-num_tokens // BLOCK_TOKENS)
        self._slots = torch.arange(num_tokens)

    def absorbed(self) -> Way:
        heads = LatentHeads.of(self._weight, HEADS, PLAIN, self._ops)
        caches, read_bytes = self._caches(self._rows, self._rows[..., :RANK], values_in_keys=True)
        row = self._rows[-1:]

        def step() -> Tensor:
            attended = self._attend(next(caches), heads.absorb(self._query), row, row[..., :RANK])
            return heads.expand(attended)

        return Way("absorbed", read_bytes, step)

    def naive(self) -> Way:
        caches, read_bytes = self._caches(*self._keys_and_values(self._rows))

        def step() -> Tensor:
            key, value = self._keys_and_values(self._rows[-1:])
            return self._attend(next(caches), self._query, key, value)

        return Way("naive", read_bytes, step)

    def _keys_and_values(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Make keys [T, H, N + P] and values [T, H, V] of rows [T, 1, R + P]."""
        latents = rows[:, 0, :RANK].contiguous()
        expanded = self._matrix.linear(latents).view(-1, HEADS, PLAIN + VALUE)
        rotated = rows[..., RANK:].expand(-1, HEADS, -1)
        return torch.cat((expanded[..., :PLAIN], rotated), dim=-1), expanded[..., PLAIN:]

    def _caches(
        self, key: Tensor, value: Tensor, *, values_in_keys: bool = False
    ) -> tuple[Iterator[KvCache], int]:
        """Return caches with the same content, in an endless cycle, and the bytes of one."""
        _, heads, dim = key.shape
        sizes = (self._num_blocks, BLOCK_TOKENS, heads, dim, value.shape[-1])
        caches: list[KvCache] = []
        while sum(cache.nbytes for cache in caches) < LEAST_ROTATED_BYTES:
            cache = make_cache(*sizes, self._dtype, values_in_keys=values_in_keys)
            self._kernels.write_cache(cache, key.contiguous(), value.contiguous(), self._slots)
            caches.append(cache)
        return cycle(caches), caches[0].nbytes

    def _attend(self, cache: KvCache, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        self._kernels.write_cache(cache, key.contiguous(), value.contiguous(), self._slots[-1:])
        return self._kernels.attention(
            query,
            cache,
            torch.tensor([0, 1], dtype=torch.int32),
            torch.tensor([len(self._slots)], dtype=torch.int32),
            torch.arange(self._num_blocks, dtype=torch.int32)[None],
            scale=(PLAIN + ROTATED) ** -0.5,
        )


# ---- blocks of a sequence ----------------------------------------------------------------------


def show_held(*, window: int, context_tokens: int, chunk_tokens: int) -> None:
    prompt, decode = held_tokens(window, context_tokens, chunk_tokens)
    print(
        f"tokens that a sequence of {context_tokens:,} holds at most in a layer, in steps of "
        f"{chunk_tokens}, blocks of {BLOCK_TOKENS}"
    )
    for name, group in ((f"a window of {window:,}", 0), ("everything", 1)):
        print(
            f"  layers that see {name:<17} {prompt[group]:6,} in its prompt, "
            f"{decode[group]:6,} while it decodes"
        )
    most = window + chunk_tokens + BLOCK_TOKENS
    print(f"  a window, a step and a block are {most:,}")


def held_tokens(
    window: int, context_tokens: int, chunk_tokens: int
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the most tokens in blocks, while a prompt is computed and in a thousand decode steps
    after it; each for layers with and without the window.
    """
    groups = (CacheGroup(window=window), CacheGroup(pool=1))
    num_blocks = 2 * context_tokens // BLOCK_TOKENS
    blocks = BlockManager(
        [num_blocks] * 2, BLOCK_TOKENS, groups=groups, max_chunk_tokens=chunk_tokens
    )
    sequence = make_sequence(prompt=range(context_tokens))

    def held_after(start: int, end: int) -> tuple[int, ...]:
        """Count tokens in blocks after a step computes [start, end)."""
        blocks.slide(sequence, start)
        assert blocks.grow(sequence, end), "no blocks are left"
        return tuple(len(blocks.blocks_of(sequence, group)) * BLOCK_TOKENS for group in range(2))

    chunks = range(0, context_tokens, chunk_tokens)
    decodes = range(context_tokens, context_tokens + 1000)
    prompt = [held_after(start, min(context_tokens, start + chunk_tokens)) for start in chunks]
    decode = [held_after(start, start + 1) for start in decodes]
    return _most(prompt), _most(decode)


def _most(held: list[tuple[int, ...]]) -> tuple[int, ...]:
    return tuple(map(max, zip(*held, strict=True)))


if __name__ == "__main__":
    main()
