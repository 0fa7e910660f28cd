"""bad_words: bans the last id of a word if the output ends with the word's other ids."""

from __future__ import annotations

from collections import abc, deque

import numpy as np
from torch import Tensor

from penstock_proto.engine_request import EngineRequest
from penstock_shard.sequence import Sequence
from penstock_shard.worker import token_state
from penstock_shard.worker.logits_processors.base import LogitsProcessor, LogitsState, ban


class _Tail(LogitsState):
    def __init__(self, sequence: Sequence) -> None:
        request = sequence.request
        self._words = token_state.BadWords(request.sampling.bad_words)
        output = sequence.token_ids[sequence.num_prompt_tokens :]
        self._tail: deque[int] = deque(output, maxlen=self._words.num_tail_tokens)
        self.banned_ids: list[int] = []

    def choose(self) -> bool:
        self.banned_ids = self._words.completing(self._tail)
        return bool(self.banned_ids)

    def append(self, token_id: int) -> None:
        self._tail.append(token_id)


class BadWords(LogitsProcessor[_Tail]):
    def wants(self, request: EngineRequest) -> bool:
        return bool(request.sampling.bad_words)

    def begin(self, sequence: Sequence) -> _Tail:
        return _Tail(sequence)

    def apply(self, logits: Tensor, rows: abc.Sequence[tuple[int, _Tail]]) -> None:
        ban(logits, [(i, np.array(state.banned_ids)) for i, state in rows])
