"""Penalties on tokens that occurred before.

For tokens of prompt and output, repetition_penalty divides positive logits and multiplies others
(Keskar et al., "CTRL", 2019). Then, for tokens of the output, presence_penalty is subtracted once
and frequency_penalty once for each occurrence. With penalty_window_tokens = w, only the last w
tokens count.
"""

from __future__ import annotations

from collections import abc

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from penstock_proto.engine_request import EngineRequest
from penstock_shard.device.async_copy import to_device
from penstock_shard.sequence import Sequence
from penstock_shard.worker.logits_processors.base import LogitsProcessor, LogitsState, elements
from penstock_shard.worker.token_state import TokenCounts, WindowCounts

_LARGEST_LOGIT = torch.finfo(torch.float32).max


class _Counted(LogitsState):
    def __init__(self, sequence: Sequence) -> None:
        self.sampling = sequence.request.sampling
        num_prompt_tokens = sequence.num_prompt_tokens
        prompt, output = (
            sequence.token_ids[:num_prompt_tokens],
            sequence.token_ids[num_prompt_tokens:],
        )
        self.counts: TokenCounts | WindowCounts
        if self.sampling.penalty_window_tokens is not None:
            self.counts = WindowCounts(self.sampling.penalty_window_tokens, prompt, output)
        else:
            # Without a repetition penalty, tokens of the prompt do not count.
            repeats = self.sampling.repetition_penalty != 1.0
            self.counts = TokenCounts(prompt if repeats else (), output)

    def append(self, token_id: int) -> None:
        self.counts.add(token_id)

    def subtracted(self) -> NDArray[np.float32]:
        sampling, counts = self.sampling, self.counts.counts
        penalty = sampling.presence_penalty * (counts > 0) + sampling.frequency_penalty * counts
        return penalty.astype(np.float32)


class Penalties(LogitsProcessor[_Counted]):
    def wants(self, request: EngineRequest) -> bool:
        sampling = request.sampling
        return (
            sampling.repetition_penalty != 1.0
            or sampling.presence_penalty != 0.0
            or sampling.frequency_penalty != 0.0
        )

    def begin(self, sequence: Sequence) -> _Counted:
        return _Counted(sequence)

    def apply(self, logits: Tensor, rows: abc.Sequence[tuple[int, _Counted]]) -> None:
        where = elements(logits, [(i, state.counts.ids) for i, state in rows])
        repetition = np.repeat(
            np.array([s.sampling.repetition_penalty for _, s in rows], dtype=np.float32),
            [len(state.counts.ids) for _, state in rows],
        )
        subtracted = np.concatenate([state.subtracted() for _, state in rows])
        factor = to_device(repetition, logits.device)
        flat = logits.view(-1)
        values = flat.index_select(0, where)
        values = torch.where(values > 0, values / factor, values * factor)
        # Division by a tiny penalty gives infinity.
        values = values.clamp(max=_LARGEST_LOGIT) - to_device(subtracted, logits.device)
        flat.index_copy_(0, where, values)
