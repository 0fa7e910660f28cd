"""Deltas -> the JSON of the Responses API: a response whole, and the events of its stream.

One answer is one message with one part of text. Every event is numbered. A piece of text is the
same JSON around it each time, so that JSON is rendered once.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any, Final, Literal, NotRequired, TypedDict, cast

import msgspec

from penstock_router.apis.base import Envelope, event_frame
from penstock_router.apis.logprobs import ChatLogprob, chat_logprobs
from penstock_router.apis.responses_request import (
    Item,
    ItemStatus,
    Part,
    Repeated,
    ResponsesRequest,
)
from penstock_router.choice import Delta, EndReason
from penstock_router.deltas import Usage
from penstock_router.errors import ApiError
from penstock_router.job import Job

COMPLETED: Final = "completed"
INCOMPLETE: Final = "incomplete"
FAILED: Final = "failed"
CANCELLED: Final = "cancelled"
IN_PROGRESS: Final = "in_progress"

# Of a response that this server makes.
ResponseStatus = Literal["completed", "incomplete", "failed", "cancelled", "in_progress"]
_ErrorCode = Literal["invalid_prompt", "rate_limit_exceeded", "server_error"]

_TEXT_DELTA = "response.output_text.delta"
_ERROR_CODES: dict[int, _ErrorCode] = {400: "invalid_prompt", 429: "rate_limit_exceeded"}
_DEFAULT_ERROR_CODE: Final = "server_error"

_encode = msgspec.json.encode


# ---- What answers look like --------------------------------------------------------------------


class InputTokensDetails(TypedDict):
    """Of the prompt's tokens."""

    cached_tokens: int
    cache_write_tokens: int


class OutputTokensDetails(TypedDict):
    """Of the answer's tokens."""

    reasoning_tokens: int


class ResponseUsage(TypedDict):
    """Tokens of a response."""

    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int
    x_penstock_continued: NotRequired[Literal["approximate"]]


class ResponseError(TypedDict):
    """Why a response failed."""

    code: _ErrorCode
    message: str


class IncompleteDetails(TypedDict):
    """Why a response ends early."""

    reason: Literal["max_output_tokens"]


class ResponseAnswer(Repeated):
    """A response, in whatever state it is."""

    id: str
    object: Literal["response"]
    created_at: int
    completed_at: int | None
    status: ResponseStatus
    error: ResponseError | None
    incomplete_details: IncompleteDetails | None
    model: str
    output: list[Item]
    temperature: float | None
    top_p: float | None
    usage: ResponseUsage | None


class ResponseEvent(TypedDict):
    """An event of a stream; what it has besides its number depends on its type."""

    type: str
    sequence_number: int
    response: NotRequired[ResponseAnswer]
    output_index: NotRequired[int]
    content_index: NotRequired[int]
    item_id: NotRequired[str]
    item: NotRequired[Item]
    part: NotRequired[Part]
    delta: NotRequired[str]
    text: NotRequired[str]
    logprobs: NotRequired[list[ChatLogprob]]


class DeletedAnswer(TypedDict):
    """A response that was deleted."""

    id: str
    object: Literal["response"]
    deleted: Literal[True]


class ItemList(TypedDict):
    """Items of a conversation, a page of them."""

    object: Literal["list"]
    data: list[Item]
    first_id: str
    last_id: str
    has_more: bool


def usage_object(usage: Usage) -> ResponseUsage:
    """The `usage` of a response."""
    shown: ResponseUsage = {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {
            "cached_tokens": usage.cached_tokens or 0,
            "cache_write_tokens": 0,
        },
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }
    if usage.approximate:
        shown["x_penstock_continued"] = "approximate"
    return shown


def error_object(error: ApiError) -> ResponseError:
    """The `error` of a response that failed."""
    code = _ERROR_CODES.get(error.status, _DEFAULT_ERROR_CODE)
    return {"code": code, "message": error.message}


# ---- The shape ---------------------------------------------------------------------------------


class ResponseShape:
    """One response: `answer` is in progress until one of the methods that end it."""

    def __init__(self, job: Job, envelope: Envelope) -> None:
        assert isinstance(job.options, ResponsesRequest)
        self._asked = job.options
        self._conversation = job.conversation
        self._tokenizer = job.model.tokenizer
        self._usage = envelope.usage
        self._texts: list[str] = []
        # As JSON by now: the end of a stream says all of them four times over.
        self._logprobs: list[msgspec.Raw] = []
        self._finish_reason: EndReason | None = None
        self._item_id = "msg_" + envelope.response_id.removeprefix("resp_")
        self._place = {"output_index": 0, "content_index": 0, "item_id": self._item_id}
        # Of the next event.
        self._number = 0
        self._delta_opens = event_frame(_TEXT_DELTA, {"type": _TEXT_DELTA, **self._place})
        self._delta_opens = self._delta_opens.removesuffix(b"}\n\n")
        given, default = job.options, job.model.info.default_sampling
        self.answer: ResponseAnswer = {
            **job.options.repeated,
            "id": envelope.response_id,
            "object": "response",
            "created_at": envelope.created,
            "completed_at": None,
            "status": IN_PROGRESS,
            "error": None,
            "incomplete_details": None,
            "model": job.model.info.model,
            "output": [],
            "temperature": _first_of(given.temperature, default.temperature),
            "top_p": _first_of(given.top_p, default.top_p),
            "usage": None,
        }

    # ---- whole ----

    def whole(self, deltas: Sequence[Delta]) -> ResponseAnswer:
        """The answer that is no stream."""
        for delta in deltas:
            self.take(delta)
        self.finish()
        return self.answer

    def headers(self) -> Mapping[str, str]:
        """None of its own."""
        return {}

    def take(self, delta: Delta) -> list[msgspec.Raw]:
        """Add to the text; the log-probabilities that came with it."""
        self._texts.append(delta.text)
        self._finish_reason = delta.finish_reason
        if self._asked.logprobs is None or delta.logprobs is None:
            return []
        shown = chat_logprobs(
            self._tokenizer, delta.token_ids, delta.logprobs, requested_ids=(), as_ids=False
        )["content"]
        encoded = [msgspec.Raw(_encode(token)) for token in shown]
        self._logprobs += encoded
        return encoded

    # ---- ends ----

    def finish(self) -> None:
        """After the last delta, or later; once only."""
        answer = self.answer
        if answer["status"] != IN_PROGRESS:
            return
        answer["usage"] = usage_object(self._usage)
        if self._finish_reason == "length":
            self._end(INCOMPLETE)
            answer["incomplete_details"] = {"reason": "max_output_tokens"}
        else:
            self._end(COMPLETED)
            answer["completed_at"] = int(time.time())

    def fail(self, error: ApiError, *, show_output: bool = True) -> None:
        """What was said so far stays."""
        self._end(FAILED)
        self.answer["error"] = error_object(error)
        if not show_output:
            self.answer["output"] = []

    def cancel(self) -> None:
        """On request."""
        self._end(CANCELLED)

    def _end(self, status: Literal["completed", "incomplete", "failed", "cancelled"]) -> None:
        self.answer["status"] = status
        self.answer["completed_at"] = self.answer["incomplete_details"] = None
        if status == COMPLETED or self._texts:
            done: ItemStatus = COMPLETED if status == COMPLETED else INCOMPLETE
            self.answer["output"] = [self._item(done, [self._part()])]

    def _item(self, status: ItemStatus, content: list[Part]) -> Item:
        return {
            "type": "message",
            "id": self._item_id,
            "role": "assistant",
            "status": status,
            "content": content,
        }

    def _part(self) -> Part:
        return _output_text("".join(self._texts), self._logprobs)

    @property
    def conversation(self) -> bytes:
        """The items up to and with the answer's, as they are stored and gone on from: JSON."""
        answered = [
            {**item, "content": [_output_text(part["text"], []) for part in item["content"]]}
            for item in self.answer["output"]
        ]
        return _joined(self._conversation, _encode(answered))

    # ---- a stream ----

    def opening(self) -> list[bytes]:
        """A response, its message, and the message's part, all empty yet."""
        return [
            self._event("response.created", response=self.answer),
            self._event("response.in_progress", response=self.answer),
            self._event(
                "response.output_item.added", output_index=0, item=self._item(IN_PROGRESS, [])
            ),
            self._event("response.content_part.added", **self._place, part=_output_text("", [])),
        ]

    def chunk(self, delta: Delta) -> bytes | None:
        """A delta as a frame; None where it has nothing to show."""
        logprobs = self.take(delta)
        if not (delta.text or logprobs):
            return None
        frame = b'%b,"delta":%b,"logprobs":%b,"sequence_number":%d}\n\n' % (
            self._delta_opens,
            _encode(delta.text),
            _encode(logprobs),
            self._number,
        )
        self._number += 1
        return frame

    def closing(self) -> list[bytes]:
        """The part, the message and the response, whole."""
        self.finish()
        [item] = self.answer["output"]
        [part] = item["content"]
        return [
            self._event(
                "response.output_text.done",
                **self._place,
                text=part["text"],
                logprobs=self._logprobs,
            ),
            self._event("response.content_part.done", **self._place, part=part),
            self._event("response.output_item.done", output_index=0, item=item),
            self._event(f"response.{self.answer['status']}", response=self.answer),
        ]

    def failed(self, error: ApiError) -> bytes:
        """The response with its error; before it the first event, if that was not sent."""
        frames = b""
        if self._number == 0:
            frames = self._event("response.created", response=self.answer)
        self.fail(error)
        return frames + self._event("response.failed", response=self.answer)

    def _event(self, name: str, **more: object) -> bytes:
        event = {"type": name, **more, "sequence_number": self._number}
        self._number += 1
        return event_frame(name, event)


def _joined(array: bytes, other: bytes) -> bytes:
    """Two arrays of JSON as one, without a look at what is in them."""
    if len(array) <= 2 or len(other) <= 2:
        return array if len(array) > 2 else other
    return b"%b,%b" % (array[:-1], other[1:])


def _output_text(text: str, logprobs: Sequence[msgspec.Raw]) -> Part:
    shown = cast(list[ChatLogprob], list(logprobs))
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": shown}


def _first_of(given: float | None, default: float | None) -> float:
    """What temperature and top_p were: neither changes anything at 1."""
    return next((value for value in (given, default) if value is not None), 1.0)


def lost(answer: dict[str, Any]) -> None:
    """A stored response whose maker is gone."""
    answer["status"] = FAILED
    answer["error"] = {
        "code": _DEFAULT_ERROR_CODE,
        "message": "the process that made this response ended before it was finished",
    }
