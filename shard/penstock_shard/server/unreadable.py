"""Answers messages that are not valid protobuf, for every service.

gRPC's answer would be an unknown error with protobuf's text and an exception's name.
"""

from __future__ import annotations

import inspect
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import grpc

from penstock_proto.codec import UnreadableMessage

# gRPC's type is generic only for type checkers.
Handler = Any

# Makers of handlers, by the handler attribute that holds the function.
_KINDS = {
    "unary_unary": grpc.unary_unary_rpc_method_handler,
    "unary_stream": grpc.unary_stream_rpc_method_handler,
    "stream_unary": grpc.stream_unary_rpc_method_handler,
    "stream_stream": grpc.stream_stream_rpc_method_handler,
}


class RefuseUnreadable(grpc.aio.ServerInterceptor):
    """Refuses calls with unreadable requests as the caller's mistake."""

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Handler]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Handler:
        handler = await continuation(handler_call_details)
        return None if handler is None else _reading(handler, handler_call_details.method)


def _reading(handler: Handler, method: str) -> Handler:
    kind, answer = next((k, found) for k in _KINDS if (found := getattr(handler, k)) is not None)
    # A stream's messages are read while the handler runs.
    streams = handler.request_streaming
    read = (lambda requests: requests) if streams else handler.request_deserializer

    async def once(request: Any, context: Any) -> Any:
        try:
            return await answer(read(request), context)
        except UnreadableMessage:
            _refuse(context, method)

    async def many(request: Any, context: Any) -> AsyncIterator[Any]:
        try:
            async for each in answer(read(request), context):
                yield each
        except UnreadableMessage:
            _refuse(context, method)

    return _KINDS[kind](
        many if inspect.isasyncgenfunction(answer) else once,
        request_deserializer=handler.request_deserializer if streams else None,
        response_serializer=handler.response_serializer,
    )


def _refuse(context: Any, method: str) -> None:
    context.set_code(grpc.StatusCode.INVALID_ARGUMENT)
    context.set_details(unreadable(method))


def unreadable(method: str) -> str:
    return f"{method}: a message cannot be read; send the one that the service's proto names"
