"""Errors in the form of OpenAI's Responses: with its types, and codes that are words.

Codex tells by `context_length_exceeded` that it must shorten a conversation, and waits as long as a
stream's `rate_limit_exceeded` says in its message.
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
    """Why a response failed."""

    code: FailureCode
    message: str


def error_answer(error: ApiError) -> JsonObject:
    """An error as a plain answer."""
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
    """The `error` of a response that failed."""
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
    # Codex would add what it guesses of earlier reasoning to a usage that counts it already.
    return {"x-reasoning-included": "true"}


ERRORS = ErrorForm(error_answer, RefusalAnswer, _frames, headers=_headers)
