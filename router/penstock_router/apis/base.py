"""Parts of an API: a table of fields, a translation to a request, the shape of answers and errors.

A new one is a file with an `Api` in it, its name in `offload/body_kinds.py`, and a line in the
table of routes.
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

# Anthropic's documentation asks clients to send arguments that are no JSON object back under it.
INVALID_JSON = "INVALID_JSON"
AnyRequest = TypeVar("AnyRequest", bound=Options)

# penstock's own field, on all routes that generate and on /v1/embeddings.
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
    # When the request arrived, on the clock of `time.perf_counter`.
    received_s: float
    usage: Usage
    # The choices of which the client has something, from a stream that was cut off.
    begun: frozenset[int] = frozenset()


class Shape(Protocol):
    """Renders the deltas of one answer as JSON. A frame is an encoded event of a stream."""

    def opening(self) -> Sequence[bytes]:
        """The frames before the first delta's."""

    def chunk(self, delta: Delta) -> bytes | None:
        """A delta as a frame or several; None where it has nothing to show."""

    def closing(self) -> Sequence[bytes]:
        """The frames after the last delta's."""

    def failure(self, error: ApiError) -> bytes:
        """The last frames of a stream that fails."""

    def whole(self, deltas: Sequence[Delta]) -> Any:
        """The JSON of an answer that is not streamed."""

    def headers(self) -> Mapping[str, str]:
        """The HTTP headers of an answer that is not streamed."""


@dataclass(frozen=True, slots=True)
class Framing:
    """The way a stream is sent: its media type, and what keeps a connection open where nothing
    comes, if clients skip anything.
    """

    media_type: str
    keep_alive: bytes


EVENTS = Framing("text/event-stream", b": keep-alive\n\n")
# A line of JSON for each event; clients parse every line.
LINES = Framing("application/x-ndjson", b"")


@dataclass(frozen=True, slots=True)
class ErrorForm:
    """The form of an API's errors, and what all its answers have besides."""

    body: Callable[[ApiError], JsonObject]
    # The TypedDict of what `body` returns.
    schema: type
    # The last frames of a stream that fails.
    frames: Callable[[ApiError], bytes]
    status: Callable[[ApiError], int] = lambda error: error.status
    # (what `body` returns, the request's id) -> the same with the id, where the API shows it.
    name_request: Callable[[JsonObject, str], JsonObject] = lambda answer, request_id: answer
    # (the request's id) -> headers of all answers, those that are no errors included.
    headers: Callable[[str], Mapping[str, str]] = lambda request_id: {}


@dataclass(frozen=True, slots=True, kw_only=True)
class BodyKind:
    """Bodies that are parsed, and whose text is worked on, in one way: by plain functions, the same
    ones wherever they run. `offload/dispatch.py` says where. Between the two the router finds the
    model, and what else a body refers to.
    """

    # Identifies it in messages to other processes.
    name: str
    # What `parse` returns: a dataclass with `model`, `brings_template`, `without_text`.
    request_type: type[Any]
    # Raises `BadRequest`.
    parse: Callable[[JsonObject], Any]
    # (request, model) -> prompts, or an answer to be encoded as JSON. Raises `BadRequest`.
    work: Callable[[Any, TextModel], Any]
    errors: ErrorForm
    # Whether clients of this API send JSON under any Content-Type.
    any_type: bool = False


@dataclass(frozen=True, slots=True)
class SeveralKinds:
    """Bodies whose fields tell their kind."""

    name: str
    # Raises `BadRequest`.
    choose: Callable[[JsonObject], BodyKind]
    # As `BodyKind.any_type`.
    any_type: bool = False


AnyKind = BodyKind | SeveralKinds


@dataclass(frozen=True, slots=True, kw_only=True)
class Api(BodyKind, Generic[AnyRequest]):
    """An HTTP API that generates tokens: how its bodies are read and its answers rendered."""

    request_type: type[AnyRequest]
    # The fields of its bodies: what is checked and what is documented.
    fields: Table
    parse: Callable[[JsonObject], AnyRequest]
    work: Callable[[Any, TextModel], Any] = prepare_prompts
    make_shape: Callable[[Job, Envelope], Shape]
    # (the request's id, whether the client chose it) -> the answer's id.
    name_answer: Callable[[str, bool], str]
    # The types of an answer and of a stream's event: TypedDicts, or None.
    answer: Any
    event: Any
    framing: Framing = EVENTS
    # Whether its streams can be resumed (header x-penstock-resumable).
    resumable: bool = False
    # Whether the last event of a stream repeats the whole answer.
    repeats_answer: bool = False


def call_id(response_id: str, choice: int, call: int, prefix: str = "call_") -> str:
    """The id of a tool call: the same whenever the same answer is generated again."""
    data = f"{response_id} {choice} {call}".encode()
    return prefix + hashlib.blake2b(data, digest_size=12).hexdigest()


def shown_arguments(text: str) -> JsonObject:
    """The arguments of a call as an object; a text that is not one, as of a call that was cut off,
    under `INVALID_JSON`.
    """
    given = object_in(text)
    return {INVALID_JSON: text} if given is None else given


def data_frame(payload: bytes) -> bytes:
    """A server-sent event without a name."""
    return b"data: %b\n\n" % payload


def event_frame(name: str, payload: object) -> bytes:
    """A server-sent event with a name."""
    return b"event: %b\ndata: %b\n\n" % (name.encode(), msgspec.json.encode(payload))


# ---- Errors in the form of OpenAI's API, for all APIs without a form of their own --------------


DONE = data_frame(b"[DONE]")


class ErrorObject(TypedDict):
    """The error, in the form of OpenAI's API."""

    message: str
    type: str
    param: str | None
    code: int | str


class ErrorAnswer(TypedDict):
    """An answer that is an error."""

    error: ErrorObject


def error_answer(error: ApiError) -> JsonObject:
    """An error as OpenAI's clients read it, in a plain answer and in a stream's event."""
    shown: ErrorObject = {
        "message": error.message,
        "type": error.type,
        "param": error.param,
        # The one code that clients check: by it langchain recognizes a prompt that is too long.
        "code": "context_length_exceeded" if isinstance(error, ContextExceeded) else error.status,
    }
    return {"error": shown}


def error_frames(error: ApiError) -> bytes:
    """An error as the end of a stream."""
    return data_frame(msgspec.json.encode(error_answer(error))) + DONE


ERRORS = ErrorForm(error_answer, ErrorAnswer, error_frames)
