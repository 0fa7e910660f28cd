"""Drafts of a request's next tokens, from its own tokens. Knows token ids and counts only.

Where the last tokens of a sequence occurred in it before, what followed them then is drafted to
follow again (prompt lookup decoding, Saxena 2023): answers quote their prompts, and repeat
themselves. A draft costs computing, never exactness: whoever samples compares.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from penstock_shard.request import Request

# How many of the last tokens are looked for, the longest first.
_LONGEST_MATCH = 3
# How far back: what a look-up costs has a bound, some 20 microseconds.
_WINDOW = 32_768
# Wrong drafts one after another that count: the next one waits for two to their power tokens.
_MOST_MISSES = 6
_SPARE = 256


class _History:
    """Tokens of one request, and how well they were drafted."""

    __slots__ = ("_ids", "limit", "misses", "quiet_until", "size", "waited")

    def __init__(self, limit: int) -> None:
        self._ids: NDArray[np.int32] = np.empty(0, dtype=np.int32)
        self.size = 0
        # The longest draft that its last ones call for.
        self.limit = limit
        # Drafts one after another of which nothing was right.
        self.misses = 0
        # No draft before it has this many tokens.
        self.quiet_until = 0
        # It has left out a step for the draft that comes next.
        self.waited = False

    def read(self, token_ids: Sequence[int]) -> NDArray[np.int32]:
        """All of them; those that are new are copied."""
        count = len(token_ids)
        if count > len(self._ids):
            grown = np.empty(count + max(_SPARE, count // 4), dtype=np.int32)
            grown[: self.size] = self._ids[: self.size]
            self._ids = grown
        self._ids[self.size : count] = token_ids[self.size :]
        self.size = count
        return self._ids[:count]

    def missed(self) -> None:
        self.misses = min(self.misses + 1, _MOST_MISSES)
        self.quiet_until = self.size + 2**self.misses


class Drafter:
    """Drafts up to `most` tokens; of a request whose drafts turn out wrong fewer, and later."""

    def __init__(self, most: int) -> None:
        self.most = most
        self._histories: dict[Request, _History] = {}
        # Of all requests.
        self.proposed_total = 0
        self.accepted_total = 0

    def expects(self, request: Request) -> bool:
        """Whether there may be a draft once its pending tokens are known: waiting may pay."""
        history = self._history(request)
        if request.num_tokens < history.quiet_until:
            return False
        history.waited = bool(look_up(history.read(request.token_ids), 1))
        return history.waited

    def propose(self, request: Request, most: int) -> list[int]:
        """What may follow its tokens, all of which are known: `most` ids or fewer, often none."""
        history = self._history(request)
        if most <= 0 or len(request.token_ids) < history.quiet_until:
            return []
        found = look_up(history.read(request.token_ids), min(most, history.limit))
        if history.waited and not found:
            history.missed()
        history.waited = False
        return found

    def learn(self, request: Request, num_proposed: int, num_accepted: int) -> None:
        """Of a draft of so many tokens these were right; the request may be over."""
        self.proposed_total += num_proposed
        self.accepted_total += num_accepted
        history = self._histories.get(request)
        if history is None:
            return
        if num_accepted == 0:
            history.limit = 1
            history.missed()
            return
        history.misses = 0
        wanted = 2 * num_accepted if num_accepted == num_proposed else num_accepted
        history.limit = min(self.most, wanted)

    def forget(self, request: Request) -> None:
        """The request is over."""
        self._histories.pop(request, None)

    def _history(self, request: Request) -> _History:
        history = self._histories.get(request)
        if history is None:
            history = self._histories[request] = _History(self.most)
        return history


def look_up(token_ids: NDArray[np.int32], most: int) -> list[int]:
    """What followed the last tokens where they occurred last: ids [most], or none.

    Of all places those count that agree in most of the tokens before, up to three; of these the
    last one. Where that is so late that less than `most` follow, what follows is a repetition, and
    is taken to go on as one.
    """
    ids = token_ids[-_WINDOW:]
    # Ends of the matches: places whose token is the last one, and which a token follows.
    ends = np.flatnonzero(ids[:-1] == ids[-1]) if len(ids) > 1 else ids[:0]
    if not len(ends):
        return []
    for back in range(1, min(_LONGEST_MATCH, len(ids) - 1)):
        earlier = ends[ends >= back]
        earlier = earlier[ids[earlier - back] == ids[-1 - back]]
        if not len(earlier):
            break
        ends = earlier
    first = int(ends[-1]) + 1
    period = len(ids) - first
    following: list[int] = ids[first + np.arange(most) % period].tolist()
    return following
