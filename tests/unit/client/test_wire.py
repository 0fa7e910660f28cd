"""Dataclasses to messages and back: no field may be lost on the way."""

from __future__ import annotations

import dataclasses
import hashlib
from array import array
from typing import Any

import grpc
import pytest
from support.sampling_values import SAMPLING_VALUES

from penstock_client import (
    Attempt,
    Constraint,
    ConstraintKind,
    EmbeddingDefaults,
    EmbeddingRequest,
    FinishReason,
    GenerationRequest,
    IncompatibleShard,
    InvalidRequest,
    NotServed,
    Objective,
    Output,
    Overloaded,
    Pooling,
    PromptImage,
    SamplingParams,
    ShardFailed,
    ShardUnavailable,
    ThinkingBudget,
    Unauthenticated,
)
from penstock_proto import SCHEMA_REVISION, codec
from penstock_proto import shard_pb2 as pb

ATTEMPT = Attempt(2, "an engine", hand_back=True, suspect=True, kv_source="shard:1")
FULL = GenerationRequest(
    prompt_token_ids=[1, 2],
    sampling=SamplingParams(
        **SAMPLING_VALUES,
        seed=2**63 + 5,
        logit_bias={7: -1.0},
        bad_words=[[1, 2], [3]],
        allowed_token_ids=[4, 5],
        penalty_window_tokens=7,
    ),
    max_tokens=9,
    min_tokens=2,
    stop_token_ids=[6],
    ignore_eos=True,
    logprobs=0,
    prompt_logprobs=4,
    logprob_token_ids=[8],
    output_token_ids=[11],
    images=[PromptImage("ab" * 32, 5, 6, 1, 1)],
    constraint=Constraint(ConstraintKind.REGEX, "a+"),
    thinking_budget=ThinkingBudget(7, 5, 6, begun=True),
    objective=Objective(
        priority=-1,
        deadline_s=1.5,
        time_to_first_token_s=0.5,
        seconds_between_tokens=0.25,
        latency_sensitive=True,
    ),
    model="m",
    adapter="lora",
    adapter_hash="f00d",
    cache_salt="salt",
    label="mine",
    traceparent="00-ab-cd-01",
    caller="someone",
)


def test_every_field_of_a_request_is_set_on_the_wire() -> None:
    message = codec.generate_request(FULL, "id", ATTEMPT)
    # Of the call that carries it.
    message.number = 1

    def unset(part, where: str) -> list[str]:
        names = {field.name for field in part.DESCRIPTOR.fields}
        present = {field.name for field, _ in part.ListFields()}
        # presence, and 0 where 0 has a meaning
        missing = [f"{where}.{name}" for name in names - present
                   if not (part.DESCRIPTOR.fields_by_name[name].has_presence
                           and part.HasField(name))]  # fmt: skip
        for field, value in part.ListFields():
            if field.name in ("sampling", "stop", "output", "objective", "thinking_budget"):
                missing += unset(value, field.name)
        return missing

    assert unset(message, "request") == []
    assert message.sampling.seed == 2**63 + 5
    assert message.constraint.regex == "a+"
    assert message.objective.deadline_ms == 1500


@pytest.mark.parametrize("count", [0, 1, 31, 32, 127, 128, 40_000])
def test_ids_in_an_array_are_the_same_on_the_wire(count: int) -> None:
    ids = [(7 * index) % 2**32 for index in range(count - 1)] + [2**32 - 1] * (count > 0)
    sampling = SamplingParams(seed=1, bad_words=[ids], allowed_token_ids=ids)
    listed = codec.generate_request(GenerationRequest(ids, sampling, output_token_ids=ids), "id")
    packed = array("I", ids)
    sampling = SamplingParams(seed=1, bad_words=[packed], allowed_token_ids=packed)
    request = GenerationRequest(packed, sampling, output_token_ids=packed)
    assert codec.generate_request(request, "id") == listed
    embedding = EmbeddingRequest(inputs=[packed, packed])
    assert [list(each.token_ids) for each in codec.embed_request(embedding, "id").inputs] == [
        ids,
        ids,
    ]


@pytest.mark.parametrize("field", dataclasses.fields(SamplingParams), ids=lambda f: f.name)
def test_an_absent_sampling_field_stays_absent(field: dataclasses.Field[object]) -> None:
    message = codec.generate_request(GenerationRequest([1]), "id").sampling
    descriptor = message.DESCRIPTOR.fields_by_name[field.name]
    if field.name == "seed":
        assert message.seed != codec.generate_request(GenerationRequest([1]), "id").sampling.seed
    elif descriptor.has_presence:
        assert not message.HasField(field.name)
    else:
        assert len(getattr(message, field.name)) == 0


@pytest.mark.parametrize(
    ("kind", "value"),
    [(kind, "x") for kind in ConstraintKind if kind.value.endswith(("schema", "regex", "tag"))],
)
def test_each_text_constraint_has_its_own_field(kind: ConstraintKind, value: str) -> None:
    request = GenerationRequest([1], constraint=Constraint(kind, value))
    message = codec.generate_request(request, "id")
    assert message.constraint.WhichOneof("kind") == kind.value


def test_choices_and_any_object_are_constraints_too() -> None:
    choice = Constraint(ConstraintKind.CHOICE, options=["a", "b"])
    message = codec.generate_request(GenerationRequest([1], constraint=choice), "id")
    assert list(message.constraint.choice.options) == ["a", "b"]
    anything = Constraint(ConstraintKind.JSON_OBJECT)
    message = codec.generate_request(GenerationRequest([1], constraint=anything), "id")
    assert message.constraint.json_object


ODD_CHOICE = Constraint(ConstraintKind.CHOICE, options=[1])  # type: ignore[list-item]


@pytest.mark.parametrize(
    ("request_", "field"),
    [
        (GenerationRequest([-1]), "prompt_token_ids"),
        (GenerationRequest([2**32]), "prompt_token_ids"),
        (GenerationRequest(["x"]), "prompt_token_ids"),  # type: ignore[list-item]
        (GenerationRequest([1], max_tokens=-1), "max_tokens"),
        (GenerationRequest([1], SamplingParams(seed=-1)), "seed"),
        (GenerationRequest([1], SamplingParams(top_k=2**40)), "top_k"),
        (GenerationRequest([1], SamplingParams(logit_bias={-1: 0.0})), "logit_bias"),
        (GenerationRequest([1], label="\ud800"), "label"),
        (GenerationRequest([1], objective=Objective(deadline_s=float("inf"))), "deadline_s"),
        (GenerationRequest([1], objective=Objective(deadline_s=float("nan"))), "deadline_s"),
        (GenerationRequest([1], constraint=ODD_CHOICE), "choice"),
        (
            GenerationRequest([1], thinking_budget=ThinkingBudget(-1, 1, 2)),
            "thinking_budget.max_tokens",
        ),
    ],
)
def test_a_value_that_does_not_fit_the_wire_names_its_field(
    request_: GenerationRequest, field: str
) -> None:
    with pytest.raises(InvalidRequest) as caught:
        codec.generate_request(request_, "id")
    assert caught.value.field == field


def test_an_output_comes_back_whole() -> None:
    message = pb.Output(
        request_id="id",
        first_position=3,
        token_ids=[1, 2],
        logprobs=pb.Logprobs(
            chosen=[-0.5, -1.0], ranks=[1, 3], top_n=1, top_token_ids=[1, 9],
            top_logprobs=[-0.5, -0.25], requested=[-2.0, -3.0],
        ),
        prompt_logprobs=pb.PromptLogprobs(first_index=4, logprobs=pb.Logprobs(chosen=[-1.0])),
        cached_tokens=0,
        queue_s=0.5,
        finish=pb.Finish(reason=pb.Finish.REASON_STOP, stop_token_id=0),
    )  # fmt: skip
    output = codec.output(message)
    assert not isinstance(output, Exception)
    assert (output.token_ids, output.first_position, output.cached_tokens) == ([1, 2], 3, 0)
    assert output.queue_s == 0.5
    assert output.logprobs is not None
    assert output.logprobs.ranks == [1, 3]
    assert output.logprobs.requested == [-2.0, -3.0]
    assert output.prompt_logprobs is not None
    assert output.prompt_logprobs_start == 4
    assert (output.finish_reason, output.stop_token_id) == (FinishReason.STOP, 0)


@pytest.mark.parametrize(
    ("status", "error"),
    [
        (grpc.StatusCode.INVALID_ARGUMENT, InvalidRequest),
        (grpc.StatusCode.NOT_FOUND, InvalidRequest),
        (grpc.StatusCode.FAILED_PRECONDITION, NotServed),
        (grpc.StatusCode.UNIMPLEMENTED, NotServed),
        (grpc.StatusCode.RESOURCE_EXHAUSTED, Overloaded),
        (grpc.StatusCode.UNAVAILABLE, ShardUnavailable),
        (grpc.StatusCode.UNAUTHENTICATED, Unauthenticated),
        (grpc.StatusCode.INTERNAL, ShardFailed),
    ],
)
def test_each_error_code_has_its_exception(status: grpc.StatusCode, error: type[Exception]) -> None:
    message = pb.Output(error=pb.Error(code=status.value[0], message="why", field="f", bound="b"))
    result = codec.output(message)
    assert type(result) is error
    assert str(result) == "why"
    assert getattr(result, "field", "f") == "f"


@pytest.mark.parametrize(
    ("revision", "minimum"), [(0, 0), (SCHEMA_REVISION + 2, SCHEMA_REVISION + 1)]
)
def test_a_shard_of_another_revision_is_refused_with_both_ranges(
    revision: int, minimum: int
) -> None:
    message = pb.InfoResponse(schema_revision=revision, min_schema_revision=minimum)
    reason = f"revisions {minimum} to {revision}.*1 to {SCHEMA_REVISION}"
    with pytest.raises(IncompatibleShard, match=reason):
        codec.shard_info(message, "host:1")


def test_an_embedding_request_arrives_as_it_was_asked() -> None:
    request = EmbeddingRequest(
        [[1, 2], [3]], pooling="mean", dimensions=7, normalize=True, label="mine"
    )
    sent = codec.embed_request(request, "id", "engine").SerializeToString()
    message = pb.EmbedRequest.FromString(sent)
    assert [list(each.token_ids) for each in message.inputs] == [[1, 2], [3]]
    assert (message.request_id, message.instance_id, message.label) == ("id", "engine", "mine")
    assert (message.pooling, message.dimensions) == (pb.EmbedRequest.POOLING_MEAN, 7)
    assert message.normalize


def test_what_an_embedding_request_leaves_open_is_absent() -> None:
    message = codec.embed_request(EmbeddingRequest([[1]]), "id")
    assert message.pooling == pb.EmbedRequest.POOLING_UNSPECIFIED
    assert not message.HasField("dimensions")
    assert not message.normalize


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"inputs": [[-1]]}, "inputs"),
        ({"inputs": [["a"]]}, "inputs"),
        ({"inputs": [[1]], "pooling": "cls"}, "pooling"),
        ({"inputs": [[1]], "dimensions": -1}, "dimensions"),
    ],
)
def test_what_does_not_fit_an_embedding_request_names_its_field(
    fields: dict[str, Any], field: str
) -> None:
    with pytest.raises(InvalidRequest) as caught:
        codec.embed_request(EmbeddingRequest(**fields), "id")
    assert caught.value.field == field


def test_a_shards_embedding_defaults_are_read_and_absent_where_it_has_none() -> None:
    message = pb.InfoResponse(schema_revision=SCHEMA_REVISION, min_schema_revision=1)
    assert codec.shard_info(message, "host:1").embedding is None
    message.embedding.pooling = pb.EmbedRequest.POOLING_MEAN
    message.embedding.size = 8
    found = codec.shard_info(message, "host:1").embedding
    assert found == EmbeddingDefaults(Pooling.MEAN, normalize=False, size=8)


def test_merged_outputs_keep_the_first_queue_time() -> None:
    first, later = Output([1], 0, queue_s=0.25), Output([2], 1, queue_s=9.0)
    first.merge(later)
    assert first.queue_s == 0.25


def test_a_file_is_put_together_again_and_one_that_arrives_damaged_is_refused() -> None:
    digest = hashlib.sha256(b"one file").hexdigest()
    chunks = [
        pb.FileChunk(name="a", data=b"one "),
        pb.FileChunk(name="b", data=b"half of another"),
        pb.FileChunk(name="a", data=b"file", sha256=digest),
    ]
    assert codec.whole_files(chunks) == {"a": b"one file"}
    with pytest.raises(ShardFailed, match="a arrived damaged: its sha256 is not as announced"):
        codec.whole_files(chunks[1:])
