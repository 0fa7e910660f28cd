"""Renders deltas as answers of Anthropic's Messages, whole or as the events of a stream.

A block of thinking or text ends where another kind begins; each call is a block. An answer without
blocks is shown as one empty text block.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, NotRequired, TypedDict

from penstock_router.apis.base import Envelope, call_id, event_frame, shown_arguments
from penstock_router.apis.messages.errors import error_frames
from penstock_router.errors import ApiError
from penstock_router.generation.choice import Delta
from penstock_router.generation.job import Job
from penstock_router.json_fields import JsonObject
from penstock_router.text.answer_pieces import Piece, PieceKind, join_pieces


class ThinkingBlock(TypedDict):
    """Reasoning. The signature is empty: reasoning that is sent back is accepted unchecked."""

    type: Literal["thinking"]
    thinking: str
    signature: str


class TextBlock(TypedDict):
    """Text of an answer."""

    type: Literal["text"]
    text: str


class ToolUseBlock(TypedDict):
    """A tool call. Arguments that are not a JSON object are shown as text under INVALID_JSON."""

    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]


Block = ThinkingBlock | TextBlock | ToolUseBlock


class ThinkingTokens(TypedDict):
    """The number of thinking tokens in the answer."""

    thinking_tokens: int


class CacheCreation(TypedDict):
    """Tokens billed for writing to the prefix cache: none."""

    ephemeral_5m_input_tokens: int
    ephemeral_1h_input_tokens: int


class MessageUsage(TypedDict):
    """Token counts; `input_tokens` excludes tokens found in the prefix cache."""

    input_tokens: int
    cache_read_input_tokens: int
    cache_creation_input_tokens: int
    cache_creation: CacheCreation
    output_tokens: int
    output_tokens_details: NotRequired[ThinkingTokens]
    # No tool runs on this server.
    server_tool_use: None
    service_tier: Literal["standard"]


StopReason = Literal[
    "end_turn", "max_tokens", "stop_sequence", "tool_use", "model_context_window_exceeded"
]


class MessageEnd(TypedDict):
    """The reason why a message ended."""

    stop_reason: StopReason | None
    stop_sequence: str | None


class ContextManagement(TypedDict):
    """Edits made to the conversation."""

    applied_edits: list[dict[str, Any]]


class MessageAnswer(TypedDict):
    """An answer of /v1/messages."""

    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[Block]
    stop_reason: StopReason | None
    stop_sequence: str | None
    usage: MessageUsage
    # The edits are always empty: no turn is left out.
    context_management: ContextManagement


class MessageEvent(TypedDict):
    """An event of a stream; its fields depend on its type."""

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
    content_block: NotRequired[Block]
    delta: NotRequired[dict[str, Any]]
    usage: NotRequired[MessageUsage]


def _event(type_: str, **rest: Any) -> bytes:
    return event_frame(type_, {"type": type_, **rest})


class MessageShape:
    def __init__(self, job: Job, envelope: Envelope) -> None:
        self._id = envelope.response_id
        self._model = job.model.name
        self._usage_so_far = envelope.usage
        self._end: MessageEnd = {"stop_reason": None, "stop_sequence": None}
        self._calls_tools = False
        self._ends_with_context = job.ends_with_context
        # The kind and index of the stream's open block.
        self._open: PieceKind | None = None
        self._index = -1

    def _usage(self) -> MessageUsage:
        usage = self._usage_so_far
        cached = usage.cached_tokens or 0
        shown: MessageUsage = {
            "input_tokens": usage.prompt_tokens - cached,
            "cache_read_input_tokens": cached,
            "cache_creation_input_tokens": 0,
            "cache_creation": {"ephemeral_5m_input_tokens": 0, "ephemeral_1h_input_tokens": 0},
            "output_tokens": usage.completion_tokens,
            "server_tool_use": None,
            "service_tier": "standard",
        }
        if usage.reasoning_tokens is not None:
            shown["output_tokens_details"] = {"thinking_tokens": usage.reasoning_tokens}
        return shown

    def _message(self, content: list[Block]) -> MessageAnswer:
        return {
            "id": self._id,
            "type": "message",
            "role": "assistant",
            "model": self._model,
            "content": content,
            "stop_reason": self._end["stop_reason"],
            "stop_sequence": self._end["stop_sequence"],
            "usage": self._usage(),
            "context_management": {"applied_edits": []},
        }

    def headers(self) -> Mapping[str, str]:
        return {}

    def _note_end(self, delta: Delta) -> None:
        if delta.pieces is not None and not self._calls_tools:
            self._calls_tools = any(piece.kind is PieceKind.CALL for piece in delta.pieces)
        reason: StopReason
        if delta.finish_reason == "length":
            cut = self._ends_with_context
            reason = "model_context_window_exceeded" if cut else "max_tokens"
            self._end = {"stop_reason": reason, "stop_sequence": None}
        elif isinstance(delta.stop_reason, str) and delta.finish_reason != "tool_calls":
            self._end = {"stop_reason": "stop_sequence", "stop_sequence": delta.stop_reason}
        elif delta.finish_reason is not None:
            # Report "tool_use" even if tool_choice named the tool; other APIs then report an
            # ordinary stop.
            reason = "tool_use" if self._calls_tools else "end_turn"
            self._end = {"stop_reason": reason, "stop_sequence": None}

    def _call_block(self, call: Piece, arguments: JsonObject) -> ToolUseBlock:
        id_ = call_id(self._id, 0, call.call, "toolu_")
        return {"type": "tool_use", "id": id_, "name": call.text, "input": arguments}

    # ---- whole ----

    def whole(self, deltas: Sequence[Delta]) -> MessageAnswer:
        [delta] = deltas
        self._note_end(delta)
        if delta.pieces is None:
            return self._message([{"type": "text", "text": delta.text}])
        return self._message(self._blocks(delta.pieces) or [{"type": "text", "text": ""}])

    def _blocks(self, pieces: Sequence[Piece]) -> list[Block]:
        blocks: list[Block] = []
        arguments = {
            piece.call: piece.text
            for piece in join_pieces(pieces)
            if piece.kind is PieceKind.ARGUMENTS
        }
        for piece in join_pieces(pieces):
            if piece.kind is PieceKind.REASONING:
                blocks.append({"type": "thinking", "thinking": piece.text, "signature": ""})
            elif piece.kind is PieceKind.CONTENT:
                blocks.append({"type": "text", "text": piece.text})
            elif piece.kind is PieceKind.CALL:
                given = shown_arguments(arguments.get(piece.call, ""))
                blocks.append(self._call_block(piece, given))
        return blocks

    # ---- in events ----

    def opening(self) -> list[bytes]:
        return [_event("message_start", message=self._message([]))]

    def chunk(self, delta: Delta) -> bytes | None:
        self._note_end(delta)
        if delta.pieces is None:
            return self._gain(Piece(PieceKind.CONTENT, delta.text)) if delta.text else None
        return b"".join([self._gain(piece) for piece in delta.pieces if piece.text]) or None

    def closing(self) -> list[bytes]:
        first = self._begin(Piece(PieceKind.CONTENT, "")) if self._open is None else b""
        return [
            first + self._end_block(),
            _event("message_delta", delta=self._end, usage=self._usage()),
            _event("message_stop"),
        ]

    def failure(self, error: ApiError) -> bytes:
        return error_frames(error, self._id.removeprefix("msg_"))

    def _gain(self, piece: Piece) -> bytes:
        # Arguments extend their call's open block.
        kind = PieceKind.CALL if piece.kind is PieceKind.ARGUMENTS else piece.kind
        if kind is self._open and piece.kind is not PieceKind.CALL:
            return self._delta(piece)
        begun = self._end_block() + self._begin(piece)
        return begun if kind is PieceKind.CALL else begun + self._delta(piece)

    def _delta(self, piece: Piece) -> bytes:
        if piece.kind is PieceKind.REASONING:
            gained = {"type": "thinking_delta", "thinking": piece.text}
        elif piece.kind is PieceKind.CONTENT:
            gained = {"type": "text_delta", "text": piece.text}
        else:
            gained = {"type": "input_json_delta", "partial_json": piece.text}
        return _event("content_block_delta", index=self._index, delta=gained)

    def _begin(self, piece: Piece) -> bytes:
        block: Block = {"type": "text", "text": ""}
        if piece.kind is PieceKind.REASONING:
            block = {"type": "thinking", "thinking": "", "signature": ""}
        elif piece.kind is PieceKind.CALL:
            block = self._call_block(piece, {})
        self._index += 1
        self._open = piece.kind
        begun = _event("content_block_start", index=self._index, content_block=block)
        # As in Anthropic's API: one ping, after the first content_block_start.
        return begun + _event("ping") if self._index == 0 else begun

    def _end_block(self) -> bytes:
        if self._open is None:
            return b""
        end = _event("content_block_stop", index=self._index)
        if self._open is not PieceKind.REASONING:
            return end
        signed = {"type": "signature_delta", "signature": ""}
        return _event("content_block_delta", index=self._index, delta=signed) + end
