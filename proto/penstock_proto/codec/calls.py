"""The service, its calls, and the errors with which they end."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

import grpc
from google.protobuf.message import DecodeError

from penstock_proto import shard_pb2 as pb
from penstock_proto.errors import (
    DeadlineExceeded,
    InvalidRequest,
    NotServed,
    Overloaded,
    PenstockError,
    RequestRefused,
    ShardFailed,
    ShardUnavailable,
    Unauthenticated,
)
from penstock_proto.shard_pb2_grpc import ShardServicer, ShardStub, add_ShardServicer_to_server
from penstock_proto.transport import FIELD_METADATA, explain
from penstock_proto.types import Error

# Re-exported, so that other modules need not import generated code.
Servicer = ShardServicer
add_servicer: Callable[[ShardServicer, grpc.aio.Server], None] = add_ShardServicer_to_server
# Raised when a call's bytes are not a valid message.
UnreadableMessage = DecodeError
ABORT_RESPONSE = pb.AbortResponse()
RETAIN_RESPONSE = pb.RetainResponse()
UNLOAD_ADAPTER_RESPONSE = pb.UnloadAdapterResponse()
SERVICE_NAME: Final[str] = pb.DESCRIPTOR.services_by_name["Shard"].full_name


def stub(channel: grpc.Channel | grpc.aio.Channel) -> Any:
    """The stub over a channel; untyped, since generated code has no types for asyncio."""
    return ShardStub(channel)  # type: ignore[no-untyped-call]


_ERRORS: Mapping[grpc.StatusCode, type[PenstockError]] = {
    grpc.StatusCode.INVALID_ARGUMENT: InvalidRequest,
    # It asks for what cannot be gone on with, here or elsewhere.
    grpc.StatusCode.OUT_OF_RANGE: RequestRefused,
    grpc.StatusCode.NOT_FOUND: InvalidRequest,
    grpc.StatusCode.FAILED_PRECONDITION: NotServed,
    grpc.StatusCode.UNIMPLEMENTED: NotServed,
    grpc.StatusCode.RESOURCE_EXHAUSTED: Overloaded,
    grpc.StatusCode.UNAVAILABLE: ShardUnavailable,
    grpc.StatusCode.CANCELLED: ShardUnavailable,
    grpc.StatusCode.DEADLINE_EXCEEDED: DeadlineExceeded,
    grpc.StatusCode.UNAUTHENTICATED: Unauthenticated,
    grpc.StatusCode.PERMISSION_DENIED: Unauthenticated,
}
_ERRORS_BY_CODE = {status.value[0]: kind for status, kind in _ERRORS.items()}


def error_of_code(
    code: int, text: str, *, field: str = "", value: str = "", bound: str = ""
) -> PenstockError:
    kind = _ERRORS_BY_CODE.get(code, ShardFailed)
    if issubclass(kind, RequestRefused):
        return kind(text, field=field, value=value, bound=bound)
    error = kind(text)
    if isinstance(error, Overloaded):
        error.field = field
    return error


def call_error(error: grpc.RpcError, address: str) -> PenstockError:
    """The exception for a call that ended with a status."""
    code: grpc.StatusCode = error.code()
    details = explain(error.details() or code.name)
    # Typed by each of gRPC's two kinds of calls in its own way.
    metadata: Any = error.trailing_metadata() or ()
    field = next((str(value) for key, value in metadata if key == FIELD_METADATA), "")
    # A refusal is about the request, and is told to whoever sent it: not which shards there are.
    is_of_shard = _ERRORS.get(code) is not InvalidRequest
    text = f"shard {address}: {details}" if is_of_shard else details
    return error_of_code(code.value[0], text, field=field)


@contextlib.contextmanager
def errors_of(address: str) -> Iterator[None]:
    """A call of gRPC's that fails within raises this library's exception."""
    try:
        yield
    except grpc.RpcError as error:
        raise call_error(error, address) from None


def status(error: Error) -> grpc.StatusCode:
    return grpc.StatusCode[error.code.name]
