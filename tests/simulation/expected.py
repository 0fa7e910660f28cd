"""What the fake runner's hash says an output must be, computed without engine, scheduler or fleet."""

from __future__ import annotations

import dataclasses

from simulation.engine import EngineKind, info_of
from support.engines import EOS_ID

from penstock_client import _wire
from penstock_client.types import FinishReason, GenerationRequest, Logprobs
from penstock_shard import wire
from penstock_shard.config import ShardConfig
from penstock_shard.engine_loop import request_of
from penstock_shard.request import Request
from penstock_shard.runner import base
from penstock_shard.runner.base import ScheduledRequest, StepPlan
from penstock_shard.runner.fake import FakeRunner
from penstock_shard.validation import check


@dataclasses.dataclass
class Answer:
    """All of an output."""

    token_ids: list[int]
    logprobs: Logprobs | None
    prompt_logprobs: Logprobs | None
    finish_reason: FinishReason


def expected(request: GenerationRequest, kind: EngineKind, config: ShardConfig) -> Answer:
    """What every shard of this kind must answer."""
    info = info_of(kind)
    runner = FakeRunner(info, range(EOS_ID), step_s=0.0, eos_rate=kind.eos_rate)
    incoming = wire.incoming(_wire.generate_request(request, "expected"))
    sequence = request_of(check(incoming, info, config))
    logprobs = None if request.logprobs is None else Logprobs(top_n=request.logprobs)
    prompt_logprobs = _prompt_logprobs(runner, sequence)
    finish = FinishReason.LENGTH
    while sequence.num_output_tokens < sequence.max_tokens:
        count = len(sequence.token_ids)
        runner.launch(StepPlan((ScheduledRequest(sequence, count - 1, 1, samples=True),)))
        (result,) = runner.collect()
        assert result.token_id is not None, result.error
        sequence.token_ids.append(result.token_id)
        if logprobs is not None and result.logprobs is not None:
            logprobs.extend(_seen(result.logprobs))
        if sequence.ends_with(result.token_id):
            finish = FinishReason.STOP
            break
    token_ids = sequence.token_ids[sequence.num_prompt_tokens :]
    return Answer(token_ids, logprobs, prompt_logprobs, finish)


def _prompt_logprobs(runner: FakeRunner, sequence: Request) -> Logprobs | None:
    count = sequence.num_prompt_tokens - 1
    if sequence.prompt_logprobs is None or not count:
        return None
    row = ScheduledRequest(sequence, 0, count, samples=False, num_prompt_logprobs=count)
    runner.launch(StepPlan((row,)))
    (result,) = runner.collect()
    assert result.prompt_logprobs is not None
    return _seen(result.prompt_logprobs)


def _seen(logprobs: base.Logprobs) -> Logprobs:
    """As a client sees them."""
    return Logprobs(**{f.name: getattr(logprobs, f.name) for f in dataclasses.fields(logprobs)})
