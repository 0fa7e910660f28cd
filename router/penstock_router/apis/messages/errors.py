"""Errors in the form of Anthropic's API."""

from __future__ import annotations

from typing import Literal, NotRequired, TypedDict

from penstock_router.apis.base import ErrorForm, event_frame
from penstock_router.errors import ApiError, ContextExceeded, ImageUnusable
from penstock_router.json_fields import JsonObject

# For prompts whose tokens were not counted: most texts have at least 3 characters per token.
_CHARS_A_TOKEN = 3


class MessageErrorObject(TypedDict):
    """The kind of an error, and its message."""

    type: str
    message: str


class MessageError(TypedDict):
    """An answer that is an error."""

    type: Literal["error"]
    error: MessageErrorObject
    request_id: NotRequired[str]


_ERROR_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


def _error_answer(error: ApiError) -> JsonObject:
    fallback = "invalid_request_error" if error.status < 500 else "api_error"
    type_ = _ERROR_TYPES.get(error.status, fallback)
    return {"type": "error", "error": {"type": type_, "message": _words(error)}}


def _words(error: ApiError) -> str:
    """Return the error's message. Its words tell clients what to leave out when they retry."""
    if isinstance(error, ImageUnusable):
        return f"Could not process image: {error.message}"
    if not isinstance(error, ContextExceeded):
        return error.message
    limit, given = error.limit_tokens, error.prompt_tokens
    if given is None:
        given = (error.prompt_chars or 0) // _CHARS_A_TOKEN
    # A prompt that fills the whole context is also too long.
    return f"prompt is too long: {max(given, limit + 1)} tokens > {limit} maximum"


def name_request(answer: JsonObject, request_id: str) -> JsonObject:
    return {**answer, "request_id": _shown_id(request_id)}


def _shown_id(request_id: str) -> str:
    return f"req_{request_id}"


def _headers(request_id: str) -> dict[str, str]:
    return {"request-id": _shown_id(request_id)}


def error_frames(error: ApiError, request_id: str = "") -> bytes:
    answer = _error_answer(error)
    return event_frame("error", name_request(answer, request_id) if request_id else answer)


ERRORS = ErrorForm(
    _error_answer, MessageError, error_frames, name_request=name_request, headers=_headers
)
