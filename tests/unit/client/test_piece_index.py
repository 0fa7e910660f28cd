"""The index of pieces: a mapping in a few bytes each, of which no change takes long."""

from __future__ import annotations

import random
import sys
import time

import pytest
from support.budget import budget, seeded

from penstock_client.load_balancing import piece_index
from penstock_client.load_balancing.piece_index import PieceIndex
from penstock_proto.prefix_hash import Tier

_GONE = int(Tier.GONE)


def _name(number: int) -> int:
    """Return a name of 64 bits, as uniform as a hash."""
    return random.Random(number).getrandbits(64)


def _check(index: PieceIndex, expected: dict[int, int], absent: list[int]) -> None:
    assert len(index) == len(expected)
    assert all(index.tier(name) == tier for name, tier in expected.items())
    assert all(index.tier(name) == expected.get(name, _GONE) for name in absent)
    buckets = index._buckets
    assert sum(len(bucket) for bucket in buckets) == len(expected)
    assert all(list(bucket) == sorted(bucket) for bucket in buckets)


def test_it_is_a_mapping_whatever_comes_and_goes() -> None:
    rng = seeded("piece index")
    for _ in range(budget(6, 60)):
        index, expected = PieceIndex(), dict[int, int]()
        names = [rng.getrandbits(64) for _ in range(rng.choice((5, 100, 3000)))]
        names += [0, 1, 2, 3, 2**64 - 1]
        # By the upper 62 bits alone they are told apart.
        names = list({name >> 2: name for name in names}.values())
        for _ in range(4):
            share = rng.choice((0.1, 0.5, 0.9))
            for _ in range(len(names) * 2):
                name = rng.choice(names)
                tier = rng.randint(1, 3) if rng.random() < share else _GONE
                index.put(name, tier)
                expected.pop(name, None)
                if tier != _GONE:
                    expected[name] = tier
            _check(index, expected, names)


def _num_bytes(index: PieceIndex) -> int:
    buckets = index._buckets
    own = sys.getsizeof(index) + sys.getsizeof(index.__dict__) + sys.getsizeof(buckets)
    return own + sum(sys.getsizeof(bucket) for bucket in buckets)


def test_a_piece_takes_few_bytes_at_any_fill() -> None:
    """The index is filled to up to a million names, and emptied to a thousand again."""
    most = budget(2**16, 2**20)
    index, names, worst = PieceIndex(), [random.Random(1).getrandbits(64)], 0.0
    rng = random.Random(1)
    names = [rng.getrandbits(64) for _ in range(most)]
    for count, name in enumerate(names, start=1):
        index.put(name, 1 + count % 3)
        if count >= 1000 and count % (count // 50) == 0:
            worst = max(worst, _num_bytes(index) / count)
    assert len(index) == most
    rng.shuffle(names)
    for count, name in zip(range(most - 1, 999, -1), names, strict=False):
        index.put(name, _GONE)
        if count % (count // 50) == 0:
            worst = max(worst, _num_bytes(index) / count)
    assert len(index) == 1000
    print(f"at most {worst:.1f} bytes a piece")
    assert worst <= 64


def test_no_change_takes_long_however_many_there_are() -> None:
    """Each change copies a bounded number of entries, so a larger index makes none slower."""
    index, rng = PieceIndex(), random.Random(3)
    for _ in range(budget(50_000, 1_000_000)):
        index.put(rng.getrandbits(64), 1)
    assert max(len(bucket) for bucket in index._buckets) < 4 * piece_index._MOST_IN_BUCKET
    times_s = []
    for _ in range(2000):
        name = rng.getrandbits(64)
        start_s = time.perf_counter()
        index.put(name, 1)
        times_s.append(time.perf_counter() - start_s)
    assert sorted(times_s)[-20] < 0.001


def test_it_has_no_more_than_its_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(piece_index, "_MOST_PIECES", 100)
    index = PieceIndex()
    for number in range(200):
        index.put(_name(number), 1)
    assert len(index) == 100
    index.put(_name(0), 3)
    assert index.tier(_name(0)) == 3
    assert index.tier(_name(150)) == _GONE
    index.put(_name(0), _GONE)
    index.put(_name(150), 2)
    assert index.tier(_name(150)) == 2
