"""Anthropic's Messages: a chat by other names. All of the translation is in this file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, NotRequired, TypedDict

from penstock_router.apis.base import TIMEOUT, Api, Envelope, ErrorForm, event_frame
from penstock_router.apis.chat_messages import TEXT, messages_schema, read_messages
from penstock_router.choice import Delta
from penstock_router.errors import ApiError, BadRequest
from penstock_router.fields import (
    ANYTHING,
    ARRAY,
    BOOLEAN,
    INT32_MAX,
    OBJECT,
    POSITIVE,
    STRING,
    Field,
    JsonObject,
    Kind,
    array_of,
    integer,
    not_served,
    number,
    read_fields,
    string,
    table,
)
from penstock_router.job import Job
from penstock_router.request import ChatRequest, Message

_MAX_STOPS = 16
_ROLES = ("user", "assistant")


def _read_turns(name: str, value: Any) -> list[Message]:
    turns = read_messages(name, value)
    for index, turn in enumerate(turns):
        if turn["role"] not in _ROLES:
            raise BadRequest(f"{name}[{index}].role: must be user or assistant", param=name)
    return turns


_TURNS = Kind(_read_turns, messages_schema({"enum": list(_ROLES)}))
_PROMPT_FIELDS = (
    Field("model", STRING, "One of /v1/models.", required=True),
    Field("messages", _TURNS, "The chat so far; the last may be to continue.", required=True),
    Field("system", TEXT, "What comes before the chat: a text, or text blocks."),
    not_served("tools", ARRAY, []),
    not_served("tool_choice", OBJECT, {"type": "none"}, {"type": "auto"}),
    not_served("thinking", OBJECT, {"type": "disabled"}),
)
COUNT_FIELDS = table(_PROMPT_FIELDS)
FIELDS = table(
    [
        *_PROMPT_FIELDS,
        Field("max_tokens", POSITIVE, "At most so many tokens.", required=True),
        Field(
            "stop_sequences",
            array_of(string(1, 1024), at_most=_MAX_STOPS, unit="strings"),
            "Strings that end the answer; they are cut off.",
        ),
        Field("stream", BOOLEAN, "Answer with events as tokens come."),
        Field("temperature", number(0, 1), "Below 1e-5 the likeliest token is always taken."),
        Field("top_p", number(0, 1, above_low=True), "Draw from the likeliest that add up to it."),
        Field("top_k", integer(0, INT32_MAX), "Draw from so many; 0: from all."),
        Field("metadata", OBJECT, "Accepted, and nothing comes of it."),
        Field("service_tier", STRING, "Accepted, and nothing comes of it."),
        TIMEOUT,
        not_served("container", ANYTHING),
        not_served("mcp_servers", ARRAY, []),
        not_served("output_config", OBJECT, {}),
    ]
)


def parse(body: JsonObject) -> ChatRequest:
    """A body of /v1/messages."""
    values = read_fields(FIELDS, body)
    options = ("model", "max_tokens", "stream", "temperature", "top_p", "top_k")
    return ChatRequest(
        messages=_chat(values),
        **_ending(values),
        stop=values.get("stop_sequences", ()),
        timeout_s=values.get("timeout"),
        **{name: values[name] for name in options if name in values},
    )


def parse_count(body: JsonObject) -> ChatRequest:
    """A body of /v1/messages/count_tokens."""
    values = read_fields(COUNT_FIELDS, body)
    return ChatRequest(model=values["model"], messages=_chat(values), **_ending(values))


def _chat(values: JsonObject) -> list[dict[str, Any]]:
    system = [{"role": "system", "content": values["system"]}] if values.get("system") else []
    return [*system, *values["messages"]]


def _ending(values: JsonObject) -> dict[str, Any]:
    """An answer goes on with a last message of its own role."""
    continues = values["messages"][-1]["role"] == "assistant"
    return {
        "add_special_tokens": False,
        "add_generation_prompt": not continues,
        "continue_final_message": continues,
    }


# ---- Answers -----------------------------------------------------------------------------------


class TextBlock(TypedDict):
    """A piece of an answer."""

    type: Literal["text"]
    text: str


class MessageUsage(TypedDict):
    """Tokens of a request: those of the prompt that no cache had, and those that one had."""

    input_tokens: int
    cache_read_input_tokens: int
    cache_creation_input_tokens: int
    output_tokens: int


StopReason = Literal["end_turn", "max_tokens", "stop_sequence"]


class MessageEnd(TypedDict):
    """Why a message ended."""

    stop_reason: StopReason | None
    stop_sequence: str | None


class MessageAnswer(TypedDict):
    """An answer of /v1/messages."""

    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[TextBlock]
    stop_reason: StopReason | None
    stop_sequence: str | None
    usage: MessageUsage


class MessageEvent(TypedDict):
    """An event of a stream; what else it has depends on its type."""

    type: Literal[
        "message_start",
        "content_block_start",
        "ping",
        "content_block_delta",
        "content_block_stop",
        "message_delta",
        "message_stop",
    ]
    index: NotRequired[int]
    message: NotRequired[MessageAnswer]
    content_block: NotRequired[TextBlock]
    delta: NotRequired[dict[str, Any]]
    usage: NotRequired[MessageUsage]


class TokenCount(TypedDict):
    """Of a prompt."""

    input_tokens: int


def _event(type_: str, **rest: Any) -> bytes:
    return event_frame(type_, {"type": type_, **rest})


class MessageShape:
    """Answers of /v1/messages."""

    def __init__(self, job: Job, envelope: Envelope) -> None:
        self._id = envelope.response_id
        self._model = job.model.info.model
        self._usage_so_far = envelope.usage
        self._end: MessageEnd = {"stop_reason": None, "stop_sequence": None}

    def _usage(self) -> MessageUsage:
        usage = self._usage_so_far
        cached = usage.cached_tokens or 0
        return {
            "input_tokens": usage.prompt_tokens - cached,
            "cache_read_input_tokens": cached,
            "cache_creation_input_tokens": 0,
            "output_tokens": usage.completion_tokens,
        }

    def _message(self, content: list[TextBlock]) -> MessageAnswer:
        return {
            "id": self._id,
            "type": "message",
            "role": "assistant",
            "model": self._model,
            "content": content,
            "stop_reason": self._end["stop_reason"],
            "stop_sequence": self._end["stop_sequence"],
            "usage": self._usage(),
        }

    def opening(self) -> list[bytes]:
        """The message, empty, and its one block."""
        return [
            _event("message_start", message=self._message([])),
            _event("content_block_start", index=0, content_block={"type": "text", "text": ""}),
            _event("ping"),
        ]

    def chunk(self, delta: Delta) -> bytes | None:
        """A piece of the block."""
        self._note_end(delta)
        if not delta.text:
            return None
        piece = {"type": "text_delta", "text": delta.text}
        return _event("content_block_delta", index=0, delta=piece)

    def closing(self) -> list[bytes]:
        """The block's end, why the message ended, and the message's end."""
        return [
            _event("content_block_stop", index=0),
            _event("message_delta", delta=self._end, usage=self._usage()),
            _event("message_stop"),
        ]

    def failed(self, error: ApiError) -> bytes:
        """The error as an event."""
        return _error_frames(error)

    def whole(self, deltas: Sequence[Delta]) -> MessageAnswer:
        """The answer that is no stream."""
        [delta] = deltas
        self._note_end(delta)
        return self._message([{"type": "text", "text": delta.text}])

    def headers(self) -> Mapping[str, str]:
        """None of its own."""
        return {}

    def _note_end(self, delta: Delta) -> None:
        if delta.finish_reason == "length":
            self._end = {"stop_reason": "max_tokens", "stop_sequence": None}
        elif isinstance(delta.stop_reason, str):
            self._end = {"stop_reason": "stop_sequence", "stop_sequence": delta.stop_reason}
        elif delta.finish_reason is not None:
            self._end = {"stop_reason": "end_turn", "stop_sequence": None}


# ---- Errors ------------------------------------------------------------------------------------


class MessageErrorObject(TypedDict):
    """What went wrong."""

    type: str
    message: str


class MessageError(TypedDict):
    """An answer that is an error."""

    type: Literal["error"]
    error: MessageErrorObject


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
    return {"type": "error", "error": {"type": type_, "message": error.message}}


def _error_frames(error: ApiError) -> bytes:
    return event_frame("error", _error_answer(error))


ERRORS = ErrorForm(_error_answer, MessageError, _error_frames)

MESSAGES_API = Api(
    name="messages",
    request_type=ChatRequest,
    fields=FIELDS,
    parse=parse,
    make_shape=MessageShape,
    name_answer=lambda request_id, named_by_client: f"msg_{request_id}",
    errors=ERRORS,
    answer=MessageAnswer,
    event=MessageEvent,
)
