"""Made-up traffic of a fleet's users, the same for the same seed. It knows no shard."""

from __future__ import annotations

import random
from collections.abc import Iterator

from simulation.policies import Conversation, Turn

# Ids that mean nothing, below those of the simulated shards' vocabulary.
_IDS = range(10, 900)


def chat(
    rng: random.Random, *, shards: int, seconds: float, starts_per_s: float = 0.6
) -> list[Conversation]:
    """Conversations of 2 to 12 turns, `starts_per_s` new ones for each shard, that share a few
    system prompts: four of 400 to 1200 tokens, the first the most popular. What a user says has
    100 tokens in the median, an answer 150, and people take 8 s to go on.
    """
    systems = [_ids(rng, rng.randint(400, 1200)) for _ in range(4)]
    return [
        Conversation(f"chat-{number}", start_s, _turns(rng, systems))
        for number, start_s in enumerate(_poisson(rng, starts_per_s * shards, seconds))
    ]


def _turns(rng: random.Random, systems: list[list[int]]) -> list[Turn]:
    (system,) = rng.choices(systems, weights=(8, 4, 2, 1))
    turns = []
    for index in range(rng.randint(2, 12)):
        said = _ids(rng, _length(rng, 100, 0.8, 2000))
        think_s = rng.expovariate(1 / 8) if index else 0.0
        turns.append(Turn(said if index else system + said, _length(rng, 150, 0.6, 600), think_s))
    return turns


def mixed(
    rng: random.Random, *, shards: int, seconds: float, starts_per_s: float = 1.5
) -> list[Conversation]:
    """Single requests that share nothing, `starts_per_s` for each shard and three times as many for
    2 s of every 20: prompts of 300 tokens in the median, one in ten of 4,000 to 16,000; answers of
    120 tokens, one in ten of 500 to 1,500.
    """
    found = []
    for number, start_s in enumerate(_bursts(rng, starts_per_s * shards, seconds)):
        is_long, talks_long = rng.random() < 0.1, rng.random() < 0.1
        prompt = rng.randint(4_000, 16_000) if is_long else _length(rng, 300, 0.8, 3_000)
        output = rng.randint(500, 1_500) if talks_long else _length(rng, 120, 0.6, 500)
        turn = Turn(_ids(rng, prompt), output)
        found.append(Conversation(f"request-{number}", start_s, [turn]))
    return found


def _bursts(rng: random.Random, per_s: float, seconds: float) -> Iterator[float]:
    """Poisson arrivals, thinned to a third but for 2 s of every 20."""
    for at_s in _poisson(rng, 3 * per_s, seconds):
        if at_s % 20 >= 18 or rng.random() < 1 / 3:
            yield at_s


def _poisson(rng: random.Random, per_s: float, seconds: float) -> Iterator[float]:
    at_s = rng.expovariate(per_s)
    while at_s < seconds:
        yield at_s
        at_s += rng.expovariate(per_s)


def _length(rng: random.Random, median: int, sigma: float, most: int) -> int:
    return min(most, max(1, round(median * rng.lognormvariate(0, sigma))))


def _ids(rng: random.Random, count: int) -> list[int]:
    return rng.choices(_IDS, k=count)
