"""Deltas -> the JSON of answers: completions and chats, whole and in chunks. Waits for nothing.

A chunk of a stream is nearly always the same JSON around one escaped piece of text, so that JSON
is rendered once for each choice; only chunks that carry more are built as objects.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Protocol

import msgspec

from penstock_client.types import Logprobs
from penstock_router.choice import Delta
from penstock_router.generation import Usage
from penstock_router.job import Job
from penstock_router.tokenizer import Tokenizer

# Log-probabilities end here: minus infinity is not JSON.
LOWEST_LOGPROB = -9999.0

_encode = msgspec.json.encode

TokenText = Callable[[int], str]


class Shape(Protocol):
    """One answer's form, made of deltas."""

    def opening(self) -> list[bytes]:
        """The chunks before the first delta's."""

    def chunk(self, delta: Delta) -> bytes | None:
        """A delta as a chunk; None where it has nothing to show."""

    def usage_chunk(self) -> bytes:
        """The last chunk of a stream that was asked for its usage."""

    def whole(self, deltas: Sequence[Delta]) -> dict[str, Any]:
        """The answer that is no stream."""


def usage_object(usage: Usage) -> dict[str, Any]:
    """The `usage` of an answer."""
    cached = usage.cached_tokens
    shown: dict[str, Any] = {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": None if cached is None else {"cached_tokens": cached},
        "completion_tokens_details": None,
    }
    if usage.approximate:
        shown["x_penstock_continued"] = "approximate"
    return shown


class _Shape(ABC):
    """What both forms share: the envelope, and chunks around a piece of text."""

    object_name: ClassVar[str]
    chunk_name: ClassVar[str]
    # What stands around a piece of text in a chunk's choice, after its index.
    _text_opens: ClassVar[bytes]
    _text_closes: ClassVar[bytes]

    def __init__(self, job: Job, response_id: str, created: int, usage: Usage) -> None:
        self._job = job
        self._options = job.options
        self._usage = usage
        self._envelope = {
            "id": response_id,
            "object": self.chunk_name,
            "created": created,
            "model": job.model.info.model,
            "system_fingerprint": job.model.fingerprint,
        }
        head = _encode(self._envelope)[:-1] + b',"choices":[{"index":'
        self._heads = [
            b"%b%d%b" % (head, index, self._text_opens) for index in range(len(job.requests))
        ]
        self._has_ids = self._options.return_token_ids
        self._as_ids = self._options.return_tokens_as_token_ids
        self._tail = self._text_closes + b',"logprobs":null,"finish_reason":null}]}'
        if self._options.include_usage:
            self._tail = self._tail[:-1] + b',"usage":null}'

    def chunk(self, delta: Delta) -> bytes | None:
        """A delta as a chunk; None where it has nothing to show."""
        if delta.finish_reason is None and delta.logprobs is None and not self._has_ids:
            return self._text_chunk(delta) if delta.text else None
        return self._full_chunk([self._chunk_choice(delta)])

    def _text_chunk(self, delta: Delta) -> bytes:
        tail = self._tail
        if self._options.continuous_usage:
            tail = b"%b%b}" % (tail.removesuffix(b"null}"), _encode(usage_object(self._usage)))
        return b"%b%b%b" % (self._heads[delta.index], _encode(delta.text), tail)

    def _full_chunk(self, choices: list[dict[str, Any]], **more: object) -> bytes:
        body = {**self._envelope, "choices": choices, **more}
        if self._options.include_usage:
            continuous = self._options.continuous_usage
            body.setdefault("usage", usage_object(self._usage) if continuous else None)
        return _encode(body)

    def usage_chunk(self) -> bytes:
        """The last chunk of a stream that was asked for its usage."""
        return self._full_chunk([], usage=usage_object(self._usage))

    def _answer(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        usage = usage_object(self._usage)
        envelope = {**self._envelope, "object": self.object_name}
        return {**envelope, "choices": choices, "usage": usage}

    @abstractmethod
    def _chunk_choice(self, delta: Delta) -> dict[str, Any]:
        """The delta as an entry of a chunk's `choices`."""


class CompletionShape(_Shape):
    """Answers of /v1/completions."""

    object_name = "text_completion"
    chunk_name = "text_completion"
    _text_opens = b',"text":'
    _text_closes = b""

    def __init__(self, job: Job, response_id: str, created: int, usage: Usage) -> None:
        super().__init__(job, response_id, created, usage)
        text_of = token_text(job.model.tokenizer, as_ids=self._as_ids)
        self._logprobs = [CompletionLogprobs(text_of) for _ in job.requests]
        # Those that have shown something, also before they were taken up again.
        self._begun = {index for index, known in enumerate(job.delivered) if known.begun}
        for index in self._begun if self._options.echo else ():
            self._logprobs[index].skip(job.prompt_of(index).token_ids)

    def opening(self) -> list[bytes]:
        """Completions begin with their text."""
        return []

    def whole(self, deltas: Sequence[Delta]) -> dict[str, Any]:
        """The answer that is no stream."""
        return self._answer([self._choice(delta) for delta in deltas])

    def _chunk_choice(self, delta: Delta) -> dict[str, Any]:
        return self._choice(delta)

    def _choice(self, delta: Delta) -> dict[str, Any]:
        first = delta.index not in self._begun
        self._begun.add(delta.index)
        choice = {
            "index": delta.index,
            "text": delta.text,
            "logprobs": self._logprobs_of(delta, first),
            "finish_reason": delta.finish_reason,
            "stop_reason": delta.stop_reason,
        }
        if self._has_ids:
            choice["token_ids"] = delta.token_ids
            if first:
                choice["prompt_token_ids"] = self._prompt_ids(delta)
        return choice

    def _prompt_ids(self, delta: Delta) -> list[int]:
        # The n answers stand in order of their prompts, whatever was generated for them.
        options = self._options
        return self._job.prompts[delta.index // options.n].token_ids

    def _logprobs_of(self, delta: Delta, first: bool) -> dict[str, Any] | None:
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


class ChatShape(_Shape):
    """Answers of /v1/chat/completions."""

    object_name = "chat.completion"
    chunk_name = "chat.completion.chunk"
    _text_opens = b',"delta":{"content":'
    _text_closes = b"}"

    def opening(self) -> list[bytes]:
        """The role of each choice, said once."""
        prompt_ids = self._job.prompts[0].token_ids
        more = {"prompt_token_ids": prompt_ids} if self._has_ids else {}
        first = {"role": "assistant", "content": ""}
        return [
            self._full_chunk(
                [{"index": index, "delta": first, "logprobs": None, "finish_reason": None}],
                **more,
            )
            for index in range(len(self._job.requests))
        ]

    def whole(self, deltas: Sequence[Delta]) -> dict[str, Any]:
        """The answer that is no stream."""
        answer = self._answer([self._choice(delta) for delta in deltas])
        if self._has_ids:
            answer["prompt_token_ids"] = self._job.prompts[0].token_ids
        return answer

    def _choice(self, delta: Delta) -> dict[str, Any]:
        message = {"role": "assistant", "content": delta.text, "refusal": None}
        return {"index": delta.index, "message": message, **self._rest(delta)}

    def _chunk_choice(self, delta: Delta) -> dict[str, Any]:
        content = {"content": delta.text} if delta.text else {}
        return {"index": delta.index, "delta": content, **self._rest(delta)}

    def _rest(self, delta: Delta) -> dict[str, Any]:
        rest: dict[str, Any] = {
            "logprobs": None,
            "finish_reason": delta.finish_reason,
            "stop_reason": delta.stop_reason,
        }
        if self._options.logprobs is not None and delta.logprobs is not None:
            content = chat_logprobs(
                self._job.model.tokenizer, delta.token_ids, delta.logprobs, as_ids=self._as_ids
            )
            rest["logprobs"] = {"content": content}
        if self._has_ids:
            rest["token_ids"] = delta.token_ids
        return rest


# ---- Log-probabilities -------------------------------------------------------------------------


def token_text(tokenizer: Tokenizer, *, as_ids: bool) -> TokenText:
    """How a token is named beside its log-probability."""
    return (lambda token_id: f"token_id:{token_id}") if as_ids else tokenizer.token_text


class CompletionLogprobs:
    """One choice's columns; `text_offset` goes on from one chunk to the next."""

    def __init__(self, text_of: TokenText) -> None:
        self._text_of = text_of
        self._offset = 0

    def empty(self) -> dict[str, Any]:
        """Columns without rows."""
        return {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}

    def add(self, result: Mapping[str, Any], token_ids: Sequence[int], columns: Logprobs) -> None:
        """One row for each token."""
        for row, token_id in enumerate(token_ids):
            self._add_token(result, token_id)
            result["token_logprobs"].append(_finite(columns.chosen[row]))
            result["top_logprobs"].append(self._top(token_id, row, columns))

    def add_prompt(
        self, result: Mapping[str, Any], token_ids: Sequence[int], columns: Logprobs | None
    ) -> None:
        """One row for each token of the prompt; nothing predicts the first."""
        self._add_token(result, token_ids[0])
        result["token_logprobs"].append(None)
        result["top_logprobs"].append(None)
        if columns is not None:
            self.add(result, token_ids[1:], columns)

    def skip(self, token_ids: Sequence[int]) -> None:
        """Tokens whose rows were shown before."""
        self._offset += sum(len(self._text_of(token_id)) for token_id in token_ids)

    def _add_token(self, result: Mapping[str, Any], token_id: int) -> None:
        text = self._text_of(token_id)
        result["tokens"].append(text)
        result["text_offset"].append(self._offset)
        self._offset += len(text)

    def _top(self, token_id: int, row: int, columns: Logprobs) -> dict[str, float]:
        """The chosen token and the best, by text. Of two tokens with one text the later is
        named by its id, so that the chosen one's value is always found under its own text."""
        top = {self._text_of(token_id): _finite(columns.chosen[row])}
        for other, value in _top_row(columns, row):
            if other != token_id:
                text = self._text_of(other)
                top[f"token_id:{other}" if text in top else text] = _finite(value)
        return top


def chat_logprobs(
    tokenizer: Tokenizer, token_ids: Sequence[int], columns: Logprobs, *, as_ids: bool
) -> list[dict[str, Any]]:
    """The `content` of a chat's logprobs: exactly `top_n` best for each token."""
    text_of = token_text(tokenizer, as_ids=as_ids)

    def entry(token_id: int, value: float) -> dict[str, Any]:
        data = tokenizer.token_bytes(token_id)
        return {"token": text_of(token_id), "logprob": _finite(value), "bytes": list(data)}

    return [
        {
            **entry(token_id, columns.chosen[row]),
            "top_logprobs": [entry(other, value) for other, value in _top_row(columns, row)],
        }
        for row, token_id in enumerate(token_ids)
    ]


def _top_row(columns: Logprobs, row: int) -> Sequence[tuple[int, float]]:
    start, end = row * columns.top_n, (row + 1) * columns.top_n
    ids, values = columns.top_token_ids[start:end], columns.top_logprobs[start:end]
    return list(zip(ids, values, strict=True))


def _finite(value: float) -> float:
    return max(value, LOWEST_LOGPROB)
