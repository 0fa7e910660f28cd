"""What the sampler keeps of a request's tokens, position by position.

Knows how often each token occurs and how far a bad word has come; numpy and plain integers only.
Knows nothing of logits or of how tokens are drawn.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from penstock_shard.request import Request, SamplingParams

TokenIds = NDArray[np.int64]

_SPARE_SLOTS = 64


def needs_state(request: Request) -> bool:
    """Whether more than the logits and the filters decides about its tokens."""
    sampling = request.sampling
    return bool(
        _counts_tokens(sampling)
        or sampling.logit_bias
        or sampling.allowed_token_ids
        or sampling.bad_words
        or request.min_tokens
    )


def _counts_tokens(sampling: SamplingParams) -> bool:
    return (
        sampling.repetition_penalty != 1.0
        or sampling.presence_penalty != 0.0
        or sampling.frequency_penalty != 0.0
    )


class TokenCounts:
    """Distinct tokens, and how often each is in the output; one token more costs a table look-up.

    The tokens it starts with are sorted, later ones stand behind them in order of appearance.
    """

    def __init__(self, prompt: Sequence[int], output: Sequence[int]) -> None:
        generated = np.array(output, dtype=np.int64)
        known = np.unique(np.concatenate([np.array(prompt, dtype=np.int64), generated]))
        self._num_sorted = self._size = len(known)
        spare = np.zeros(_SPARE_SLOTS, dtype=np.int64)
        self._ids = np.concatenate([known, spare])
        self._counts = np.bincount(
            np.searchsorted(known, generated), minlength=len(known) + _SPARE_SLOTS
        )
        self._slots: dict[int, int] = {}

    @property
    def ids(self) -> TokenIds:
        return self._ids[: self._size]

    @property
    def counts(self) -> NDArray[np.int64]:
        """Beside `ids`; 0 for a token that only the prompt has."""
        return self._counts[: self._size]

    def add(self, token_id: int) -> None:
        """Count one more token of the output."""
        slot = self._slots.get(token_id)
        if slot is None:
            slot = self._slots[token_id] = self._find_or_append(token_id)
        self._counts[slot] += 1

    def _find_or_append(self, token_id: int) -> int:
        known = self._ids[: self._num_sorted]
        slot = int(np.searchsorted(known, token_id))
        if slot < len(known) and known[slot] == token_id:
            return slot
        if self._size == len(self._ids):
            self._ids = np.concatenate([self._ids, np.zeros_like(self._ids)])
            self._counts = np.concatenate([self._counts, np.zeros_like(self._counts)])
        self._ids[self._size] = token_id
        self._size += 1
        return self._size - 1


class BadWords:
    """Which ids would complete a word that must not occur."""

    def __init__(self, words: Iterable[Sequence[int]]) -> None:
        self._single: list[int] = []
        # Under the last id before its end: what a word begins with, and its last id.
        self._longer: dict[int, list[tuple[tuple[int, ...], int]]] = {}
        # How much of the output's end can matter.
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


class TokenState:
    """What decides beside logits and filters, for one request, at one position of its output.

    Goes forward with the tokens it is given, and finds its way from the request's own tokens
    wherever it is asked for another position.
    """

    def __init__(self, request: Request) -> None:
        sampling = request.sampling
        self.sampling = sampling
        self.bias_ids = np.array([token_id for token_id, _ in sampling.logit_bias], dtype=np.int64)
        self.bias = np.array([bias for _, bias in sampling.logit_bias], dtype=np.float32)
        self.allowed_ids = np.array(sampling.allowed_token_ids, dtype=np.int64)
        # Of prompt and output where a repetition penalty asks for both, else of the output.
        self.counts: TokenCounts | None = None
        # Ids that cannot be drawn at this position.
        self.banned_ids: list[int] = []
        self._request = request
        self._stop_ids = sorted(request.stop_token_ids)
        self._bad_words = BadWords(sampling.bad_words)
        self._tail: deque[int] = deque(maxlen=self._bad_words.num_tail_tokens)
        self._follows_output = _counts_tokens(sampling) or self._bad_words.num_tail_tokens > 0
        # How many tokens of the output it has taken in.
        self._num_output_tokens = -1

    @property
    def changes_logits(self) -> bool:
        """Whether anything of this is in force at this position."""
        return bool(
            self.counts is not None
            or self.banned_ids
            or self.bias_ids.size
            or self.allowed_ids.size
        )

    def move_to(self, position: int) -> None:
        """Stand where `position` tokens of the output are known and the next is to be drawn.

        They are known if the last of them was given to `append`; otherwise the request must have
        them.
        """
        if self._follows_output and position != self._num_output_tokens:
            self._read(position)
        self.banned_ids = self._bad_words.completing(self._tail)
        if position < self._request.min_tokens:
            self.banned_ids += self._stop_ids

    def append(self, token_id: int) -> None:
        """This token was drawn at the position it stands at."""
        if self.counts is not None:
            self.counts.add(token_id)
        self._tail.append(token_id)
        self._num_output_tokens += 1

    def _read(self, position: int) -> None:
        request = self._request
        end = request.num_prompt_tokens + position
        assert len(request.token_ids) >= end, (
            f"request {request.request_id}: output position {position} is to be drawn, but only "
            f"{request.num_output_tokens} output tokens are known"
        )
        output = request.token_ids[request.num_prompt_tokens : end]
        if _counts_tokens(self.sampling):
            repeats = self.sampling.repetition_penalty != 1.0
            prompt = request.token_ids[: request.num_prompt_tokens] if repeats else ()
            self.counts = TokenCounts(prompt, output)
        self._tail.clear()
        self._tail.extend(output)
        self._num_output_tokens = position
