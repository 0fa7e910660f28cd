"""One table of cases for all attention backends, and attention by its definition.

Every backend runs every case, or must say beforehand that it does not serve it.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from penstock_shard.attention.base import AttentionBackend, AttentionBatch, LayerSpec

F32, F16, BF16, F8 = torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn
SEED = 20
CPU = torch.device("cpu")


@dataclass(frozen=True)
class Case:
    """A layer, the sequences over it, and how they are stored."""

    name: str
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 16
    head_dim_v: int | None = None
    scale: float | None = None
    window: int | None = None
    softcap: float | None = None
    sinks: bool = False
    # Values are the first elements of the keys.
    latent: bool = False
    dtype: torch.dtype = F32
    kv_dtype: torch.dtype | None = None
    # What the first step computes of a sequence is an image, and what the last one does.
    images: bool = False
    # Rounded up to what the backend takes.
    block_size: int = 16
    lengths: tuple[int, ...] = (37, 9, 17, 4)

    @property
    def spec(self) -> LayerSpec:
        return LayerSpec(
            0,
            self.heads,
            self.kv_heads,
            self.head_dim,
            self.head_dim_v or self.head_dim,
            self.scale or self.head_dim**-0.5,
            self.window,
            self.softcap,
            self.sinks,
            values_in_keys=self.latent,
        )

    @property
    def cached_as(self) -> torch.dtype:
        return self.kv_dtype or self.dtype

    def blocks_for(self, backend: AttentionBackend) -> int:
        return -(-self.block_size // backend.block_multiple) * backend.block_multiple

    def __str__(self) -> str:
        return self.name


_ALL_AT_ONCE = {"window": 7, "softcap": 2.0, "sinks": True}
CASES = (
    # How many query heads share a KV head.
    Case("mha", heads=3, kv_heads=3),
    Case("gqa"),
    Case("mqa", heads=8, kv_heads=1),
    Case("seven queries a head", heads=14, kv_heads=2),
    Case("mha in bf16", heads=3, kv_heads=3, dtype=BF16),
    Case("mqa in fp16", heads=8, kv_heads=1, dtype=F16),
    # Head sizes.
    *(
        Case(f"heads of {size} in {name}", heads=2, kv_heads=1, head_dim=size, dtype=dtype)
        for size in (16, 64, 80, 96, 128, 256)
        for name, dtype in (("fp32", F32), ("bf16", BF16))
    ),
    Case("heads of 8", head_dim=8),
    Case("heads of 20 and values of 7", head_dim=20, head_dim_v=7),
    Case("heads of 12 in fp16", head_dim=12, dtype=F16),
    Case("heads of 192", heads=2, kv_heads=1, head_dim=192, dtype=F16),
    Case("heads of 320", heads=1, kv_heads=1, head_dim=320, dtype=BF16, lengths=(20,)),
    Case("wider values", head_dim_v=32),
    Case("wider values in bf16", head_dim_v=32, dtype=BF16),
    Case("narrower values in bf16", heads=2, head_dim=192, head_dim_v=128, dtype=BF16),
    Case("odd values in bf16", heads=2, head_dim=128, head_dim_v=64, dtype=BF16),
    # What a layer can ask for.
    *(
        Case(f"{name} in {kind}", dtype=dtype, **options)
        for name, options in (
            ("scale", {"scale": 0.7}),
            ("window", {"window": 7}),
            ("window of 1", {"window": 1}),
            ("window of a block", {"window": 16}),
            ("window never filled", {"window": 100}),
            ("softcap", {"softcap": 1.5}),
            ("window and softcap", {"window": 5, "softcap": 2.0}),
            ("sinks", {"sinks": True}),
            ("all", _ALL_AT_ONCE),
        )
        for kind, dtype in (("fp32", F32), ("fp16", F16), ("bf16", BF16))
    ),
    *(
        Case(name, heads=heads, kv_heads=1, head_dim=dim, head_dim_v=dim_v, latent=True, **options)
        for name, heads, dim, dim_v, options in (
            ("latents", 5, 48, 32, {}),
            ("latents of odd sizes", 3, 21, 13, {"lengths": (70, 33)}),
            ("latents past 256 with all", 2, 40, 32, {"lengths": (300, 12), **_ALL_AT_ONCE}),
            ("latents of 576", 4, 576, 512, {"lengths": (40, 3)}),
            ("latents in an fp16 cache", 5, 40, 32, {"kv_dtype": F16}),
            ("latents in an fp8 cache", 5, 40, 32, {"kv_dtype": F8}),
            ("latents in bf16", 5, 48, 32, {"dtype": BF16}),
        )
    ),
    # Images, whose tokens see later ones too.
    *(
        Case(f"images{name}", images=True, **options)
        for name, options in (
            ("", {}),
            (" in a window", {"window": 7}),
            (" with all", _ALL_AT_ONCE),
            (" past 256", {"heads": 2, "kv_heads": 1, "lengths": (300, 600), "window": 150}),
            (" in bf16", {"dtype": BF16}),
            (" in a window in bf16", {"dtype": BF16, "window": 7}),
        )
    ),
    # Keys and values kept in fewer bits.
    Case("fp16 cache", kv_dtype=F16),
    Case("fp16 cache under bf16", dtype=BF16, kv_dtype=F16),
    Case("fp8 cache", kv_dtype=F8),
    Case("fp8 cache under bf16", dtype=BF16, kv_dtype=F8),
    Case("fp8 cache, all", kv_dtype=F8, **_ALL_AT_ONCE),  # type: ignore[arg-type]
    # Blocks, and lengths at their edges and past several of them.
    Case("blocks of 32", block_size=32, lengths=(70, 33, 32, 31)),
    Case("blocks of 64 in bf16", block_size=64, dtype=BF16, lengths=(70, 64, 65)),
    Case("blocks of 512 in bf16", block_size=512, dtype=BF16, lengths=(70, 3)),
    Case("full blocks", lengths=(16, 32, 48, 17)),
    Case("past 256", heads=2, kv_heads=1, lengths=(300, 257, 256, 255)),
    Case("past 256 in bf16", heads=2, kv_heads=1, dtype=BF16, lengths=(300, 257, 256, 255)),
    Case("past 512 in a window", heads=2, kv_heads=1, dtype=BF16, window=270, lengths=(530, 12)),
    Case("one token", lengths=(1,)),
    Case("one token each in bf16", dtype=BF16, lengths=(1, 1, 1)),
    Case("one sequence", lengths=(40,), dtype=F16),
)
TOLERANCE = {F32: 2e-5, F16: 3e-3, BF16: 2e-2}


@dataclass(frozen=True)
class Expected:
    """Query, key and value of each sequence as they are given, and attention by its definition."""

    sequences: tuple[tuple[Tensor, Tensor, Tensor], ...]
    sinks: Tensor | None
    attended: tuple[Tensor, ...]


@functools.cache
def expected(case: Case) -> Expected:
    generator = torch.Generator().manual_seed(SEED)

    def noise(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(case.dtype)

    spec = case.spec
    sequences = tuple(
        (
            # Scores of about 2, so that some keys matter much more than others.
            2 * noise(n, spec.num_heads, spec.head_dim),
            noise(n, spec.num_kv_heads, spec.head_dim),
            noise(n, spec.num_kv_heads, spec.head_dim_v),
        )
        for n in case.lengths
    )
    if spec.values_in_keys:
        sequences = tuple((q, key, key[..., : spec.head_dim_v]) for q, key, _ in sequences)
    sinks = 2 * noise(spec.num_heads) if spec.has_sinks else None
    attended = tuple(
        by_definition(
            query.double(),
            key.to(case.cached_as).double(),
            value.to(case.cached_as).double(),
            spec,
            None if sinks is None else sinks.double(),
            _sight(case, index),
        )
        for index, (query, key, value) in enumerate(sequences)
    )
    return Expected(sequences, sinks, attended)


def _sight(case: Case, index: int) -> list[int]:
    """Before which key the sight of each query of a sequence ends."""
    length = case.lengths[index]
    ends = list(range(1, length + 1))
    if case.images:
        first, _, last = (step[index] for step in _steps(case.lengths))
        ends[:first] = [first] * first
        ends[length - last :] = [length] * last
    return ends


def by_definition(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    spec: LayerSpec,
    sinks: Tensor | None,
    ends: Sequence[int],
) -> Tensor:
    """Attention of a whole sequence, query by query and head by head."""
    length, heads, _ = query.shape
    group = heads // key.shape[1]
    output = torch.empty(length, heads, value.shape[2], dtype=query.dtype)
    for i, head in itertools.product(range(length), range(heads)):
        first = 0 if spec.window is None else max(0, i - spec.window + 1)
        scores = key[first : ends[i], head // group] @ query[i, head] * spec.scale
        if spec.softcap is not None:
            scores = spec.softcap * torch.tanh(scores / spec.softcap)
        if sinks is not None:
            scores = torch.cat((scores, sinks[head : head + 1]))
        weights = torch.softmax(scores, dim=0)[: ends[i] - first]
        output[i, head] = weights @ value[first : ends[i], head // group]
    return output


def check_case(backend: AttentionBackend, case: Case, device: torch.device = CPU) -> None:
    """A chunk of each sequence, then decodes beside chunks, then the rest, over shuffled blocks in
    a table with columns to spare.
    """
    print(f"seed {SEED}")
    want = expected(case)
    spec, count = case.spec, len(case.lengths)
    block_size = case.blocks_for(backend)
    width = -(-max(case.lengths) // block_size)
    shuffled = torch.randperm(count * width, generator=torch.Generator().manual_seed(SEED))
    blocks = shuffled.view(count, width)
    cache = backend.make_cache(spec, blocks.numel(), block_size, case.cached_as, device)
    soil(cache, backend)
    done = [0] * count
    for number, step in enumerate(_steps(case.lengths)):
        rows = sorted((i for i in range(count) if step[i]), key=lambda i: step[i] != 1)
        if not rows:
            continue
        spans = [slice(done[i], done[i] + step[i]) for i in rows]
        batch = make_batch(
            [step[i] for i in rows],
            [done[i] + step[i] for i in rows],
            blocks[rows],
            block_size,
            device,
            bidirectional=case.images and number != 1,
        )
        query, key, value = (
            torch.cat(
                [want.sequences[i][part][span] for i, span in zip(rows, spans, strict=True)]
            ).to(device)
            for part in range(3)
        )
        if backend.name == "triton" and device == CPU:
            # Its interpreter rounds to 8 bits wrongly where a carry reaches the exponent.
            key, value = (part.to(case.cached_as).to(case.dtype) for part in (key, value))
        backend.write(cache, key, value, batch.slots)
        got = backend.attend(
            cache,
            query,
            batch,
            scale=spec.scale,
            window=spec.window,
            softcap=spec.softcap,
            sinks=None if want.sinks is None else want.sinks.to(device),
        )
        assert got.dtype == case.dtype
        attended = torch.cat([want.attended[i][s] for i, s in zip(rows, spans, strict=True)])
        tolerance = TOLERANCE[case.dtype]
        torch.testing.assert_close(got.cpu().double(), attended, atol=tolerance, rtol=tolerance)
        done = [before + more for before, more in zip(done, step, strict=True)]
    assert done == list(case.lengths)


def soil(cache: object, backend: AttentionBackend) -> None:
    """Fill the cache with values that must not matter: NaN, or zeros for libraries that read whole
    blocks. The cache of cpu stays as it is.
    """
    if backend.name == "cpu":
        return
    for part in cache:  # type: ignore[attr-defined]
        fresh = 0.0 if backend.name in ("flash_attn", "torch_varlen") else torch.nan
        part.copy_(torch.full_like(part, fresh, dtype=torch.float32))


def _steps(lengths: Sequence[int]) -> list[list[int]]:
    """Tokens of each sequence in three steps."""
    first = [max(1, n // 3) for n in lengths]
    left = [n - k for n, k in zip(lengths, first, strict=True)]
    second = [min(1, k) if i % 2 else max(0, k - 1) for i, k in enumerate(left)]
    return [first, second, [k - s for k, s in zip(left, second, strict=True)]]


def make_batch(
    query_lens: Sequence[int],
    seq_lens: Sequence[int],
    tables: Tensor,
    block_size: int,
    device: torch.device = CPU,
    *,
    bidirectional: bool = False,
) -> AttentionBatch:
    """A step whose row i computes the last `query_lens[i]` of `seq_lens[i]` tokens."""
    slots = [
        int(tables[row, position // block_size]) * block_size + position % block_size
        for row, (count, length) in enumerate(zip(query_lens, seq_lens, strict=True))
        for position in range(length - count, length)
    ]
    table = torch.zeros(len(tables), tables.shape[1] + 2, dtype=torch.int32)
    table[:, : tables.shape[1]] = tables
    return AttentionBatch(
        query_lens=query_lens,
        seq_lens=seq_lens,
        num_decodes=len(list(itertools.takewhile(lambda count: count == 1, query_lens))),
        block_size=block_size,
        slots=torch.tensor(slots, device=device),
        cu_queries=_sums(query_lens, device),
        cu_keys=_sums(seq_lens, device),
        seq_lens_tensor=torch.tensor(seq_lens, dtype=torch.int32, device=device),
        block_table=table.to(device),
        bidirectional=frozenset(range(len(query_lens)) if bidirectional else ()),
    )


def _sums(lengths: Sequence[int], device: torch.device) -> Tensor:
    return torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32, device=device)
