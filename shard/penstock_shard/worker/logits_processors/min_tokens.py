"""min_tokens: bans stop ids until the output has this many tokens."""

from __future__ import annotations

from collections import abc

import numpy as np
from torch import Tensor

from penstock_proto.engine_request import EngineRequest
from penstock_shard.sequence import Sequence
from penstock_shard.worker.logits_processors.base import LogitsProcessor, LogitsState, ban


class _Short(LogitsState):
    def __init__(self, sequence: Sequence) -> None:
        request = sequence.request
        self.stop_ids = np.array(sorted(request.stop_token_ids), dtype=np.int64)
        self._num_left = request.min_tokens - sequence.num_output_tokens

    def choose(self) -> bool:
        return self._num_left > 0 and bool(self.stop_ids.size)

    def append(self, token_id: int) -> None:
        self._num_left -= 1

    def skip(self) -> None:
        self._num_left -= 1

    def repeat(self) -> None:
        self._num_left += 1


class MinTokens(LogitsProcessor[_Short]):
    """Bans stop ids. A constraint decides for itself where they may be drawn."""

    def wants(self, request: EngineRequest) -> bool:
        return request.min_tokens > 0 and request.constraint is None

    def begin(self, sequence: Sequence) -> _Short:
        return _Short(sequence)

    def apply(self, logits: Tensor, rows: abc.Sequence[tuple[int, _Short]]) -> None:
        ban(logits, [(i, state.stop_ids) for i, state in rows])
