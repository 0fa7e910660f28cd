"""Log-probabilities of tokens, as runners give them and as they are sent on."""

from __future__ import annotations

from collections import abc
from dataclasses import dataclass, field

import numpy as np

_ITEM_BYTES = 4


@dataclass(slots=True)
class Logprobs:
    """Log-probabilities of n tokens, in flat columns.

    `best_*` hold `top_n` values for each token, best first, as bytes: there may be as many as the
    vocabulary has tokens. `requested` holds one for each of the sequence's `logprob_token_ids` for
    each token.
    """

    chosen: list[float] = field(default_factory=list)
    ranks: list[int] = field(default_factory=list)
    top_n: int = 0
    # Unsigned 32-bit integers and float32, little-endian, as they stand on the wire.
    best_ids: bytearray = field(default_factory=bytearray)
    best_logprobs: bytearray = field(default_factory=bytearray)
    requested: list[float] = field(default_factory=list)

    @property
    def top_token_ids(self) -> list[int]:
        """`best_ids` as integers."""
        ids: list[int] = np.frombuffer(self.best_ids, dtype="<u4").tolist()
        return ids

    @property
    def top_logprobs(self) -> list[float]:
        """`best_logprobs` as floats."""
        values: list[float] = np.frombuffer(self.best_logprobs, dtype="<f4").tolist()
        return values

    @property
    def num_requested(self) -> int:
        """Values in `requested` for each token."""
        return len(self.requested) // max(1, len(self.chosen))

    @property
    def num_bytes(self) -> int:
        """Bytes that the columns take on the wire, about."""
        return len(self.best_ids) + len(self.best_logprobs) + _ITEM_BYTES * len(self.requested)

    def add_best(self, token_ids: abc.Sequence[int], logprobs: abc.Sequence[float]) -> None:
        """Append the best of the tokens that follow."""
        self.best_ids += np.array(token_ids, dtype="<u4").tobytes()
        self.best_logprobs += np.array(logprobs, dtype="<f4").tobytes()

    def first(self, count: int) -> Logprobs:
        """The log-probabilities of the first `count` tokens."""
        keep = count * self.top_n * _ITEM_BYTES
        keep_requested = count * self.num_requested
        return Logprobs(
            self.chosen[:count],
            self.ranks[:count],
            self.top_n,
            self.best_ids[:keep],
            self.best_logprobs[:keep],
            self.requested[:keep_requested],
        )

    def drop_first(self, count: int) -> None:
        """Remove those of the first `count` tokens."""
        num_requested = self.num_requested
        skip = count * self.top_n * _ITEM_BYTES
        del self.chosen[:count], self.ranks[:count]
        del self.best_ids[:skip], self.best_logprobs[:skip]
        del self.requested[: count * num_requested]

    def extend(self, later: Logprobs) -> None:
        """Append the log-probabilities of the tokens that follow."""
        self.chosen += later.chosen
        self.ranks += later.ranks
        self.best_ids += later.best_ids
        self.best_logprobs += later.best_logprobs
        self.requested += later.requested
