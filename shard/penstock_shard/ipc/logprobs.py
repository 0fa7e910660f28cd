"""Log-probabilities of tokens, as runners give them and as they are sent on."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True)
class Logprobs:
    """Log-probabilities of n tokens, in flat columns.

    `top_*` hold `top_n` values for each token, best first; `requested` holds one for each of the
    sequence's `logprob_token_ids` for each token.
    """

    chosen: list[float] = field(default_factory=list)
    ranks: list[int] = field(default_factory=list)
    top_n: int = 0
    top_token_ids: list[int] = field(default_factory=list)
    top_logprobs: list[float] = field(default_factory=list)
    requested: list[float] = field(default_factory=list)

    @property
    def num_requested(self) -> int:
        """Values in `requested` for each token."""
        return len(self.requested) // max(1, len(self.chosen))

    def first(self, count: int) -> Logprobs:
        """The log-probabilities of the first `count` tokens."""
        keep = count * self.top_n
        keep_requested = count * self.num_requested
        return Logprobs(
            self.chosen[:count],
            self.ranks[:count],
            self.top_n,
            self.top_token_ids[:keep],
            self.top_logprobs[:keep],
            self.requested[:keep_requested],
        )

    def without_first(self, count: int) -> Logprobs:
        """The log-probabilities of all but the first `count` tokens."""
        skip = count * self.top_n
        skip_requested = count * self.num_requested
        return Logprobs(
            self.chosen[count:],
            self.ranks[count:],
            self.top_n,
            self.top_token_ids[skip:],
            self.top_logprobs[skip:],
            self.requested[skip_requested:],
        )

    def extend(self, later: Logprobs) -> None:
        """Append the log-probabilities of the tokens that follow."""
        self.chosen += later.chosen
        self.ranks += later.ranks
        self.top_token_ids += later.top_token_ids
        self.top_logprobs += later.top_logprobs
        self.requested += later.requested
