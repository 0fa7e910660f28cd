"""Maps names of pieces to tiers, in a few bytes each.

A Python dictionary takes 100 bytes for two integers. Here names are in sorted arrays, the buckets
of linear hashing (W. Litwin, Linear Hashing, VLDB 1980). One bucket at a time is split, or joined
with its other half, so every change takes microseconds. A table that doubles its size would block
the event loop for half a second at a million names.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left

from penstock_proto.prefix_hash import Tier

_MOST_PIECES = 2**20
# The mean number of pieces above which buckets are split, and below which they are joined.
_MOST_IN_BUCKET = 64
_LEAST_IN_BUCKET = 16
# The tier replaces the name's 2 low bits; the other 62 bits distinguish a million pieces.
_TIER = 3


class PieceIndex:
    """A mapping of at most `_MOST_PIECES` names (64 bits, uniformly distributed) to tiers."""

    def __init__(self) -> None:
        self._buckets = [array("Q")]
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def tier(self, name: int) -> int:
        """Return the piece's `Tier`; `GONE` if the piece is not in the index."""
        key = name & ~_TIER
        bucket = self._bucket_of(key)
        place = bisect_left(bucket, key)
        # XOR leaves only the tier of an entry with this name.
        tier = bucket[place] ^ key if place < len(bucket) else Tier.GONE
        return tier if tier < Tier.GONE else Tier.GONE

    def put(self, name: int, tier: int) -> None:
        """Set a piece's tier; `GONE` removes the piece."""
        key = name & ~_TIER
        bucket = self._bucket_of(key)
        place = bisect_left(bucket, key)
        is_there = place < len(bucket) and bucket[place] ^ key <= _TIER
        if tier == Tier.GONE:
            if is_there:
                del bucket[place]
                self._count -= 1
                self._join()
        elif is_there:
            bucket[place] = key | tier
        elif self._count < _MOST_PIECES:
            bucket.insert(place, key | tier)
            self._count += 1
            self._split()

    def _bucket_of(self, entry: int) -> array[int]:
        """Return a name's bucket. Its number is the name's low bits, as if there were twice as many
        buckets, but without the top bit if that bucket does not exist yet.
        """
        buckets = self._buckets
        mask = (1 << len(buckets).bit_length()) - 1
        number = entry >> 2 & mask
        return buckets[number if number < len(buckets) else number & mask >> 1]

    def _split(self) -> None:
        """If buckets are too full, split one: the first that was not split since the number of
        buckets last doubled.
        """
        buckets = self._buckets
        if self._count > len(buckets) * _MOST_IN_BUCKET:
            half = _half_of(len(buckets))
            entries, buckets[half] = buckets[half], array("Q")
            buckets.append(array("Q"))
            for entry in entries:
                self._bucket_of(entry).append(entry)

    def _join(self) -> None:
        """Undo the last split if buckets are too empty."""
        buckets = self._buckets
        if len(buckets) > 1 and self._count < (len(buckets) - 1) * _LEAST_IN_BUCKET:
            entries = buckets.pop()
            half = _half_of(len(buckets))
            buckets[half] = array("Q", sorted([*buckets[half], *entries]))


def _half_of(number: int) -> int:
    """Return the number without its highest bit."""
    return number ^ 1 << number.bit_length() - 1
