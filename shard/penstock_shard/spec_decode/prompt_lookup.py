"""Drafts of a sequence's next tokens, from its own tokens.

If the last tokens of a sequence occurred in it before, the tokens that followed them become the
draft (prompt lookup decoding, Saxena 2023). Answers often quote their prompts and repeat
themselves. A wrong draft costs only time, because the sampler verifies each token.
"""

from __future__ import annotations

from collections import abc

import numpy as np
from numpy.typing import NDArray

from penstock_shard.sequence import Sequence

# The largest number of trailing tokens that a match compares.
_LONGEST_MATCH = 3
# The number of tokens searched for matches. It bounds a look-up to some 20 microseconds.
_WINDOW = 32_768
# After n wrong drafts in a row, the next draft waits for 2 ** n tokens. This is the largest n.
_MOST_MISSES = 6
_SPARE = 256


class _History:
    """The tokens of one sequence, and the success of its drafts."""

    __slots__ = ("_ids", "limit", "misses", "quiet_until", "size", "waited")

    def __init__(self, limit: int) -> None:
        self._ids: NDArray[np.int32] = np.empty(0, dtype=np.int32)
        self.size = 0
        # The longest draft worth trying, judged by how many tokens of recent drafts were accepted.
        self.limit = limit
        # The number of drafts in a row without an accepted token.
        self.misses = 0
        # The number of tokens that the sequence must have before its next draft.
        self.quiet_until = 0
        # True if the sequence left out a step to wait for its next draft.
        self.waited = False

    def read(self, token_ids: abc.Sequence[int]) -> NDArray[np.int32]:
        """Return all tokens as an array. Only new tokens are copied."""
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
    """Drafts up to `most` tokens; fewer, and less often, for sequences whose drafts were wrong."""

    def __init__(self, most: int) -> None:
        self.most = most
        self._histories: dict[Sequence, _History] = {}
        # Draft tokens of all sequences.
        self.proposed_total = 0
        self.accepted_total = 0

    def expects(self, sequence: Sequence) -> bool:
        """Tell whether to wait for the tokens being sampled, because a draft may follow them."""
        history = self._history(sequence)
        if sequence.num_tokens < history.quiet_until:
            return False
        history.waited = bool(look_up(history.read(sequence.token_ids), 1))
        return history.waited

    def propose(self, sequence: Sequence, most: int) -> list[int]:
        """Draft up to `most` next tokens of a sequence whose tokens are all known; often none."""
        history = self._history(sequence)
        if most <= 0 or len(sequence.token_ids) < history.quiet_until:
            return []
        found = look_up(history.read(sequence.token_ids), min(most, history.limit))
        if history.waited and not found:
            history.missed()
        history.waited = False
        return found

    def learn(self, sequence: Sequence, num_proposed: int, num_accepted: int) -> None:
        """Note how many tokens of a draft were accepted. The sequence may have ended."""
        self.proposed_total += num_proposed
        self.accepted_total += num_accepted
        history = self._histories.get(sequence)
        if history is None:
            return
        if num_accepted == 0:
            history.limit = 1
            history.missed()
            return
        history.misses = 0
        wanted = 2 * num_accepted if num_accepted == num_proposed else num_accepted
        history.limit = min(self.most, wanted)

    def forget(self, sequence: Sequence) -> None:
        self._histories.pop(sequence, None)

    def _history(self, sequence: Sequence) -> _History:
        history = self._histories.get(sequence)
        if history is None:
            history = self._histories[sequence] = _History(self.most)
        return history


def look_up(token_ids: NDArray[np.int32], most: int) -> list[int]:
    """Return the tokens that followed the best earlier match of the last tokens: ids [most], or [].

    The best match agrees in the most trailing tokens, up to three; among equal matches it is the
    latest. If fewer than `most` tokens follow it, the draft repeats them.
    """
    ids = token_ids[-_WINDOW:]
    # A match ends at an earlier place of the last token.
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
