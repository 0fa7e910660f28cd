"""What the sampler keeps of a sequence's tokens, position by position.

Knows how often each token occurs, how far a bad word has matched, how many reasoning tokens there
are and the state of the constraint; numpy and plain integers only. Knows nothing of logits or of
how tokens are drawn.
"""

from __future__ import annotations

from collections import abc, deque
from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from penstock_shard.request import Request, SamplingParams, ThinkingBudget
from penstock_shard.runner.base import Admission

TokenIds = NDArray[np.int64]

_SPARE_PLACES = 64


def needs_state(request: Request) -> bool:
    """Whether its tokens depend on more than the logits and the filters (top-k and the like)."""
    sampling = request.sampling
    return bool(
        _counts_tokens(sampling)
        or sampling.logit_bias
        or sampling.allowed_token_ids
        or sampling.bad_words
        or request.min_tokens
        or request.constraint is not None
        or request.thinking_budget is not None
    )


def _counts_tokens(sampling: SamplingParams) -> bool:
    return (
        sampling.repetition_penalty != 1.0
        or sampling.presence_penalty != 0.0
        or sampling.frequency_penalty != 0.0
    )


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


class TokenState:
    """What changes the logits of one sequence at one position of its output, beginning with the
    position that follows the tokens of its admission. Advances with the tokens it is given.
    """

    def __init__(self, admission: Admission) -> None:
        request = admission.request
        sampling = request.sampling
        prompt = admission.token_ids[: request.num_prompt_tokens]
        output = admission.token_ids[request.num_prompt_tokens :]
        self.sampling = sampling
        self.bias_ids = np.array([token_id for token_id, _ in sampling.logit_bias], dtype=np.int64)
        self.bias = np.array([bias for _, bias in sampling.logit_bias], dtype=np.float32)
        # The only ids that may be drawn at this position; empty: all.
        self.allowed_ids = self._always_allowed = _array(sampling.allowed_token_ids)
        # Tokens of the output, and with a repetition penalty of the prompt too; None without
        # penalties.
        self.counts: TokenCounts | None = None
        if _counts_tokens(sampling):
            repeats = sampling.repetition_penalty != 1.0
            self.counts = TokenCounts(prompt if repeats else (), output)
        # Ids that cannot be drawn at this position.
        self.banned_ids: list[int] = []
        # How many tokens of the output are in this state.
        self.position = len(output)
        self.constraint = admission.constraint
        if self.constraint is not None:
            self.constraint.move_to(output)
        budget = request.thinking_budget
        self._thinking = None if budget is None else Thinking(budget, output)
        self._min_tokens = request.min_tokens
        # Empty with a constraint, which itself says when stop ids may be drawn.
        self._stop_ids = [] if self.constraint else sorted(request.stop_token_ids)
        self._bad_words = BadWords(sampling.bad_words)
        self._tail: deque[int] = deque(output, maxlen=self._bad_words.num_tail_tokens)

    @property
    def changes_logits(self) -> bool:
        """Whether the logits are changed at this position."""
        return bool(
            self.counts is not None
            or self.banned_ids
            or self.bias_ids.size
            or self.allowed_ids.size
            or self.constraint is not None
        )

    def choose(self) -> None:
        """Work out which ids may be drawn at this position, but for the constraint's mask."""
        if self._thinking is not None:
            forced = self._thinking.forced_id
            self.allowed_ids = self._always_allowed if forced is None else _array((forced,))
        self.banned_ids = self._bad_words.completing(self._tail)
        if self.position < self._min_tokens:
            self.banned_ids += self._stop_ids

    def append(self, token_id: int) -> None:
        """Advance by the token that was drawn at this position."""
        if self.counts is not None:
            self.counts.add(token_id)
        if self.constraint is not None:
            self.constraint.append(token_id)
        if self._thinking is not None:
            self._thinking.append(token_id)
        self._tail.append(token_id)
        self.position += 1

    def skip(self) -> None:
        """Advance without a token: none could be drawn at this position. A step launched ahead may
        still ask for the next position; its result is thrown away.
        """
        if self.constraint is not None:
            self.constraint.skip()
        self.position += 1

    def repeat(self) -> None:
        """Take a `skip` back."""
        if self.constraint is not None:
            self.constraint.repeat()
        self.position -= 1


def _array(ids: abc.Sequence[int]) -> TokenIds:
    return np.array(ids, dtype=np.int64)
