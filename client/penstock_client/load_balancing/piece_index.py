"""Names of pieces of prefixes, each with the tier where it is, in a few bytes each.

Python's own dictionaries take 100 bytes for two integers. Here they stand in sorted arrays, which
are the buckets of linear hashing (W. Litwin, Linear Hashing: A New Tool for File and Table
Addressing, VLDB 1980): as names come and go, one bucket at a time is split in two, or joined with
its other half. So no change takes longer than microseconds, where a table that doubles its size
would hold up the event loop for half a second at a million.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left

from penstock_proto.prefix_hash import Tier

_MOST_PIECES = 2**20
# A bucket has so many pieces in the mean; with half of the least it is joined with another.
_MOST_IN_BUCKET = 64
_LEAST_IN_BUCKET = 16
# The low bits of a name give way to the tier: 62 bits tell a million pieces apart.
_TIER = 3


class PieceIndex:
    """A mapping of names (64 bits, uniformly distributed) to tiers; of at most `_MOST_PIECES`."""

    def __init__(self) -> None:
        self._buckets = [array("Q")]
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def tier(self, name: int) -> int:
        """The piece's `Tier`; `GONE` of one that is not there."""
        key = name & ~_TIER
        bucket = self._bucket_of(key)
        place = bisect_left(bucket, key)
        # Nothing but the tier is left of an entry with this name.
        tier = bucket[place] ^ key if place < len(bucket) else Tier.GONE
        return tier if tier < Tier.GONE else Tier.GONE

    def put(self, name: int, tier: int) -> None:
        """Set its tier; `GONE` removes it."""
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
        """Choose by as many bits of the name as number twice as many buckets, or without the
        highest of these if that bucket is not there yet.
        """
        buckets = self._buckets
        mask = (1 << len(buckets).bit_length()) - 1
        number = entry >> 2 & mask
        return buckets[number if number < len(buckets) else number & mask >> 1]

    def _split(self) -> None:
        """Split a bucket if they are too full: the first of those that were not yet split since
        there were half as many.
        """
        buckets = self._buckets
        if self._count > len(buckets) * _MOST_IN_BUCKET:
            half = _half_of(len(buckets))
            entries, buckets[half] = buckets[half], array("Q")
            buckets.append(array("Q"))
            for entry in entries:
                self._bucket_of(entry).append(entry)

    def _join(self) -> None:
        """Take the last split back if buckets are too empty."""
        buckets = self._buckets
        if len(buckets) > 1 and self._count < (len(buckets) - 1) * _LEAST_IN_BUCKET:
            entries = buckets.pop()
            half = _half_of(len(buckets))
            buckets[half] = array("Q", sorted([*buckets[half], *entries]))


def _half_of(number: int) -> int:
    """The bucket of which a bucket is the other half: its number without the highest bit."""
    return number ^ 1 << number.bit_length() - 1
