"""Philox-4x32-10 against its published vectors, and the uniform numbers made of it."""

from __future__ import annotations

import numpy as np
import pytest

from penstock_shard.worker.sampling.philox import philox4x32, uniforms

# kat_vectors of Random123, the authors' library: counter, key, expected words.
VECTORS = [
    (
        (0, 0, 0, 0),
        (0, 0),
        (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8),
    ),
    (
        (0xFFFFFFFF, 0xFFFFFFFF, 0xFFFFFFFF, 0xFFFFFFFF),
        (0xFFFFFFFF, 0xFFFFFFFF),
        (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD),
    ),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


@pytest.mark.parametrize(("counter", "key", "expected"), VECTORS)
def test_published_vectors(
    counter: tuple[int, ...], key: tuple[int, ...], expected: tuple[int, ...]
) -> None:
    words = philox4x32(
        [np.array([word], dtype=np.uint64) for word in counter],
        [np.array([word], dtype=np.uint64) for word in key],
    )
    assert tuple(int(word[0]) for word in words) == expected


def test_a_number_depends_on_its_seed_and_position_only() -> None:
    seeds = [0, 1, 2**32, 2**64 - 1, 1]
    positions = [0, 7, 7, 2**40, 8]
    together = uniforms(seeds, positions)
    alone = [uniforms([s], [p])[0] for s, p in zip(seeds, positions, strict=True)]
    assert together.tolist() == alone
    assert len(set(alone)) == len(alone)


def test_numbers_fill_the_unit_interval_evenly() -> None:
    numbers = uniforms([3] * 20_000, range(20_000))
    assert numbers.min() >= 0
    assert numbers.max() < 1
    counts, _ = np.histogram(numbers, bins=20, range=(0, 1))
    # 19 degrees of freedom: above 50 once in 7,000 seeds.
    assert ((counts - 1000) ** 2 / 1000).sum() < 50


def test_the_first_words_make_the_53_bits() -> None:
    expected = ((0x6627E8D5 << 21) | (0xE169C58D >> 11)) / 2**53
    assert uniforms([0], [0])[0] == expected
