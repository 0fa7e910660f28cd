"""The promises of our own backend alone: bits that depend on the query alone, and splits of any
number.

The table of cases tests that its results are right.
"""

from __future__ import annotations

import inspect
import os
from typing import Any

import pytest
import torch
from models.attention_cases import make_batch
from support.budget import budget, seeded
from torch import Tensor

from penstock_shard.attention.base import LayerSpec, make_paged_pair
from penstock_shard.attention.sdpa import SdpaBackend

pytest.importorskip("triton")
if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("Triton compiles for a device here", allow_module_level=True)

from triton.runtime.interpreter import InterpretedFunction

from penstock_shard.attention import triton as backend_module
from penstock_shard.attention.triton import (
    TritonBackend,
    _latent_tiling,
    _rows_tiling,
    _split_for,
    _split_tiling,
)
from penstock_shard.kernels import triton_attention, triton_layers, triton_matmul
from penstock_shard.kernels.triton_attention import MOST_SPLITS, SPLIT

PAGE = 16
# The interpreter takes seconds for each.
LAYERS = (
    LayerSpec(0, 3, 1, 16, 12, 0.25, window=60, softcap=2.0, has_sinks=True),
    LayerSpec(0, 4, 1, 24, 16, 0.25, values_in_keys=True),
    LayerSpec(0, 4, 2, 16, 16, 0.25),
    # Shared by two programs.
    LayerSpec(0, 20, 1, 24, 16, 0.25, values_in_keys=True),
)[: budget(2, 4)]
WINDOWS = (700, None)[: budget(1, 2)]


class Sequences:
    """Some sequences in one cache. Pieces of them can be computed beside each other."""

    def __init__(self, spec: LayerSpec, lengths: list[int], dtype: torch.dtype) -> None:
        generator = torch.Generator().manual_seed(5)

        def noise(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator).to(dtype)

        self.spec = spec
        self.queries = [noise(n, spec.num_heads, spec.head_dim) for n in lengths]
        width = -(-max(lengths) // PAGE)
        blocks = torch.randperm(len(lengths) * width, generator=generator)
        self.tables = blocks.view(len(lengths), width)
        self.cache = make_paged_pair(spec, len(blocks), PAGE, dtype, torch.device("cpu"))
        for part in self.cache:
            part.copy_(noise(*part.shape))
        self.sinks = noise(spec.num_heads) if spec.has_sinks else None

    def attend(
        self, backend: TritonBackend | SdpaBackend, rows: list[tuple[int, int, int]]
    ) -> list[Tensor]:
        """Return attention of each row (sequence, first query, count)."""
        counts = [count for _, _, count in rows]
        ends = [start + count for _, start, count in rows]
        tables = self.tables[[sequence for sequence, _, _ in rows]]
        batch = make_batch(counts, ends, tables[:, : -(-max(ends) // PAGE)], PAGE)
        query = torch.cat([self.queries[i][start : start + n] for i, start, n in rows])
        spec = self.spec
        attended = backend.attend(
            self.cache,
            query,
            batch,
            scale=spec.scale,
            window=spec.window,
            softcap=spec.softcap,
            sinks=self.sinks,
        )
        return list(attended.split(counts))


@pytest.mark.parametrize("spec", LAYERS, ids=lambda spec: f"{spec.num_heads} of {spec.head_dim}")
def test_a_query_has_the_same_bits_in_any_step(spec: LayerSpec) -> None:
    rng = seeded("steps")
    sequences = Sequences(spec, [300, 290, 20], torch.float32)
    backend = TritonBackend(exact=True)
    # Past the end of the first split of keys.
    first, last = 250, 266
    (whole,) = sequences.attend(backend, [(0, first, last - first)])
    alone = [sequences.attend(backend, [(0, at, 1)])[0] for at in (254, 255, 256, 265)]
    assert torch.equal(whole[[4, 5, 6, 15]], torch.cat(alone))
    cut = rng.randint(first + 1, last - 2)
    beside = sequences.attend(backend, [(1, 280, 1), (0, first, cut - first), (2, 3, 9)])[1]
    after = sequences.attend(backend, [(2, 1, 1), (1, 3, 4), (0, cut, last - cut)])[2]
    assert torch.equal(whole, torch.cat([beside, after]))
    decoded = sequences.attend(backend, [(2, 15, 1), (0, cut, 1), (1, 289, 1), (2, 0, 3)])[1]
    assert torch.equal(whole[cut - first : cut - first + 1], decoded)


@pytest.mark.parametrize("heads", [3, 70])
def test_latents_give_what_plain_torch_gives_in_any_batch(heads: int) -> None:
    """70 heads are shared by two programs."""
    rng = seeded("latents")
    spec = LayerSpec(0, heads, 1, 24, 16, 0.25, values_in_keys=True)
    lengths = [rng.randint(1, 90) for _ in range(budget(4, 9))]
    sequences = Sequences(spec, lengths, torch.float16)
    counts = [rng.choice([1, rng.randint(1, min(9, length))]) for length in lengths]
    rows = [(i, lengths[i] - counts[i], counts[i]) for i in range(len(lengths))]
    rows.sort(key=lambda row: row[2])
    found, wanted = (sequences.attend(each, rows) for each in (TritonBackend(), SdpaBackend()))
    for got, want in zip(found, wanted, strict=True):
        torch.testing.assert_close(got, want, atol=3e-3, rtol=3e-3)


def test_little_scratch_changes_no_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    sequences = Sequences(LayerSpec(0, 2, 1, 16, 16, 0.25), [40, 30], torch.float32)
    backend = TritonBackend(exact=True)
    rows = [(1, 29, 1), (0, 20, 19), (1, 3, 9)]
    plenty = sequences.attend(backend, rows)
    monkeypatch.setattr(backend_module, "_SCRATCH_BYTES", 5 * 2 * (16 + 2) * 4)
    for few, many in zip(sequences.attend(backend, rows), plenty, strict=True):
        assert torch.equal(few, many)


@pytest.mark.parametrize("window", WINDOWS)
def test_splits_grow_where_there_would_be_too_many(window: int | None) -> None:
    end = SPLIT * MOST_SPLITS
    spec = LayerSpec(0, 1, 1, 16, 16, 0.25, window=window)
    sequences = Sequences(spec, [end + 2], torch.float16)
    backend = TritonBackend(exact=True)
    rows = [(0, end - 1, 3)]
    (got,) = sequences.attend(backend, rows)
    (want,) = sequences.attend(SdpaBackend(), rows)
    torch.testing.assert_close(got, want, atol=2e-3, rtol=2e-3)
    for index in (0, 1):
        (alone,) = sequences.attend(backend, [(0, end - 1 + index, 1)])
        assert torch.equal(alone[0], got[index])


def test_larger_splits_change_nothing_but_the_last_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    sequences = Sequences(LayerSpec(0, 2, 1, 16, 16, 0.25), [1100, 700, 3], torch.float32)
    rows = [(0, 1099, 1), (1, 699, 1), (2, 2, 1)]
    wanted = sequences.attend(SdpaBackend(), rows)
    for size in (SPLIT, 4 * SPLIT, 2 * SPLIT, 8 * SPLIT)[: budget(2, 4)]:
        monkeypatch.setattr(backend_module, "_split_for", lambda *_, size=size: size)
        found = sequences.attend(TritonBackend(), rows)
        for got, want in zip(found, wanted, strict=True):
            torch.testing.assert_close(got, want, atol=2e-5, rtol=2e-5)


def test_splits_are_as_large_as_keeps_programs_without_keys_few() -> None:
    # Of 8 KV heads: one row, 32 in a wide table, 256 in a narrow one, and few in a very wide one.
    shapes = [(1, 8192), (32, 8192), (256, 1024), (8, 131072)]
    sizes = [_split_for(rows * 8, keys) for rows, keys in shapes]
    assert sizes == [256, 1024, 1024, 2048]


def test_exact_attention_has_splits_of_one_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(backend_module, "_split_for")
    sequences = Sequences(LayerSpec(0, 2, 1, 16, 16, 0.25), [40], torch.float32)
    sequences.attend(TritonBackend(exact=True), [(0, 39, 1)])


def test_where_programs_have_less_memory_tiles_are_smaller_and_right(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tiles = {
        card: (_rows_tiling(2, 256, 2, kilobytes << 10), _split_tiling(64, 256, 2, kilobytes << 10))
        for card, kilobytes in (("H100", 227), ("A100", 163), ("L4", 99))
    }
    sizes = {
        card: [(2 * rows.queries, rows.keys), (64 * split.queries, split.keys)]
        for card, (rows, split) in tiles.items()
    }
    assert sizes == {
        "H100": [(128, 64), (64, 32)],
        "A100": [(128, 32), (64, 32)],
        "L4": [(64, 32), (64, 16)],
    }
    monkeypatch.setattr(backend_module, "shared_bytes", lambda device: 99 << 10)
    sequences = Sequences(LayerSpec(0, 2, 1, 256, 256, 0.06), [70], torch.float16)
    for rows in ([(0, 0, 70)], [(0, 69, 1)]):
        got, want = (sequences.attend(b, rows) for b in (TritonBackend(), SdpaBackend()))
        torch.testing.assert_close(got[0], want[0], atol=2e-3, rtol=2e-3)


def test_latents_have_tiles_of_as_many_rows_as_registers_hold() -> None:
    tiles = {
        (heads, least, card): _latent_tiling(heads, 576, 2, kilobytes << 10, least)
        for heads in (4, 16, 128)
        for least in (16, 64)
        for card, kilobytes in (("H100", 227), ("L4", 99))
    }
    sizes = {sort: (tile.heads, tile.queries) for sort, tile in tiles.items()}
    assert sizes == {
        (4, 16, "H100"): (4, 4),
        (4, 16, "L4"): (4, 4),
        (4, 64, "H100"): (4, 16),
        (4, 64, "L4"): (4, 8),
        (16, 16, "H100"): (16, 1),
        (16, 16, "L4"): (16, 1),
        (16, 64, "H100"): (16, 4),
        (16, 64, "L4"): (16, 2),
        (128, 16, "H100"): (64, 1),
        (128, 16, "L4"): (32, 1),
        (128, 64, "H100"): (64, 1),
        (128, 64, "L4"): (32, 1),
    }


def test_heads_and_numbers_that_are_not_served_are_refused() -> None:
    backend = TritonBackend()
    refusal = backend.refusal(LayerSpec(0, 1, 1, 320, 16, 1.0), torch.bfloat16)
    assert refusal == "serves heads of at most 256, not 320"
    for latent, rotated in ((640, 64), (512, 0), (512, 128)):
        spec = LayerSpec(0, 1, 1, latent + rotated, latent, 1.0, values_in_keys=True)
        assert backend.refusal(spec, torch.bfloat16) == (
            "serves latents of at most 512 beside 1 to 64 rotated elements, "
            f"not {latent}, {rotated}"
        )
    refusal = backend.refusal(LayerSpec(0, 1, 1, 16, 16, 1.0), torch.float64)
    assert refusal == "serves float32, float16 and bfloat16, not float64"


@pytest.mark.parametrize("module", [triton_attention, triton_layers, triton_matmul])
def test_what_is_not_to_be_specialised_is_named_as_kernels_name_it(module: Any) -> None:
    kernels = [
        kernel for kernel in vars(module).values() if isinstance(kernel, InterpretedFunction)
    ]
    assert kernels
    for kernel in kernels:
        names = set(inspect.signature(kernel.fn).parameters)
        for option in ("do_not_specialize", "do_not_specialize_on_alignment"):
            assert names >= set(kernel.kwargs[option] or ())
