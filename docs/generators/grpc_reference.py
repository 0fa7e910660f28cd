"""shard.proto as a page: its comments, services, messages and fields, from the compiler itself."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from google.protobuf.descriptor_pb2 import (
    DescriptorProto,
    EnumDescriptorProto,
    FieldDescriptorProto,
    FileDescriptorProto,
    FileDescriptorSet,
    ServiceDescriptorProto,
)

PROTO = Path(__file__).parents[2] / "proto" / "penstock_proto" / "shard.proto"
# Field numbers of descriptor.proto: what a comment's path is made of.
_SYNTAX, _SERVICE, _MESSAGE, _ENUM = 12, 6, 4, 5
_METHOD, _FIELD, _NESTED_MESSAGE, _NESTED_ENUM, _VALUE = 2, 2, 3, 4, 2
_PackedPath = tuple[int, ...]


def page() -> str:
    file = _described(PROTO)
    return "\n".join(_Page(file).lines())


def _described(proto: Path) -> FileDescriptorProto:
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "descriptor"
        subprocess.run(
            [
                *(sys.executable, "-m", "grpc_tools.protoc", "-I", proto.parent),
                *("--include_source_info", f"--descriptor_set_out={output}", proto.name),
            ],
            check=True,
        )
        (file,) = FileDescriptorSet.FromString(output.read_bytes()).file
    return file


class _Page:
    """One file's descriptor as Markdown."""

    def __init__(self, file: FileDescriptorProto) -> None:
        self._file = file
        self._comments = {
            tuple(location.path): location.leading_comments or location.trailing_comments
            for location in file.source_code_info.location
        }

    def lines(self) -> Iterator[str]:
        yield "# gRPC reference"
        yield ""
        yield f"Made from `shard.proto`, package `{self._file.package}`."
        yield f"[The gRPC API](grpc-api.md) says how to use it.\n\n{self._comment((_SYNTAX,))}"
        for index, service in enumerate(self._file.service):
            yield from self._service(service, (_SERVICE, index))
        yield "\n## Messages"
        for index, message in enumerate(self._file.message_type):
            yield from self._message(message, (_MESSAGE, index), ())
        for index, enum in enumerate(self._file.enum_type):
            yield from self._enum(enum, (_ENUM, index), ())

    def _comment(self, path: _PackedPath) -> str:
        lines = self._comments.get(path, "").splitlines()
        # "<" would begin HTML; a bracket would begin an optional link.
        return "\n".join(line.strip().replace("<", "&lt;") for line in lines)

    def _cell(self, path: _PackedPath) -> str:
        return " ".join(self._comment(path).split()).replace("|", "\\|")

    def _service(self, service: ServiceDescriptorProto, path: _PackedPath) -> Iterator[str]:
        yield f"\n## Service {service.name}\n\n{self._comment(path)}"
        for index, method in enumerate(service.method):
            asked = _streamed(method.client_streaming, method.input_type)
            answered = _streamed(method.server_streaming, method.output_type)
            yield f"\n### {method.name}\n\n{asked} → {answered}\n"
            yield self._comment((*path, _METHOD, index))

    def _message(
        self, message: DescriptorProto, path: _PackedPath, outer: Sequence[str]
    ) -> Iterator[str]:
        names = (*outer, message.name)
        if message.options.map_entry:
            return
        yield f"\n### {'.'.join(names)}\n\n{self._comment(path)}\n"
        if message.field:
            yield "| field | number | type | |\n|---|---|---|---|"
        for index, field in enumerate(message.field):
            kind = self._type(message, field)
            about = self._cell((*path, _FIELD, index))
            yield f"| `{field.name}` | {field.number} | {kind} | {about} |"
        for index, nested in enumerate(message.nested_type):
            yield from self._message(nested, (*path, _NESTED_MESSAGE, index), names)
        for index, enum in enumerate(message.enum_type):
            yield from self._enum(enum, (*path, _NESTED_ENUM, index), names)

    def _enum(
        self, enum: EnumDescriptorProto, path: _PackedPath, outer: Sequence[str]
    ) -> Iterator[str]:
        yield f"\n### {'.'.join((*outer, enum.name))}\n\n{self._comment(path)}\n"
        yield "| value | number | |\n|---|---|---|"
        for index, value in enumerate(enum.value):
            yield f"| `{value.name}` | {value.number} | {self._cell((*path, _VALUE, index))} |"

    def _type(self, message: DescriptorProto, field: FieldDescriptorProto) -> str:
        for entry in message.nested_type:
            is_its = field.type_name.rpartition(".")[2] == entry.name
            if is_its and entry.options.map_entry:
                key, value = entry.field
                return f"map of {_plain_type(key)} to {_plain_type(value)}"
        kind = _plain_type(field)
        if field.label == FieldDescriptorProto.LABEL_REPEATED:
            return f"repeated {kind}"
        if field.proto3_optional:
            return f"optional {kind}"
        if field.HasField("oneof_index"):
            return f"{kind}, one of `{message.oneof_decl[field.oneof_index].name}`"
        return kind


def _plain_type(field: FieldDescriptorProto) -> str:
    if field.type_name:
        return _link(field.type_name)
    return FieldDescriptorProto.Type.Name(field.type).removeprefix("TYPE_").lower()


def _streamed(streams: bool, type_name: str) -> str:
    return f"stream of {_link(type_name)}" if streams else _link(type_name)


def _link(type_name: str) -> str:
    """To a message's heading; `type_name` is ".penstock.v1.Finish.Reason"."""
    name = ".".join(type_name.split(".")[3:])
    return f"[{name}](#{name.replace('.', '').lower()})"
