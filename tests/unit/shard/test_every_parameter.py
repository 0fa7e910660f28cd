"""Every field of a client's request, one by one: what the engine gets, or who else needs it.

A field of the dataclasses that is not named here fails a test, so none is added that gets lost on
the way; so does a field of the message or of the checked request that no client's field fills.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import pytest
from support.engines import EOS_ID, runner_info
from support.sampling_values import SAMPLING_VALUES

from penstock_client import (
    Attempt,
    Constraint,
    ConstraintKind,
    GenerationRequest,
    Objective,
    SamplingParams,
    ThinkingBudget,
)
from penstock_proto import codec
from penstock_proto import shard_pb2 as pb
from penstock_proto.engine_request import EngineRequest
from penstock_proto.facts import Adapter
from penstock_proto.types import PromptImage
from penstock_shard.config import ShardConfig
from penstock_shard.server.validation import Refusal, check

CONFIG = ShardConfig(served_model_names=("one", "two"))
INFO = dataclasses.replace(
    runner_info(),
    capabilities=runner_info().capabilities | {"adapter", "images"},
    adapters=(Adapter("lora", "f00d", "/adapters/lora", 8),),
)
# Of a fleet's own: where a request goes. No shard hears of them.
# The name of a key is for the audit log.
OF_THE_FLEET = {"tokenizer_hash", "exact", "numerics", "session", "shard", "key_name"}
# Only in the message: for logs, traces and turns, and to be refused where it is not served.
OF_THE_MESSAGE: dict[str, Any] = {
    "label": "mine",
    "traceparent": "00-ab-cd-01",
    "caller": "someone",
    "adapter_hash": "f00d",
    "model": "two",
}
View = Callable[[EngineRequest], Any]


def ids(data: bytes) -> list[int]:
    return np.frombuffer(data, dtype="<u4").tolist()


# A value that is nobody's default, and how it looks at the engine. A float32 holds all of them.
REQUEST: dict[str, tuple[Any, View, Any]] = {
    "prompt_token_ids": ([7, 8, 9], lambda submit: ids(submit.prompt), [7, 8, 9]),
    "output_token_ids": ([11, 12], lambda submit: ids(submit.output), [11, 12]),
    "max_tokens": (9, lambda submit: submit.max_tokens, 9),
    "min_tokens": (2, lambda submit: submit.min_tokens, 2),
    "stop_token_ids": ([6, 5], lambda request: request.stop_token_ids, {6, 5, EOS_ID}),
    "ignore_eos": (True, lambda request: request.stop_token_ids, frozenset()),
    "logprobs": (3, lambda submit: submit.logprobs, 3),
    "prompt_logprobs": (4, lambda submit: submit.prompt_logprobs, 4),
    "logprob_token_ids": ([8, 7], lambda submit: submit.logprob_token_ids, (8, 7)),
    "cache_salt": ("salt", lambda submit: submit.cache_salt, "salt"),
    "adapter": ("lora", lambda submit: submit.adapter, "lora"),
    "images": (
        [PromptImage("ab" * 32, 5, 6, 0, 2)],
        lambda submit: submit.images,
        (PromptImage("ab" * 32, 5, 6, 0, 2),),
    ),
}
SAMPLING: dict[str, tuple[Any, Any]] = {
    **{name: (value, value) for name, value in SAMPLING_VALUES.items()},
    "seed": (2**63 + 5, 2**63 + 5),
    "logit_bias": ({7: -1.0, 0: 100.0}, ((0, 100.0), (7, -1.0))),
    "bad_words": ([[1, 2], [3]], ((1, 2), (3,))),
    "allowed_token_ids": ([4, 5], (4, 5)),
    "penalty_window_tokens": (64, 64),
}
# What acts beside another parameter only, and that one.
BESIDE: dict[str, dict[str, Any]] = {"penalty_window_tokens": {"presence_penalty": 0.5}}
OBJECTIVE: dict[str, tuple[Any, Any]] = {
    "priority": (-3, -3),
    "deadline_s": (1.5, 1.5),
    "time_to_first_token_s": (0.5, 0.5),
    "seconds_between_tokens": (0.25, 0.25),
    "latency_sensitive": (True, True),
}
PLAIN = GenerationRequest([1, 2])


def names_of(kind: Any) -> set[str]:
    return {field.name for field in dataclasses.fields(kind)}


def message_of(sent: GenerationRequest) -> pb.GenerateRequest:
    """Return the message for a request as it comes out of the network."""
    data = codec.generate_request(sent, "id", Attempt(2, "an engine", True, True))
    return pb.GenerateRequest.FromString(data.SerializeToString())


def submitted(sent: GenerationRequest) -> EngineRequest:
    submit = check(codec.submission(message_of(sent)), INFO, CONFIG)
    return msgspec.msgpack.decode(msgspec.msgpack.encode(submit), type=EngineRequest)


def test_every_field_of_a_request_is_in_a_table_here() -> None:
    parts = {"sampling", "objective", "constraint", "thinking_budget"}
    known = {*REQUEST, *OF_THE_FLEET, *OF_THE_MESSAGE, *parts}
    assert names_of(GenerationRequest) == known
    assert names_of(SamplingParams) == SAMPLING.keys()
    assert names_of(Objective) == OBJECTIVE.keys()


@pytest.mark.parametrize("name", REQUEST)
def test_a_field_of_the_request_reaches_the_engine(name: str) -> None:
    value, view, wanted = REQUEST[name]
    assert view(submitted(dataclasses.replace(PLAIN, **{name: value}))) == wanted
    assert view(submitted(PLAIN)) != wanted


@pytest.mark.parametrize("name", SAMPLING)
def test_a_sampling_parameter_reaches_the_engine(name: str) -> None:
    value, wanted = SAMPLING[name]
    sampling = SamplingParams(**{name: value}, **BESIDE.get(name, {}))
    sent = dataclasses.replace(PLAIN, sampling=sampling)
    assert getattr(submitted(sent).sampling, name) == wanted
    assert getattr(submitted(PLAIN).sampling, name) != wanted


@pytest.mark.parametrize("name", OBJECTIVE)
def test_a_part_of_the_objective_reaches_the_scheduler(name: str) -> None:
    value, wanted = OBJECTIVE[name]
    sent = dataclasses.replace(PLAIN, objective=Objective(**{name: value}))
    assert getattr(submitted(sent).objective, name) == wanted
    assert submitted(PLAIN).objective is None


@pytest.mark.parametrize("name", OF_THE_MESSAGE)
def test_what_is_not_for_the_engine_is_in_the_message(name: str) -> None:
    value = OF_THE_MESSAGE[name]
    assert getattr(message_of(dataclasses.replace(PLAIN, **{name: value})), name) == value
    assert getattr(message_of(PLAIN), name) != value


@pytest.mark.parametrize("kind", ConstraintKind)
def test_a_constraint_reaches_the_engine(kind: ConstraintKind) -> None:
    sent = dataclasses.replace(PLAIN, constraint=Constraint(kind, "x", ["a", "b"]))
    reached = submitted(sent).constraint
    assert reached is not None
    value = "" if kind in (ConstraintKind.JSON_OBJECT, ConstraintKind.CHOICE) else "x"
    options = ("a", "b") if kind is ConstraintKind.CHOICE else ()
    assert (reached.kind, reached.value, reached.options) == (kind.value, value, options)
    assert submitted(PLAIN).constraint is None


@pytest.mark.parametrize("kind", ConstraintKind)
def test_a_constraint_that_a_shard_cannot_follow_is_refused_by_its_name(
    kind: ConstraintKind,
) -> None:
    sent = dataclasses.replace(PLAIN, constraint=Constraint(kind, "x", ["a", "b"]))
    info = runner_info()
    lacks = dataclasses.replace(info, capabilities=info.capabilities - {kind.value})
    with pytest.raises(Refusal) as refused:
        check(codec.submission(message_of(sent)), lacks, CONFIG)
    assert refused.value.error.field == kind.value


def test_a_budget_of_reasoning_reaches_the_engine() -> None:
    budget = ThinkingBudget(7, 5, 6, begun=True)
    reached = submitted(dataclasses.replace(PLAIN, thinking_budget=budget)).thinking_budget
    assert reached is not None
    assert dataclasses.astuple(reached) == dataclasses.astuple(budget)
    assert submitted(PLAIN).thinking_budget is None


@pytest.mark.parametrize(
    ("fields", "code", "words"),
    [
        ({"adapter": "other"}, 5, "'other' is not loaded here; loaded: lora"),
        ({"adapter": "lora", "adapter_hash": "beef"}, 5, "'lora' is another one here"),
    ],
)
def test_an_adapter_that_is_not_there_is_refused(
    fields: dict[str, Any], code: int, words: str
) -> None:
    with pytest.raises(Refusal, match=words) as refused:
        submitted(dataclasses.replace(PLAIN, **fields))
    assert (refused.value.error.code, refused.value.error.field) == (code, "adapter")


def test_an_adapter_is_refused_where_none_are_served() -> None:
    sent = codec.submission(message_of(dataclasses.replace(PLAIN, adapter="lora")))
    with pytest.raises(Refusal, match="adapter is not served") as refused:
        check(sent, runner_info(), CONFIG)
    assert refused.value.error.code == 9


def test_a_shard_reads_every_field_of_the_message() -> None:
    """Each field, set alone, changes what the shard makes of the message."""
    plain = codec.submission(pb.GenerateRequest())
    lists = {"prompt_token_ids", "output_token_ids", "stop_token_ids", "logprob_token_ids"}
    for path, descriptor in leaves(pb.GenerateRequest.DESCRIPTOR, ()):
        message = pb.GenerateRequest()
        part: Any = message
        for step in path[:-1]:
            part = getattr(part, step)
        name = path[-1]
        if name in {*lists, "allowed_token_ids"}:
            getattr(part, name).append(1)
        elif name == "logit_bias":
            part.logit_bias[1] = 1.0
        elif name == "bad_words":
            part.bad_words.add().token_ids.append(1)
        elif name == "choice":
            part.choice.options.append("a")
        elif name == "images":
            part.images.add().digest = b"x"
        elif path[0] == "thinking_budget":
            setattr(part, name, 3)
        else:
            setattr(part, name, VALUES[descriptor.type])
        assert codec.submission(message) != plain, ".".join(path)


VALUES = {
    pb.GenerateRequest.DESCRIPTOR.fields_by_name["label"].type: "x",
    pb.GenerateRequest.DESCRIPTOR.fields_by_name["attempt"].type: 1,
    pb.GenerateRequest.DESCRIPTOR.fields_by_name["hand_back"].type: True,
    pb.SamplingParams.DESCRIPTOR.fields_by_name["temperature"].type: 0.5,
    pb.SamplingParams.DESCRIPTOR.fields_by_name["top_k"].type: 1,
    pb.SamplingParams.DESCRIPTOR.fields_by_name["seed"].type: 1,
    pb.Objective.DESCRIPTOR.fields_by_name["priority"].type: 1,
}


def leaves(descriptor: Any, path: tuple[str, ...]) -> Any:
    """Yield the fields of a message and of its parts."""
    for field in descriptor.fields:
        here = (*path, field.name)
        is_part = field.name in ("sampling", "stop", "output", "objective", "constraint")
        is_part |= field.name == "thinking_budget"
        if is_part:
            yield from leaves(field.message_type, here)
        else:
            yield here, field


def test_every_part_of_a_submit_is_filled_by_some_field() -> None:
    """No field of the checked request is at its default when all fields are set at once."""
    sent = GenerationRequest(
        **{name: value for name, (value, _, _) in REQUEST.items() if name != "output_token_ids"},
        sampling=SamplingParams(**{name: value for name, (value, _) in SAMPLING.items()}),
        objective=Objective(**{name: value for name, (value, _) in OBJECTIVE.items()}),
        constraint=Constraint(ConstraintKind.REGEX, "a+"),
        thinking_budget=ThinkingBudget(7, 5, 6),
    )
    full, plain = submitted(sent), submitted(PLAIN)
    # Fields of an attempt, of a continued request, and of other calls.
    others = {"request_id", "attempt", "hand_back", "kv_source", "output", "pooling"}
    others.add("only_fetches")
    for name in set(EngineRequest.__struct_fields__) - others:
        assert getattr(full, name) != getattr(plain, name), name
    assert (full.request_id, full.attempt, full.hand_back) == ("id", 2, True)
