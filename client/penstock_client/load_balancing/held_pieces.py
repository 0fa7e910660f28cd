"""Contents of an engine's prefix cache, as far as they are known here. Decides nothing."""

from __future__ import annotations

from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence

from penstock_client.load_balancing.piece_index import PieceIndex
from penstock_proto.prefix_hash import Tier

# Pieces remembered as sent: of a million tokens.
_MOST_SENT = 8192


class HeldPieces:
    """Pieces that one engine has told of, and those that were sent there and are not told of yet:
    what it has to compute, and all that is known of a shard that tells nothing.
    """

    def __init__(self, instance_id: str = "") -> None:
        self.instance_id = instance_id
        self.told = PieceIndex()
        # The least recently sent first. Values are unused.
        self._sent: OrderedDict[int, None] = OrderedDict()

    def runs(self, names: Sequence[int]) -> Iterator[tuple[int, int]]:
        """Count the pieces of a prompt that are held, from the first on, in each tier. They are
        looked for by halves: what is later in a prompt is where it is slower to get, or gone.
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
        """A prompt was sent there. Its last pieces are forgotten first, as they are of no use
        without the others.
        """
        for name in reversed(names):
            self._sent[name] = None
            self._sent.move_to_end(name)
        while len(self._sent) > _MOST_SENT:
            self._sent.popitem(last=False)

    def take(self, changes: Mapping[int, Iterable[int]]) -> None:
        """Take the engine's report: names, by the tier where they are now."""
        for tier, names in changes.items():
            for name in names:
                self.told.put(name, tier)
                self._sent.pop(name, None)
