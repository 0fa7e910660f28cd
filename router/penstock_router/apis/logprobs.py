"""Renders log-probabilities of completions, chats and prompts as OpenAI's answers show them.

JSON has no minus infinity: values below -9999 are shown as -9999. Each token's entry is encoded
immediately, because freeing the objects of many tokens would block other requests. The constant
part of a token's JSON is encoded only once: an entry may list a whole vocabulary.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import NotRequired, TypedDict, TypeVar, cast

import msgspec

from penstock_proto.types import Logprobs
from penstock_router.text.tokenizer import Tokenizer

LOWEST_LOGPROB = -9999.0

_encode = msgspec.json.encode

TokenText = Callable[[int], str]
# Numbers encoded in one call, during which no other thread runs.
_NUMBERS_AT_ONCE = 10_000


class CompletionColumns(TypedDict):
    """Parallel arrays, one entry per token. A prompt's first token has no log-probability."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class ChatLogprob(TypedDict):
    """A token; `bytes` is its UTF-8."""

    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: NotRequired[list[ChatLogprob]]


class ChatLogprobs(TypedDict):
    """Log-probabilities of a choice, one entry per token."""

    content: list[ChatLogprob]


class PromptLogprob(TypedDict):
    """A token of the prompt, or an alternative at its position; rank 1 is the likeliest."""

    logprob: float
    rank: int
    decoded_token: str


_Made = TypeVar("_Made")


class _Table(dict[int, _Made]):
    def __init__(self, make: Callable[[int], _Made]) -> None:
        super().__init__()
        self._make = make

    def __missing__(self, token_id: int) -> _Made:
        made = self[token_id] = self._make(token_id)
        return made


class _Tables:
    """Caches of a tokenizer: each token's name, and its JSON before and after the number."""

    def __init__(self, tokenizer: Tokenizer, as_ids: bool) -> None:
        text_of, bytes_of = tokenizer.token_text, tokenizer.token_bytes
        self.texts = _Table[str](as_id if as_ids else text_of)

        def chat_parts(token_id: int) -> tuple[bytes, bytes]:
            name, data = _encode(self.texts[token_id]), _encode(list(bytes_of(token_id)))
            return b'{"token":%b,"logprob":' % name, b',"bytes":%b}' % data

        def prompt_parts(token_id: int) -> tuple[bytes, bytes]:
            name = _encode(text_of(token_id))
            return b'"%d":{"logprob":' % token_id, b',"decoded_token":%b}' % name

        self.chat_parts = _Table[tuple[bytes, bytes]](chat_parts)
        self.prompt_parts = _Table[tuple[bytes, bytes]](prompt_parts)


def as_id(token_id: int) -> str:
    return f"token_id:{token_id}"


def token_text(tokenizer: Tokenizer, *, as_ids: bool) -> TokenText:
    """Return the function that names tokens beside their log-probabilities."""
    return _tables(tokenizer, as_ids).texts.__getitem__


@functools.lru_cache(maxsize=8)
def _tables(tokenizer: Tokenizer, as_ids: bool) -> _Tables:
    return _Tables(tokenizer, as_ids)


class CompletionLogprobs:
    """Builds one choice's columns; `text_offset` continues from chunk to chunk."""

    def __init__(self, text_of: TokenText, top_n: int, requested_ids: Sequence[int]) -> None:
        self._text_of = text_of
        self._top_n = top_n
        self._requested_ids = requested_ids
        self._offset = 0

    def empty(self) -> CompletionColumns:
        return {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}

    def add(self, result: CompletionColumns, token_ids: Sequence[int], columns: Logprobs) -> None:
        for row, token_id in enumerate(token_ids):
            self._add_token(result, token_id)
            result["token_logprobs"].append(_finite(columns.chosen[row]))
            top = cast(dict[str, float], self._top(token_id, row, columns))
            result["top_logprobs"].append(top)

    def add_prompt(
        self, result: CompletionColumns, token_ids: Sequence[int], columns: Logprobs | None
    ) -> None:
        self._add_token(result, token_ids[0])
        result["token_logprobs"].append(None)
        result["top_logprobs"].append(None)
        if columns is not None:
            self.add(result, token_ids[1:], columns)

    def skip(self, token_ids: Sequence[int]) -> None:
        """Advance `text_offset` past tokens that were shown before."""
        self._offset += sum(len(self._text_of(token_id)) for token_id in token_ids)

    def _add_token(self, result: CompletionColumns, token_id: int) -> None:
        text = self._text_of(token_id)
        result["tokens"].append(text)
        result["text_offset"].append(self._offset)
        self._offset += len(text)

    def _top(self, token_id: int, row: int, columns: Logprobs) -> msgspec.Raw:
        """The sampled token and its alternatives, by text. If two tokens have the same text, the
        later one is named by its id, so the sampled token is always named by its text.
        """
        top = {self._text_of(token_id): _finite(columns.chosen[row])}
        others = _alternatives(columns, row, self._top_n, self._requested_ids)
        for other, value in zip(*others, strict=True):
            if other != token_id:
                text = self._text_of(other)
                top[as_id(other) if text in top else text] = _finite(value)
        return msgspec.Raw(_encode(top))


def chat_logprobs(
    tokenizer: Tokenizer,
    token_ids: Sequence[int],
    columns: Logprobs,
    *,
    requested_ids: Sequence[int],
    as_ids: bool,
) -> list[msgspec.Raw]:
    """Render a `ChatLogprob` for each token, with exactly the `top_n` likeliest alternatives. With
    `requested_ids`, the alternatives are the token itself and these ids.
    """
    parts = _tables(tokenizer, as_ids).chat_parts
    content: list[msgspec.Raw] = []
    for row, token_id in enumerate(token_ids):
        ids, values = _alternatives(columns, row, columns.top_n, requested_ids)
        if requested_ids:
            others = [pair for pair in zip(ids, values, strict=True) if pair[0] != token_id]
            ids = [token_id, *(other for other, _ in others)]
            values = [columns.chosen[row], *(value for _, value in others)]
        head, tail = parts[token_id]
        chosen = head + _encode(_finite(columns.chosen[row])) + tail[:-1]
        top = b",".join(_around(map(parts.__getitem__, ids), _numbers(values)))
        content.append(msgspec.Raw(b'%b,"top_logprobs":[%b]}' % (chosen, top)))
    return content


def prompt_logprobs(
    tokenizer: Tokenizer, token_ids: Sequence[int], columns: Logprobs | None, top_n: int
) -> list[msgspec.Raw | None]:
    """Render, for each prompt token, the `PromptLogprob`s of the token and of the `top_n` likeliest
    tokens in its place, by token id. The first token has None.
    """
    parts = _tables(tokenizer, False).prompt_parts
    rows: list[msgspec.Raw | None] = [None]
    for row, token_id in enumerate(token_ids[1:] if columns is not None else ()):
        assert columns is not None
        ids, values = _alternatives(columns, row, top_n)
        numbers = _numbers([columns.chosen[row], *values])
        ranked = [b'%b,"rank":%d' % (number, rank) for rank, number in enumerate(numbers)]
        ranked[0] = b'%b,"rank":%d' % (numbers[0], columns.ranks[row])
        others = list(ids)
        if token_id in others:
            # The token itself comes first, with its own rank.
            place = others.index(token_id)
            del others[place], ranked[place + 1]
        shown = _around(map(parts.__getitem__, [token_id, *others]), ranked)
        rows.append(msgspec.Raw(b"{%b}" % b",".join(shown)))
    return rows


def _around(parts: Iterable[tuple[bytes, bytes]], numbers: Iterable[bytes]) -> list[bytes]:
    return [head + number + tail for (head, tail), number in zip(parts, numbers, strict=True)]


def _numbers(values: Sequence[float]) -> list[bytes]:
    numbers: list[bytes] = []
    for start in range(0, len(values), _NUMBERS_AT_ONCE):
        some = [_finite(value) for value in values[start : start + _NUMBERS_AT_ONCE]]
        numbers += _encode(some)[1:-1].split(b",")
    return numbers


def _alternatives(
    columns: Logprobs, row: int, top_n: int, requested_ids: Sequence[int] = ()
) -> tuple[Sequence[int], Sequence[float]]:
    """Return the `top_n` likeliest tokens of a row, or the requested ids if the row has any."""
    if requested_ids and columns.requested:
        count = len(requested_ids)
        return requested_ids, columns.requested[row * count : (row + 1) * count]
    ids, logprobs = columns.best(row)
    return ids[:top_n], logprobs[:top_n]


def _finite(value: float) -> float:
    return max(value, LOWEST_LOGPROB)
