"""Logits processors: what any of them may rely on."""

from __future__ import annotations

from collections import abc
from typing import Any

import numpy as np
import pytest
import torch
from models.driver import make_sequence
from torch import Tensor

from penstock_proto.engine_request import EngineRequest
from penstock_proto.types import EngineSampling
from penstock_shard.sequence import Sequence
from penstock_shard.worker.base import RowResult
from penstock_shard.worker.logits_processors.apply import LogitsShaping
from penstock_shard.worker.logits_processors.base import LogitsProcessor, LogitsState, ban
from penstock_shard.worker.logits_processors.order import every_processor
from penstock_shard.worker.sampling.sampler import Sampler, SampleRows

GREEDY = EngineSampling(temperature=0.0)
# The higher an id the likelier it is.
RISING = torch.arange(8.0).unsqueeze(0)


class _Taken(LogitsState):
    def __init__(self) -> None:
        self.ids: list[int] = []

    def choose(self) -> bool:
        return bool(self.ids)

    def append(self, token_id: int) -> None:
        self.ids.append(token_id)


class _NeverTwice(LogitsProcessor[_Taken]):
    """A token is drawn once, by requests that give a number of log-probabilities."""

    def wants(self, request: EngineRequest) -> bool:
        return request.logprobs is not None

    def begin(self, sequence: Sequence) -> _Taken:
        return _Taken()

    def apply(self, logits: Tensor, rows: abc.Sequence[tuple[int, _Taken]]) -> None:
        ban(logits, [(i, np.array(state.ids)) for i, state in rows])


def _admit(sampler: Sampler, slot: int, **fields: Any) -> None:
    sequence = make_sequence([1, 2], GREEDY, **fields)
    sequence.slot = slot
    sampler.admit(sequence)


def _sample(sampler: Sampler, *rows: tuple[int, int]) -> list[int | None]:
    slots, positions = np.array(rows).T
    results: list[RowResult] = sampler.sample(
        RISING.expand(len(rows), -1), SampleRows(slots, positions)
    )
    return [result.token_id for result in results]


def test_a_processor_is_one_class_and_its_states_go_by_slot() -> None:
    sampler = Sampler(LogitsShaping([_NeverTwice()]))
    _admit(sampler, 0, logprobs=0)
    _admit(sampler, 1)
    _admit(sampler, 2, logprobs=0)
    assert _sample(sampler, (0, 0), (1, 0)) == [7, 7]
    assert _sample(sampler, (0, 1), (1, 1), (2, 0)) == [6, 7, 7]
    assert _sample(sampler, (2, 1), (0, 2)) == [6, 5]
    # Another sequence in the same slot knows nothing of the one before.
    _admit(sampler, 0, logprobs=0)
    assert _sample(sampler, (0, 0), (2, 2)) == [7, 5]


def test_without_processors_logits_are_taken_as_they_are() -> None:
    sampling = EngineSampling(temperature=0.0, logit_bias=((0, 100.0),), bad_words=((7,),))
    tokens = []
    for sampler in (Sampler(), Sampler(every_processor())):
        sequence = make_sequence([1, 2], sampling)
        sequence.slot = 0
        sampler.admit(sequence)
        tokens += _sample(sampler, (0, 0))
    assert tokens == [7, 0]


@pytest.mark.parametrize(
    ("sampling", "fields", "expected"),
    [
        # The bias comes after penalties, which divide what is positive: 7 / 100 + 1 is below 6.
        ({"repetition_penalty": 100.0, "logit_bias": ((7, 1.0),)}, {"prompt": [7]}, 6),
        # Allowed ids, and of these none that is banned.
        ({"allowed_token_ids": (3, 5), "bad_words": ((5,),)}, {}, 3),
        # A bias makes nothing possible that is not allowed.
        ({"allowed_token_ids": (3, 5), "logit_bias": ((7, 50.0),)}, {}, 5),
        ({"logit_bias": ((2, 50.0),), "bad_words": ((2,),)}, {}, 7),
    ],
)
def test_processors_apply_in_their_order(
    sampling: dict[str, Any], fields: dict[str, Any], expected: int
) -> None:
    sampler = Sampler(every_processor())
    prompt = fields.pop("prompt", [1, 2])
    sequence = make_sequence(prompt, EngineSampling(temperature=0.0, **sampling), **fields)
    sequence.slot = 0
    sampler.admit(sequence)
    assert _sample(sampler, (0, 0)) == [expected]
