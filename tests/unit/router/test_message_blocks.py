"""Thinking, text and calls in the blocks of Messages, whole and in events."""

from __future__ import annotations

import json
import random
from collections.abc import Iterable, Sequence
from typing import Any

import pytest
from support.answer_pieces import delta_of, envelope_of, job_of, random_deltas, random_pieces
from support.budget import budget, seeded

from penstock_router.apis.base import call_id
from penstock_router.apis.messages.answers import MessageShape
from penstock_router.generation.choice import Delta
from penstock_router.text.answer_pieces import Piece, PieceKind

THOUGHT = Piece(PieceKind.REASONING, "Well")
SAID = Piece(PieceKind.CONTENT, "Hello")
CALL = Piece(PieceKind.CALL, "look_up")
ARGUMENTS = Piece(PieceKind.ARGUMENTS, '{"word": "é"}')


def shape_of() -> MessageShape:
    return MessageShape(job_of(), envelope_of("msg_1"))


def whole(delta: Delta) -> Any:
    return shape_of().whole([delta])


def frames_of(deltas: Sequence[Delta]) -> bytes:
    shape = shape_of()
    shown = [*shape.opening(), *[shape.chunk(delta) or b"" for delta in deltas], *shape.closing()]
    return b"".join(shown)


def events_of(frames: bytes) -> list[dict[str, Any]]:
    events = []
    for frame in frames.decode().removesuffix("\n\n").split("\n\n"):
        name, _, data = frame.partition("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        events.append(event)
    return events


def message_of(events: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """Return the message that a client makes of a stream. Check that each event is allowed where it
    stands.
    """
    message: dict[str, Any] = {}
    block: dict[str, Any] | None = None
    texts = {"text_delta": "text", "thinking_delta": "thinking", "signature_delta": "signature"}
    for event in events:
        kind = event["type"]
        if kind == "message_start":
            message = event["message"]
        elif kind == "content_block_start":
            assert block is None
            assert event["index"] == len(message["content"])
            block, json_text = event["content_block"], ""
            message["content"].append(block)
        elif kind == "content_block_delta":
            assert block is not None
            assert event["index"] == len(message["content"]) - 1
            gained = event["delta"]
            if gained["type"] == "input_json_delta":
                json_text += gained["partial_json"]
            else:
                key = texts[gained["type"]]
                block[key] += gained[key]
        elif kind == "content_block_stop":
            assert block is not None
            assert event["index"] == len(message["content"]) - 1
            if block["type"] == "tool_use":
                block["input"] = json.loads(json_text)
            block = None
        elif kind == "message_delta":
            assert block is None
            message = {**message, **event["delta"], "usage": event["usage"]}
    return message


# ---- Whole -------------------------------------------------------------------------------------


def test_a_message_has_a_block_for_each_kind_and_each_call() -> None:
    again = [Piece(PieceKind.CALL, "add", 1), Piece(PieceKind.ARGUMENTS, "{}", 1)]
    answer = whole(delta_of([THOUGHT, SAID, CALL, ARGUMENTS, *again], "tool_calls"))
    assert answer["stop_reason"] == "tool_use"
    assert answer["content"] == [
        {"type": "thinking", "thinking": "Well", "signature": ""},
        {"type": "text", "text": "Hello"},
        {
            "type": "tool_use",
            "id": call_id("msg_1", 0, 0, "toolu_"),
            "name": "look_up",
            "input": {"word": "é"},
        },
        {"type": "tool_use", "id": call_id("msg_1", 0, 1, "toolu_"), "name": "add", "input": {}},
    ]


def test_an_answer_of_nothing_is_an_empty_text() -> None:
    for delta in (Delta(0, "", [], finish_reason="stop"), delta_of([], "stop")):
        assert whole(delta)["content"] == [{"type": "text", "text": ""}]
        assert message_of(events_of(frames_of([delta])))["content"] == [
            {"type": "text", "text": ""}
        ]


@pytest.mark.parametrize(
    ("finish_reason", "stop_reason", "shown"),
    [
        ("tool_calls", None, ("tool_use", None)),
        # As chats say it where the request named the tool.
        ("stop", None, ("tool_use", None)),
        ("length", None, ("max_tokens", None)),
        ("stop", "STOP", ("stop_sequence", "STOP")),
        # The stop string stood right behind the call.
        ("tool_calls", "STOP", ("tool_use", None)),
    ],
)
def test_why_an_answer_with_a_call_ended(
    finish_reason: Any, stop_reason: str | None, shown: tuple[str, str | None]
) -> None:
    end = delta_of([CALL, ARGUMENTS], finish_reason, stop_reason=stop_reason)
    later = delta_of([], finish_reason, stop_reason=stop_reason)
    for answer in (
        whole(end),
        message_of(events_of(frames_of([end]))),
        message_of(events_of(frames_of([delta_of([CALL, ARGUMENTS]), later]))),
    ):
        assert (answer["stop_reason"], answer["stop_sequence"]) == shown


@pytest.mark.parametrize(
    "text", ["", '{"word": "cut o', "[1]", '{"a": 1e999}', '{"a"' + "[" * 9999]
)
def test_arguments_that_are_no_object_are_shown_as_they_came(text: str) -> None:
    pieces = [CALL, Piece(PieceKind.ARGUMENTS, text)] if text else [CALL]
    answer = whole(delta_of(pieces, "length"))
    assert answer["content"][0]["input"] == {"INVALID_JSON": text}
    assert answer["stop_reason"] == "max_tokens"


def test_an_answer_that_fills_the_context_says_so() -> None:
    end = delta_of([SAID], "length")
    shape = MessageShape(job_of(ends_with_context=True), envelope_of("msg_1"))
    assert shape.whole([end])["stop_reason"] == "model_context_window_exceeded"
    assert whole(end)["stop_reason"] == "max_tokens"


# ---- In events ---------------------------------------------------------------------------------


def test_an_answer_of_text_only_has_the_same_events_with_pieces_as_without() -> None:
    plain = [Delta(0, "", [1]), Delta(0, "Hel", [2]), Delta(0, "lo", [3], finish_reason="stop")]
    said = [Piece(PieceKind.CONTENT, "Hel"), Piece(PieceKind.CONTENT, "lo")]
    pieces = [delta_of([]), delta_of(said[:1]), delta_of(said[1:], "stop")]
    assert frames_of(plain) == frames_of(pieces)
    start = {
        "type": "content_block_start",
        "index": 0,
        "content_block": {"type": "text", "text": ""},
    }
    usage = whole(plain[-1])["usage"]
    assert events_of(frames_of(plain))[1:] == [
        start,
        {"type": "ping"},
        {"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": "Hel"}},
        {"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": "lo"}},
        {"type": "content_block_stop", "index": 0},
        {
            "type": "message_delta",
            "delta": {"stop_reason": "end_turn", "stop_sequence": None},
            "usage": usage,
        },
        {"type": "message_stop"},
    ]


def test_blocks_begin_and_end_in_order_and_thinking_is_signed() -> None:
    events = events_of(
        frames_of([delta_of([THOUGHT, SAID]), delta_of([CALL, ARGUMENTS], "tool_calls")])
    )
    said = [
        (event["type"], event.get("index"), event.get("delta", {}).get("type"))
        for event in events[1:-2]
    ]
    assert said == [
        ("content_block_start", 0, None),
        ("ping", None, None),
        ("content_block_delta", 0, "thinking_delta"),
        ("content_block_delta", 0, "signature_delta"),
        ("content_block_stop", 0, None),
        ("content_block_start", 1, None),
        ("content_block_delta", 1, "text_delta"),
        ("content_block_stop", 1, None),
        ("content_block_start", 2, None),
        ("content_block_delta", 2, "input_json_delta"),
        ("content_block_stop", 2, None),
    ]


def test_a_delta_that_shows_nothing_is_no_event() -> None:
    assert shape_of().chunk(delta_of([])) is None
    assert shape_of().chunk(delta_of([Piece(PieceKind.CONTENT, "")])) is None


def test_the_events_join_to_the_whole_message() -> None:
    rng = seeded("events")
    for _ in range(budget(100, 10_000)):
        _check_that_events_join(rng)


def _check_that_events_join(rng: random.Random) -> None:
    pieces = random_pieces(rng)
    has_calls = any(piece.kind is PieceKind.CALL for piece in pieces)
    reason: Any = "tool_calls" if has_calls else "stop"
    streamed = message_of(events_of(frames_of(random_deltas(rng, pieces, reason))))
    assert streamed == whole(delta_of(pieces, reason))
