"""Outputs of a sequence after a step: tokens, finish reason, error."""

from __future__ import annotations

from penstock_proto.errors import Code
from penstock_proto.types import Error, FinishReason, Logprobs, RequestOutput, Work
from penstock_shard.sequence import Sequence
from penstock_shard.worker.base import RowResult


def token_output(sequence: Sequence, result: RowResult) -> RequestOutput:
    """Return the output of a row that sampled a token. A token that ends the sequence is always the
    last.
    """
    request, last = sequence.request, sequence.token_ids[-1]
    token_ids = [last]
    if result.more_token_ids:
        token_ids = sequence.token_ids[-1 - len(result.more_token_ids) :].tolist()
    count = len(sequence.token_ids) - sequence.num_prompt_tokens
    position = count - len(token_ids)
    output = RequestOutput(
        token_ids,
        position,
        request_id=request.request_id,
        attempt=request.attempt,
        logprobs=result.logprobs,
    )
    if position == sequence.num_delivered:
        output.cached_tokens = sequence.cached_tokens
    if last in request.stop_token_ids or last in request.reluctant_stop_ids:
        output.finish_reason = FinishReason.STOP
        output.stop_token_id = last
    elif count >= request.max_tokens:
        output.finish_reason = FinishReason.LENGTH
    return output


def add_prompt_logprobs(output: RequestOutput, sequence: Sequence, logprobs: Logprobs) -> None:
    output.prompt_logprobs = logprobs
    first = sequence.num_prompt_logprobs_sent - len(logprobs.chosen)
    output.prompt_logprobs_start = first + 1


def error_of(sequence: Sequence, result: RowResult) -> Error:
    if sequence.constraint is not None and sequence.constraint.may_be_others_failure:
        # Another sequence may be at fault: the request's retry at another shard will tell.
        return Error(Code.UNAVAILABLE, f"{result.error}; the request is given back")
    kind = "" if sequence.request.constraint is None else sequence.request.constraint.kind
    code = Code.OUT_OF_RANGE if result.is_callers else Code.INTERNAL
    return Error(code, result.error or "", kind)


def work_of(sequence: Sequence) -> Work:
    """Count a sequence's steps and preemptions. A step with accepted drafts gave the drafts and 1
    more token.
    """
    num_sampled = sequence.num_output_tokens - sequence.num_delivered - sequence.num_accepted_drafts
    return Work(sequence.num_partial_steps + num_sampled, sequence.preemptions)


def empty_output(sequence: Sequence) -> RequestOutput:
    request = sequence.request
    return RequestOutput(
        [], sequence.num_output_tokens, request_id=request.request_id, attempt=request.attempt
    )


def last_output(
    sequence: Sequence, *, finish: FinishReason | None = None, error: Error | None = None
) -> RequestOutput:
    output = empty_output(sequence)
    output.finish_reason = finish
    output.error = error
    output.work = work_of(sequence)
    return output
