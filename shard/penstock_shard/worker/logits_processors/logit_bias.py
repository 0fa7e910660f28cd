"""logit_bias: adds a number to a token's logit."""

from __future__ import annotations

from collections import abc

import numpy as np
from torch import Tensor

from penstock_proto.engine_request import EngineRequest
from penstock_shard.device.async_copy import to_device
from penstock_shard.sequence import Sequence
from penstock_shard.worker.logits_processors.base import LogitsProcessor, LogitsState, elements


class _Biased(LogitsState):
    def __init__(self, sequence: Sequence) -> None:
        bias = sequence.request.sampling.logit_bias
        self.ids = np.array([token_id for token_id, _ in bias], dtype=np.int64)
        self.bias = np.array([value for _, value in bias], dtype=np.float32)


class Bias(LogitsProcessor[_Biased]):
    def wants(self, request: EngineRequest) -> bool:
        return bool(request.sampling.logit_bias)

    def begin(self, sequence: Sequence) -> _Biased:
        return _Biased(sequence)

    def apply(self, logits: Tensor, rows: abc.Sequence[tuple[int, _Biased]]) -> None:
        bias = np.concatenate([state.bias for _, state in rows])
        where = elements(logits, [(i, state.ids) for i, state in rows])
        logits.view(-1).index_add_(0, where, to_device(bias, logits.device))
