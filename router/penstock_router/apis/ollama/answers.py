"""Renders deltas as answers of Ollama's API: messages or texts, whole or in lines of JSON.

A line has the text since the previous line; the final line has counts and times. A call is shown
when complete.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, Literal, NotRequired, TypedDict, cast

import msgspec

from penstock_router.apis.base import Envelope, ErrorForm, call_id, shown_arguments
from penstock_router.apis.logprobs import ChatLogprob, chat_logprobs
from penstock_router.errors import ApiError, ContextExceeded, UnknownModel
from penstock_router.generation.choice import Delta
from penstock_router.generation.job import Job
from penstock_router.json_fields import JsonObject
from penstock_router.request import ChatRequest
from penstock_router.text.answer_pieces import Piece, PieceKind

# ---- What answers look like --------------------------------------------------------------------


class OllamaFunction(TypedDict):
    """A function and its arguments. Text that is not a JSON object is shown under INVALID_JSON."""

    index: int
    name: str
    arguments: dict[str, Any]


class OllamaCall(TypedDict):
    """A call of a tool."""

    id: str
    function: OllamaFunction


class AnswerMessage(TypedDict):
    """The assistant's message, or a part of it."""

    role: Literal["assistant"]
    content: str
    thinking: NotRequired[str]
    tool_calls: NotRequired[list[OllamaCall]]


class _End(TypedDict):
    """Additional fields of a stream's last line and of an unstreamed answer: why the answer ended,
    its durations in nanoseconds, and its token counts.
    """

    model: str
    # RFC 3339.
    created_at: str
    done: bool
    done_reason: NotRequired[Literal["stop", "length", "load", "unload"]]
    total_duration: NotRequired[int]
    load_duration: NotRequired[int]
    prompt_eval_count: NotRequired[int]
    prompt_eval_duration: NotRequired[int]
    eval_count: NotRequired[int]
    eval_duration: NotRequired[int]
    logprobs: NotRequired[list[ChatLogprob]]


class OllamaChatAnswer(_End):
    """An answer of /api/chat, or a line of it."""

    message: AnswerMessage


class OllamaGenerateAnswer(_End):
    """An answer of /api/generate, or a line of it."""

    response: str
    thinking: NotRequired[str]
    tool_calls: NotRequired[list[OllamaCall]]
    # Token ids of prompt and answer, which a client sends as the next request's `context`. Every
    # answer's end has them, except a raw one's.
    context: NotRequired[list[int]]


class EmbedAnswer(TypedDict):
    """An answer of /api/embed: a vector for each input."""

    model: str
    embeddings: list[list[float]]
    total_duration: NotRequired[int]
    load_duration: NotRequired[int]
    prompt_eval_count: NotRequired[int]


class EmbeddingsAnswer(TypedDict):
    """An answer of /api/embeddings, the older form: one vector."""

    embedding: list[float]


# ---- Shapes ------------------------------------------------------------------------------------


class Gain(TypedDict, total=False):
    """The text and calls that a line adds to the answer."""

    content: str
    thinking: str
    tool_calls: list[OllamaCall]


class _Lines(ABC):
    """The common part of answers to /api/chat and /api/generate."""

    def __init__(self, job: Job, envelope: Envelope) -> None:
        self._job = job
        self._envelope = envelope
        self._reason: Literal["stop", "length"] = "stop"
        # Time of the stream's first delta.
        self._first_s: float | None = None
        # The incomplete call: its name and the pieces of its arguments.
        self._call: tuple[str, list[str]] | None = None
        self._num_calls = 0

    @abstractmethod
    def _show(self, gain: Gain) -> JsonObject:
        """Show the text and calls under the API's keys."""

    def _line(self, gain: Gain, delta: Delta | None = None) -> JsonObject:
        line = {"model": self._job.model.name, "created_at": now(), **self._show(gain)}
        scores = None if delta is None else self._logprobs(delta)
        return line | {"done": False} | ({} if scores is None else {"logprobs": scores})

    def _logprobs(self, delta: Delta) -> list[ChatLogprob] | None:
        if self._job.options.logprobs is None or delta.logprobs is None:
            return None
        rows = chat_logprobs(
            self._job.model.tokenizer,
            delta.token_ids,
            delta.logprobs,
            requested_ids=(),
            as_ids=False,
        )
        return cast(list[ChatLogprob], rows)

    def _end(self) -> JsonObject:
        usage, now_s = self._envelope.usage, time.perf_counter()
        # An unstreamed answer has no first delta: all its time counts as generation.
        first_s = self._envelope.received_s if self._first_s is None else self._first_s
        return {
            "done": True,
            "done_reason": self._reason,
            "total_duration": _nanoseconds(now_s - self._envelope.received_s),
            "load_duration": 0,
            "prompt_eval_count": usage.prompt_tokens,
            "prompt_eval_duration": _nanoseconds(first_s - self._envelope.received_s),
            "eval_count": usage.completion_tokens,
            "eval_duration": _nanoseconds(now_s - first_s),
        }

    def _gain(self, delta: Delta) -> Gain:
        """Gather what this delta adds, including calls that it completes."""
        if delta.finish_reason == "length":
            self._reason = "length"
        gain: Gain = {}
        pieces = delta.pieces
        if pieces is None:
            pieces = [Piece(PieceKind.CONTENT, delta.text)] if delta.text else []
        for piece in pieces:
            self._take(piece, gain)
        if delta.finish_reason is not None:
            self._complete_call(gain)
        return gain

    def _take(self, piece: Piece, gain: Gain) -> None:
        if piece.kind is PieceKind.ARGUMENTS:
            if self._call is not None:
                self._call[1].append(piece.text)
        elif piece.kind is PieceKind.CALL:
            self._complete_call(gain)
            self._call = piece.text, []
        elif piece.kind is PieceKind.REASONING:
            gain["thinking"] = gain.get("thinking", "") + piece.text
        else:
            gain["content"] = gain.get("content", "") + piece.text

    def _complete_call(self, gain: Gain) -> None:
        if self._call is None:
            return
        name, texts = self._call
        function: OllamaFunction = {
            "index": self._num_calls,
            "name": name,
            "arguments": shown_arguments("".join(texts) or "{}"),
        }
        named = call_id(self._envelope.response_id, 0, self._num_calls)
        gain.setdefault("tool_calls", []).append({"id": named, "function": function})
        self._call = None
        self._num_calls += 1

    # ---- whole

    def headers(self) -> Mapping[str, str]:
        return {}

    def whole(self, deltas: Sequence[Delta]) -> JsonObject:
        [delta] = deltas
        return self._line(self._gain(delta), delta) | self._end()

    # ---- in lines

    def opening(self) -> list[bytes]:
        return []

    def chunk(self, delta: Delta) -> bytes | None:
        """Render a line; None if the delta adds nothing."""
        if self._first_s is None:
            self._first_s = time.perf_counter()
        gain = self._gain(delta)
        if not any(gain.values()) and self._logprobs(delta) is None:
            return None
        return _frame(self._line(gain, delta))

    def closing(self) -> list[bytes]:
        return [_frame(self._line({}) | self._end())]

    def failure(self, error: ApiError) -> bytes:
        return _error_frames(error)


class ChatShape(_Lines):
    def _show(self, gain: Gain) -> JsonObject:
        return {"message": {"role": "assistant", "content": "", **gain}}


class GenerateShape(_Lines):
    def __init__(self, job: Job, envelope: Envelope) -> None:
        super().__init__(job, envelope)
        self._answer_ids: list[int] = []

    def _gain(self, delta: Delta) -> Gain:
        self._answer_ids += delta.token_ids
        return super()._gain(delta)

    def _end(self) -> JsonObject:
        [prompt] = self._job.prompts
        if prompt.images or not isinstance(self._job.options, ChatRequest):
            return super()._end()
        return super()._end() | {"context": [*prompt.token_ids, *self._answer_ids]}

    def _show(self, gain: Gain) -> JsonObject:
        rest = {name: value for name, value in gain.items() if name != "content"}
        return {"response": gain.get("content", ""), **rest}


def load_answer(name: str, *, is_chat: bool, unloads: bool) -> JsonObject:
    """Answer a request that only asks to load or unload the model."""
    empty = {"message": {"role": "assistant", "content": ""}} if is_chat else {"response": ""}
    reason = "unload" if unloads else "load"
    return {"model": name, "created_at": now(), **empty, "done": True, "done_reason": reason}


def embed_answer(
    model: str, vectors: Sequence[Sequence[float]], num_tokens: int, seconds: float
) -> EmbedAnswer:
    """Render the vectors in the order of their inputs."""
    return {
        "model": model,
        "embeddings": [list(vector) for vector in vectors],
        "total_duration": _nanoseconds(seconds),
        "load_duration": 0,
        "prompt_eval_count": num_tokens,
    }


def pull_progress(*, is_streamed: bool) -> bytes:
    """Answer a request to pull a model that is already here."""
    stages = ("pulling manifest", "success") if is_streamed else ("success",)
    return b"".join(_frame({"status": stage}) for stage in stages)


def now() -> str:
    return datetime.now(UTC).isoformat().replace("+00:00", "Z")


def _frame(line: JsonObject) -> bytes:
    return msgspec.json.encode(line) + b"\n"


def _nanoseconds(seconds: float) -> int:
    return max(0, round(seconds * 1e9))


# ---- Errors ------------------------------------------------------------------------------------


class OllamaError(TypedDict):
    """An answer that is an error."""

    error: str


def _error_answer(error: ApiError) -> JsonObject:
    """Render an error. Some clients recognize it by these words."""
    if isinstance(error, UnknownModel):
        return {"error": f"model '{error.name}' not found"}
    if isinstance(error, ContextExceeded):
        given = "" if error.prompt_tokens is None else f"; given: {error.prompt_tokens}"
        limit = f"{error.limit_tokens} tokens with the answer's{given}"
        return {"error": f"the input length exceeds the context length ({limit})"}
    return {"error": error.message}


def _error_frames(error: ApiError) -> bytes:
    return _frame(_error_answer(error))


ERRORS = ErrorForm(_error_answer, OllamaError, _error_frames)
