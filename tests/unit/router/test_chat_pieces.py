"""Reasoning and calls in answers of chats, whole and in chunks."""

from __future__ import annotations

import json
import random
from collections.abc import Iterable, Iterator
from typing import Any

from openai.lib.streaming._deltas import accumulate_delta
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from support.answer_pieces import delta_of, envelope_of, job_of, random_deltas, random_pieces
from support.budget import budget, seeded

from penstock_router.apis.base import call_id
from penstock_router.apis.openai.answers import ChatShape
from penstock_router.generation.choice import Delta
from penstock_router.text.answer_pieces import Piece, PieceKind

THOUGHT = Piece(PieceKind.REASONING, "Well")
SAID = Piece(PieceKind.CONTENT, "Hello")
CALL = Piece(PieceKind.CALL, "look_up")
ARGUMENTS = Piece(PieceKind.ARGUMENTS, "{}")


def chunks_of(frames: Iterable[bytes | None]) -> list[dict[str, Any]]:
    """Every chunk, as the released package reads it too, strictly."""
    chunks = []
    for line in b"".join(frame or b"" for frame in frames).splitlines():
        if line and line != b"data: [DONE]":
            chunk = json.loads(line.removeprefix(b"data: "))
            ChatCompletionChunk.model_validate(chunk, strict=True)
            chunks.append(chunk)
    return chunks


def delta_shown(delta: Delta, **options: Any) -> dict[str, Any]:
    [chunk] = chunks_of([ChatShape(job_of(**options), envelope_of()).chunk(delta)])
    shown: dict[str, Any] = chunk["choices"][0]["delta"]
    return shown


def message_of(delta: Delta) -> dict[str, Any]:
    answer = ChatShape(job_of(), envelope_of()).whole([delta])
    ChatCompletion.model_validate(answer, strict=True)
    message: dict[str, Any] = answer["choices"][0]["message"]
    return message


# ---- Whole -------------------------------------------------------------------------------------


def test_a_message_has_reasoning_and_calls_under_keys_of_their_own() -> None:
    assert message_of(delta_of([THOUGHT, SAID, CALL, ARGUMENTS], "tool_calls")) == {
        "role": "assistant",
        "content": "Hello",
        "refusal": None,
        "reasoning_content": "Well",
        "reasoning": "Well",
        "tool_calls": [
            {
                "id": call_id("chatcmpl-1", 0, 0),
                "type": "function",
                "function": {"name": "look_up", "arguments": "{}"},
            }
        ],
    }


def test_content_is_null_only_where_there_are_calls_and_nothing_else() -> None:
    assert message_of(delta_of([CALL, ARGUMENTS], "tool_calls"))["content"] is None
    assert message_of(delta_of([THOUGHT], "length"))["content"] == ""
    assert message_of(Delta(0, "", [], finish_reason="stop"))["content"] == ""


def test_what_was_not_said_is_null_or_has_no_key() -> None:
    plain = {"role": "assistant", "content": "Hello", "refusal": None, "reasoning": None}
    assert message_of(delta_of([SAID], "stop")) == plain
    assert message_of(Delta(0, "Hello", [], finish_reason="stop")) == plain


# ---- In chunks ---------------------------------------------------------------------------------


def test_an_answer_of_text_only_has_the_bytes_of_one_without_pieces() -> None:
    shape = ChatShape(job_of(include_usage=True), envelope_of())
    for reason in (None, "stop"):
        plain = shape.chunk(Delta(0, "Hello", [7], finish_reason=reason))
        assert shape.chunk(delta_of([SAID], reason)) == plain


def test_a_call_begins_with_its_id_and_name_and_goes_on_with_its_arguments() -> None:
    assert delta_shown(delta_of([CALL])) == {
        "tool_calls": [
            {
                "index": 0,
                "id": call_id("chatcmpl-1", 0, 0),
                "type": "function",
                "function": {"name": "look_up", "arguments": ""},
            }
        ]
    }
    more = Piece(PieceKind.ARGUMENTS, '{"a"', 3)
    assert delta_shown(delta_of([more])) == {
        "tool_calls": [{"index": 3, "function": {"arguments": '{"a"'}}]
    }


def test_arguments_of_a_call_without_any_are_sent() -> None:
    [call] = delta_shown(delta_of([CALL, ARGUMENTS]))["tool_calls"]
    assert call["function"] == {"name": "look_up", "arguments": "{}"}


def test_a_delta_is_one_chunk_whatever_kinds_of_pieces_it_has() -> None:
    again = [Piece(PieceKind.CALL, "add", 1), Piece(PieceKind.ARGUMENTS, "{}", 1)]
    shown = delta_shown(delta_of([THOUGHT, SAID, CALL, ARGUMENTS, *again]))
    assert (shown["reasoning_content"], shown["content"]) == ("Well", "Hello")
    assert [call["index"] for call in shown["tool_calls"]] == [0, 1]
    assert len({call["id"] for call in shown["tool_calls"]}) == 2


def test_a_delta_that_shows_nothing_is_no_chunk() -> None:
    shape = ChatShape(job_of(), envelope_of())
    assert shape.chunk(delta_of([])) is None
    assert shape.chunk(delta_of([Piece(PieceKind.CONTENT, "")])) is None


def test_pieces_stand_beside_token_ids_and_the_end() -> None:
    assert delta_shown(delta_of([THOUGHT]), return_token_ids=True)["reasoning_content"] == "Well"
    assert delta_shown(delta_of([THOUGHT, SAID], "length"))["content"] == "Hello"


def test_reasoning_has_the_usage_of_so_far_where_that_is_wanted() -> None:
    job = job_of(include_usage=True, continuous_usage=True)
    shape = ChatShape(job, envelope_of(reasoning_tokens=4))
    [chunk] = chunks_of([shape.chunk(delta_of([THOUGHT]))])
    assert chunk["usage"]["completion_tokens_details"] == {"reasoning_tokens": 4}


def test_reasoning_has_both_its_names_in_every_form_of_an_answer() -> None:
    text = 'Well, "\u00e9\U0001f600\\\n'
    both = {"reasoning_content": text, "reasoning": text}
    thought = Piece(PieceKind.REASONING, text)
    assert delta_shown(delta_of([thought])) == both
    assert delta_shown(delta_of([thought]), include_usage=True, continuous_usage=True) == both
    assert delta_shown(delta_of([thought, SAID])) == {**both, "content": "Hello"}
    assert delta_shown(delta_of([thought]), return_token_ids=True) == both
    message = message_of(delta_of([thought, SAID], "stop"))
    assert {name: message[name] for name in both} == both


def test_usage_tells_of_reasoning_only_where_it_is_told_from_content() -> None:
    for count, shown in ((None, None), (0, {"reasoning_tokens": 0}), (5, {"reasoning_tokens": 5})):
        shape = ChatShape(job_of(), envelope_of(reasoning_tokens=count))
        answer = shape.whole([Delta(0, "Hello", [], finish_reason="stop")])
        assert answer["usage"]["completion_tokens_details"] == shown


def test_ids_of_calls_are_the_same_again_and_different_for_each_call() -> None:
    ids = {
        call_id(response, choice, call)
        for response in ("chatcmpl-1", "chatcmpl-2")
        for choice in range(3)
        for call in range(12)
    }
    assert len(ids) == 72
    assert call_id("chatcmpl-1", 0, 0) == "call_db3023b160813eb8bbdf3b8d"
    assert call_id("chatcmpl-1", 0, 0, "toolu_") == "toolu_db3023b160813eb8bbdf3b8d"


def test_the_chunks_join_to_the_whole_answer() -> None:
    rng = seeded("chunks")
    for _ in range(budget(100, 10_000)):
        _check_that_chunks_join(rng)


class _Counted(list[Piece]):
    """Pieces that count how often somebody goes over them."""

    times = 0

    def __iter__(self) -> Iterator[Piece]:
        self.times += 1
        return super().__iter__()


def test_of_many_calls_the_pieces_are_gone_over_a_few_times_only() -> None:
    pieces = _Counted()
    for call in range(200):
        pieces.append(Piece(PieceKind.CALL, "add", call))
        pieces.append(Piece(PieceKind.ARGUMENTS, f'{{"a": {call}}}', call))
    delta = delta_of([], "tool_calls")
    delta.pieces = pieces
    answer = ChatShape(job_of(), envelope_of()).whole([delta])
    calls = answer["choices"][0]["message"]["tool_calls"]
    assert [call["function"]["arguments"] for call in calls] == [
        f'{{"a": {call}}}' for call in range(200)
    ]
    assert pieces.times < 5


def _check_that_chunks_join(rng: random.Random) -> None:
    choices = rng.randrange(1, 4)
    job, answers, deltas = job_of(choices), [], []
    for index in range(choices):
        pieces = random_pieces(rng)
        made = random_deltas(rng, pieces, "stop")
        for delta in made:
            delta.index = index
        answers.append(delta_of(pieces, "stop", index))
        deltas += made
    shape = ChatShape(job, envelope_of())
    chunks = chunks_of([*shape.opening(), *(shape.chunk(delta) for delta in deltas)])
    whole = ChatShape(job, envelope_of()).whole(answers)
    for index in range(choices):
        gained: dict[object, object] = {}
        ends = []
        for chunk in chunks:
            [choice] = chunk["choices"]
            if choice["index"] == index:
                gained = accumulate_delta(gained, choice["delta"])
                ends.append(choice["finish_reason"])
        assert ends[-1] == "stop"
        assert set(ends[:-1]) <= {None}
        message = whole["choices"][index]["message"]
        calls: Any = gained.get("tool_calls", [])
        shown = {key: value for key, value in gained.items() if key != "tool_calls"}
        assert [{key: call[key] for key in call if key != "index"} for call in calls] == (
            message.get("tool_calls", [])
        )
        wanted = {"role": "assistant", "content": message["content"] or ""}
        for name in ("reasoning_content", "reasoning"):
            if message.get(name) is not None:
                wanted[name] = message[name]
        assert message.get("reasoning") == message.get("reasoning_content")
        assert shown == wanted


def test_a_stream_that_is_taken_up_again_goes_on_in_the_middle_of_a_call() -> None:
    rng = seeded("taken up again")
    for _ in range(budget(20, 1000)):
        _check_that_it_goes_on(rng)


def _check_that_it_goes_on(rng: random.Random) -> None:
    pieces = [
        *random_pieces(rng),
        Piece(PieceKind.CALL, "add", 99),
        Piece(PieceKind.ARGUMENTS, '{"a": 1}', 99),
    ]
    deltas = random_deltas(rng, pieces, "tool_calls")
    at = rng.randrange(len(deltas))
    unbroken = ChatShape(job_of(), envelope_of())
    first, second = (ChatShape(job_of(), envelope_of()) for _ in range(2))
    shown = [first.chunk(delta) for delta in deltas[:at]]
    shown += [second.chunk(delta) for delta in deltas[at:]]
    assert shown == [unbroken.chunk(delta) for delta in deltas]
