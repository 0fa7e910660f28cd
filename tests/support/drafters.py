"""Drafts that a test chooses, where the usual ones would be right too seldom."""

from __future__ import annotations

import random
from collections import abc
from collections.abc import Callable, Mapping

from penstock_proto.engine_request import EngineRequest
from penstock_shard.sequence import Sequence
from penstock_shard.spec_decode.prompt_lookup import Drafter
from support.engines import EOS_ID

# What a request's output will be, deliveries of earlier attempts included.
Foresight = Callable[[EngineRequest], abc.Sequence[int]]


def named(outputs: Mapping[str, abc.Sequence[int]]) -> Foresight:
    """The output of each request, by its id."""
    return lambda request: outputs[request.request_id]


def always(output: abc.Sequence[int]) -> Foresight:
    return lambda request: output


class Oracle(Drafter):
    """Drafts what will come, all that it may."""

    def __init__(self, most: int, foresee: Foresight) -> None:
        super().__init__(most)
        self._foresee = foresee

    def expects(self, sequence: Sequence) -> bool:
        return True

    def propose(self, sequence: Sequence, most: int) -> list[int]:
        number = sequence.num_output_tokens
        return list(self._foresee(sequence.request)[number : number + most])


class FickleOracle(Oracle):
    """Drafts as many as it likes, some right, then others; waits for its turn or does not."""

    def __init__(
        self, most: int, foresee: Foresight, rng: random.Random, vocab_size: int = EOS_ID
    ) -> None:
        super().__init__(most, foresee)
        self._random = rng
        self._vocab_size = vocab_size

    def expects(self, sequence: Sequence) -> bool:
        return self._random.random() < 0.5

    def propose(self, sequence: Sequence, most: int) -> list[int]:
        right = super().propose(sequence, self._random.randint(0, most))
        wrong = [self._random.randrange(self._vocab_size) for _ in range(most - len(right))]
        return (right + wrong)[: self._random.randint(0, most)]
