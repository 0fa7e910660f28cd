"""Within v1 the wire only grows: what was released is still there, unchanged."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest
from contract.descriptor import RELEASED, Fact, breaks, facts, served
from google.protobuf.descriptor_pb2 import (
    DescriptorProto,
    FieldDescriptorProto,
    FileDescriptorProto,
)

from penstock_proto import MIN_SCHEMA_REVISION, SCHEMA_REVISION

Doctor = Callable[[FileDescriptorProto], None]


def released() -> tuple[int, list[Fact]]:
    content = json.loads(RELEASED.read_text())
    return content["schema_revision"], content["facts"]


def test_everything_released_is_still_served() -> None:
    assert breaks(released()[1], facts(served())) == []


def test_an_addition_comes_with_a_higher_schema_revision() -> None:
    revision, old = released()
    assert MIN_SCHEMA_REVISION <= revision <= SCHEMA_REVISION
    added = [fact["name"] for fact in facts(served()) if fact not in old]
    assert not added or revision < SCHEMA_REVISION, (
        f"not in the released descriptor: {added}. Raise SCHEMA_REVISION, or, before the first "
        "release, write the descriptor again (contract/descriptor.py)"
    )


def message(file: FileDescriptorProto, name: str) -> DescriptorProto:
    return next(m for m in file.message_type if m.name == name)


def field(file: FileDescriptorProto, owner: str, name: str) -> FieldDescriptorProto:
    return next(f for f in message(file, owner).field if f.name == name)


def add_a_field(file: FileDescriptorProto) -> None:
    message(file, "AbortResponse").field.add(
        name="count", number=1, type=FieldDescriptorProto.TYPE_UINT32, label=1
    )


def add_a_message(file: FileDescriptorProto) -> None:
    file.message_type.add(name="PauseRequest")


def add_an_enum_value(file: FileDescriptorProto) -> None:
    message(file, "Finish").enum_type[0].value.add(name="REASON_PAUSED", number=4)


def add_an_rpc(file: FileDescriptorProto) -> None:
    file.service[0].method.add(
        name="Pause", input_type=".penstock.v1.AbortRequest", output_type=".penstock.v1.Error"
    )


@pytest.mark.parametrize("add", [add_a_field, add_a_message, add_an_enum_value, add_an_rpc])
def test_an_addition_breaks_nothing(add: Doctor) -> None:
    file = served()
    add(file)
    assert facts(file) != facts(served())
    assert breaks(facts(served()), facts(file)) == []


def remove_a_field(file: FileDescriptorProto) -> None:
    message(file, "Output").field.remove(field(file, "Output", "cached_tokens"))


def rename_a_field(file: FileDescriptorProto) -> None:
    field(file, "Output", "cached_tokens").name = "tokens_cached"


def renumber_a_field(file: FileDescriptorProto) -> None:
    field(file, "Output", "first_position").number = 99


def retype_a_field(file: FileDescriptorProto) -> None:
    field(file, "Output", "token_ids").type = FieldDescriptorProto.TYPE_UINT32


def point_a_field_elsewhere(file: FileDescriptorProto) -> None:
    field(file, "Output", "finish").type_name = ".penstock.v1.Error"


def unrepeat_a_field(file: FileDescriptorProto) -> None:
    field(file, "Output", "token_ids").label = FieldDescriptorProto.LABEL_OPTIONAL


def take_presence_from_a_field(file: FileDescriptorProto) -> None:
    seed = field(file, "SamplingParams", "seed")
    seed.proto3_optional = False
    seed.ClearField("oneof_index")


def take_a_field_out_of_its_oneof(file: FileDescriptorProto) -> None:
    field(file, "Output", "error").ClearField("oneof_index")


def remove_a_message(file: FileDescriptorProto) -> None:
    file.message_type.remove(message(file, "DrainProgress"))


def renumber_an_enum_value(file: FileDescriptorProto) -> None:
    message(file, "Finish").enum_type[0].value[1].number = 7


def remove_an_rpc(file: FileDescriptorProto) -> None:
    del file.service[0].method[1]


def unstream_an_rpc(file: FileDescriptorProto) -> None:
    file.service[0].method[0].client_streaming = False


@pytest.mark.parametrize(
    "doctor",
    [
        remove_a_field,
        rename_a_field,
        renumber_a_field,
        retype_a_field,
        point_a_field_elsewhere,
        unrepeat_a_field,
        take_presence_from_a_field,
        take_a_field_out_of_its_oneof,
        remove_a_message,
        renumber_an_enum_value,
        remove_an_rpc,
        unstream_an_rpc,
    ],
)
def test_a_change_of_what_was_released_is_found(doctor: Doctor) -> None:
    file = served()
    doctor(file)
    assert breaks(facts(served()), facts(file)) != []
