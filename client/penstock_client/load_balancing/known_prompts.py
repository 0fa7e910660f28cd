"""Remembers prompts, to recognize the next turn of an unnamed session: that turn's prompt begins
with the last turn's.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

from penstock_client.load_balancing.base import Candidate

# Bound of all known prompts, about 100 bytes each.
_MOST_KNOWN = 65_536
# Bound of prompts that have all named pieces in common. If more sessions share a long system
# prompt, the sessions with the oldest last turns count as new.
_MOST_ALIKE = 256
# Prompts with the same pieces are compared by this number of last tokens.
_END_TOKENS = 32


# The most prompts that may continue a known one. A prompt with more followers is the common
# beginning of several sessions, so it does not identify one.
_MOST_FOLLOWERS = 4


@dataclass(slots=True)
class _Known:
    num_tokens: int
    end: int
    instance_id: str
    num_followers: int = 0


class KnownPrompts:
    """Prompts that were sent, by the name of their last whole piece. The least recently sent is
    forgotten first.
    """

    def __init__(self) -> None:
        self._by_name: OrderedDict[int, list[_Known]] = OrderedDict()
        self._num_known = 0

    def note(self, names: Sequence[int], token_ids: Sequence[int], chosen: Candidate) -> None:
        """Note a prompt sent to a shard, by the names of its pieces. Ignore a prompt without a
        whole piece.
        """
        if not names:
            return
        self._follow(names, token_ids)
        alike = self._by_name.setdefault(names[-1], [])
        num_tokens, before = len(token_ids), len(alike)
        end = _end(token_ids, num_tokens)
        alike[:] = [each for each in alike if (each.num_tokens, each.end) != (num_tokens, end)]
        alike.append(_Known(num_tokens, end, chosen.instance_id))
        del alike[:-_MOST_ALIKE]
        self._num_known += len(alike) - before
        self._by_name.move_to_end(names[-1])
        while self._num_known > _MOST_KNOWN:
            self._num_known -= len(self._by_name.popitem(last=False)[1])

    def longest_within(self, names: Sequence[int], token_ids: Sequence[int]) -> tuple[int, str]:
        """Find the longest known prompt that this prompt continues. Return its token count and the
        instance that got it; 0 and "" if there is none.
        """
        found = self._find(names, token_ids)
        return (found[1].num_tokens, found[1].instance_id) if found is not None else (0, "")

    def _find(
        self, names: Sequence[int], token_ids: Sequence[int]
    ) -> tuple[list[_Known], _Known] | None:
        compared = 0
        for name in reversed(names):
            alike = self._by_name.get(name, [])
            for each in sorted(alike, key=lambda known: known.num_tokens, reverse=True):
                if each.num_tokens < len(token_ids):
                    compared += 1
                    if each.end == _end(token_ids, each.num_tokens):
                        return alike, each
            if compared > _MOST_ALIKE:
                break
        return None

    def _follow(self, names: Sequence[int], token_ids: Sequence[int]) -> None:
        """Note that a prompt continues a known one, so that the known one is forgotten early."""
        found = self._find(names, token_ids)
        if found is None:
            return
        alike, known = found
        alike.remove(known)
        known.num_followers += 1
        if known.num_followers < _MOST_FOLLOWERS:
            alike.insert(0, known)
        else:
            self._num_known -= 1


def _end(token_ids: Sequence[int], num_tokens: int) -> int:
    return hash(tuple(token_ids[num_tokens - _END_TOKENS : num_tokens]))
