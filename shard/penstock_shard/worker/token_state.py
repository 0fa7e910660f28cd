"""State of a sequence's tokens: counts of tokens, progress of bad words, number of reasoning
tokens.
"""

from __future__ import annotations

from collections import abc, deque
from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from penstock_proto.types import ThinkingBudget

TokenIds = NDArray[np.int64]

_SPARE_PLACES = 64


class TokenCounts:
    """Distinct tokens, and each token's count in the output. Adding a token costs a table look-up.

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
        """The count of each of `ids`; 0 for a token that only the prompt has."""
        return self._counts[: self._size]

    def add(self, token_id: int) -> None:
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


class WindowCounts:
    """Distinct tokens among the last `size` of the prompt and the output, and each token's count in
    the output's part of this window. Adding a token costs two table look-ups.
    """

    def __init__(self, size: int, prompt: abc.Sequence[int], output: abc.Sequence[int]) -> None:
        self._size = size
        recent_output = _last(output, size)
        recent_prompt = _last(prompt, size - len(recent_output))
        recent = np.concatenate([recent_prompt, recent_output])
        known, places, totals = np.unique(recent, return_inverse=True, return_counts=True)
        generated = np.bincount(places[len(recent_prompt) :], minlength=len(known))
        # Columns: token, count in the output's part, count in the whole window.
        self._columns = np.stack([known, generated, totals])
        self._num_distinct = len(known)
        self._places = {token_id: place for place, token_id in enumerate(known.tolist())}
        self._tokens = deque(recent.tolist())
        self._num_prompt_tokens = len(recent_prompt)

    @property
    def ids(self) -> TokenIds:
        return self._columns[0, : self._num_distinct]

    @property
    def counts(self) -> NDArray[np.int64]:
        """The count of each of `ids`; 0 for a token that occurs only in the prompt's part."""
        return self._columns[1, : self._num_distinct]

    def add(self, token_id: int) -> None:
        """Move the window forward by one token of the output."""
        place = self._places.get(token_id)
        if place is None:
            place = self._append(token_id)
        self._columns[1:, place] += 1
        self._tokens.append(token_id)
        if len(self._tokens) > self._size:
            self._drop_first()

    def _append(self, token_id: int) -> int:
        place = self._places[token_id] = self._num_distinct
        if place == self._columns.shape[1]:
            spare = np.zeros((3, max(_SPARE_PLACES, place)), dtype=np.int64)
            self._columns = np.concatenate([self._columns, spare], axis=1)
        self._columns[:, place] = token_id, 0, 0
        self._num_distinct += 1
        return place

    def _drop_first(self) -> None:
        token_id = self._tokens.popleft()
        place = self._places[token_id]
        if self._num_prompt_tokens:
            self._num_prompt_tokens -= 1
        else:
            self._columns[1, place] -= 1
        self._columns[2, place] -= 1
        if self._columns[2, place] == 0:
            self._remove(token_id, place)

    def _remove(self, token_id: int, place: int) -> None:
        del self._places[token_id]
        self._num_distinct -= 1
        if place < self._num_distinct:
            self._columns[:, place] = self._columns[:, self._num_distinct]
            self._places[int(self._columns[0, place])] = place


def _last(tokens: abc.Sequence[int], count: int) -> TokenIds:
    return np.array(tokens[max(0, len(tokens) - count) :], dtype=np.int64)


class BadWords:
    """The ids that would complete a forbidden word."""

    def __init__(self, words: Iterable[abc.Sequence[int]]) -> None:
        self._single: list[int] = []
        # Keyed by a word's second-last id: (all its ids but the last, its last id).
        self._longer: dict[int, list[tuple[tuple[int, ...], int]]] = {}
        # The largest number of output tokens that are compared with a word's beginning.
        self.num_tail_tokens = 0
        for word in words:
            *beginning, last = word
            if not beginning:
                self._single.append(last)
                continue
            self._longer.setdefault(beginning[-1], []).append((tuple(beginning), last))
            self.num_tail_tokens = max(self.num_tail_tokens, len(beginning))

    def completing(self, tail: Iterable[int]) -> list[int]:
        """Return the ids that must not follow an output that ends with `tail`."""
        banned = list(self._single)
        end = tuple(tail)
        for beginning, last in self._longer.get(end[-1], ()) if end else ():
            if end[-len(beginning) :] == beginning:
                banned.append(last)
        return banned


class Thinking:
    """Counts the reasoning tokens in an output, and tracks whether it is inside reasoning."""

    def __init__(self, budget: ThinkingBudget, output: Iterable[int] = ()) -> None:
        self._budget = budget
        self._inside = budget.begun
        self._num_tokens = 0
        for token_id in output:
            self.append(token_id)

    def append(self, token_id: int) -> None:
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
