"""Renders deltas in OpenAI's Responses API: a whole response, and the events of its stream.

A text-only answer is one message. In other answers, consecutive pieces of one kind form an item.
Every event has a number.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final, Literal, NotRequired, TypedDict, cast

import msgspec

from penstock_router.apis import json_in_thread
from penstock_router.apis.base import Envelope, call_id
from penstock_router.apis.logprobs import ChatLogprob, chat_logprobs
from penstock_router.apis.responses.errors import ResponseError, error_object
from penstock_router.apis.responses.items.types import Item, ItemStatus, Part
from penstock_router.apis.responses.output.calls import call_builder
from penstock_router.apis.responses.output.items import (
    ItemBuilder,
    MessageBuilder,
    ReasoningBuilder,
    output_text,
)
from penstock_router.apis.responses.request_type import EchoedFields, ResponsesRequest
from penstock_router.errors import ApiError
from penstock_router.generation.choice import Delta, EndReason
from penstock_router.generation.job import Job
from penstock_router.observe.request_record import Usage
from penstock_router.text.answer_pieces import PieceKind

COMPLETED: Final = "completed"
INCOMPLETE: Final = "incomplete"
FAILED: Final = "failed"
CANCELLED: Final = "cancelled"
IN_PROGRESS: Final = "in_progress"
QUEUED: Final = "queued"

ResponseStatus = Literal["completed", "incomplete", "failed", "cancelled", "in_progress", "queued"]

# A local name, because every delta looks it up.
_CONTENT = PieceKind.CONTENT


# ---- What answers look like --------------------------------------------------------------------


class InputTokensDetails(TypedDict):
    """The number of prompt tokens found in the prefix cache; `cache_write_tokens` is always 0."""

    cached_tokens: int
    cache_write_tokens: int


class OutputTokensDetails(TypedDict):
    """The number of reasoning tokens in the answer."""

    reasoning_tokens: int


class ResponseUsage(TypedDict):
    """Token counts of a response."""

    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int
    x_penstock_continued: NotRequired[Literal["approximate"]]
    # Tools whose grammars were shown to the model, but not enforced.
    x_penstock_unenforced: NotRequired[list[str]]


class IncompleteDetails(TypedDict):
    """The reason why a response ended early."""

    reason: Literal["max_output_tokens"]


class ResponseAnswer(EchoedFields):
    """A response, finished or not."""

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
    # OpenAI's answers lack these two fields, but Open Responses requires them.
    presence_penalty: float
    frequency_penalty: float
    usage: ResponseUsage | None


class ResponseEvent(TypedDict):
    """An event of a stream; its fields depend on its type."""

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
    name: NotRequired[str]
    arguments: NotRequired[str]
    input: NotRequired[str]
    logprobs: NotRequired[list[ChatLogprob]]


class DeletedAnswer(TypedDict):
    """A response that was deleted."""

    id: str
    object: Literal["response"]
    deleted: Literal[True]


class ItemList(TypedDict):
    """A page of the items of a conversation."""

    object: Literal["list"]
    data: list[Item]
    first_id: str
    last_id: str
    has_more: bool


def usage_object(usage: Usage, unenforced: Sequence[str] = ()) -> ResponseUsage:
    """Show the usage; `unenforced` names tools whose grammars were not enforced."""
    shown: ResponseUsage = {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {
            "cached_tokens": usage.cached_tokens or 0,
            "cache_write_tokens": 0,
        },
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens or 0},
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }
    if usage.approximate:
        shown["x_penstock_continued"] = "approximate"
    if unenforced:
        shown["x_penstock_unenforced"] = list(unenforced)
    return shown


# ---- The shape ---------------------------------------------------------------------------------


class ResponseShape:
    """A response in progress: `answer` is incomplete until `finish`, `fail` or `cancel`.

    Encode `answer` in a thread, because it may be long.
    """

    def __init__(self, job: Job, envelope: Envelope) -> None:
        assert isinstance(job.options, ResponsesRequest)
        self._asked = job.options
        self._conversation = job.prepared.conversation
        self._unenforced = job.prepared.unenforced
        self._tokenizer = job.model.tokenizer
        self.usage = envelope.usage
        self._id_stem = envelope.response_id.removeprefix("resp_")
        self._items: list[ItemBuilder] = []
        self._growing: ItemBuilder | None = None
        self._num_calls = 0
        # Log-probabilities of tokens whose text is not in a message yet.
        self._logprobs: list[msgspec.Raw] = []
        self._finish_reason: EndReason | None = None
        # `_frames`: frames not sent yet. `_streams`: true if there is a stream. `_number`: the next
        # event's number.
        self._frames: list[bytes] = []
        self._streams = False
        self._number = 0
        given, default = job.options, job.model.info.default_sampling
        repeated = {name: msgspec.Raw(value) for name, value in job.prepared.repeated.items()}
        own = {
            "id": envelope.response_id,
            "object": "response",
            "created_at": envelope.created,
            "completed_at": None,
            "status": IN_PROGRESS,
            "error": None,
            "incomplete_details": None,
            "model": job.model.name,
            "output": [],
            "temperature": _first_of(given.temperature, default.temperature),
            "top_p": _first_of(given.top_p, default.top_p),
            "presence_penalty": _first_of(given.presence_penalty, default.presence_penalty, 0.0),
            "frequency_penalty": _first_of(given.frequency_penalty, default.frequency_penalty, 0.0),
            "usage": None,
        }
        self.answer = cast(ResponseAnswer, {**repeated, **own})

    # ---- whole ----

    def whole(self, deltas: Sequence[Delta]) -> ResponseAnswer:
        for delta in deltas:
            self.take(delta)
        self.finish()
        return self.answer

    def headers(self) -> Mapping[str, str]:
        return {}

    def take(self, delta: Delta) -> None:
        self._finish_reason = delta.finish_reason
        if self._asked.logprobs is not None and delta.logprobs is not None:
            self._note_logprobs(delta)
        if delta.pieces is None:
            self._say(_CONTENT, delta.text)
            return
        for piece in delta.pieces:
            self._say(piece.kind, piece.text)
        if self._logprobs and isinstance(self._growing, MessageBuilder):
            self._say(_CONTENT, "")

    def _note_logprobs(self, delta: Delta) -> None:
        assert delta.logprobs is not None
        self._logprobs += chat_logprobs(
            self._tokenizer, delta.token_ids, delta.logprobs, requested_ids=(), as_ids=False
        )

    def _say(self, kind: PieceKind, text: str) -> None:
        item = self._growing
        if item is None or item.grows_by is not kind:
            item = self._begin(kind, text)
            if kind is PieceKind.CALL:
                return
        logprobs: Sequence[msgspec.Raw] = ()
        if self._logprobs and kind is _CONTENT:
            logprobs, self._logprobs = self._logprobs, []
        shown = item.grow(text, logprobs)
        if self._streams and (shown or logprobs):
            self._frames.append(item.delta(shown, logprobs, self._number))
            self._number += 1

    def _begin(self, kind: PieceKind, text: str) -> ItemBuilder:
        if self._growing is not None and self._streams:
            self._close(self._growing, self._growing.as_item(COMPLETED))
        stem, index = self._id_stem, len(self._items)
        item: ItemBuilder
        if kind is PieceKind.CALL:
            named = call_id(self.answer["id"], 0, self._num_calls)
            item = call_builder(stem, index, named, text, self._asked.served)
            self._num_calls += 1
        elif kind is PieceKind.REASONING:
            item = ReasoningBuilder(stem, index, is_sealed=self._asked.seals_reasoning)
        else:
            item = MessageBuilder(stem, index)
        self._items.append(item)
        self._growing = item
        if self._streams:
            self._frames += [self._event(name, **fields) for name, fields in item.opening()]
        return item

    def _close(self, item: ItemBuilder, shown: Item) -> None:
        self._frames += [self._event(name, **fields) for name, fields in item.closing(shown)]

    # ---- ends ----

    def finish(self) -> None:
        """Complete the response, if it has not ended yet."""
        answer = self.answer
        if answer["status"] not in (IN_PROGRESS, QUEUED):
            return
        if not self._items:
            # An answer has at least one message, which may be empty.
            self._say(_CONTENT, "")
        answer["usage"] = usage_object(self.usage, self._unenforced)
        if self._finish_reason == "length":
            self._end(INCOMPLETE)
            answer["incomplete_details"] = {"reason": "max_output_tokens"}
        else:
            self._end(COMPLETED)
            answer["completed_at"] = int(time.time())

    def queue(self) -> None:
        self.answer["status"] = QUEUED

    def begin(self) -> None:
        self.answer["status"] = IN_PROGRESS

    def fail(self, error: ApiError, *, show_output: bool = True) -> None:
        """End the response with an error; without `show_output`, drop its output."""
        self._end(FAILED)
        self.answer["error"] = error_object(error)
        if not show_output:
            self.answer["output"] = []

    def cancel(self) -> None:
        """End the response at a client's request; keep its output."""
        self._end(CANCELLED)

    def _end(self, status: Literal["completed", "incomplete", "failed", "cancelled"]) -> None:
        self.answer["status"] = status
        self.answer["completed_at"] = self.answer["incomplete_details"] = None
        last: ItemStatus = COMPLETED if status == COMPLETED else INCOMPLETE
        before = [item.as_item(COMPLETED) for item in self._items[:-1]]
        self.answer["output"] = before + [item.as_item(last) for item in self._items[-1:]]

    def stored(self) -> tuple[bytes, bytes]:
        """Return, as JSON, the answer, and the conversation including it, which later responses
        continue.
        """
        return json_in_thread.encode(self.answer), json_in_thread.join(self._all_items())

    def _all_items(self) -> Iterator[bytes]:
        answered = [_without_logprobs(item) for item in self.answer["output"]]
        before = memoryview(self._conversation)[1:-1]
        yield b"["
        yield from json_in_thread.cut(before)
        yield b"," if before and answered else b""
        for index, item in enumerate(answered):
            yield b"," if index else b""
            yield from json_in_thread.json_pieces(item)
        yield b"]"

    # ---- a stream ----

    def opening(self) -> list[bytes]:
        self._streams = True
        return [
            self._event("response.created", response=self.answer),
            self._event("response.in_progress", response=self.answer),
        ]

    def chunk(self, delta: Delta) -> bytes | None:
        self.take(delta)
        frames = self._frames
        if not frames:
            return None
        self._frames = []
        return frames[0] if len(frames) == 1 else b"".join(frames)

    def closing(self) -> list[bytes]:
        self.finish()
        self._close(self._items[-1], self.answer["output"][-1])
        frames, self._frames = self._frames, []
        return [*frames, self._event(f"response.{self.answer['status']}", response=self.answer)]

    def failure(self, error: ApiError) -> bytes:
        """Render the failed response. If the stream has no event yet, put its first event before
        it.
        """
        frames = b""
        if self._number == 0:
            frames = self._event("response.created", response=self.answer)
        self.fail(error)
        return frames + self._event("response.failed", response=self.answer)

    def _event(self, name: str, /, **more: object) -> bytes:
        event = {"type": name, **more, "sequence_number": self._number}
        self._number += 1
        begun = b"event: %b\ndata: " % name.encode()
        return json_in_thread.join((begun, *json_in_thread.json_pieces(event), b"\n\n"))


def _without_logprobs(item: Item) -> Item:
    if item["type"] != "message":
        return item
    return {**item, "content": [output_text(part["text"], []) for part in item["content"]]}


def _first_of(given: float | None, default: float | None, idle: float = 1.0) -> float:
    """Return the request's value, the model's default, or `idle`, which has no effect."""
    return next((value for value in (given, default) if value is not None), idle)


def mark_lost(answer: dict[str, Any]) -> None:
    """Mark a response as failed: the process that generated it is gone."""
    answer["status"] = FAILED
    answer["error"] = {
        "code": "server_error",
        "message": "the process that made this response ended before it was finished",
    }
