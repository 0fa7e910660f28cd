"""Reasoning, messages and calls as items of a response, whole and as events."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest
from openai import omit
from openai.lib.streaming.responses._responses import ResponseStreamState
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter
from support.answer_pieces import delta_of, envelope_of, random_deltas, random_pieces
from support.budget import budget, seeded
from support.router_doubles import INFO, fake_logprobs

from penstock_router.apis.base import call_id
from penstock_router.apis.responses.answers import ResponseShape
from penstock_router.apis.responses.requests import LOGPROBS, parse_response
from penstock_router.errors import BadRequest
from penstock_router.generation.choice import Delta, EndReason
from penstock_router.generation.job import Job
from penstock_router.text.answer_pieces import Piece, PieceKind
from penstock_router.text.prompts import PreparedPrompts

THOUGHT = Piece(PieceKind.REASONING, "Well")
SAID = Piece(PieceKind.CONTENT, "Hello")
CALL = Piece(PieceKind.CALL, "look_up")
ARGUMENTS = Piece(PieceKind.ARGUMENTS, '{"a":1}')
OTHER_CALL = Piece(PieceKind.CALL, "add", 1)
OTHER_ARGUMENTS = Piece(PieceKind.ARGUMENTS, "{}", 1)

REASONS: list[EndReason] = ["length", "stop", "tool_calls"]
EVENT = TypeAdapter[Any](ResponseStreamEvent)
# Where the text of an item grows, by the type of the event.
GROWS = {
    "response.output_text.delta": "message",
    "response.reasoning_text.delta": "reasoning",
    "response.function_call_arguments.delta": "function_call",
}


class Names:
    """A tokenizer that only names tokens."""

    def token_text(self, token_id: int) -> str:
        return f"t{token_id}"

    def token_bytes(self, token_id: int) -> bytes:
        return b"t%d" % token_id


def shape_of(reasoning_tokens: int | None = None, **fields: Any) -> ResponseShape:
    asked = parse_response({"input": "Hello", **fields})
    repeated = {
        name: msgspec.Raw(msgspec.json.encode(asked.repeated[name])) for name in asked.repeated
    }
    job = SimpleNamespace(
        options=asked,
        prepared=PreparedPrompts((), conversation=b'[{"type":"message"}]', repeated=repeated),
        model=SimpleNamespace(info=INFO, name=INFO.model, tokenizer=Names()),
    )
    return ResponseShape(cast(Job, job), envelope_of("resp_1", reasoning_tokens))


def whole(deltas: Sequence[Delta], **fields: Any) -> Any:
    """The answer that is no stream, as a client reads it."""
    data = msgspec.json.encode(shape_of(**fields).whole(deltas))
    Response.model_validate_json(data, strict=True)
    return json.loads(data)


def frames_of(deltas: Iterable[Delta], **fields: Any) -> bytes:
    shape = shape_of(stream=True, **fields)
    frames = [*shape.opening(), *(shape.chunk(delta) or b"" for delta in deltas)]
    return b"".join([*frames, *shape.closing()])


def events_in(frames: bytes) -> list[Any]:
    """Every event, which the released package reads strictly; they are numbered."""
    events = []
    for frame in frames.decode().removesuffix("\n\n").split("\n\n"):
        name, data = frame.split("\n", 1)
        data = data.removeprefix("data: ")
        EVENT.validate_json(data, strict=True)
        events.append(json.loads(data))
        assert name == f"event: {events[-1]['type']}"
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    return events


def events_of(deltas: Iterable[Delta], **fields: Any) -> list[Any]:
    return events_in(frames_of(deltas, **fields))


def short_types(events: Iterable[Any]) -> list[str]:
    return [event["type"].removeprefix("response.") for event in events]


def text_of(item: Any) -> str:
    if item["type"] == "function_call":
        return str(item["arguments"])
    return "".join(part["text"] for part in item["content"])


def grown(events: Iterable[Any]) -> list[Any]:
    """The items as somebody builds them who reads no event that repeats what others said."""
    items: list[Any] = []
    for event in events:
        if event["type"] == "response.output_item.added":
            assert event["output_index"] == len(items)
            assert event["item"]["status"] == "in_progress"
            assert text_of(event["item"]) == ""
            items.append({"item": event["item"], "text": "", "done": None})
        elif event["type"] in GROWS:
            growing = items[event["output_index"]]
            # One at a time.
            assert growing is items[-1]
            assert growing["done"] is None
            assert growing["item"]["type"] == GROWS[event["type"]]
            assert growing["item"]["id"] == event["item_id"]
            growing["text"] += event["delta"]
        elif event["type"] == "response.output_item.done":
            items[event["output_index"]]["done"] = event["item"]
    return items


# ---- One by one --------------------------------------------------------------------------------


def test_each_run_of_pieces_is_an_item_in_the_order_of_the_answer() -> None:
    pieces = [THOUGHT, SAID, CALL, ARGUMENTS, OTHER_CALL, OTHER_ARGUMENTS]
    answer = whole([delta_of(pieces, "tool_calls")])
    assert answer["status"] == "completed"
    assert answer["output"] == [
        {
            "type": "reasoning",
            "id": "rs_1",
            "summary": [],
            "content": [{"type": "reasoning_text", "text": "Well"}],
            "status": "completed",
        },
        {
            "type": "message",
            "id": "msg_1_1",
            "role": "assistant",
            "status": "completed",
            "content": [
                {"type": "output_text", "text": "Hello", "annotations": [], "logprobs": []}
            ],
        },
        *(
            {
                "type": "function_call",
                "id": f"fc_1_{index}",
                "call_id": call_id("resp_1", 0, index - 2),
                "name": name,
                "arguments": arguments,
                "status": "completed",
            }
            for index, name, arguments in [(2, "look_up", '{"a":1}'), (3, "add", "{}")]
        ),
    ]


def test_the_events_of_each_item_end_before_those_of_the_next() -> None:
    deltas = [delta_of([THOUGHT]), delta_of([SAID, CALL]), delta_of([ARGUMENTS], "tool_calls")]
    events = events_of(deltas)
    assert short_types(events) == [
        *("created", "in_progress"),
        *("output_item.added", "content_part.added", "reasoning_text.delta"),
        *("reasoning_text.done", "content_part.done", "output_item.done"),
        *("output_item.added", "content_part.added", "output_text.delta"),
        *("output_text.done", "content_part.done", "output_item.done"),
        *("output_item.added", "function_call_arguments.delta"),
        *("function_call_arguments.done", "output_item.done"),
        "completed",
    ]
    indexes = [event["output_index"] for event in events if "output_index" in event]
    assert indexes == [0] * 6 + [1] * 6 + [2] * 4
    [done] = [e for e in events if e["type"] == "response.function_call_arguments.done"]
    assert (done["name"], done["arguments"], done["item_id"]) == ("look_up", '{"a":1}', "fc_1_2")


def test_an_answer_that_is_text_only_is_one_message_from_its_first_event_on() -> None:
    deltas = [Delta(0, "", [1]), Delta(0, "Hello", [2]), Delta(0, "", [0], finish_reason="stop")]
    events = events_of(deltas)
    assert short_types(events) == [
        *("created", "in_progress", "output_item.added", "content_part.added"),
        *("output_text.delta", "output_text.done", "content_part.done", "output_item.done"),
        "completed",
    ]
    # Byte for byte: other clients may read no JSON where they look for text.
    shape = shape_of(stream=True)
    shape.opening()
    shape.chunk(deltas[0])
    assert shape.chunk(deltas[1]) == (
        b'event: response.output_text.delta\ndata: {"type":"response.output_text.delta",'
        b'"output_index":0,"content_index":0,"item_id":"msg_1","delta":"Hello","logprobs":[],'
        b'"sequence_number":4}\n\n'
    )
    assert shape.chunk(deltas[0]) is None


@pytest.mark.parametrize("pieces", [None, []])
def test_an_answer_that_says_nothing_is_a_message_without_text(pieces: Any) -> None:
    delta = Delta(0, "", [0], pieces=pieces, finish_reason="stop")
    [item] = whole([delta])["output"]
    assert (item["type"], text_of(item)) == ("message", "")
    events = events_of([delta])
    [grew] = grown(events)
    assert grew["done"] == item
    assert events[-1]["response"]["output"] == [item]


@pytest.mark.parametrize(
    "pieces", [[THOUGHT], [THOUGHT, SAID], [SAID, CALL], [SAID, CALL, Piece(ARGUMENTS.kind, '{"')]]
)
def test_of_an_answer_that_is_cut_off_the_last_item_is_incomplete(pieces: list[Piece]) -> None:
    delta = delta_of(pieces, "length")
    answer = whole([delta])
    assert answer["status"] == "incomplete"
    *before, last = [item["status"] for item in answer["output"]]
    assert set(before) <= {"completed"}
    assert last == "incomplete"
    events = events_of([delta])
    assert [item["done"] for item in grown(events)] == answer["output"]
    assert events[-1]["type"] == "response.incomplete"


def test_a_stream_that_fails_keeps_what_was_said_so_far() -> None:
    shape = shape_of(stream=True)
    frames = b"".join(shape.opening()) + (shape.chunk(delta_of([THOUGHT, CALL, ARGUMENTS])) or b"")
    final = events_in(frames + shape.failure(BadRequest("no")))[-1]
    assert final["type"] == "response.failed"
    output = final["response"]["output"]
    assert [(item["type"], item["status"]) for item in output] == [
        ("reasoning", "completed"),
        ("function_call", "incomplete"),
    ]


def test_a_background_response_grows_without_events() -> None:
    shape = shape_of(background=True)
    shape.take(delta_of([THOUGHT]))
    shape.take(delta_of([CALL, ARGUMENTS], "tool_calls"))
    shape.finish()
    answer = whole([delta_of([THOUGHT, CALL, ARGUMENTS], "tool_calls")])
    assert json.loads(msgspec.json.encode(shape.answer))["output"] == answer["output"]


def test_usage_tells_tokens_of_reasoning() -> None:
    delta = delta_of([THOUGHT, SAID], "stop")
    for tokens, shown in ((None, 0), (5, 5)):
        usage = whole([delta], reasoning_tokens=tokens)["usage"]
        assert usage["output_tokens_details"] == {"reasoning_tokens": shown}


# ---- Log-probabilities -------------------------------------------------------------------------


def scored(pieces: Sequence[Piece], token_ids: list[int], **more: Any) -> Delta:
    delta = delta_of(pieces, logprobs=fake_logprobs(token_ids, 1), **more)
    delta.token_ids = token_ids
    return delta


def test_log_probabilities_of_reasoning_are_shown_with_the_text_that_follows() -> None:
    fields: dict[str, Any] = {"include": [LOGPROBS], "top_logprobs": 1}
    deltas = [
        scored([THOUGHT], [5]),
        scored([], [6]),
        scored([SAID], [7]),
        scored([], [8], finish_reason="stop"),
    ]
    at_once = scored([THOUGHT, SAID], [5, 6, 7, 8], finish_reason="stop")
    output = whole([at_once], **fields)["output"]
    shown = [entry["token"] for entry in output[1]["content"][0]["logprobs"]]
    assert shown == ["t5", "t6", "t7", "t8"]
    events = events_of(deltas, **fields)
    assert events[-1]["response"]["output"] == output
    pieces = [event for event in events if event["type"] == "response.output_text.delta"]
    assert [(e["delta"], len(e["logprobs"])) for e in pieces] == [("Hello", 3), ("", 1)]


def test_log_probabilities_are_refused_beside_tools() -> None:
    tool = {"type": "function", "name": "look_up"}
    with pytest.raises(BadRequest, match="not served beside tools") as refused:
        shape_of(include=[LOGPROBS], tools=[tool])
    assert refused.value.param == "include"
    shape_of(include=[LOGPROBS], tools=[tool], tool_choice="none")


# ---- Whatever is said --------------------------------------------------------------------------


def test_a_stream_and_a_whole_answer_say_the_same_whatever_is_said() -> None:
    rng = seeded("responses of pieces")
    for _ in range(budget(60, 20_000)):
        pieces = random_pieces(rng)
        reason = rng.choice(REASONS)
        answer = whole([delta_of(pieces, reason)])
        frames = frames_of(random_deltas(rng, pieces, reason))
        events = events_in(frames)
        final = events[-1]["response"]
        assert final["output"] == answer["output"]
        items = grown(events)
        assert [item["done"] for item in items] == answer["output"]
        assert [item["text"] for item in items] == [text_of(item) for item in answer["output"]]
        _check_repeated(events)
        accumulated = _accumulated(frames)
        assert len(accumulated) == len(items)
        for item, found in zip(answer["output"], accumulated, strict=True):
            # Of reasoning the package's own helper gathers nothing.
            if item["type"] != "reasoning":
                assert text_of(found.to_dict()) == text_of(item)


def _check_repeated(events: list[Any]) -> None:
    """Events that say once more what was said have it as the item has it at its end."""
    ends = {e["output_index"]: e["item"] for e in events if e["type"].endswith("output_item.done")}
    for event in events:
        if event["type"] == "response.content_part.done":
            assert ends[event["output_index"]]["content"] == [event["part"]]
        elif event["type"] in ("response.output_text.done", "response.reasoning_text.done"):
            assert text_of(ends[event["output_index"]]) == event["text"]
        elif event["type"] == "response.function_call_arguments.done":
            assert ends[event["output_index"]]["arguments"] == event["arguments"]


def _accumulated(frames: bytes) -> list[Any]:
    """The output as the package's stream helper gathers it from the events."""
    state = ResponseStreamState[Any](input_tools=omit, text_format=omit)
    snapshot: Any = None
    for frame in frames.decode().removesuffix("\n\n").split("\n\n"):
        event = EVENT.validate_json(frame.split("\n", 1)[1].removeprefix("data: "))
        state.handle_event(event)
        snapshot = state._ResponseStreamState__current_snapshot  # type: ignore[attr-defined]
    return list(snapshot.output)
