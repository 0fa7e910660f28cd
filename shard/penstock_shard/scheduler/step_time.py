"""Predicts the seconds of a step from earlier steps.

The model is linear: a fixed part (launching, reading the weights), and a part for each decode row,
prompt token and key attended to. A least squares fit over about the last hundred steps gives four
coefficients, none of them negative, by coordinate descent on decaying sums (Lawson and Hanson's
problem). A few sweeps suffice.
"""

from __future__ import annotations

import math
from collections import abc
from collections.abc import Iterable
from dataclasses import dataclass

from penstock_shard.scheduler.rows import Row

# A step's weight relative to the next step's.
_DECAY = 0.98
_SWEEPS = 2
# The order of fitting: prompt tokens and decode rows before the fixed part, so that the first
# steps' time is attributed to what they compute.
_ORDER = (2, 1, 0, 3)
# A measured time is cut to this many times its prediction or the average, whichever is larger,
# because a pause of the machine says little about the next step.
_DISTURBED = 3.0
# A coefficient with a smaller decayed sum had no recent data and is not fitted.
_FORGOTTEN = 1e-6
# Longer than any chunk.
_MOST_TOKENS = 2**31
# Keys are counted in thousands, so that the sums have similar sizes.
_KEYS = 1e-3


@dataclass(frozen=True, slots=True)
class StepSize:
    """The work of a step. `num_keys` counts pairs of a query and a key. A draft token is assumed to
    cost as much as a prompt token.
    """

    num_decodes: int
    num_prompt_tokens: int
    num_keys: int
    num_drafts: int = 0

    def plus(self, other: StepSize) -> StepSize:
        return StepSize(
            self.num_decodes + other.num_decodes,
            self.num_prompt_tokens + other.num_prompt_tokens,
            self.num_keys + other.num_keys,
            self.num_drafts + other.num_drafts,
        )


def step_size(rows: Iterable[Row]) -> StepSize:
    decodes = prompt_tokens = keys = drafts = 0
    for row in rows:
        if row.samples and row.count == 1:
            decodes += 1
            keys += row.start + 1
            continue
        keys += row.count * row.start + row.count * (row.count + 1) // 2
        if row.drafts:
            decodes += 1
            drafts += len(row.drafts)
        else:
            prompt_tokens += row.count
    return StepSize(decodes, prompt_tokens, keys, drafts)


class StepTime:
    """Predicts seconds; 0 until it has seen a step."""

    def __init__(self) -> None:
        self._products = [[0.0] * 4 for _ in range(4)]
        self._targets = [0.0] * 4
        # Seconds of any step, and for each decode row, prompt token and thousand keys.
        self._seconds = [0.0] * 4
        self._num_seen = 0

    def learn(self, size: StepSize, seconds: float) -> None:
        features = _features(size)
        if self._num_seen > 16:
            # Use the average too, because the prediction is near 0 for a new kind of step.
            average_s = self._targets[0] / self._products[0][0]
            seconds = min(seconds, _DISTURBED * max(self._dot(features), average_s))
        self._num_seen += 1
        for index, value in enumerate(features):
            self._products[index] = [
                _DECAY * total + value * other
                for total, other in zip(self._products[index], features, strict=True)
            ]
            self._targets[index] = _DECAY * self._targets[index] + value * seconds
        self._solve()

    def predict(self, size: StepSize) -> float:
        return self._dot(_features(size))

    def decode_s(self, num_keys: int) -> float:
        """Predict the seconds that a decode row over `num_keys` keys adds."""
        return self._seconds[1] + self._seconds[3] * num_keys * _KEYS

    @property
    def fixed_s(self) -> float:
        """Seconds of a step without rows."""
        return self._seconds[0]

    def prompt_s(self, start: int, count: int) -> float:
        """Predict the seconds that prompt tokens [start, start + count) add."""
        num_keys = count * start + count * (count + 1) // 2
        return self._seconds[2] * count + self._seconds[3] * num_keys * _KEYS

    def prompt_tokens_in(self, seconds: float, start: int) -> int:
        """Return how many prompt tokens from `start` on a step can compute in `seconds` more."""
        if seconds <= 0:
            return 0
        per_key = self._seconds[3] * _KEYS
        # Token n of the chunk attends to start + n keys, so time is quadratic in the chunk's
        # length.
        per_token = self._seconds[2] + per_key * start
        if per_key > 0:
            root = math.sqrt(per_token * per_token + 2 * per_key * seconds)
            return int(min(2 * seconds / (per_token + root), _MOST_TOKENS))
        return int(min(seconds / per_token, _MOST_TOKENS)) if per_token > 0 else _MOST_TOKENS

    def _dot(self, features: abc.Sequence[float]) -> float:
        fixed, decode, prompt_token, keys = self._seconds
        one, num_decodes, num_prompt_tokens, num_keys = features
        return (
            fixed * one + decode * num_decodes + prompt_token * num_prompt_tokens + keys * num_keys
        )

    def _solve(self) -> None:
        for _ in range(_SWEEPS):
            for index in _ORDER:
                row = self._products[index]
                if row[index] < _FORGOTTEN:
                    continue
                others = self._dot(row) - row[index] * self._seconds[index]
                self._seconds[index] = max(0.0, (self._targets[index] - others) / row[index])


def _features(size: StepSize) -> tuple[float, float, float, float]:
    return (
        1.0,
        float(size.num_decodes),
        float(size.num_prompt_tokens + size.num_drafts),
        size.num_keys * _KEYS,
    )
