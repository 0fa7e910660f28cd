"""Renders deltas as OpenAI's completions and chats, whole and in chunks.

The JSON around the text is the same in almost every chunk of a choice, so it is rendered once. Only
other chunks are built as objects. A delta becomes one chunk with its pieces of all kinds, because
an event's id must identify one position in the answer. Clients read each kind from its own key.
"""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal, NotRequired, TypedDict, cast

import msgspec

from penstock_router.apis.base import DONE, Envelope, call_id, data_frame, error_frames
from penstock_router.apis.logprobs import (
    ChatLogprob,
    ChatLogprobs,
    CompletionColumns,
    CompletionLogprobs,
    PromptLogprob,
    chat_logprobs,
    prompt_logprobs,
    token_text,
)
from penstock_router.errors import ApiError
from penstock_router.generation.choice import Delta, EndReason
from penstock_router.generation.job import Job
from penstock_router.json_fields import JsonObject
from penstock_router.observe.request_record import Usage
from penstock_router.text.answer_pieces import Piece, PieceKind, content_of

_encode = msgspec.json.encode


class PromptTokensDetails(TypedDict):
    """The number of prompt tokens found in the prefix cache."""

    cached_tokens: int


class CompletionTokensDetails(TypedDict):
    """The number of reasoning tokens in the answer."""

    reasoning_tokens: int


class UsageObject(TypedDict):
    """Token counts of a request. A prompt counts once, however many choices it has."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails | None
    completion_tokens_details: CompletionTokensDetails | None
    x_penstock_continued: NotRequired[Literal["approximate"]]


class CompletionChoice(TypedDict):
    """A choice; in a stream, the event's addition to the choice."""

    index: int
    text: str
    logprobs: CompletionColumns | None
    finish_reason: EndReason | None
    stop_reason: NotRequired[str | int | None]
    token_ids: NotRequired[list[int] | None]
    prompt_token_ids: NotRequired[list[int] | None]
    prompt_logprobs: NotRequired[list[dict[str, PromptLogprob] | None] | None]


class CompletionAnswer(TypedDict):
    """An answer of /v1/completions, or an event of its stream. Fields that were not asked for are
    null in an answer, and missing in an event.
    """

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    system_fingerprint: str
    choices: list[CompletionChoice]
    usage: NotRequired[UsageObject | None]
    service_tier: NotRequired[None]
    kv_transfer_params: NotRequired[None]


class CalledFunction(TypedDict):
    """The function of a call; `arguments` is JSON, incomplete if the answer was cut off."""

    name: str
    arguments: str


class ToolCall(TypedDict):
    """A tool call."""

    id: str
    type: Literal["function"]
    function: CalledFunction


class ChatMessage(TypedDict):
    """The assistant's message. `content` is null if there are calls and no text. Reasoning has two
    names, because clients read only one of them. Without reasoning, one of the names is null.
    """

    role: Literal["assistant"]
    content: str | None
    refusal: None
    reasoning_content: NotRequired[str]
    reasoning: str | None
    tool_calls: NotRequired[list[ToolCall]]


class ChatChoice(TypedDict):
    """A choice of a chat."""

    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None
    finish_reason: EndReason | None
    stop_reason: str | int | None
    token_ids: list[int] | None


class ChatAnswer(TypedDict):
    """An answer of /v1/chat/completions. Fields that were not asked for are null."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    system_fingerprint: str
    choices: list[ChatChoice]
    usage: UsageObject
    prompt_token_ids: list[int] | None
    prompt_logprobs: list[dict[str, PromptLogprob] | None] | None
    service_tier: None
    kv_transfer_params: None


class CalledFunctionDelta(TypedDict):
    """The name comes with a call's first delta; `arguments` is a piece to append."""

    name: NotRequired[str]
    arguments: str


class ToolCallDelta(TypedDict):
    """An addition to call number `index`; its first delta has the id and type."""

    index: int
    id: NotRequired[str]
    type: NotRequired[Literal["function"]]
    function: CalledFunctionDelta


class ChatDelta(TypedDict):
    """An event's addition to a choice's message. Reasoning has two names, as in `ChatMessage`."""

    role: NotRequired[Literal["assistant"]]
    reasoning_content: NotRequired[str]
    reasoning: NotRequired[str]
    content: NotRequired[str]
    tool_calls: NotRequired[list[ToolCallDelta]]


class ChatChunkChoice(TypedDict):
    """An event's addition to a choice, and the reason why the choice ended."""

    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None
    finish_reason: EndReason | None
    stop_reason: NotRequired[str | int | None]
    token_ids: NotRequired[list[int]]


class ChatChunk(TypedDict):
    """An event of a chat's stream."""

    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    system_fingerprint: str
    choices: list[ChatChunkChoice]
    usage: NotRequired[UsageObject | None]
    prompt_token_ids: NotRequired[list[int]]


def usage_object(usage: Usage) -> UsageObject:
    cached, reasoning = usage.cached_tokens, usage.reasoning_tokens
    shown: UsageObject = {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": None if cached is None else {"cached_tokens": cached},
        "completion_tokens_details": (
            None if reasoning is None else {"reasoning_tokens": reasoning}
        ),
    }
    if usage.approximate:
        shown["x_penstock_continued"] = "approximate"
    return shown


class _OpenAIShape(ABC):
    """The common part of completions and chats: the envelope, and chunks around a text."""

    object_name: ClassVar[str]
    chunk_name: ClassVar[str]
    # JSON before the text (after the choice's index), and JSON after the text.
    _text_opens: ClassVar[bytes]
    _text_closes: ClassVar[bytes]

    def __init__(self, job: Job, envelope: Envelope) -> None:
        self._job = job
        self._options = job.options
        self._usage = envelope.usage
        self._head = {
            "id": envelope.response_id,
            "object": self.chunk_name,
            "created": envelope.created,
            "model": job.model.name,
            "system_fingerprint": job.model.fingerprint,
        }
        self._heads = self._heads_for(self._text_opens)
        self._has_ids = self._options.return_token_ids
        self._as_ids = self._options.return_tokens_as_token_ids
        end = b',"usage":null}\n\n' if self._options.include_usage else b"}\n\n"
        self._tail = self._text_closes + b',"logprobs":null,"finish_reason":null}]' + end

    @abstractmethod
    def opening(self) -> list[bytes]:
        """The frames before the first delta."""

    def chunk(self, delta: Delta) -> bytes | None:
        if delta.finish_reason is not None or delta.logprobs is not None or self._has_ids:
            return self._full_chunk([self._chunk_choice(delta)])
        if delta.pieces is not None:
            return self._pieces_chunk(delta, delta.pieces)
        return self._text_chunk(self._heads[delta.index], delta.text) if delta.text else None

    def _pieces_chunk(self, delta: Delta, pieces: Sequence[Piece]) -> bytes | None:
        return self._full_chunk([self._chunk_choice(delta)]) if pieces else None

    def _heads_for(self, opens: bytes) -> list[bytes]:
        """Return the JSON before a chunk's text, up to `opens`, for each choice."""
        head = b"data: " + _encode(self._head)[:-1] + b',"choices":[{"index":'
        return [b"%b%d%b" % (head, index, opens) for index in range(len(self._job.requests))]

    def _text_chunk(self, head: bytes, text: str, again: bytes = b"") -> bytes:
        """Render a chunk with a text; with `again`, also under this key."""
        tail = self._tail
        if self._options.continuous_usage:
            usage = _encode(usage_object(self._usage))
            tail = b"%b%b}\n\n" % (tail.removesuffix(b"null}\n\n"), usage)
        shown = _encode(text)
        if again:
            return b"".join((head, shown, again, shown, tail))
        return b"".join((head, shown, tail))

    def _full_chunk(self, choices: Sequence[Mapping[str, Any]], **more: object) -> bytes:
        body = {**self._head, "choices": choices, **more}
        if self._options.include_usage:
            body.setdefault("usage", self._usage_so_far(self._usage))
        return data_frame(_encode(body))

    def _usage_so_far(self, usage: Usage) -> UsageObject | None:
        return usage_object(usage) if self._options.continuous_usage else None

    def closing(self) -> list[bytes]:
        if not self._options.include_usage:
            return [DONE]
        return [self._full_chunk([], usage=usage_object(self._usage)), DONE]

    def failure(self, error: ApiError) -> bytes:
        return error_frames(error)

    def headers(self) -> Mapping[str, str]:
        return {}

    def _answer(self, choices: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        return {
            **self._head,
            "object": self.object_name,
            "choices": choices,
            "usage": usage_object(self._usage),
            "service_tier": None,
            "kv_transfer_params": None,
        }

    def _prompt_logprobs(self, delta: Delta) -> list[dict[str, PromptLogprob] | None]:
        prompt = self._job.prompts[delta.index // self._options.n]
        rows = prompt_logprobs(
            self._job.model.tokenizer,
            prompt.token_ids,
            delta.prompt_logprobs,
            self._options.prompt_logprobs or 0,
        )
        return cast(list[dict[str, PromptLogprob] | None], rows)

    @abstractmethod
    def _chunk_choice(self, delta: Delta) -> Mapping[str, Any]:
        """The delta as an entry of a chunk's `choices`."""


class CompletionShape(_OpenAIShape):
    object_name = "text_completion"
    chunk_name = "text_completion"
    _text_opens = b',"text":'
    _text_closes = b""

    def __init__(self, job: Job, envelope: Envelope) -> None:
        super().__init__(job, envelope)
        text_of = token_text(job.model.tokenizer, as_ids=self._as_ids)
        options = self._options
        self._logprobs = [
            CompletionLogprobs(text_of, options.logprobs or 0, options.logprob_token_ids)
            for _ in job.requests
        ]
        # Choices that the client has in part, perhaps from an earlier connection.
        self._begun = set(envelope.begun)
        for index in self._begun if options.echo else ():
            self._logprobs[index].skip(job.prompt_of(index).token_ids)

    def opening(self) -> list[bytes]:
        return []

    def chunk(self, delta: Delta) -> bytes | None:
        if self._options.prompt_logprobs is not None and delta.index not in self._begun:
            return self._full_chunk([self._chunk_choice(delta)])
        return super().chunk(delta)

    def whole(self, deltas: Sequence[Delta]) -> dict[str, Any]:
        unasked = {"token_ids": None, "prompt_token_ids": None, "prompt_logprobs": None}
        return self._answer([{**unasked, **self._chunk_choice(delta)} for delta in deltas])

    def _chunk_choice(self, delta: Delta) -> CompletionChoice:
        first = delta.index not in self._begun
        self._begun.add(delta.index)
        choice: CompletionChoice = {
            "index": delta.index,
            "text": delta.text,
            "logprobs": self._logprobs_of(delta, first),
            "finish_reason": delta.finish_reason,
            "stop_reason": delta.stop_reason,
        }
        if self._has_ids:
            choice["token_ids"] = delta.token_ids
            if first:
                choice["prompt_token_ids"] = list(self._prompt_ids(delta))
        if self._options.prompt_logprobs is not None and first:
            choice["prompt_logprobs"] = self._prompt_logprobs(delta)
        return choice

    def _prompt_ids(self, delta: Delta) -> Sequence[int]:
        # Each prompt has n answers, even if best_of generated more.
        options = self._options
        return self._job.prompts[delta.index // options.n].token_ids

    def _logprobs_of(self, delta: Delta, first: bool) -> CompletionColumns | None:
        if self._options.logprobs is None:
            return None
        columns = self._logprobs[delta.index]
        columns.skip(delta.known_token_ids)
        result = columns.empty()
        if first and self._options.echo:
            columns.add_prompt(result, self._prompt_ids(delta), delta.prompt_logprobs)
        if delta.logprobs is not None:
            columns.add(result, delta.token_ids, delta.logprobs)
        return result


class ChatShape(_OpenAIShape):
    object_name = "chat.completion"
    chunk_name = "chat.completion.chunk"
    _text_opens = b',"delta":{"content":'
    _reasoning_opens = b',"delta":{"reasoning_content":'
    _reasoning_again = b',"reasoning":'
    _text_closes = b"}"

    def __init__(self, job: Job, envelope: Envelope) -> None:
        super().__init__(job, envelope)
        self._response_id = envelope.response_id
        self._reasoning_heads = self._heads_for(self._reasoning_opens)

    def opening(self) -> list[bytes]:
        prompt_ids = self._job.prompts[0].token_ids
        more: JsonObject = {"prompt_token_ids": list(prompt_ids)} if self._has_ids else {}
        # These chunks are sent with the first token, but show the usage before it.
        before = dataclasses.replace(self._usage, completion_tokens=0)
        usage = {"usage": self._usage_so_far(before)} if self._options.include_usage else {}
        first: ChatDelta = {"role": "assistant", "content": ""}
        frames = []
        for index in range(len(self._job.requests)):
            choice: ChatChunkChoice = {
                "index": index,
                "delta": first,
                "logprobs": None,
                "finish_reason": None,
            }
            frames.append(self._full_chunk([choice], **more, **usage))
            # All choices share one prompt, perhaps long: show it once.
            more = {}
        return frames

    def whole(self, deltas: Sequence[Delta]) -> dict[str, Any]:
        answer = self._answer([self._choice(delta) for delta in deltas])
        prompt_ids, shows = (
            self._job.prompts[0].token_ids,
            self._options.prompt_logprobs is not None,
        )
        answer["prompt_token_ids"] = list(prompt_ids) if self._has_ids else None
        answer["prompt_logprobs"] = self._prompt_logprobs(deltas[0]) if shows else None
        return answer

    def _message(self, delta: Delta) -> ChatMessage:
        message: ChatMessage = {
            "role": "assistant",
            "content": delta.text,
            "refusal": None,
            "reasoning": None,
        }
        if delta.pieces is None:
            return message
        if reasoning := _text_of(PieceKind.REASONING, delta.pieces):
            message["reasoning_content"] = message["reasoning"] = reasoning
        if calls := self._calls(delta.index, delta.pieces):
            # A whole answer has complete calls.
            message["tool_calls"] = cast(list[ToolCall], list(calls.values()))
            message["content"] = delta.text or None
        return message

    def _choice(self, delta: Delta) -> ChatChoice:
        return {
            "index": delta.index,
            "message": self._message(delta),
            "logprobs": self._logprobs_of(delta),
            "finish_reason": delta.finish_reason,
            "stop_reason": delta.stop_reason,
            "token_ids": delta.token_ids if self._has_ids else None,
        }

    def _pieces_chunk(self, delta: Delta, pieces: Sequence[Piece]) -> bytes | None:
        # Almost always there is one piece, of text.
        if len(pieces) == 1 and pieces[0].text:
            [piece] = pieces
            if piece.kind is PieceKind.CONTENT:
                return self._text_chunk(self._heads[delta.index], piece.text)
            if piece.kind is PieceKind.REASONING:
                head = self._reasoning_heads[delta.index]
                return self._text_chunk(head, piece.text, self._reasoning_again)
        has_text = any(piece.text for piece in pieces)
        return self._full_chunk([self._chunk_choice(delta)]) if has_text else None

    def _gained(self, delta: Delta) -> ChatDelta:
        if delta.pieces is None:
            return {"content": delta.text} if delta.text else {}
        gained: ChatDelta = {}
        if reasoning := _text_of(PieceKind.REASONING, delta.pieces):
            gained["reasoning_content"] = gained["reasoning"] = reasoning
        if content := content_of(delta.pieces):
            gained["content"] = content
        if calls := self._calls(delta.index, delta.pieces):
            # Clients append entries with the same index.
            shown = [{"index": index, **call} for index, call in calls.items()]
            gained["tool_calls"] = cast(list[ToolCallDelta], shown)
        return gained

    def _calls(self, choice: int, pieces: Sequence[Piece]) -> dict[int, JsonObject]:
        calls: dict[int, JsonObject] = {}
        # In one pass: an answer may make thousands of calls.
        for piece in pieces:
            if piece.kind is PieceKind.CALL:
                calls[piece.call] = {
                    "id": call_id(self._response_id, choice, piece.call),
                    "type": "function",
                    "function": {"name": piece.text, "arguments": ""},
                }
            elif piece.kind is PieceKind.ARGUMENTS and piece.text:
                # The call may have begun in an earlier chunk or connection.
                known = calls.setdefault(piece.call, {"function": {"arguments": ""}})
                known["function"]["arguments"] += piece.text
        return calls

    def _chunk_choice(self, delta: Delta) -> ChatChunkChoice:
        choice: ChatChunkChoice = {
            "index": delta.index,
            "delta": self._gained(delta),
            "logprobs": self._logprobs_of(delta),
            "finish_reason": delta.finish_reason,
            "stop_reason": delta.stop_reason,
        }
        if self._has_ids:
            choice["token_ids"] = delta.token_ids
        return choice

    def _logprobs_of(self, delta: Delta) -> ChatLogprobs | None:
        options = self._options
        if options.logprobs is None or delta.logprobs is None:
            return None
        rows = chat_logprobs(
            self._job.model.tokenizer,
            delta.token_ids,
            delta.logprobs,
            requested_ids=options.logprob_token_ids,
            as_ids=self._as_ids,
        )
        return {"content": cast(list[ChatLogprob], rows)}


def _text_of(kind: PieceKind, pieces: Sequence[Piece]) -> str:
    return "".join([piece.text for piece in pieces if piece.kind is kind])
