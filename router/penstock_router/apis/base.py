"""The parts of an API: a table of fields, a translation to requests, the shape of answers and
errors.

To add an API, write an `Api`, and add it to `offload/body_kinds.py` and the table of routes.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypedDict, TypeVar

import msgspec

from penstock_router.errors import ApiError, ContextExceeded
from penstock_router.generation.choice import Delta
from penstock_router.generation.job import Job
from penstock_router.json_fields import Field, JsonObject, Table, number, object_in
from penstock_router.observe.request_record import Usage
from penstock_router.request import MAX_TIMEOUT_S, MIN_TIMEOUT_S, Options
from penstock_router.text.prompts import TextModel, prepare_prompts

# Anthropic's documentation asks clients to return arguments under this key if they are not a JSON
# object.
INVALID_JSON = "INVALID_JSON"
AnyRequest = TypeVar("AnyRequest", bound=Options)

# penstock's own field, on /v1/embeddings and all routes that generate tokens.
TIMEOUT = Field(
    "timeout",
    number(MIN_TIMEOUT_S, MAX_TIMEOUT_S),
    "Seconds from its arrival, waiting included, after which the request ends with an error.",
)


@dataclass(frozen=True, slots=True)
class Envelope:
    """The metadata of an answer. `usage` is updated while the answer is generated."""

    response_id: str
    # Unix time, whole seconds.
    created: int
    # `time.perf_counter` at the request's arrival.
    received_s: float
    usage: Usage
    # Choices of a resumed stream that the client already has in part.
    begun: frozenset[int] = frozenset()


class Shape(Protocol):
    """Renders one answer's deltas as JSON. A frame is an encoded event of a stream."""

    def opening(self) -> Sequence[bytes]:
        """The frames before the first delta."""

    def chunk(self, delta: Delta) -> bytes | None:
        """The frames of a delta; None if it has nothing to show."""

    def closing(self) -> Sequence[bytes]:
        """The frames after the last delta."""

    def failure(self, error: ApiError) -> bytes:
        """The last frames of a stream that failed."""

    def whole(self, deltas: Sequence[Delta]) -> Any:
        """The JSON of an answer that is not streamed."""

    def headers(self) -> Mapping[str, str]:
        """HTTP headers of an answer that is not streamed."""


@dataclass(frozen=True, slots=True)
class Framing:
    """A stream's media type, and the bytes that keep its connection open: none if clients cannot
    skip them.
    """

    media_type: str
    keep_alive: bytes


EVENTS = Framing("text/event-stream", b": keep-alive\n\n")
# One line of JSON for each event; clients parse every line.
LINES = Framing("application/x-ndjson", b"")


@dataclass(frozen=True, slots=True)
class ErrorForm:
    """The form of an API's errors, and the headers of all its answers."""

    body: Callable[[ApiError], JsonObject]
    # The TypedDict that `body` returns.
    schema: type
    # Last frames of a stream that failed.
    frames: Callable[[ApiError], bytes]
    status: Callable[[ApiError], int] = lambda error: error.status
    # (result of `body`, request id) -> the result with the id, if the API shows it.
    name_request: Callable[[JsonObject, str], JsonObject] = lambda answer, request_id: answer
    # (request id) -> headers of all answers, with or without an error.
    headers: Callable[[str], Mapping[str, str]] = lambda request_id: {}


@dataclass(frozen=True, slots=True, kw_only=True)
class BodyKind:
    """Parses bodies of one kind and does their text work, in the process that `offload/dispatch.py`
    chooses. In between, the router finds the model and everything else that a body refers to.
    """

    # The kind's name in messages to other processes.
    name: str
    # Result of `parse`: a dataclass with `model`, `brings_template`, `without_text`.
    request_type: type[Any]
    # Raises `BadRequest`.
    parse: Callable[[JsonObject], Any]
    # (request, model) -> prompts, or an answer to encode as JSON. Raises `BadRequest`.
    work: Callable[[Any, TextModel], Any]
    errors: ErrorForm
    # True if clients of this API send JSON under any Content-Type.
    any_type: bool = False


@dataclass(frozen=True, slots=True)
class SeveralKinds:
    """Bodies whose fields determine their kind."""

    name: str
    # Raises `BadRequest`.
    choose: Callable[[JsonObject], BodyKind]
    # See `BodyKind.any_type`.
    any_type: bool = False


AnyKind = BodyKind | SeveralKinds


@dataclass(frozen=True, slots=True, kw_only=True)
class Api(BodyKind, Generic[AnyRequest]):
    """An HTTP API that generates tokens."""

    request_type: type[AnyRequest]
    fields: Table
    parse: Callable[[JsonObject], AnyRequest]
    work: Callable[[Any, TextModel], Any] = prepare_prompts
    make_shape: Callable[[Job, Envelope], Shape]
    # (request id, whether the client chose it) -> answer id.
    name_answer: Callable[[str, bool], str]
    # Types of an answer and an event: TypedDicts or None.
    answer: Any
    event: Any
    framing: Framing = EVENTS
    # True if streams can be resumed (header x-penstock-resumable).
    resumable: bool = False
    # True if a stream's last event repeats the whole answer.
    repeats_answer: bool = False


def call_id(response_id: str, choice: int, call: int, prefix: str = "call_") -> str:
    """Return a tool call's id, the same if the answer is generated again."""
    data = f"{response_id} {choice} {call}".encode()
    return prefix + hashlib.blake2b(data, digest_size=12).hexdigest()


def shown_arguments(text: str) -> JsonObject:
    """Parse a call's arguments. Text that is not an object, as in a call that was cut off, is put
    under `INVALID_JSON`.
    """
    given = object_in(text)
    return {INVALID_JSON: text} if given is None else given


def data_frame(payload: bytes) -> bytes:
    return b"data: %b\n\n" % payload


def event_frame(name: str, payload: object) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (name.encode(), msgspec.json.encode(payload))


# ---- Errors in OpenAI's form, for all APIs without a form of their own -------------------------


DONE = data_frame(b"[DONE]")


class ErrorObject(TypedDict):
    """An error in the form of OpenAI's API."""

    message: str
    type: str
    param: str | None
    code: int | str


class ErrorAnswer(TypedDict):
    """An answer that is an error."""

    error: ErrorObject


def error_answer(error: ApiError) -> JsonObject:
    """Render an error as OpenAI's clients read it, in an answer or an event."""
    shown: ErrorObject = {
        "message": error.message,
        "type": error.type,
        "param": error.param,
        # By this code langchain recognizes a prompt that is too long. Clients check no other code.
        "code": "context_length_exceeded" if isinstance(error, ContextExceeded) else error.status,
    }
    return {"error": shown}


def error_frames(error: ApiError) -> bytes:
    return data_frame(msgspec.json.encode(error_answer(error))) + DONE


ERRORS = ErrorForm(error_answer, ErrorAnswer, error_frames)
