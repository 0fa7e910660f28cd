"""Turns outputs of vLLM's core into outputs of a shard."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np

from penstock_proto.engine_request import EngineRequest
from penstock_proto.errors import Code
from penstock_proto.types import Error, FinishReason, Logprobs, RequestOutput

_ERRORS = msgspec.json.Decoder(Error)
_FINISH = {
    "stop": FinishReason.STOP,
    "length": FinishReason.LENGTH,
    "abort": FinishReason.ABORTED,
}


@dataclass(slots=True)
class Progress:
    """A request in the core, or one that waits for its images."""

    request: EngineRequest
    num_output: int
    adapter_index: int = 0
    num_scored: int = 0
    # True if the core has the request and the server was told.
    is_started: bool = False

    @property
    def waiting_tokens(self) -> int:
        """The request's tokens if it has no new output yet, else 0."""
        is_waiting = self.num_output == len(self.request.output) // 4
        return self.request.num_tokens if is_waiting else 0


def read_output(progress: Progress, given: Any) -> RequestOutput:
    request = progress.request
    token_ids = list(given.new_token_ids)
    output = RequestOutput(
        token_ids, progress.num_output, request_id=request.request_id, attempt=request.attempt
    )
    progress.num_output += len(token_ids)
    if given.new_logprobs is not None:
        output.logprobs = _logprobs(*given.new_logprobs[:3], top_n=request.logprobs or 0)
    if given.new_prompt_logprobs_tensors is not None:
        columns = [np.asarray(each) for each in given.new_prompt_logprobs_tensors[:3]]
        output.prompt_logprobs = _logprobs(*columns, top_n=request.prompt_logprobs or 0)
        output.prompt_logprobs_start = 1 + progress.num_scored
        progress.num_scored += len(columns[0])
    if given.prefill_stats is not None:
        output.cached_tokens = given.prefill_stats.num_cached_tokens
    if given.pooling_output is not None:
        vector = given.pooling_output.float().numpy()
        output.embedding = np.ascontiguousarray(vector, dtype="<f4").tobytes()
    if given.finish_reason is not None:
        _end(output, str(given.finish_reason), given.stop_reason)
    return output


def _end(output: RequestOutput, reason: str, stop_reason: Any) -> None:
    output.finish_reason = _FINISH.get(reason)
    if output.finish_reason is None:
        # Drop these tokens: they may break the constraint, for example.
        output.token_ids = []
        output.logprobs = None
        # A text is always an error from `grammars.py` in the core.
        is_told = isinstance(stop_reason, str)
        unknown = Error(Code.INTERNAL, f"vLLM ended this request: {reason}")
        output.error = _ERRORS.decode(stop_reason) if is_told else unknown
    elif output.finish_reason is FinishReason.STOP:
        last = output.token_ids[-1] if output.token_ids else None
        output.stop_token_id = stop_reason if isinstance(stop_reason, int) else last


def _logprobs(ids: Any, logprobs: Any, ranks: Any, *, top_n: int) -> Logprobs:
    """Make columns from rows that have the chosen token first, then the best ones."""
    best = slice(1, 1 + top_n)
    return Logprobs(
        chosen=logprobs[:, 0].tolist(),
        ranks=ranks.tolist(),
        top_n=top_n,
        best_ids=bytearray(np.ascontiguousarray(ids[:, best], dtype="<u4").tobytes()),
        best_logprobs=bytearray(np.ascontiguousarray(logprobs[:, best], dtype="<f4").tobytes()),
    )
