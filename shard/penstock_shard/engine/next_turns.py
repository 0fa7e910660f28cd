"""Follows hints of clients about the next turn of an ended request: retains the request's blocks,
and loads those that the device lost before the next turn.
"""

from __future__ import annotations

import heapq
import itertools
import uuid
from array import array
from collections import deque
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from penstock_proto.engine_request import EngineRequest
from penstock_proto.types import EngineSampling
from penstock_shard.ipc.messages import Retention
from penstock_shard.kv_cache.block_manager import BlockManager
from penstock_shard.kv_cache.prefix_tree import Prefix
from penstock_shard.kv_cache.retention import Ended

if TYPE_CHECKING:
    from penstock_shard.engine.block_moves import BlockMoves

# The most hints that wait; below, the most that one turn follows. A hint for 65,000 tokens takes 13
# ms.
_MOST_HINTS = 4096
_HINTS_A_TURN = 2
# The most prefixes that wait to be loaded.
_MOST_EXPECTED = 4096
# A prefix loaded ahead may take this share of the free blocks that are not retained.
_SHARE_OF_FREE = 0.25


class NextTurns:
    """Follows a few hints in each turn of the engine, and loads one prefix ahead at a time."""

    def __init__(self, blocks: BlockManager, moves: BlockMoves | None) -> None:
        """`moves` loads copies; None if there are none."""
        self._blocks = blocks
        self._moves = moves
        self._hints: deque[tuple[float, Retention]] = deque()
        self._expected: list[tuple[float, int, Ended]] = []
        self._numbers = itertools.count()
        # The id of the request that loads, and the prefix.
        self._loading: tuple[str, Prefix] | None = None

    @property
    def has_work(self) -> bool:
        return bool(self._hints)

    @property
    def due_at_s(self) -> float | None:
        """The clock time of the next load or release; None if there is none."""
        times_s = [self._blocks.retention.due_at_s]
        if self._expected and self._loading is None:
            times_s.append(self._expected[0][0])
        return min((time_s for time_s in times_s if time_s is not None), default=None)

    def take(self, hints: Iterable[Retention], now_s: float) -> None:
        """Take hints; drop those beyond `_MOST_HINTS`."""
        for hint in hints:
            if len(self._hints) < _MOST_HINTS:
                self._hints.append((now_s, hint))

    def advance(self, now_s: float, *, may_load: bool) -> Iterator[EngineRequest]:
        """Follow some hints, and release prefixes at their times. If `may_load`, yield a request
        that only loads the next prefix.
        """
        self._blocks.retention.let_go(now_s)
        for _ in range(min(_HINTS_A_TURN, len(self._hints))):
            self._follow(*self._hints.popleft())
        while may_load and self._loading is None and self._expected:
            if self._expected[0][0] > now_s:
                return
            _, _, ended = heapq.heappop(self._expected)
            if self._is_worth_loading(ended.prefix):
                request = _request(ended)
                self._loading = request.request_id, ended.prefix
                yield request

    def finish(self, request_id: str) -> bool:
        """Retain the loaded prefix again; false if this request did not load one."""
        if self._loading is None or self._loading[0] != request_id:
            return False
        last, self._loading = self._loading[1], None
        self._blocks.retention.renew(last)
        return True

    def close(self) -> None:
        self._hints.clear()
        self._expected.clear()

    def _follow(self, came_s: float, hint: Retention) -> None:
        ended = self._blocks.retention.ended(hint.request_id)
        if ended is None:
            return
        self._blocks.retain(ended.prefix, came_s + hint.seconds, hint.priority)
        if hint.expected_s is not None and self._moves is not None and ended.is_plain:
            if len(self._expected) >= _MOST_EXPECTED:
                self._expected.remove(max(self._expected))
                heapq.heapify(self._expected)
            at_s = came_s + hint.expected_s
            heapq.heappush(self._expected, (at_s, next(self._numbers), ended))

    def _is_worth_loading(self, last: Prefix) -> bool:
        """True if other tiers may have the blocks that the device lacks, and the device has
        room.
        """
        lacking = [prefix for prefix in last.chain() if min(prefix.block_ids) < 0]
        if not lacking or len(lacking) > _SHARE_OF_FREE * self._blocks.num_free_unretained:
            return False
        has_disk = self._moves is not None and self._moves.reads is not None
        return has_disk or any(max(prefix.slots) >= 0 for prefix in lacking)


def _request(ended: Ended) -> EngineRequest:
    prompt = array("I")
    for prefix in reversed(list(ended.prefix.chain())):
        prompt.extend(prefix.token_ids)
    # A fetch leaves out a prompt's last token, so add one.
    prompt.append(0)
    return EngineRequest(
        # An id that no client uses.
        request_id=f"ahead-{uuid.uuid4().hex}",
        attempt=0,
        prompt=prompt.tobytes(),
        sampling=EngineSampling(),
        max_tokens=1,
        cache_salt=ended.cache_salt,
        only_fetches=True,
    )
