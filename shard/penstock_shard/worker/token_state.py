"""What is kept of a sequence's tokens, position by position: how often each occurs, how far a bad
word has matched, how many reasoning tokens there are.

numpy and plain integers only.
"""

from __future__ import annotations

from collections import abc
from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from penstock_shard.ipc.request import ThinkingBudget

TokenIds = NDArray[np.int64]

_SPARE_PLACES = 64


class TokenCounts:
    """Distinct tokens, and how often each is in the output; adding one costs a table look-up.

    The initial tokens are sorted; later ones follow in order of appearance.
    """

    def __init__(self, prompt: abc.Sequence[int], output: abc.Sequence[int]) -> None:
        generated = np.array(output, dtype=np.int64)
        known = np.unique(np.concatenate([np.array(prompt, dtype=np.int64), generated]))
        self._num_sorted = self._size = len(known)
        spare = np.zeros(_SPARE_PLACES, dtype=np.int64)
        self._ids = np.concatenate([known, spare])
        self._counts = np.bincount(
            np.searchsorted(known, generated), minlength=len(known) + _SPARE_PLACES
        )
        self._places: dict[int, int] = {}

    @property
    def ids(self) -> TokenIds:
        return self._ids[: self._size]

    @property
    def counts(self) -> NDArray[np.int64]:
        """Beside `ids`; 0 for a token that only the prompt has."""
        return self._counts[: self._size]

    def add(self, token_id: int) -> None:
        """Count one more token of the output."""
        place = self._places.get(token_id)
        if place is None:
            place = self._places[token_id] = self._find_or_append(token_id)
        self._counts[place] += 1

    def _find_or_append(self, token_id: int) -> int:
        known = self._ids[: self._num_sorted]
        place = int(np.searchsorted(known, token_id))
        if place < len(known) and known[place] == token_id:
            return place
        if self._size == len(self._ids):
            self._ids = np.concatenate([self._ids, np.zeros_like(self._ids)])
            self._counts = np.concatenate([self._counts, np.zeros_like(self._counts)])
        self._ids[self._size] = token_id
        self._size += 1
        return self._size - 1


class BadWords:
    """Which ids would complete a word that must not occur."""

    def __init__(self, words: Iterable[abc.Sequence[int]]) -> None:
        self._single: list[int] = []
        # By a word's last id but one: (all its ids but the last, its last id).
        self._longer: dict[int, list[tuple[tuple[int, ...], int]]] = {}
        # How many of the output's last tokens can matter.
        self.num_tail_tokens = 0
        for word in words:
            *beginning, last = word
            if not beginning:
                self._single.append(last)
                continue
            self._longer.setdefault(beginning[-1], []).append((tuple(beginning), last))
            self.num_tail_tokens = max(self.num_tail_tokens, len(beginning))

    def completing(self, tail: Iterable[int]) -> list[int]:
        """Ids that must not follow an output that ends with `tail`."""
        banned = list(self._single)
        end = tuple(tail)
        for beginning, last in self._longer.get(end[-1], ()) if end else ():
            if end[-len(beginning) :] == beginning:
                banned.append(last)
        return banned


class Thinking:
    """How far an output is in its reasoning."""

    def __init__(self, budget: ThinkingBudget, output: Iterable[int] = ()) -> None:
        self._budget = budget
        self._inside = budget.begun
        self._num_tokens = 0
        for token_id in output:
            self.append(token_id)

    def append(self, token_id: int) -> None:
        """This token is the next one of the output."""
        if not self._inside:
            self._inside = token_id == self._budget.begin_token_id
        elif token_id == self._budget.end_token_id:
            self._inside = False
        else:
            self._num_tokens += 1

    @property
    def forced_id(self) -> int | None:
        """The only token that may come next; None if any may."""
        if self._inside and self._num_tokens >= self._budget.max_tokens:
            return self._budget.end_token_id
        return None
