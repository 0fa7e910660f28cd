"""The known contents of an engine's prefix cache."""

from __future__ import annotations

from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence

from penstock_client.load_balancing.piece_index import PieceIndex
from penstock_proto.prefix_hash import Tier

# Maximum number of pieces remembered as sent: about a million tokens.
_MOST_SENT = 8192


class HeldPieces:
    """Pieces that an engine reported, and pieces sent to it but not reported: the engine still
    computes them, or its shard reports nothing.
    """

    def __init__(self, instance_id: str = "") -> None:
        self.instance_id = instance_id
        self.told = PieceIndex()
        # Names of pieces, the least recently sent first. Values are unused.
        self._sent: OrderedDict[int, None] = OrderedDict()

    def runs(self, names: Sequence[int]) -> Iterator[tuple[int, int]]:
        """Count a prompt's pieces that the engine holds, up to the first missing one. Yield (tier,
        count). Bisection works, because a later piece is never in a faster tier.
        """
        start = 0
        while start < len(names) and (tier := self._tier(names[start])) != Tier.GONE:
            end = bisect_right(names, tier, lo=start, key=self._tier)
            yield tier, end - start
            start = end

    def _tier(self, name: int) -> int:
        tier = self.told.tier(name)
        return Tier.DEVICE if tier == Tier.GONE and name in self._sent else tier

    def note_sent(self, names: Sequence[int]) -> None:
        """Note a prompt that was sent to the engine. Its last pieces are forgotten first, because
        they are useless without the earlier ones.
        """
        for name in reversed(names):
            self._sent[name] = None
            self._sent.move_to_end(name)
        while len(self._sent) > _MOST_SENT:
            self._sent.popitem(last=False)

    def take(self, changes: Mapping[int, Iterable[int]]) -> None:
        """Take the engine's report: names by their present tier."""
        for tier, names in changes.items():
            for name in names:
                self.told.put(name, tier)
                self._sent.pop(name, None)
