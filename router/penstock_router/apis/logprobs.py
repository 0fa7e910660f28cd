"""Log-probabilities as OpenAI's answers show them: of completions, of chats, of prompts.

Values below -9999 are shown as -9999: minus infinity is not JSON. Each token's entry is encoded at
once: freeing the objects of many tokens would take long and hold up all other requests.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NotRequired, TypedDict, cast

import msgspec

from penstock_client.types import Logprobs
from penstock_router.text.tokenizer import Tokenizer

LOWEST_LOGPROB = -9999.0

_encode = msgspec.json.encode

TokenText = Callable[[int], str]


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
    """One entry for each token."""

    content: list[ChatLogprob]


class PromptLogprob(TypedDict):
    """A token of the prompt, or an alternative at its position; rank 1 is the likeliest."""

    logprob: float
    rank: int
    decoded_token: str


def token_text(tokenizer: Tokenizer, *, as_ids: bool) -> TokenText:
    """How a token is named beside its log-probability."""
    return (lambda token_id: f"token_id:{token_id}") if as_ids else tokenizer.token_text


class CompletionLogprobs:
    """Builds one choice's columns; `text_offset` continues from one chunk to the next."""

    def __init__(self, text_of: TokenText, top_n: int, requested_ids: Sequence[int]) -> None:
        self._text_of = text_of
        self._top_n = top_n
        self._requested_ids = requested_ids
        self._offset = 0

    def empty(self) -> CompletionColumns:
        """Columns without rows."""
        return {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}

    def add(self, result: CompletionColumns, token_ids: Sequence[int], columns: Logprobs) -> None:
        """One row for each token."""
        for row, token_id in enumerate(token_ids):
            self._add_token(result, token_id)
            result["token_logprobs"].append(_finite(columns.chosen[row]))
            top = cast(dict[str, float], self._top(token_id, row, columns))
            result["top_logprobs"].append(top)

    def add_prompt(
        self, result: CompletionColumns, token_ids: Sequence[int], columns: Logprobs | None
    ) -> None:
        """One row for each token of the prompt; the first has no log-probability."""
        self._add_token(result, token_ids[0])
        result["token_logprobs"].append(None)
        result["top_logprobs"].append(None)
        if columns is not None:
            self.add(result, token_ids[1:], columns)

    def skip(self, token_ids: Sequence[int]) -> None:
        """Advance `text_offset` past tokens whose rows were shown before."""
        self._offset += sum(len(self._text_of(token_id)) for token_id in token_ids)

    def _add_token(self, result: CompletionColumns, token_id: int) -> None:
        text = self._text_of(token_id)
        result["tokens"].append(text)
        result["text_offset"].append(self._offset)
        self._offset += len(text)

    def _top(self, token_id: int, row: int, columns: Logprobs) -> msgspec.Raw:
        """The chosen token and its alternatives, by text. If two have the same text, the later is
        named by its id, so that the chosen one's value is always found under its own text."""
        top = {self._text_of(token_id): _finite(columns.chosen[row])}
        for other, value in _alternatives(columns, row, self._top_n, self._requested_ids):
            if other != token_id:
                text = self._text_of(other)
                top[f"token_id:{other}" if text in top else text] = _finite(value)
        return msgspec.Raw(_encode(top))


def chat_logprobs(
    tokenizer: Tokenizer,
    token_ids: Sequence[int],
    columns: Logprobs,
    *,
    requested_ids: Sequence[int],
    as_ids: bool,
) -> list[msgspec.Raw]:
    """A `ChatLogprob` for each token, with exactly the `top_n` likeliest, or in place of these with
    itself and those of `requested_ids`.
    """
    text_of = token_text(tokenizer, as_ids=as_ids)

    def entry(token_id: int, value: float) -> ChatLogprob:
        data = tokenizer.token_bytes(token_id)
        return {"token": text_of(token_id), "logprob": _finite(value), "bytes": list(data)}

    content: list[msgspec.Raw] = []
    for row, token_id in enumerate(token_ids):
        shown = entry(token_id, columns.chosen[row])
        top = _alternatives(columns, row, columns.top_n, requested_ids)
        if requested_ids:
            chosen = (token_id, columns.chosen[row])
            top = [chosen, *(pair for pair in top if pair[0] != token_id)]
        shown["top_logprobs"] = [entry(other, value) for other, value in top]
        content.append(msgspec.Raw(_encode(shown)))
    return content


def prompt_logprobs(
    tokenizer: Tokenizer, token_ids: Sequence[int], columns: Logprobs | None, top_n: int
) -> list[msgspec.Raw | None]:
    """For each token of a prompt, `PromptLogprob`s by token id: the token itself and the `top_n`
    likeliest at its position. None for the first token.
    """

    def entry(token_id: int, value: float, rank: int) -> PromptLogprob:
        text = tokenizer.token_text(token_id)
        return {"logprob": _finite(value), "rank": rank, "decoded_token": text}

    rows: list[msgspec.Raw | None] = [None]
    for row, token_id in enumerate(token_ids[1:] if columns is not None else ()):
        assert columns is not None
        shown = {str(token_id): entry(token_id, columns.chosen[row], columns.ranks[row])}
        for rank, (other, value) in enumerate(_alternatives(columns, row, top_n), 1):
            shown.setdefault(str(other), entry(other, value, rank))
        rows.append(msgspec.Raw(_encode(shown)))
    return rows


def _alternatives(
    columns: Logprobs, row: int, top_n: int, requested_ids: Sequence[int] = ()
) -> list[tuple[int, float]]:
    """The `top_n` likeliest of a row, or in place of these the requested ids, if it has any."""
    if requested_ids and columns.requested:
        count = len(requested_ids)
        requested = columns.requested[row * count : (row + 1) * count]
        return list(zip(requested_ids, requested, strict=True))
    start = row * columns.top_n
    end = start + min(top_n, columns.top_n)
    ids, values = columns.top_token_ids[start:end], columns.top_logprobs[start:end]
    return list(zip(ids, values, strict=True))


def _finite(value: float) -> float:
    return max(value, LOWEST_LOGPROB)
