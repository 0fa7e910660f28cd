"""A client that has no .proto and no stubs: all it knows of a shard it asks by reflection."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import grpc
import pytest
from google.protobuf import json_format
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message_factory import GetMessageClass
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import (
    ProtoReflectionDescriptorDatabase,
)

SHARD = "penstock.v1.Shard"
TIMEOUT_S = 10.0


class ReflectionClient:
    """Calls any RPC by its name, with messages as JSON, as grpcurl does."""

    def __init__(self, channel: grpc.Channel) -> None:
        self._channel = channel
        self._database = ProtoReflectionDescriptorDatabase(channel)
        # A pool of its own: the stubs that this process has imported are not in it.
        self._pool = DescriptorPool(self._database)

    def services(self) -> set[str]:
        return set(self._database.get_services())

    def call(self, name: str, *requests: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """Answers, one or many; `name` is "package.Service/Method"."""
        service, _, rpc = name.partition("/")
        method = self._pool.FindServiceByName(service).methods_by_name[rpc]
        request_class = GetMessageClass(method.input_type)
        messages = [json_format.ParseDict(request, request_class()) for request in requests]
        # Every RPC may be called as one that streams both ways: on the wire they are the same.
        call: Any = self._channel.stream_stream(
            f"/{name}",
            request_serializer=lambda message: message.SerializeToString(),
            response_deserializer=GetMessageClass(method.output_type).FromString,
        )
        for answer in call(iter(messages), timeout=TIMEOUT_S):
            yield json_format.MessageToDict(answer)


@pytest.fixture
def client(pair) -> Iterator[ReflectionClient]:
    with grpc.insecure_channel(pair.shard.address) as channel:
        yield ReflectionClient(channel)


def test_it_lists_what_is_served(client) -> None:
    assert client.services() == {
        SHARD,
        "grpc.health.v1.Health",
        "grpc.reflection.v1alpha.ServerReflection",
    }


def test_it_asks_what_the_shard_is(client) -> None:
    (info,) = client.call(f"{SHARD}/GetInfo", {})
    assert info["model"] == "penstock-toy"
    assert info["maxModelLen"] == 2048


def test_it_asks_for_health_of_the_server_and_of_the_service(client) -> None:
    for service in ("", SHARD):
        (answer,) = client.call("grpc.health.v1.Health/Check", {"service": service})
        assert answer == {"status": "SERVING"}


def test_it_generates(client) -> None:
    request = {"requestId": "reflected", "promptTokenIds": [5, 6], "stop": {"maxTokens": 8}}
    answers = list(client.call(f"{SHARD}/Generate", request))
    outputs = [output for answer in answers for output in answer["outputs"]]
    assert sum(len(output.get("tokenIds", [])) for output in outputs) == 8
    assert [output["finish"] for output in outputs if "finish" in output] == [
        {"reason": "REASON_LENGTH"}
    ]


def test_an_error_says_what_was_wrong_in_its_message_and_in_its_status(client) -> None:
    request = {"requestId": "wrong", "promptTokenIds": [5], "sampling": {"topP": 2.0}}
    answers = client.call(f"{SHARD}/Generate", request)
    (output,) = next(answers)["outputs"]
    assert output["error"]["code"] == grpc.StatusCode.INVALID_ARGUMENT.value[0]
    said = {name: output["error"][name] for name in ("field", "value", "bound")}
    assert said == {"field": "top_p", "value": "2.0", "bound": "above 0, at most 1"}
    with pytest.raises(grpc.RpcError) as caught:
        next(answers)
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "top_p" in str(caught.value.details())
