"""Restricts tokens to allowed_token_ids. Once a thinking budget is spent, only the token that ends
the reasoning is allowed.
"""

from __future__ import annotations

from collections import abc

import numpy as np
from torch import Tensor

from penstock_proto.engine_request import EngineRequest
from penstock_shard.sequence import Sequence
from penstock_shard.worker.logits_processors.base import (
    LogitsProcessor,
    LogitsState,
    elements,
    index,
)
from penstock_shard.worker.token_state import Thinking, TokenIds


class _Allowed(LogitsState):
    def __init__(self, sequence: Sequence) -> None:
        request = sequence.request
        # Empty if all ids are allowed.
        self.ids = self._always = np.array(request.sampling.allowed_token_ids, dtype=np.int64)
        self._thinking = None
        if request.thinking_budget is not None:
            output = sequence.token_ids[sequence.num_prompt_tokens :]
            self._thinking = Thinking(request.thinking_budget, output)

    def choose(self) -> bool:
        if self._thinking is not None:
            forced = self._thinking.forced_id
            self.ids = self._always if forced is None else _single(forced)
        return bool(self.ids.size)

    def append(self, token_id: int) -> None:
        if self._thinking is not None:
            self._thinking.append(token_id)


class AllowedIds(LogitsProcessor[_Allowed]):
    def wants(self, request: EngineRequest) -> bool:
        return bool(request.sampling.allowed_token_ids) or request.thinking_budget is not None

    def begin(self, sequence: Sequence) -> _Allowed:
        return _Allowed(sequence)

    def apply(self, logits: Tensor, rows: abc.Sequence[tuple[int, _Allowed]]) -> None:
        where = elements(logits, [(i, state.ids) for i, state in rows])
        flat = logits.view(-1)
        allowed = flat.index_select(0, where)
        logits.index_fill_(0, index([i for i, _ in rows], logits), float("-inf"))
        flat.index_copy_(0, where, allowed)


def _single(token_id: int) -> TokenIds:
    return np.array((token_id,), dtype=np.int64)
