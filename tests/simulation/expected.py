"""The outputs that must come by the fake runner's hash, without engine, scheduler or fleet."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from support.compilers import two_ended_compiler
from support.plans import batch_of

from penstock_proto import codec
from penstock_proto.types import (
    EmbeddingRequest,
    FinishReason,
    GenerationRequest,
    Logprobs,
    RequestOutput,
)
from penstock_shard.config import ShardConfig
from penstock_shard.scheduler.rows import Row
from penstock_shard.sequence import Sequence
from penstock_shard.server.last_outputs import vector_of
from penstock_shard.server.validation import check, check_embedding
from penstock_shard.structured_output.matcher_state import ConstraintState
from penstock_shard.worker.base import RowResult
from penstock_shard.worker.fake_runner import FakeRunner
from simulation.engine import ORDINARY_IDS, EngineKind, adapter_of, info_of


@dataclasses.dataclass
class Answer:
    """A whole answer: tokens, log-probabilities and finish reason."""

    token_ids: list[int]
    logprobs: Logprobs | None
    prompt_logprobs: Logprobs | None
    finish_reason: FinishReason


def expected(request: GenerationRequest, kind: EngineKind, config: ShardConfig) -> Answer:
    """Return the answer that every shard of this kind must give."""
    runner, sequence = _runner(kind), _sequence(request, kind, config)
    logprobs = None if request.logprobs is None else Logprobs(top_n=request.logprobs)
    prompt_logprobs = _prompt_logprobs(runner, sequence)
    finish = FinishReason.LENGTH
    for result in _sampled(runner, sequence):
        assert result.token_id is not None, result.error
        sequence.token_ids.append(result.token_id)
        if logprobs is not None and result.logprobs is not None:
            logprobs.extend(result.logprobs)
        if sequence.request.ends_with(result.token_id):
            finish = FinishReason.STOP
            break
    token_ids = sequence.token_ids[sequence.num_prompt_tokens :].tolist()
    return Answer(token_ids, logprobs, prompt_logprobs, finish)


def expected_vectors(
    request: EmbeddingRequest, kind: EngineKind, config: ShardConfig
) -> list[list[float]]:
    """Return the vectors that every shard of this kind must give."""
    runner, info = _runner(kind), info_of(kind)
    asked = codec.embedding_request(codec.embed_request(request, "expected", ""))
    response = codec.EmbedResponse()
    for each in check_embedding(asked, "expected", info, "expected"):
        sequence = Sequence.of(each)
        count = len(sequence.token_ids)
        vector = _run(runner, Row(sequence, 0, count, samples=True)).embedding
        assert vector is not None
        output = RequestOutput([], 0, request_id="r", attempt=0, embedding=vector)
        codec.add_vector(response, vector_of(output, asked))
    return codec.embeddings(response)


def _runner(kind: EngineKind) -> FakeRunner:
    return FakeRunner(
        info_of(kind),
        ORDINARY_IDS,
        step_s=0.0,
        eos_rate=kind.eos_rate,
        sleep=lambda seconds: None,
    )


def _sequence(request: GenerationRequest, kind: EngineKind, config: ShardConfig) -> Sequence:
    adapters = tuple(adapter_of(name, source) for name, source in config.loras)
    info = dataclasses.replace(info_of(kind), adapters=adapters)
    submission = codec.submission(codec.generate_request(request, "expected"))
    sequence = Sequence.of(check(submission, info, config))
    if sequence.request.constraint is not None:
        compiler, constraint = two_ended_compiler(), sequence.request.constraint
        matcher = compiler.compile(constraint)
        distinct = compiler.distinct(constraint, matcher)
        sequence.constraint = ConstraintState(sequence.request, matcher, distinct)
    return sequence


def _run(runner: FakeRunner, row: Row) -> RowResult:
    row.sequence.slot = 0
    runner.launch(batch_of(row))
    (result,) = runner.collect()
    return result


def _sampled(runner: FakeRunner, sequence: Sequence) -> Iterator[RowResult]:
    """A token after the other up to `max_tokens`. The runner has the sequence from the first on,
    and appends what it samples.
    """
    sequence.slot = 0
    batch = batch_of(Row(sequence, len(sequence.token_ids) - 1, 1, samples=True))
    for _ in range(sequence.request.max_tokens - sequence.num_output_tokens):
        runner.launch(batch)
        yield from runner.collect()
        batch = dataclasses.replace(batch, admitted=())


def _prompt_logprobs(runner: FakeRunner, sequence: Sequence) -> Logprobs | None:
    count = sequence.num_prompt_tokens - 1
    if sequence.request.prompt_logprobs is None or not count:
        return None
    row = Row(sequence, 0, count, samples=False, scored=count)
    result = _run(runner, row)
    assert result.prompt_logprobs is not None
    return result.prompt_logprobs
