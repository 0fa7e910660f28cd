"""A proto file as a flat list of facts, one for each thing a peer relies on.

Knows descriptors. What a change of a fact means is for the reader to say.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from google.protobuf.descriptor_pb2 import (
    DescriptorProto,
    EnumDescriptorProto,
    FieldDescriptorProto,
    FileDescriptorProto,
    MethodDescriptorProto,
)

from penstock_proto import SCHEMA_REVISION
from penstock_proto.shard_pb2 import DESCRIPTOR

# What the last release promised. `python tests/contract/descriptor.py` writes it, at a release.
RELEASED = Path(__file__).with_name("shard_v1.json")

Fact = Mapping[str, object]


def served() -> FileDescriptorProto:
    """A copy of the descriptor in the committed stubs."""
    file = FileDescriptorProto()
    DESCRIPTOR.CopyToProto(file)
    return file


def facts(file: FileDescriptorProto) -> list[Fact]:
    """Every message, field, enum, value and rpc of a file, by its full name."""
    found: list[Fact] = []
    for message in file.message_type:
        found += _message(message, file.package)
    for enum in file.enum_type:
        found += _enum(enum, file.package)
    for service in file.service:
        found += (_rpc(method, f"{file.package}.{service.name}") for method in service.method)
    return found


def breaks(released: Iterable[Fact], now: Iterable[Fact]) -> list[str]:
    """Return a line for each released fact that is gone or different. Additions break nothing."""
    present = {(fact["kind"], fact["name"]): fact for fact in now}
    problems = []
    for fact in released:
        found = present.get((fact["kind"], fact["name"]))
        if found is None:
            problems.append(f"{fact['kind']} {fact['name']} is gone")
        elif found != fact:
            changed = [f"{k} {fact[k]!r} -> {found.get(k)!r}" for k in fact if fact[k] != found[k]]
            problems.append(f"{fact['kind']} {fact['name']}: {', '.join(changed)}")
    return problems


def _message(message: DescriptorProto, scope: str) -> Iterator[Fact]:
    name = f"{scope}.{message.name}"
    yield {"kind": "message", "name": name}
    for field in message.field:
        yield _field(field, message, name)
    for nested in message.nested_type:
        yield from _message(nested, name)
    for enum in message.enum_type:
        yield from _enum(enum, name)


def _field(field: FieldDescriptorProto, message: DescriptorProto, scope: str) -> Fact:
    label = "singular"
    if field.label == FieldDescriptorProto.LABEL_REPEATED:
        label = "repeated"
    elif field.proto3_optional:
        label = "optional"
    elif field.HasField("oneof_index"):
        label = f"oneof {message.oneof_decl[field.oneof_index].name}"
    kind = FieldDescriptorProto.Type.Name(field.type).removeprefix("TYPE_").lower()
    return {
        "kind": "field",
        "name": f"{scope}.{field.name}",
        "number": field.number,
        "type": field.type_name.removeprefix(".") or kind,
        "label": label,
    }


def _enum(enum: EnumDescriptorProto, scope: str) -> Iterator[Fact]:
    name = f"{scope}.{enum.name}"
    yield {"kind": "enum", "name": name}
    for value in enum.value:
        yield {"kind": "value", "name": f"{name}.{value.name}", "number": value.number}


def _rpc(method: MethodDescriptorProto, scope: str) -> Fact:
    return {
        "kind": "rpc",
        "name": f"{scope}.{method.name}",
        "takes": _stream(method.input_type, method.client_streaming),
        "gives": _stream(method.output_type, method.server_streaming),
    }


def _stream(type_name: str, streaming: bool) -> str:
    return ("stream " if streaming else "") + type_name.removeprefix(".")


def _write() -> None:
    lines = ",\n    ".join(json.dumps(fact) for fact in facts(served()))
    RELEASED.write_text(
        f'{{\n  "schema_revision": {SCHEMA_REVISION},\n  "facts": [\n    {lines}\n  ]\n}}\n'
    )


if __name__ == "__main__":
    _write()
