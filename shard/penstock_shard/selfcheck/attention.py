"""Test steps of attention on random tokens. Their results reveal one key too many or too few.

Each query has a high score with at most one key, whose value dominates the result: its own, the
first that it sees, the last before its window, the next after its own, or one in the middle.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from penstock_shard.attention.base import (
    AttentionBackend,
    AttentionBatch,
    LayerSpec,
)

# The score of the key that dominates a query; other scores vary around 0.
_LEAN = 12.0
# No sequence fills a longer window, because the keys would take too much memory.
_LONGEST_WINDOW = 8192
# Unused columns of the block table, as in steps captured as a CUDA graph.
_SPARE_COLUMNS = 3


@dataclass(frozen=True, slots=True)
class Tokens:
    """A sequence of n tokens: query [m, Hq, D] of the last m tokens, key [n, Hkv, D], value [n,
    Hkv, Dv].
    """

    query: Tensor
    key: Tensor
    value: Tensor

    def __len__(self) -> int:
        return len(self.key)

    def queries(self, span: slice) -> Tensor:
        before = len(self.key) - len(self.query)
        return self.query[span.start - before : span.stop - before]


@dataclass(frozen=True, slots=True)
class Outcome:
    """A step's attention [T, Hq, Dv]; `num_decodes` counts decode rows."""

    attended: Tensor
    num_decodes: int


@dataclass(frozen=True, slots=True)
class AttentionCase:
    """Sequences for one layer, and the division of their tokens into steps."""

    spec: LayerSpec
    sequences: tuple[Tokens, ...]
    # Scores of a virtual key, [Hq], if the layer has sinks.
    sinks: Tensor | None
    # For each sequence: the number of tokens that are only written to the cache, then of each step.
    steps: tuple[tuple[int, ...], ...]

    def run(
        self,
        backend: AttentionBackend,
        block_size: int,
        dtype: torch.dtype,
        kv_dtype: torch.dtype,
    ) -> Iterator[Outcome]:
        """Run the steps on a cache of `kv_dtype`, with queries rounded to `dtype`."""
        device = self.sequences[0].key.device
        width = -(-max(map(len, self.sequences)) // block_size)
        order = torch.randperm(
            len(self.sequences) * width, generator=torch.Generator().manual_seed(1)
        )
        tables = order.view(len(self.sequences), width)
        cache = backend.make_cache(self.spec, len(order), block_size, kv_dtype, device)
        done = [0] * len(self.sequences)
        for number, counts in enumerate(zip(*self.steps, strict=True)):
            rows = [i for i, count in enumerate(counts) if count]
            rows.sort(key=lambda i: counts[i] != 1)
            batch = _batch(rows, counts, done, tables, block_size, device)
            spans = [(self.sequences[i], slice(done[i], done[i] + counts[i])) for i in rows]
            key = torch.cat([tokens.key[span] for tokens, span in spans]).to(dtype)
            value = torch.cat([tokens.value[span] for tokens, span in spans]).to(dtype)
            backend.write(cache, key, value, batch.slots)
            done = [before + count for before, count in zip(done, counts, strict=True)]
            if number == 0:
                continue
            query = torch.cat([tokens.queries(span) for tokens, span in spans]).to(dtype)
            attended = backend.attend(
                cache,
                query,
                batch,
                scale=self.spec.scale,
                window=self.spec.window,
                softcap=self.spec.softcap,
                sinks=None if self.sinks is None else self.sinks.to(dtype),
            )
            yield Outcome(attended, batch.num_decodes)


def make_case(
    spec: LayerSpec,
    dtype: torch.dtype,
    kv_dtype: torch.dtype,
    device: torch.device,
    most_queries: int,
) -> AttentionCase:
    """Make sequences of several lengths, one longer than the layer's window. Both dtypes hold their
    keys and values exactly. The last `most_queries` tokens of each sequence are computed.
    """
    lengths = [1, 16, 40, 300, 530]
    if spec.window is not None and spec.window <= _LONGEST_WINDOW:
        lengths.append(spec.window + 70)
    generator = torch.Generator(device).manual_seed(0)

    def noise(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, device=device)

    def tokens(length: int) -> Tokens:
        key = noise(length, spec.num_kv_heads, spec.head_dim).to(dtype).to(kv_dtype).float()
        value = noise(length, spec.num_kv_heads, spec.head_dim_v).to(dtype).to(kv_dtype).float()
        own = noise(min(length, most_queries), spec.num_heads, spec.head_dim)
        return Tokens((own + _leaning(spec, key, len(own))).to(dtype).float(), key, value)

    return AttentionCase(
        spec,
        tuple(tokens(length) for length in lengths),
        noise(spec.num_heads).to(dtype).float() if spec.has_sinks else None,
        tuple(_steps(length, most_queries, even) for even, length in enumerate(lengths)),
    )


def _leaning(spec: LayerSpec, key: Tensor, num_queries: int) -> Tensor:
    """Return a term, [num_queries, Hq, D], to add to the queries of the last tokens. It gives each
    query the score `_LEAN` with the key that should dominate its result.
    """
    count, heads = len(key), spec.num_heads
    own = torch.arange(count - num_queries, count, device=key.device).unsqueeze(1)
    head = torch.arange(heads, device=key.device).unsqueeze(0)
    first = own - (spec.window or count) + 1
    kinds = torch.stack([own, first, first - 1, own + 1, own - 1 - own // 2]).expand(-1, -1, heads)
    choice = (own + head) % (len(kinds) + 1)
    at = kinds.gather(0, choice.clamp(max=len(kinds) - 1).unsqueeze(0)).squeeze(0)
    leans = (choice < len(kinds)) & (at >= 0) & (at < count)
    at = at.clamp(0, count - 1)
    chosen = key[at, (head // (heads // spec.num_kv_heads)).expand_as(at)]
    strength = _LEAN / (chosen.square().sum(dim=-1, keepdim=True).clamp(min=1e-3) * spec.scale)
    return chosen * strength * leans.unsqueeze(-1)


def _steps(length: int, most_queries: int, number: int) -> tuple[int, ...]:
    """Return the number of tokens that are only written to the cache, then the number in each step:
    a chunk, then a decode and the rest in either order.
    """
    written = max(0, length - most_queries)
    left = length - written
    chunk = max(1, left // 2)
    rest = left - chunk
    if number % 2:
        return (written, chunk, max(0, rest - 1), min(1, rest))
    return (written, chunk, min(1, rest), max(0, rest - 1))


def _batch(
    rows: list[int],
    counts: tuple[int, ...],
    done: list[int],
    tables: Tensor,
    block_size: int,
    device: torch.device,
) -> AttentionBatch:
    query_lens = [counts[i] for i in rows]
    seq_lens = [done[i] + counts[i] for i in rows]
    slots = []
    for i in rows:
        position = torch.arange(done[i], done[i] + counts[i])
        slots.append(tables[i, position // block_size] * block_size + position % block_size)

    def int32(values: list[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int32, device=device)

    table = torch.zeros(len(rows), tables.shape[1] + _SPARE_COLUMNS, dtype=torch.int32)
    for row, i in enumerate(rows):
        used = -(-seq_lens[row] // block_size)
        table[row, :used] = tables[i, :used]
    return AttentionBatch(
        query_lens=query_lens,
        seq_lens=seq_lens,
        num_decodes=sum(count == 1 for count in query_lens),
        block_size=block_size,
        slots=torch.cat(slots).to(device),
        cu_queries=int32([0, *itertools.accumulate(query_lens)]),
        cu_keys=int32([0, *itertools.accumulate(seq_lens)]),
        seq_lens_tensor=int32(seq_lens),
        block_table=table.to(device),
    )
