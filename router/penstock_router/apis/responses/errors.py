"""Errors in the form of OpenAI's Responses, which has its own error types, and words as codes.

At `context_length_exceeded`, Codex shortens the conversation. At a stream's `rate_limit_exceeded`,
it waits as long as the message says.
"""

from __future__ import annotations

from typing import Literal, TypedDict

import msgspec

from penstock_router.apis.base import DONE, ErrorForm, data_frame
from penstock_router.errors import ApiError, ContextExceeded
from penstock_router.json_fields import JsonObject

FailureCode = Literal[
    "context_length_exceeded", "invalid_prompt", "rate_limit_exceeded", "server_error"
]
ErrorType = Literal[
    "invalid_request_error",
    "authentication_error",
    "permission_error",
    "rate_limit_error",
    "server_error",
]

_TYPES: dict[int, ErrorType] = {
    401: "authentication_error",
    403: "permission_error",
    429: "rate_limit_error",
}
_CODES = {
    401: "invalid_api_key",
    405: "method_not_allowed",
    413: "request_too_large",
    426: "websocket_not_supported",
    429: "rate_limit_exceeded",
    500: "server_error",
    503: "service_unavailable",
    504: "timeout",
}


class RefusalObject(TypedDict):
    """An error: its message, its kind, and the field at fault."""

    message: str
    type: ErrorType
    param: str | None
    code: str | None


class RefusalAnswer(TypedDict):
    """An answer that is an error."""

    error: RefusalObject


class ResponseError(TypedDict):
    """The reason why a response failed."""

    code: FailureCode
    message: str


def error_answer(error: ApiError) -> JsonObject:
    status = error.status
    kind: ErrorType = "server_error" if status >= 500 else "invalid_request_error"
    shown: RefusalObject = {
        "message": error.message,
        "type": _TYPES.get(status, kind),
        "param": error.param,
        "code": _code_of(error),
    }
    return {"error": shown}


def _code_of(error: ApiError) -> str | None:
    if isinstance(error, ContextExceeded):
        return "context_length_exceeded"
    if error.status == 404 and error.param == "model":
        return "model_not_found"
    return error.code or _CODES.get(error.status)


def error_object(error: ApiError) -> ResponseError:
    code: FailureCode = "server_error"
    message = error.message
    if isinstance(error, ContextExceeded):
        code = "context_length_exceeded"
    elif error.status == 429:
        code = "rate_limit_exceeded"
        message = f"{message} Please try again in {error.retry_after_s or 1}s."
    elif error.status < 500:
        code = "invalid_prompt"
    return {"code": code, "message": message}


def _frames(error: ApiError) -> bytes:
    return data_frame(msgspec.json.encode(error_answer(error))) + DONE


def _headers(request_id: str) -> dict[str, str]:
    # Otherwise Codex adds its estimate of earlier reasoning, which the usage already counts.
    return {"x-reasoning-included": "true"}


ERRORS = ErrorForm(error_answer, RefusalAnswer, _frames, headers=_headers)
