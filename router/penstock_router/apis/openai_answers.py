"""Deltas -> the JSON of OpenAI's answers: completions and chats, whole and in chunks.

A chunk of a stream is nearly always the same JSON around one escaped piece of text, so that JSON
is rendered once for each choice; only chunks that carry more are built as objects.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal, NotRequired, TypedDict

import msgspec

from penstock_router.apis.base import DONE, Envelope, data_frame, error_frames
from penstock_router.apis.logprobs import (
    ChatLogprobs,
    CompletionColumns,
    CompletionLogprobs,
    PromptLogprob,
    chat_logprobs,
    prompt_logprobs,
    token_text,
)
from penstock_router.choice import Delta, EndReason
from penstock_router.deltas import Usage
from penstock_router.errors import ApiError
from penstock_router.job import Job

_encode = msgspec.json.encode


# ---- What answers look like --------------------------------------------------------------------


class PromptTokensDetails(TypedDict):
    """Of a prompt's tokens, those found in a cache."""

    cached_tokens: int


class UsageObject(TypedDict):
    """Tokens of a whole request. A prompt counts once, however many choices it has."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails | None
    completion_tokens_details: None
    x_penstock_continued: NotRequired[Literal["approximate"]]


class CompletionChoice(TypedDict):
    """One choice, or what it has gained."""

    index: int
    text: str
    logprobs: CompletionColumns | None
    finish_reason: EndReason | None
    stop_reason: NotRequired[str | int | None]
    token_ids: NotRequired[list[int]]
    prompt_token_ids: NotRequired[list[int]]
    prompt_logprobs: NotRequired[list[dict[str, PromptLogprob] | None]]


class CompletionAnswer(TypedDict):
    """An answer of /v1/completions, or one of its chunks."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    system_fingerprint: str
    choices: list[CompletionChoice]
    usage: NotRequired[UsageObject | None]


class ChatMessage(TypedDict):
    """What the assistant says."""

    role: Literal["assistant"]
    content: str
    refusal: None


class ChatChoice(TypedDict):
    """One choice."""

    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None
    finish_reason: EndReason | None
    stop_reason: str | int | None
    token_ids: NotRequired[list[int]]


class ChatAnswer(TypedDict):
    """An answer of /v1/chat/completions."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    system_fingerprint: str
    choices: list[ChatChoice]
    usage: UsageObject
    prompt_token_ids: NotRequired[list[int]]
    prompt_logprobs: NotRequired[list[dict[str, PromptLogprob] | None]]


class ChatDelta(TypedDict):
    """What a choice has gained."""

    role: NotRequired[Literal["assistant"]]
    content: NotRequired[str]


class ChatChunkChoice(TypedDict):
    """What one choice has gained, and its end."""

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
    """The `usage` of an answer."""
    cached = usage.cached_tokens
    shown: UsageObject = {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": None if cached is None else {"cached_tokens": cached},
        "completion_tokens_details": None,
    }
    if usage.approximate:
        shown["x_penstock_continued"] = "approximate"
    return shown


# ---- Shapes ------------------------------------------------------------------------------------


class _OpenAIShape(ABC):
    """What both forms share: the envelope, and chunks around a piece of text."""

    object_name: ClassVar[str]
    chunk_name: ClassVar[str]
    # What stands around a piece of text in a chunk's choice, after its index.
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
            "model": job.model.info.model,
            "system_fingerprint": job.model.fingerprint,
        }
        head = b"data: " + _encode(self._head)[:-1] + b',"choices":[{"index":'
        self._heads = [
            b"%b%d%b" % (head, index, self._text_opens) for index in range(len(job.requests))
        ]
        self._has_ids = self._options.return_token_ids
        self._as_ids = self._options.return_tokens_as_token_ids
        end = b',"usage":null}\n\n' if self._options.include_usage else b"}\n\n"
        self._tail = self._text_closes + b',"logprobs":null,"finish_reason":null}]' + end

    @abstractmethod
    def opening(self) -> list[bytes]:
        """The frames before the first delta's."""

    def chunk(self, delta: Delta) -> bytes | None:
        """A delta as a frame; None where it has nothing to show."""
        if delta.finish_reason is None and delta.logprobs is None and not self._has_ids:
            return self._text_chunk(delta) if delta.text else None
        return self._full_chunk([self._chunk_choice(delta)])

    def _text_chunk(self, delta: Delta) -> bytes:
        tail = self._tail
        if self._options.continuous_usage:
            usage = _encode(usage_object(self._usage))
            tail = b"%b%b}\n\n" % (tail.removesuffix(b"null}\n\n"), usage)
        return b"%b%b%b" % (self._heads[delta.index], _encode(delta.text), tail)

    def _full_chunk(self, choices: Sequence[Mapping[str, Any]], **more: object) -> bytes:
        body = {**self._head, "choices": choices, **more}
        if self._options.include_usage:
            continuous = self._options.continuous_usage
            body.setdefault("usage", usage_object(self._usage) if continuous else None)
        return data_frame(_encode(body))

    def closing(self) -> list[bytes]:
        """The usage where it was asked for, and the end."""
        if not self._options.include_usage:
            return [DONE]
        return [self._full_chunk([], usage=usage_object(self._usage)), DONE]

    def failed(self, error: ApiError) -> bytes:
        """The error and the end."""
        return error_frames(error)

    def headers(self) -> Mapping[str, str]:
        """None of its own."""
        return {}

    def _answer(self, choices: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        usage = usage_object(self._usage)
        return {**self._head, "object": self.object_name, "choices": choices, "usage": usage}

    def _prompt_logprobs(self, delta: Delta) -> list[dict[str, PromptLogprob] | None]:
        prompt = self._job.prompts[delta.index // self._options.n]
        return prompt_logprobs(
            self._job.model.tokenizer,
            prompt.token_ids,
            delta.prompt_logprobs,
            self._options.prompt_logprobs or 0,
        )

    @abstractmethod
    def _chunk_choice(self, delta: Delta) -> Mapping[str, Any]:
        """The delta as an entry of a chunk's `choices`."""


class CompletionShape(_OpenAIShape):
    """Answers of /v1/completions."""

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
        # Those that have shown something, also before they were taken up again.
        self._begun = {index for index, known in enumerate(job.delivered) if known.begun}
        for index in self._begun if options.echo else ():
            self._logprobs[index].skip(job.prompt_of(index).token_ids)

    def opening(self) -> list[bytes]:
        """Completions begin with their text."""
        return []

    def whole(self, deltas: Sequence[Delta]) -> dict[str, Any]:
        """The answer that is no stream."""
        return self._answer([self._choice(delta) for delta in deltas])

    def _chunk_choice(self, delta: Delta) -> CompletionChoice:
        return self._choice(delta)

    def _choice(self, delta: Delta) -> CompletionChoice:
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
        # The n answers stand in order of their prompts, whatever was generated for them.
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
    """Answers of /v1/chat/completions."""

    object_name = "chat.completion"
    chunk_name = "chat.completion.chunk"
    _text_opens = b',"delta":{"content":'
    _text_closes = b"}"

    def opening(self) -> list[bytes]:
        """The role of each choice, said once."""
        prompt_ids = self._job.prompts[0].token_ids
        more = {"prompt_token_ids": list(prompt_ids)} if self._has_ids else {}
        first: ChatDelta = {"role": "assistant", "content": ""}
        frames = []
        for index in range(len(self._job.requests)):
            choice: ChatChunkChoice = {
                "index": index,
                "delta": first,
                "logprobs": None,
                "finish_reason": None,
            }
            frames.append(self._full_chunk([choice], **more))
            # All choices have one prompt, which may be long: it is shown once.
            more = {}
        return frames

    def whole(self, deltas: Sequence[Delta]) -> dict[str, Any]:
        """The answer that is no stream."""
        answer = self._answer([self._choice(delta) for delta in deltas])
        if self._has_ids:
            answer["prompt_token_ids"] = list(self._job.prompts[0].token_ids)
        if self._options.prompt_logprobs is not None:
            answer["prompt_logprobs"] = self._prompt_logprobs(deltas[0])
        return answer

    def _choice(self, delta: Delta) -> ChatChoice:
        choice: ChatChoice = {
            "index": delta.index,
            "message": {"role": "assistant", "content": delta.text, "refusal": None},
            "logprobs": self._logprobs_of(delta),
            "finish_reason": delta.finish_reason,
            "stop_reason": delta.stop_reason,
        }
        if self._has_ids:
            choice["token_ids"] = delta.token_ids
        return choice

    def _chunk_choice(self, delta: Delta) -> ChatChunkChoice:
        choice: ChatChunkChoice = {
            "index": delta.index,
            "delta": {"content": delta.text} if delta.text else {},
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
        return chat_logprobs(
            self._job.model.tokenizer,
            delta.token_ids,
            delta.logprobs,
            requested_ids=options.logprob_token_ids,
            as_ids=self._as_ids,
        )
