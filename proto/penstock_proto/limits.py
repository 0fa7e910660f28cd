"""Bounds of what requests ask for. Shards check them; a router checks the same, or less where an
HTTP API allows less, to refuse in the API's own words.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

# The largest float32, the type on the wire and in the sampler.
_LARGEST_FLOAT = (2 - 2**-23) * 2.0**127


@dataclass(frozen=True, slots=True)
class Range:
    """The values a field may have; `low` itself only where `above_low` is false."""

    low: float
    high: float = _LARGEST_FLOAT
    above_low: bool = False

    def holds(self, value: float) -> bool:
        """False for NaN and for infinities."""
        above = self.low < value if self.above_low else self.low <= value
        return above and value <= self.high

    def __str__(self) -> str:
        if not self.above_low:
            return f"{self.low:g}..{self.high:g}"
        bound = "finite" if self.high == _LARGEST_FLOAT else f"at most {self.high:g}"
        return f"above {self.low:g}, {bound}"


# ---- sampling ----------------------------------------------------------------------------------

# The parameters that are floats, in a request or in a model's files.
SAMPLING_RANGES: Mapping[str, Range] = {
    "temperature": Range(0, 100),
    "top_p": Range(0, 1, above_low=True),
    "min_p": Range(0, 1),
    "typical_p": Range(0, 1, above_low=True),
    "repetition_penalty": Range(0, above_low=True),
    "presence_penalty": Range(-2, 2),
    "frequency_penalty": Range(-2, 2),
}
# Values with which the penalties change nothing.
NO_PENALTIES: Mapping[str, float] = {
    "repetition_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
}
MAX_TOP_K = 2**31 - 1
# At lower temperatures, the most likely token is taken.
GREEDY_TEMPERATURE = 1e-5
LOGIT_BIAS_RANGE = Range(-100, 100)
# Words that an output may not contain, and the length of one.
MAX_BAD_WORDS = 1024
MAX_BAD_WORD_TOKENS = 64

# ---- the rest of a request ---------------------------------------------------------------------

MAX_ID_CHARACTERS = 256
MAX_STOP_TOKEN_IDS = 1024
MAX_LOGPROB_TOKEN_IDS = 1024
OBJECTIVE_RANGES: Mapping[str, Range] = {
    "priority": Range(-1000, 1000),
    "time_to_first_token_s": Range(0, above_low=True),
    "seconds_between_tokens": Range(0, above_low=True),
}
# Options of a choice.
MAX_CHOICE_OPTIONS = 1024
# Size of a constraint built from tools and other demands. By default, shards accept less
# (--max-constraint-bytes).
MAX_BUILT_CONSTRAINT_BYTES = 2**20
# Inputs and results of an Embed call. Callers split larger ones.
MAX_EMBEDDING_INPUTS = 1024
MAX_EMBEDDING_BYTES = 32 * 2**20
# Lengths of a LoRA adapter's name and source.
MAX_ADAPTER_NAME_CHARACTERS = 256
MAX_ADAPTER_SOURCE_CHARACTERS = 4096
# Hints of how long an ended request's KV blocks stay, and how much they matter.
RETENTION_RANGES: Mapping[str, Range] = {
    "seconds": Range(0, 86_400),
    "expected_s": Range(0, 86_400),
    "priority": Range(0, 100),
}

# ---- where an HTTP API allows less than a shard ------------------------------------------------

# The APIs' own documentation gives these ranges.
OPENAI_TEMPERATURE = Range(0, 2)
ANTHROPIC_TEMPERATURE = Range(0, 1)
# A router tokenizes each word twice, with and without a space before it.
MAX_HTTP_BAD_WORDS = 128
# Lower runs first. Below the default of 0, any HTTP client could overtake all others: negative
# classes are for those who call shards.
HTTP_PRIORITY = Range(0, 1000)

# ---- what a shard sends ------------------------------------------------------------------------

# Size of a request's log-probabilities that may wait for a slow reader. A request with more ends.
MAX_UNREAD_SCORES_BYTES = 64 * 2**20
# A suspect request that gives this many tokens in a new engine did not crash the earlier engines:
# it would have crashed the new one at the same position. When an engine dies, fewer tokens than
# this are computed but not sent.
TRIAL_TOKENS = 8


# ---- refusals ----------------------------------------------------------------------------------


def out_of_bounds(name: str, value: object, bound: object) -> str:
    """The error text for a field with such a value."""
    return f"{name}: {short(value)} is out of bounds; allowed: {bound}"


def short(value: object) -> str:
    """A value as text, cut to 80 characters."""
    text = str(value)
    return text if len(text) <= 80 else text[:77] + "..."
