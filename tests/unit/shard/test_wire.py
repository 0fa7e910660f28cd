"""From a client's request to the engine's, and log-probabilities back: nothing is lost between."""

from __future__ import annotations

import dataclasses
import socket

import pytest
from support.engines import EOS_ID, runner_info

from penstock_client import Attempt, GenerationRequest, Objective, SamplingParams, _wire
from penstock_client import Output as ClientOutput
from penstock_proto import shard_pb2 as pb
from penstock_shard import link, request, wire
from penstock_shard.config import ShardConfig
from penstock_shard.engine_main import _request
from penstock_shard.runner.base import Logprobs
from penstock_shard.validation import check

# Values that a float32 holds exactly, none of them neutral.
FULL = GenerationRequest(
    prompt_token_ids=[1, 2],
    sampling=SamplingParams(
        temperature=0.5,
        top_k=3,
        top_p=0.25,
        min_p=0.125,
        typical_p=0.75,
        repetition_penalty=1.5,
        presence_penalty=0.25,
        frequency_penalty=-0.5,
        seed=2**63 + 5,
        logit_bias={7: -1.0, 0: 100.0},
        bad_words=[[1, 2], [3]],
        allowed_token_ids=[4, 5],
    ),
    max_tokens=9,
    min_tokens=2,
    stop_token_ids=[6],
    logprobs=1,
    prompt_logprobs=4,
    logprob_token_ids=[8, 7],
    objective=Objective(
        priority=-1,
        deadline_s=1.5,
        time_to_first_token_s=0.5,
        seconds_between_tokens=0.25,
        latency_sensitive=True,
    ),
    cache_salt="salt",
)


def _at_the_engine(sent: GenerationRequest) -> request.Request:
    """Through the message, the checks, the socket and back."""
    attempt = Attempt(2, "an engine", hand_back=True, suspect=True)
    message = _wire.generate_request(sent, "id", attempt)
    incoming = wire.incoming(pb.GenerateRequest.FromString(message.SerializeToString()))
    submit = check(incoming, runner_info(), ShardConfig())
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.sendall(link.encode_frame(link.Inbox([submit], [])))
        inbox = link.EngineEnd(theirs).receive()
    assert isinstance(inbox, link.Inbox)
    return _request(inbox.submits[0])


def test_every_field_reaches_the_engine() -> None:
    found = _at_the_engine(FULL)
    assert found.sampling == request.SamplingParams(
        temperature=0.5,
        top_k=3,
        top_p=0.25,
        min_p=0.125,
        seed=2**63 + 5,
        allowed_token_ids=(4, 5),
        typical_p=0.75,
        repetition_penalty=1.5,
        presence_penalty=0.25,
        frequency_penalty=-0.5,
        logit_bias=((0, 100.0), (7, -1.0)),
        bad_words=((1, 2), (3,)),
    )
    assert found.objective == request.Objective(-1, 1.5, 0.5, 0.25, True)
    assert (found.request_id, found.attempt, found.cache_salt) == ("id", 2, "salt")
    assert (found.token_ids, found.num_prompt_tokens) == ([1, 2], 2)
    assert (found.max_tokens, found.min_tokens) == (9, 2)
    assert found.stop_token_ids == {6, EOS_ID}
    assert (found.logprobs, found.prompt_logprobs, found.logprob_token_ids) == (1, 4, (8, 7))


@pytest.mark.parametrize("part", [request.SamplingParams, request.Objective])
def test_the_test_above_leaves_no_field_neutral(part: type) -> None:
    engines = _at_the_engine(FULL)
    found = engines.sampling if part is request.SamplingParams else engines.objective
    neutral = part()
    for field in dataclasses.fields(part):
        assert getattr(found, field.name) != getattr(neutral, field.name), field.name


def test_a_plain_request_has_neutral_values_and_no_objective() -> None:
    found = _at_the_engine(GenerationRequest([1], SamplingParams(seed=0)))
    assert found.sampling == request.SamplingParams()
    # The scheduler tells requests without wishes by identity.
    assert found.objective is request.NO_OBJECTIVE
    assert (found.min_tokens, found.logprob_token_ids) == (0, ())


def test_requested_logprobs_come_back_however_they_are_merged_and_cut() -> None:
    count = 60_000

    def output(first: int) -> link.Output:
        numbers = [float(i) for i in range(first, first + count)]
        scores = Logprobs(numbers, [1] * count, 0, [], [], [n for n in numbers for _ in (0, 1)])
        return link.Output("r", 0, first, [5] * count, scores)

    merged = output(0)
    merged.merge(output(count))
    responses = list(wire.responses([merged]))
    assert max(response.ByteSize() for response in responses) < 600_000
    whole: ClientOutput | None = None
    for response in responses:
        for message in response.outputs:
            piece = _wire.output(message)
            assert isinstance(piece, ClientOutput)
            if whole is None:
                whole = piece
            else:
                whole.merge(piece)
    assert whole is not None
    assert whole.logprobs is not None
    assert whole.logprobs.chosen == [float(i) for i in range(2 * count)]
    assert whole.logprobs.requested == [float(i) for i in range(2 * count) for _ in (0, 1)]


def test_columns_are_cut_between_tokens() -> None:
    columns = Logprobs([-1.0, -2.0], [1, 2], 1, [7, 8], [-1.0, -3.0], [1.0, 2.0, 3.0, 4.0])
    assert columns.first(1) == Logprobs([-1.0], [1], 1, [7], [-1.0], [1.0, 2.0])
    assert columns.without_first(1) == Logprobs([-2.0], [2], 1, [8], [-3.0], [3.0, 4.0])
    assert columns.first(0).requested == []
