"""Renders text-generation-inference's answers, whole and as events, and its errors.

Each token is shown with its own text. No other API needs these texts, so this module decodes them
from the ids.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NotRequired, TypedDict

import msgspec

from penstock_router.apis.base import Envelope, ErrorForm, data_frame
from penstock_router.apis.logprobs import LOWEST_LOGPROB
from penstock_router.errors import (
    ApiError,
    BadRequest,
    ContextExceeded,
    GenerationFailed,
    TemplateFailed,
    TooManyRequests,
)
from penstock_router.generation.best_of import mean_logprob
from penstock_router.generation.choice import Delta
from penstock_router.generation.job import Job
from penstock_router.json_fields import JsonObject
from penstock_router.request import CompletionRequest
from penstock_router.text.tokenizer import Tokenizer

_encode = msgspec.json.encode


class GenerateError(TypedDict):
    """An error; clients choose their exception by `error_type`."""

    error: str
    error_type: str


_TYPES_BY_STATUS = {
    401: "authentication",
    403: "permission",
    404: "not_found",
    405: "method_not_allowed",
    413: "payload_too_large",
    422: "validation",
    424: "generation",
    429: "overloaded",
    500: "incomplete_generation",
    503: "unavailable",
    504: "timeout",
}


def error_answer(error: ApiError) -> JsonObject:
    error_type = _TYPES_BY_STATUS.get(error_status(error), "unknown")
    text = error.message
    if isinstance(error, TemplateFailed):
        error_type, text = "template_error", f"Template error: {text}"
    elif isinstance(error, BadRequest):
        text = f"Input validation error: {_refusal_text(error)}"
    elif isinstance(error, TooManyRequests):
        text = f"Model is overloaded: {text}"
    elif isinstance(error, GenerationFailed):
        text = f"Request failed during generation: {text}"
    shown: GenerateError = {"error": text, "error_type": error_type}
    return {**shown}


def error_frames(error: ApiError) -> bytes:
    return data_frame(_encode(error_answer(error)))


def error_status(error: ApiError) -> int:
    if isinstance(error, BadRequest):
        return 422
    return 424 if isinstance(error, GenerationFailed) else error.status


def _refusal_text(error: BadRequest) -> str:
    """Return the error's text, in the words that clients look for if the context is exceeded."""
    if not isinstance(error, ContextExceeded):
        return error.message
    limit, wanted = error.limit_tokens, error.wanted_tokens
    if error.param == "truncate_prompt_tokens":
        return f"`truncate` must be strictly positive and less than {limit}. Given: {wanted}"
    if wanted is None:
        given = "more" if error.prompt_tokens is None else error.prompt_tokens
        return f"`inputs` must have less than {limit} tokens. Given: {given}"
    return (
        f"`inputs` tokens + `max_new_tokens` must be <= {limit}. Given: {error.prompt_tokens} "
        f"`inputs` tokens and {wanted} `max_new_tokens`"
    )


ERRORS = ErrorForm(error_answer, GenerateError, error_frames, error_status)


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateRequest(CompletionRequest):
    """A completion of one prompt, and the options of its answer."""

    samples: bool
    details: bool
    # True if the text begins with the inputs.
    full_text: bool = False
    # Length of the inputs.
    num_chars: int = 0
    # True if the answer is wrapped in an array.
    as_list: bool = False

    @property
    def places(self) -> tuple[int, str]:
        return self.n, "best_of"


GenerateEnd = Literal["length", "eos_token", "stop_sequence"]


class PrefillToken(TypedDict):
    """A token of the inputs; the first token has no log-probability."""

    id: int
    text: str
    logprob: float | None


class Token(TypedDict):
    """A token of the answer. The texts of the tokens that are not special make up the answer's
    text.
    """

    id: int
    text: str
    logprob: float | None
    special: bool


class BestOfSequence(TypedDict):
    """An answer that was not the likeliest of several."""

    generated_text: str
    finish_reason: GenerateEnd
    generated_tokens: int
    seed: int | None
    prefill: list[PrefillToken]
    tokens: list[Token]
    top_tokens: NotRequired[list[list[Token]]]


class Details(TypedDict):
    """Details of an answer's generation."""

    finish_reason: GenerateEnd
    generated_tokens: int
    seed: int | None
    prefill: list[PrefillToken]
    tokens: list[Token]
    best_of_sequences: NotRequired[list[BestOfSequence]]
    top_tokens: NotRequired[list[list[Token]]]


class GenerateAnswer(TypedDict):
    """The text, and details if they were requested."""

    generated_text: str
    details: NotRequired[Details]


class StreamDetails(TypedDict):
    """Details of a stream's generation."""

    finish_reason: GenerateEnd
    generated_tokens: int
    seed: int | None
    input_length: int


class StreamEvent(TypedDict):
    """A token; the last event has the whole text."""

    index: int
    token: Token
    top_tokens: NotRequired[list[Token]]
    generated_text: str | None
    details: StreamDetails | None


class _TokenTexts:
    def __init__(self, tokenizer: Tokenizer, prompt_ids: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self._detokenizer = tokenizer.detokenizers.start(prompt_ids, skip_special_tokens=True)

    def of(self, delta: Delta) -> list[str]:
        """Return each token's text; a character that spans several tokens is shown with the last. A
        token in which a stop string ends is shown up to the stop string.
        """
        texts, rest = [], delta.text
        for token_id in delta.token_ids:
            text = self._detokenizer.feed((token_id,))[: len(rest)]
            rest = rest[len(text) :]
            special = token_id in self._tokenizer.special_ids
            texts.append(self._tokenizer.token_text(token_id) if special else text)
        return texts


class GenerateShape:
    def __init__(self, job: Job, envelope: Envelope) -> None:
        assert isinstance(job.options, GenerateRequest)
        self._validated_s = time.perf_counter()
        self._job = job
        self._options = job.options
        self._envelope = envelope
        self._tokenizer = job.model.tokenizer
        self._texts = [
            _TokenTexts(self._tokenizer, job.prompt_of(index).token_ids)
            for index in range(len(job.requests))
        ]
        self._shown: list[str] = []
        self._num_tokens = 0

    def opening(self) -> list[bytes]:
        return []

    def chunk(self, delta: Delta) -> bytes | None:
        self._shown.append(delta.text)
        tokens, top_tokens = self._tokens(delta), self._top_tokens(delta)
        num_tokens, self._num_tokens = self._num_tokens, self._num_tokens + len(tokens)
        if delta.finish_reason is not None and not tokens:
            tokens = [self._no_token()]
        frames = []
        for position, token in enumerate(tokens):
            event: StreamEvent = {
                "index": num_tokens + position + 1,
                "token": token,
                "generated_text": None,
                "details": None,
            }
            if top_tokens:
                event["top_tokens"] = top_tokens[position]
            if delta.finish_reason is not None and position == len(tokens) - 1:
                event["generated_text"] = "".join((self._job.prepared.full_text, *self._shown))
                event["details"] = self._stream_details(delta)
            frames.append(data_frame(_encode(event)))
        return b"".join(frames) or None

    def _no_token(self) -> Token:
        """Make a placeholder: an end without a token still needs an event."""
        eos_id = next(iter(self._job.model.info.eos_token_ids), 0)
        return {"id": eos_id, "text": "", "logprob": None, "special": True}

    def _stream_details(self, delta: Delta) -> StreamDetails | None:
        if not self._options.details:
            return None
        return {
            "finish_reason": _finish_reason(delta),
            "generated_tokens": self._num_tokens,
            "seed": self._seed(delta),
            "input_length": len(self._job.prompts[0].token_ids),
        }

    def closing(self) -> list[bytes]:
        return []

    def failure(self, error: ApiError) -> bytes:
        return error_frames(error)

    def whole(self, deltas: Sequence[Delta]) -> GenerateAnswer | list[GenerateAnswer]:
        """Show the likeliest answer; its details contain the others."""
        best, *others = sorted(deltas, key=mean_logprob, reverse=True)
        self._num_tokens = len(best.token_ids)
        answer: GenerateAnswer = {"generated_text": self._job.prepared.full_text + best.text}
        if self._options.details:
            sequence = self._sequence(best)
            answer["details"] = details = _details(sequence)
            if others:
                details["best_of_sequences"] = [self._sequence(delta) for delta in others]
        return [answer] if self._options.as_list else answer

    def _sequence(self, delta: Delta) -> BestOfSequence:
        sequence: BestOfSequence = {
            "generated_text": self._job.prepared.full_text + delta.text,
            "finish_reason": _finish_reason(delta),
            "generated_tokens": len(delta.token_ids),
            "seed": self._seed(delta),
            "prefill": self._prefill(delta),
            "tokens": self._tokens(delta),
        }
        if self._options.logprobs:
            sequence["top_tokens"] = self._top_tokens(delta)
        return sequence

    def headers(self) -> Mapping[str, str]:
        """Return sizes, and durations in whole milliseconds; x-compute-time is in seconds."""
        total_s = time.perf_counter() - self._envelope.received_s
        validation_s = self._validated_s - self._envelope.received_s
        usage = self._envelope.usage
        queue_s = usage.queue_s or 0.0
        inference_s = max(0.0, total_s - validation_s - queue_s)
        return {
            "x-compute-type": self._job.model.info.device,
            "x-compute-time": f"{total_s:.6f}",
            "x-compute-characters": str(self._options.num_chars),
            "x-total-time": _milliseconds(total_s),
            "x-validation-time": _milliseconds(validation_s),
            "x-queue-time": _milliseconds(queue_s),
            "x-inference-time": _milliseconds(inference_s),
            "x-time-per-token": _milliseconds(inference_s / max(1, self._num_tokens)),
            "x-prompt-tokens": str(usage.prompt_tokens),
            "x-generated-tokens": str(self._num_tokens),
        }

    def _seed(self, delta: Delta) -> int | None:
        """The seed that reproduces this sequence; None without sampling."""
        return self._job.requests[delta.index].sampling.seed if self._options.samples else None

    def _prefill(self, delta: Delta) -> list[PrefillToken]:
        if self._options.prompt_logprobs is None:
            return []
        columns = delta.prompt_logprobs
        logprobs = [None, *(columns.chosen if columns is not None else ())]
        token_ids = self._job.prompt_of(delta.index).token_ids
        return [
            {
                "id": token_id,
                "text": self._tokenizer.token_text(token_id),
                "logprob": None if logprob is None else max(logprob, LOWEST_LOGPROB),
            }
            for token_id, logprob in zip(token_ids, logprobs, strict=True)
        ]

    def _tokens(self, delta: Delta) -> list[Token]:
        texts = self._texts[delta.index].of(delta)
        logprobs = delta.logprobs.chosen if delta.logprobs is not None else []
        rows = zip(delta.token_ids, texts, logprobs, strict=True)
        return [self._token(token_id, text, logprob) for token_id, text, logprob in rows]

    def _top_tokens(self, delta: Delta) -> list[list[Token]]:
        count = self._options.logprobs
        if not count or delta.logprobs is None:
            return []
        columns = delta.logprobs
        text_of = self._tokenizer.token_text
        best = [
            self._token(token_id, text_of(token_id), logprob)
            for token_id, logprob in zip(columns.top_token_ids, columns.top_logprobs, strict=True)
        ]
        width = columns.top_n
        rows = range(0, len(best), width) if width else ()
        return [best[row : row + min(count, width)] for row in rows]

    def _token(self, token_id: int, text: str, logprob: float) -> Token:
        return {
            "id": token_id,
            "text": text,
            "logprob": max(logprob, LOWEST_LOGPROB),
            "special": token_id in self._tokenizer.special_ids,
        }


def _details(sequence: BestOfSequence) -> Details:
    details: Details = {
        "finish_reason": sequence["finish_reason"],
        "generated_tokens": sequence["generated_tokens"],
        "seed": sequence["seed"],
        "prefill": sequence["prefill"],
        "tokens": sequence["tokens"],
    }
    if "top_tokens" in sequence:
        details["top_tokens"] = sequence["top_tokens"]
    return details


def _finish_reason(delta: Delta) -> GenerateEnd:
    if delta.finish_reason == "length":
        return "length"
    return "stop_sequence" if isinstance(delta.stop_reason, str) else "eos_token"


def _milliseconds(seconds: float) -> str:
    return str(round(1000 * seconds))
