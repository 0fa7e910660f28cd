"""Figures of a run of agents, and their table."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Request:
    """A request and its result. `cached_tokens` is None before its first step. A time is the wait
    so far if the event has not come. `found_by_all` counts prompt tokens that a cache without
    evictions finds. `queue_s`, from arrival to first step, is None if unknown.
    """

    prompt_tokens: int
    cached_tokens: int | None
    found_by_all: int
    first_token_s: float
    queue_s: float | None
    is_ended: bool


@dataclass(frozen=True, slots=True)
class Figures:
    """Shares are those of the prompt tokens of requests that had a step; seconds are those of all
    requests. `imbalance` is the number of requests of the busiest shard divided by the mean.
    """

    requests: int
    ended: int
    prompt_tokens: int
    cached_share: float
    infinite_share: float
    first_token_p50_s: float
    first_token_p99_s: float
    queue_p50_s: float
    queue_p99_s: float
    imbalance: float

    @property
    def of_infinite(self) -> float:
        """Divide the cached share by that of a cache without evictions."""
        return self.cached_share / self.infinite_share if self.infinite_share else math.nan

    def as_json(self) -> dict[str, float | None]:
        """Return the figures for JSON, with null for NaN."""
        values = {**dataclasses.asdict(self), "of_infinite": self.of_infinite}
        return {name: None if math.isnan(value) else value for name, value in values.items()}


HEADINGS = (
    "load", "rule", "requests", "ended", "cached", "of infinite", "first token p50, s", "p99",
    "queued p50, s", "p99", "busiest / mean",
)  # fmt: skip


def figures_of(requests: Sequence[Request], imbalance: float) -> Figures:
    """Compute the figures of requests; NaN without requests."""
    begun = [each for each in requests if each.cached_tokens is not None]
    prompts = sum(each.prompt_tokens for each in begun)
    cached = sum(each.cached_tokens or 0 for each in begun)
    firsts = [each.first_token_s for each in requests]
    queued = [each.queue_s for each in requests if each.queue_s is not None]
    return Figures(
        requests=len(requests),
        ended=sum(each.is_ended for each in requests),
        prompt_tokens=prompts,
        cached_share=cached / prompts if prompts else math.nan,
        infinite_share=sum(each.found_by_all for each in begun) / prompts if prompts else math.nan,
        first_token_p50_s=percentile(firsts, 0.5),
        first_token_p99_s=percentile(firsts, 0.99),
        queue_p50_s=percentile(queued, 0.5),
        queue_p99_s=percentile(queued, 0.99),
        imbalance=imbalance,
    )


def percentile(values: Sequence[float], share: float) -> float:
    """Return the smallest value that is no less than this share of all; NaN for none."""
    if not values:
        return math.nan
    return sorted(values)[max(0, math.ceil(share * len(values)) - 1)]


def cells(load: str, rule: str, figures: Figures) -> tuple[str, ...]:
    """Write a row of the table."""
    seconds = (figures.first_token_p50_s, figures.first_token_p99_s,
               figures.queue_p50_s, figures.queue_p99_s)  # fmt: skip
    return (
        *(load, rule, f"{figures.requests:,}", f"{figures.ended:,}"),
        *(f"{figures.cached_share:.1%}", f"{figures.of_infinite:.1%}"),
        *("–" if math.isnan(each) else f"{each:.2f}" for each in seconds),
        "–" if math.isnan(figures.imbalance) else f"{figures.imbalance:.2f}",
    )
