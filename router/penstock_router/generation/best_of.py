"""best_of: of more choices than were asked for, the most likely are the answer."""

from __future__ import annotations

from penstock_router.generation.choice import Delta
from penstock_router.generation.job import Job


def pick_best(job: Job, deltas: list[Delta]) -> list[Delta]:
    """The n most likely of each prompt's choices, by log-probability a token."""
    n, candidates = job.options.n, job.choices_per_prompt
    if n == candidates:
        return deltas
    best: list[Delta] = []
    for start in range(0, len(deltas), candidates):
        ranked = sorted(deltas[start : start + candidates], key=mean_logprob, reverse=True)
        best += ranked[:n]
    for index, delta in enumerate(best):
        delta.index = index
        if job.options.logprobs is None:
            delta.logprobs = None
    return best


def mean_logprob(delta: Delta) -> float:
    """The mean log-probability of a token, by which `best_of` ranks choices."""
    values = delta.logprobs.chosen if delta.logprobs is not None else []
    return sum(values) / len(values) if values else 0.0
