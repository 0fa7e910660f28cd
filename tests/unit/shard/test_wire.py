"""A client's request on its way to the engine, and log-probabilities back: nothing is lost."""

from __future__ import annotations

import dataclasses
import socket
from typing import Any

import pytest
from support.engines import EOS_ID, packed, runner_info
from support.sampling_values import SAMPLING_VALUES
from support.scores import logprobs_of

from penstock_client import Adapter as ClientAdapter
from penstock_client import (
    Attempt,
    Constraint,
    ConstraintKind,
    GenerationRequest,
    Objective,
    SamplingParams,
    ThinkingBudget,
)
from penstock_client import Output as ClientOutput
from penstock_common.child_process.framing import encode_frame
from penstock_proto import codec
from penstock_proto import shard_pb2 as pb
from penstock_proto.engine_request import EngineRequest
from penstock_proto.errors import Code
from penstock_proto.facts import Adapter, ClassLoad, FieldBound, ModelShape
from penstock_proto.types import EngineSampling, Error, FinishReason, Logprobs, RequestOutput
from penstock_shard.config import ShardConfig
from penstock_shard.ipc import messages
from penstock_shard.ipc.runner_info import CacheGroup
from penstock_shard.server.live_requests import Route
from penstock_shard.server.servicer import load_report
from penstock_shard.server.shard_info import shard_info
from penstock_shard.server.supervisor import EngineSupervisor
from penstock_shard.server.validation import check

# Values that a float32 holds exactly, none of them neutral.
FULL = GenerationRequest(
    prompt_token_ids=[1, 2],
    sampling=SamplingParams(
        **SAMPLING_VALUES,
        seed=2**63 + 5,
        logit_bias={7: -1.0, 0: 100.0},
        bad_words=[[1, 2], [3]],
        allowed_token_ids=[4, 5],
        penalty_window_tokens=7,
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


def _at_the_engine(sent: GenerationRequest) -> EngineRequest:
    """Return the engine's request, after the message, the checks and the socket."""
    attempt = Attempt(2, "an engine", hand_back=True, suspect=True)
    message = codec.generate_request(sent, "id", attempt)
    sent_on = codec.submission(pb.GenerateRequest.FromString(message.SerializeToString()))
    submit = check(sent_on, runner_info(), ShardConfig())
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.sendall(encode_frame(messages.Inbox([submit], [])))
        inbox = messages.EngineEnd(theirs).receive()
    assert isinstance(inbox, messages.Inbox)
    return inbox.requests[0]


def test_every_field_reaches_the_engine() -> None:
    found = _at_the_engine(FULL)
    assert found.sampling == EngineSampling(
        **SAMPLING_VALUES,
        seed=2**63 + 5,
        allowed_token_ids=(4, 5),
        logit_bias=((0, 100.0), (7, -1.0)),
        bad_words=((1, 2), (3,)),
        penalty_window_tokens=7,
    )
    assert found.objective == Objective(-1, 1.5, 0.5, 0.25, True)
    assert (found.request_id, found.attempt, found.cache_salt) == ("id", 2, "salt")
    assert (found.prompt, found.output) == (packed([1, 2]), b"")
    assert (found.max_tokens, found.min_tokens) == (9, 2)
    assert found.stop_token_ids == {6, EOS_ID}
    assert (found.logprobs, found.prompt_logprobs, found.logprob_token_ids) == (1, 4, (8, 7))


@pytest.mark.parametrize(
    "constraint",
    [
        Constraint(ConstraintKind.JSON_SCHEMA, '{"type": "integer"}'),
        Constraint(ConstraintKind.JSON_OBJECT),
        Constraint(ConstraintKind.REGEX, "a\x00\u00e9+"),
        Constraint(ConstraintKind.CHOICE, options=("yes", "", "no")),
        Constraint(ConstraintKind.GRAMMAR, 'start: "a"'),
        Constraint(ConstraintKind.STRUCTURAL_TAG, "{}"),
    ],
)
def test_each_kind_of_constraint_reaches_the_engine(constraint: Constraint) -> None:
    sent = GenerationRequest([1], SamplingParams(seed=0), constraint=constraint)
    assert _at_the_engine(sent).constraint == constraint


def test_a_json_object_that_is_not_wanted_is_no_constraint() -> None:
    message = pb.GenerateRequest(constraint=pb.Constraint(json_object=False))
    assert codec.submission(message).request.constraint is None


def test_a_thinking_budget_reaches_the_engine() -> None:
    sent = GenerationRequest([1], SamplingParams(seed=0), thinking_budget=ThinkingBudget(0, 5, 6))
    assert _at_the_engine(sent).thinking_budget == ThinkingBudget(0, 5, 6, False)
    sent = dataclasses.replace(sent, thinking_budget=ThinkingBudget(70, 5, 6, begun=True))
    assert _at_the_engine(sent).thinking_budget == ThinkingBudget(70, 5, 6, True)


@pytest.mark.parametrize("part", [EngineSampling, Objective])
def test_the_test_above_leaves_no_field_neutral(part: type) -> None:
    engines = _at_the_engine(FULL)
    found = engines.sampling if part is EngineSampling else engines.objective
    neutral = part()
    for field in dataclasses.fields(part):
        assert getattr(found, field.name) != getattr(neutral, field.name), field.name


def test_a_plain_request_has_neutral_values_and_no_objective() -> None:
    found = _at_the_engine(GenerationRequest([1], SamplingParams(seed=0)))
    assert found.sampling == EngineSampling()
    assert found.objective is None
    assert (found.min_tokens, found.logprob_token_ids) == (0, ())
    assert (found.constraint, found.thinking_budget) == (None, None)


def test_requested_logprobs_come_back_however_they_are_merged_and_cut() -> None:
    count = 60_000

    def output(first: int) -> RequestOutput:
        numbers = [float(i) for i in range(first, first + count)]
        requested = [n for n in numbers for _ in (0, 1)]
        scores = logprobs_of(numbers, [1] * count, requested=requested)
        return RequestOutput([5] * count, first, request_id="r", attempt=0, logprobs=scores)

    merged = output(0)
    merged.merge(output(count))
    responses = list(codec.responses([merged]))
    assert max(response.ByteSize() for response in responses) < 600_000
    whole: ClientOutput | None = None
    for response in responses:
        for message in response.outputs:
            piece = codec.output(message)
            assert isinstance(piece, ClientOutput)
            if whole is None:
                whole = piece
            else:
                whole.merge(piece)
    assert whole is not None
    assert whole.logprobs is not None
    assert whole.logprobs.chosen == [float(i) for i in range(2 * count)]
    assert whole.logprobs.requested == [float(i) for i in range(2 * count) for _ in (0, 1)]


def test_an_error_comes_after_the_tokens_that_it_was_merged_with() -> None:
    merged = RequestOutput(
        [1, 2],
        7,
        request_id="r",
        attempt=3,
        logprobs=Logprobs([-1.0, -2.0], [1, 1]),
        cached_tokens=4,
    )
    merged.merge(
        RequestOutput([], 9, request_id="r", attempt=3, error=Error(Code.OUT_OF_RANGE, "no more"))
    )
    pieces = [each for response in codec.responses([merged]) for each in response.outputs]
    assert [piece.attempt for piece in pieces] == [3, 3]
    tokens, error = map(codec.output, pieces)
    assert isinstance(tokens, ClientOutput)
    assert (tokens.token_ids, tokens.first_position, tokens.cached_tokens) == ([1, 2], 7, 4)
    assert tokens.logprobs is not None
    assert tokens.logprobs.chosen == [-1.0, -2.0]
    assert "no more" in str(error)
    alone = RequestOutput(
        [], 9, request_id="r", attempt=3, error=Error(Code.OUT_OF_RANGE, "no more")
    )
    assert sum(len(response.outputs) for response in codec.responses([alone])) == 1


@pytest.mark.timeout(20)
def test_a_token_with_more_alternatives_than_a_response_holds_is_one_alone() -> None:
    # As many as a shard with such a --max-logprobs is asked for.
    top_n = 40_000
    best = [(token_id, -1.0) for token_id in range(top_n)]
    scores = logprobs_of([-0.5, -0.25], [1, 1], top_n, best * 2)
    output = RequestOutput(
        [7, 8], 0, request_id="id", attempt=0, logprobs=scores, prompt_logprobs=scores.first(2)
    )
    pieces = [each for response in codec.responses([output]) for each in response.outputs]
    assert [list(each.token_ids) for each in pieces] == [[], [7], [8]]
    assert [len(each.prompt_logprobs.logprobs.chosen) for each in pieces] == [1, 1, 0]
    assert [len(each.logprobs.top_token_ids) for each in pieces] == [0, top_n, top_n]


def test_a_whole_vocabulary_comes_with_the_same_numbers() -> None:
    vocabulary = 5_000
    best = [((7 * i) % vocabulary, -0.25 * i) for i in range(2 * vocabulary)]
    scores = logprobs_of([-0.5, -1.25], [1, 300], vocabulary, best, [-7.0, -8.0])
    output = RequestOutput([7, 8], 0, request_id="id", attempt=0, logprobs=scores)
    found: list[ClientOutput] = []
    for response in codec.responses([output]):
        for message in pb.GenerateResponse.FromString(response.SerializeToString()).outputs:
            piece = codec.output(message)
            assert isinstance(piece, ClientOutput)
            found.append(piece)
    whole, *others = found
    for other in others:
        whole.merge(other)
    columns = whole.logprobs
    assert columns is not None
    assert [*zip(columns.top_token_ids, columns.top_logprobs, strict=True)] == best
    assert (columns.chosen, columns.ranks, columns.requested) == (
        [-0.5, -1.25], [1, 300], [-7.0, -8.0],
    )  # fmt: skip
    columns.drop_first(1)
    assert [*columns.top_token_ids] == [token_id for token_id, _ in best[vocabulary:]]


def test_a_whole_vocabulary_of_no_token_is_read() -> None:
    empty = pb.Output(logprobs=pb.Logprobs(top_n=5_000))
    output = codec.output(empty)
    assert isinstance(output, ClientOutput)
    assert output.logprobs == Logprobs(top_n=5_000)


def test_columns_are_cut_between_tokens() -> None:
    columns = logprobs_of([-1.0, -2.0], [1, 2], 1, [(7, -1.0), (8, -3.0)], [1.0, 2.0, 3.0, 4.0])
    assert columns.first(0).requested == []
    assert columns.first(1) == logprobs_of([-1.0], [1], 1, [(7, -1.0)], [1.0, 2.0])
    columns.drop_first(1)
    assert columns == logprobs_of([-2.0], [2], 1, [(8, -3.0)], [3.0, 4.0])


def test_outputs_of_one_token_share_columns_where_the_caller_numbers_its_attempts() -> None:
    outputs = [
        RequestOutput([50], 5, request_id="numbered", attempt=0),
        RequestOutput([60], 6, request_id="another attempt", attempt=1),
        RequestOutput([70, 71], 7, request_id="bundled", attempt=0),
        RequestOutput([80], 8, request_id="last", attempt=0, finish_reason=FinishReason.STOP),
        RequestOutput([90], 0, request_id="first", attempt=0, cached_tokens=0, queue_s=0.5),
        RequestOutput([91], 9, request_id="scored", attempt=0, logprobs=Logprobs([-1.0], [1])),
        RequestOutput([30], 3, request_id="numbered too", attempt=2),
    ]
    ids = ("numbered", "another attempt", "bundled", "last", "first", "scored", "numbered too")
    numbers = {(name, 0): number for number, name in enumerate(ids, 1)}
    numbers["numbered too", 2] = 70
    [response] = codec.responses(outputs, numbers)
    parsed = pb.GenerateResponse.FromString(response.SerializeToString())
    found = [(number, one.first_position, one.token_ids) for number, one in codec.tokens(parsed)]
    assert found == [(1, 5, [50]), (70, 3, [30])]
    whole = ["another attempt", "bundled", "last", "first", "scored"]
    assert [output.request_id for output in parsed.outputs] == whole
    [unnumbered] = codec.responses(outputs)
    assert [output.request_id for output in unnumbered.outputs] == list(ids)
    assert not unnumbered.HasField("tokens")


def test_columns_of_very_many_requests_are_cut_into_responses_of_bounded_size() -> None:
    count = 50_000
    outputs = [
        RequestOutput([7], index, request_id=str(index), attempt=0) for index in range(count)
    ]
    numbers = {(str(index), 0): index + 1 for index in range(count)}
    responses = list(
        codec.responses([*outputs, RequestOutput([1, 2], 0, request_id="x", attempt=0)], numbers)
    )
    assert max(response.ByteSize() for response in responses) < 300_000
    found = [pair for response in responses for pair in codec.tokens(response)]
    assert [number for number, _ in found] == list(range(1, count + 1))
    assert [output.request_id for response in responses for output in response.outputs] == ["x"]


def test_columns_and_outputs_of_one_response_are_bounded_together() -> None:
    outputs = [
        RequestOutput([7] * (1 + index % 2), index, request_id=str(index), attempt=0)
        for index in range(20_000)
    ]
    numbers = {(str(index), 0): index + 1 for index in range(len(outputs))}
    sizes = [response.ByteSize() for response in codec.responses(outputs, numbers)]
    assert max(sizes) < 1.1 * 2**18


# ---- what a shard says of itself ----


def test_every_field_of_what_a_shard_serves_reaches_the_client() -> None:
    info = dataclasses.replace(
        runner_info(),
        default_sampling={"temperature": 0.5, "top_k": 20.0},
        batch_invariant=True,
        numerics_fingerprint="f",
        adapters=(Adapter("mine", "hash", "source", 8),),
        kv_bytes_per_token=2**33,
        kv_bytes_per_sequence=2**45,
        kv_sequences=7,
        state_bytes=2**34,
        shape=ModelShape("llama", 2**33, 2**34, 3, 4, 5, 6),
        bounds=(FieldBound("temperature", most=2.0, least=0.01),),
        uncontinued=frozenset({"bad_words"}),
        pools=(64, 9),
        cache_groups=(CacheGroup(), CacheGroup(pool=1, has_state=True)),
    )
    config = ShardConfig(served_model_names=("served", "alias"), max_num_batched_tokens=512)
    message = codec.info_message(shard_info(messages.Ready(info, {}, "t", "r"), config, "i"))
    message = pb.InfoResponse.FromString(message.SerializeToString())
    told = codec.shard_info(message, "host:1")
    assert [each.name for each in dataclasses.fields(told) if not getattr(told, each.name)] == []
    for part, source in ((told, info), (told.limits, config)):
        same = {each.name for each in dataclasses.fields(part)} & set(dir(source))
        for name in same - {"default_sampling", "adapters", "embedding", "shape"}:
            assert getattr(part, name) == getattr(source, name), name
    assert told.default_sampling == SamplingParams(temperature=0.5, top_k=20)
    assert told.adapters == {"mine": ClientAdapter("mine", "hash", "source", 8)}
    assert dataclasses.asdict(told.shape) == dataclasses.asdict(info.shape)
    assert (told.model, told.model_aliases) == ("served", ("alias",))


def test_every_field_of_a_load_report_reaches_the_client() -> None:
    supervisor = EngineSupervisor(ShardConfig(), clock=iter(range(1000)).__next__)
    supervisor._ready = messages.Ready(runner_info(), {}, "t", "r")
    supervisor._beat = messages.Beat(2.0, 900.0)
    supervisor.instance_id = "i"
    names = ("copied_blocks", "disk_blocks", "loaded_blocks_total", "fetched_blocks_total")
    counts = {f"kv_{name}": 50 + i for i, name in enumerate((*names, "exported_blocks_total"))}
    counts["preemptions_total"] = 60
    numbers = range(1, len(messages.Load.__struct_fields__) - 1)
    given: list[Any] = [*numbers, True, counts]
    supervisor.load = load = messages.Load(*given)
    supervisor.draining = supervisor.handing_over = True
    supervisor.adapters.revision = 3
    for number, name in enumerate(("waits", "runs")):
        route = Route(name, 1, lambda output: None, 5, 2, 0.0)
        supervisor.classes.add(route)
        if number:
            supervisor.classes.start(route)
    message = load_report(supervisor)
    told = codec.load_report(pb.LoadReport.FromString(message.SerializeToString()))
    assert [each.name for each in dataclasses.fields(told) if not getattr(told, each.name)] == []
    for name in {each.name for each in dataclasses.fields(told)} & set(dir(load)) - {"waiting"}:
        assert getattr(told, name) == getattr(load, name), name
    for name, count in counts.items():
        assert getattr(told, name.removeprefix("kv_")) == count, name
    assert (told.waiting, told.queued_prompt_tokens) == (2, 3 + 4)
    assert told.classes == (ClassLoad(2, 1, 1, 7),)
    assert (told.num_blocks, told.adapters_revision) == (64, 3)
