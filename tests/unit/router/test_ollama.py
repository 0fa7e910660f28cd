"""Ollama's API: translated to a chat, and shown in lines of JSON."""

from __future__ import annotations

import json
from typing import Any

import pytest
from support.answer_pieces import cut, envelope_of, job_of, random_pieces
from support.budget import budget, seeded
from support.router_doubles import MemoryRouter

from penstock_proto.types import ConstraintKind
from penstock_router.apis.ollama import requests as ollama
from penstock_router.apis.ollama.answers import ChatShape, GenerateShape
from penstock_router.apis.ollama.prompts import OllamaChat
from penstock_router.errors import ApiError, BadRequest
from penstock_router.generation.choice import Delta, EndReason
from penstock_router.request import CompletionRequest
from penstock_router.text.answer_pieces import Piece, PieceKind, content_of

USER = {"role": "user", "content": "Hello"}


def chat(**fields: Any) -> OllamaChat:
    return ollama.parse_chat({"model": "m", "messages": [USER], **fields})


def test_options_are_those_of_every_other_api() -> None:
    asked = chat(
        options={
            "seed": 3,
            "temperature": 0.5,
            "top_k": 7,
            "top_p": 0.8,
            "min_p": 0.1,
            "typical_p": 0.7,
            "repeat_penalty": 1.2,
            "presence_penalty": 0.3,
            "frequency_penalty": 0.4,
            "repeat_last_n": 64,
            "num_predict": 9,
            "stop": ["a", "b"],
            "num_ctx": 4096,
        }
    )
    assert (asked.seed, asked.temperature, asked.top_k, asked.top_p) == (3, 0.5, 7, 0.8)
    assert (asked.min_p, asked.typical_p, asked.repetition_penalty) == (0.1, 0.7, 1.2)
    assert (asked.presence_penalty, asked.frequency_penalty) == (0.3, 0.4)
    assert (asked.max_tokens, asked.stop) == (9, ("a", "b"))
    assert asked.penalty_window_tokens == 64
    assert asked.warnings == ("num_ctx: taken without effect",)


def test_values_that_mean_nothing_special_to_ollama_mean_it_here() -> None:
    asked = chat(options={"seed": -1, "top_p": 0, "repeat_last_n": -1, "num_predict": 32.0})
    assert (asked.seed, asked.penalty_window_tokens, asked.max_tokens) == (None, None, 32)
    assert asked.top_p is not None
    assert 0 < asked.top_p < 1e-6
    assert chat(options={"repeat_last_n": 0}).penalty_window_tokens == 0
    assert chat(options={"temperature": 5.0, "stop": [str(n) for n in range(40)]}).stop[39] == "39"
    assert chat(options=None).max_tokens is None


@pytest.mark.parametrize("value", [0, -1, -2])
def test_an_answer_without_a_bound_ends_with_the_context(value: int) -> None:
    asked = chat(options={"num_predict": value})
    assert (asked.max_tokens, asked.bounds_max_tokens) == (None, True)


def test_answers_are_streamed_and_have_no_bound_unless_asked() -> None:
    asked = chat()
    assert (asked.stream, asked.max_tokens, asked.logprobs) == (True, None, None)
    assert chat(options={"num_predict": -2}).max_tokens is None
    assert chat(stream=False, logprobs=True, top_logprobs=4).logprobs == 4
    assert chat(top_logprobs=4).logprobs is None


@pytest.mark.parametrize(
    ("fields", "line"),
    [
        ({"options": {"num_predict": "32"}}, "num_predict: must be an integer"),
        ({"options": {"num_predict": -3}}, "num_predict: must be at least -2"),
        ({"options": {"stop": [7]}}, "stop: must be a string"),
        ({"options": {"stop": [""]}}, "stop: a stop string has at least 1"),
        ({"options": []}, "options: must be an object"),
        ({"format": "{no json"}, "format: the text is no JSON"),
        ({"name": "another"}, "name: not together with another name of model"),
        ({"model": ""}, "model: must be a string of 1"),
        ({"options": {"mirostat": 1}}, "mirostat: not served"),
        ({"options": {"temperature": "hot"}}, "temperature"),
        ({"format": "yaml"}, 'format: must be "json" or a JSON schema'),
        ({"think": "enormously"}, "think"),
        ({"top_logprobs": 21}, "top_logprobs"),
        ({"messages": [{"role": "robot", "content": "x"}]}, r"messages\[0\].role"),
        ({"messages": [{**USER, "images": "x"}]}, r"messages\[0\].images: must be an array"),
        ({"messages": [{**USER, "images": [7]}]}, r"messages\[0\].images\[0\]: must be a string"),
        (
            {"messages": [{"role": "assistant", "content": "x", "images": ["x"]}]},
            r"messages\[0\].images: an answer has none",
        ),
        ({"messages": [{"role": "assistant", "tool_calls": [{}]}]}, r"tool_calls\[0\].function"),
        ({"model": None}, "model: required"),
    ],
)
def test_what_is_not_understood_is_refused_by_its_name(fields: dict[str, Any], line: str) -> None:
    with pytest.raises(BadRequest, match=line):
        chat(**fields)


def test_a_format_is_a_constraint() -> None:
    schema = chat(format={"type": "array"}).constraint
    assert schema is not None
    assert schema.kind is ConstraintKind.JSON_SCHEMA
    compact = {"x-guidance": {"whitespace_flexible": False}}
    assert json.loads(schema.value) == {"type": "array", **compact}
    assert chat(format=' {"type": "array"}').constraint == schema
    any_object = chat(format="json").constraint
    assert any_object is not None
    assert json.loads(any_object.value) == {"type": "object", **compact}
    assert chat(format="").constraint is None


def test_thinking_is_what_the_template_is_told() -> None:
    assert chat(think=False).template_kwargs["enable_thinking"] is False
    assert chat(think="high").template_kwargs["reasoning_effort"] == "high"
    assert chat(think="none").template_kwargs == chat(think=False).template_kwargs
    assert chat().template_kwargs == {}
    assert [chat(think=think).thinks for think in (True, "low", False, "none", None)] == [
        *(True, True, False, False, False)
    ]


def test_results_belong_to_calls_by_name_or_in_order() -> None:
    def call(name: str) -> dict[str, Any]:
        return {"function": {"name": name, "arguments": {"x": 1}}}

    turns = [
        {"role": "assistant", "content": "", "tool_calls": [call("a"), call("b"), call("c")]},
        {"role": "tool", "tool_name": "b", "content": "of b"},
        {"role": "tool", "content": "of a"},
        {"role": "tool", "content": "of c"},
    ]
    first, *results = chat(messages=[USER, *turns]).messages[1:]
    ids = [each["id"] for each in first["tool_calls"]]
    assert [each["tool_call_id"] for each in results] == [ids[1], ids[0], ids[2]]
    assert [each["name"] for each in results] == ["b", "a", "c"]
    assert first["tool_calls"][0]["function"]["arguments"] == {"x": 1}


def test_results_belong_to_calls_by_their_ids_first() -> None:
    calls = [{"id": name, "function": {"name": "f", "arguments": {}}} for name in "xy"]
    turns = [
        {"role": "Assistant", "tool_calls": calls},
        {"role": "tool", "tool_call_id": "y", "tool_name": "f", "content": "of y"},
        {"role": "tool", "content": "of x"},
    ]
    first, *results = chat(messages=[USER, *turns]).messages[1:]
    assert [each["id"] for each in first["tool_calls"]] == ["x", "y"]
    assert [each["tool_call_id"] for each in results] == ["y", "x"]


def test_an_image_may_be_a_data_url_but_no_other() -> None:
    urls = ["data:image/webp;base64,aGk=", "aGk=", "https://example.org/a.png"]
    asked = chat(messages=[{**USER, "images": urls}])
    png = "data:image/png;base64,"
    given = [urls[0], f"{png}aGk=", f"{png}{urls[2]}"]
    assert [image.url for image in asked.images] == given


def test_a_tool_may_be_without_its_type() -> None:
    function = {"name": "f", "parameters": {"type": "object", "properties": {}}}
    assert (
        chat(tools=[{"function": function}]).tools
        == chat(tools=[{"type": "function", "function": function}]).tools
    )
    assert chat(tools=[]).tools == ()


def test_a_last_message_of_the_assistant_is_continued() -> None:
    asked = chat(messages=[USER, {"role": "assistant", "content": "Well"}])
    assert (asked.continue_final_message, asked.add_generation_prompt) == (True, False)


def test_a_prompt_is_a_chat_or_raw() -> None:
    body = {"model": "m:latest", "prompt": "Hello", "system": "Be brief."}
    asked = ollama.parse_generate(body)
    assert [each["role"] for each in asked.messages] == ["system", "user"]
    assert (asked.model, asked.only_loads) == ("m:latest", False)
    assert ollama.parse_generate({"name": "m", "prompt": "Hello"}).model == "m"
    assert ollama.GENERATE.choose(body) is ollama.TEMPLATED
    raw = {"model": "m", "prompt": "Hello", "raw": True}
    assert ollama.GENERATE.choose(raw) is ollama.RAW
    assert isinstance(ollama.parse_raw(raw), CompletionRequest)
    with pytest.raises(BadRequest, match="system: not together with raw"):
        ollama.parse_raw({**raw, "system": "Be brief."})
    with pytest.raises(BadRequest, match="think: not together with raw"):
        ollama.parse_raw({**raw, "think": True})
    assert not ollama.parse_raw({**raw, "think": False, "context": [], "suffix": ""}).echo
    for fields in ({"suffix": "end"}, {"template": "{{ .Prompt }}"}):
        with pytest.raises(BadRequest, match=f"{next(iter(fields))}: not served"):
            ollama.parse_generate({**body, **fields})


def test_without_a_prompt_only_the_model_is_wanted() -> None:
    assert ollama.parse_generate({"model": "m"}).only_loads
    assert ollama.parse_chat({"model": "m", "messages": [], "keep_alive": 0}).unloads
    assert not chat(keep_alive="5m").only_loads


def lines_of(shape: Any, pieces: list[Piece]) -> list[Any]:
    frames = [*shape.opening()]
    for index, piece in enumerate(pieces):
        end: EndReason | None = "stop" if index == len(pieces) - 1 else None
        text = content_of([piece])
        frames.append(shape.chunk(Delta(0, text, [1], [piece], finish_reason=end)) or b"")
    frames += shape.closing()
    return [json.loads(line) for line in b"".join(frames).splitlines()]


@pytest.mark.parametrize("is_chat", [True, False])
def test_lines_join_to_the_answer_that_is_not_streamed(is_chat: bool) -> None:
    rng = seeded("ollama's lines")
    make = ChatShape if is_chat else GenerateShape
    for _ in range(budget(50, 2000)):
        pieces = random_pieces(rng)
        whole = make(job_of(), envelope_of()).whole(
            [Delta(0, content_of(pieces), [1], pieces, finish_reason="stop")]
        )
        smaller = cut(rng, pieces) or [Piece(PieceKind.CONTENT, "")]
        lines = lines_of(make(job_of(), envelope_of()), smaller)
        shown = [line["message"] if is_chat else line for line in lines]
        text = "content" if is_chat else "response"
        expected = whole["message"] if is_chat else whole
        assert "".join(each[text] for each in shown) == expected[text]
        assert "".join(each.get("thinking", "") for each in shown) == expected.get("thinking", "")
        calls = [call for each in shown for call in each.get("tool_calls", [])]
        assert calls == expected.get("tool_calls", [])
        assert [line["done"] for line in lines] == [False] * (len(lines) - 1) + [True]
        assert lines[-1]["eval_count"] == whole["eval_count"] == 9
        if not is_chat:
            assert whole["context"] == [1, 2, 3, 1]
            assert lines[-1]["context"] == [1, 2, 3, *[1] * len(smaller)]


def test_a_call_that_was_cut_off_shows_its_text() -> None:
    pieces = [Piece(PieceKind.CALL, "add", 0), Piece(PieceKind.ARGUMENTS, '{"x": 1', 0)]
    [line, last] = lines_of(ChatShape(job_of(), envelope_of()), pieces)
    (call,) = line["message"]["tool_calls"]
    invalid = {"INVALID_JSON": '{"x": 1'}
    assert call["function"] == {"index": 0, "name": "add", "arguments": invalid}
    assert last["done_reason"] == "stop"


def test_an_error_is_a_line() -> None:
    frame = ChatShape(job_of(), envelope_of()).failure(ApiError("no luck"))
    assert json.loads(frame) == {"error": "no luck"}


async def test_a_stream_is_lines_of_json_and_an_error_one_object(router: MemoryRouter) -> None:
    body = {"model": "fake-model", "messages": [USER], "options": {"num_predict": 8}}
    streamed = await router.post("/api/chat", body)
    assert streamed.headers["content-type"].startswith("application/x-ndjson")
    lines = [json.loads(line) for line in streamed.body.splitlines()]
    assert lines[-1]["eval_count"] == 8
    whole = (await router.post("/api/chat", {**body, "stream": False})).json()
    assert whole["done_reason"] == "length"
    refused = await router.post("/api/chat", {**body, "model": "nobody"})
    assert (refused.status, refused.json()) == (404, {"error": "model 'nobody' not found"})
