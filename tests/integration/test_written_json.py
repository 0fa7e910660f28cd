"""The white space in the JSON of answers, and warnings about keywords of a schema without effect.

A router and a shard run; the tokens are made up.
"""

from __future__ import annotations

import json
import re
import urllib.request
from collections.abc import Callable
from typing import Any

import pytest
from integration.conftest import Pair

# White space within its strings is the answer's own.
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "kind": {"enum": ["a  b", "c: d, e"]},
        "flags": {"type": "array", "items": {"type": "boolean"}, "minItems": 2, "maxItems": 3},
    },
    "required": ["kind", "flags"],
    "additionalProperties": False,
}
ODD = {**SCHEMA, "propertyOrder": ["kind"]}
LONG = {**ODD, "description": "so long " * 10_000}
WARNING = "keywords without effect: 'propertyOrder'"
TURNS = [{"role": "user", "content": "Hi"}]
OLLAMA = {"model": "tgi", "stream": False}
NAMED = {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA}}
FLAT = {"type": "json_schema", "name": "n", "schema": SCHEMA}


def post(pair: Pair, path: str, body: dict[str, Any]) -> tuple[str, str]:
    """Return the body of an answer, and the warnings in its header."""
    request = urllib.request.Request(pair.url + path, json.dumps(body).encode())
    request.add_header("Content-Type", "application/json")
    with urllib.request.urlopen(request, timeout=60) as answer:
        return answer.read().decode(), answer.headers.get("x-penstock-warnings", "")


def complete(pair: Pair, seed: int = 1, **fields: Any) -> tuple[Any, str]:
    """Return the JSON in a completion's text, and the text."""
    body = {"prompt": "Hi", "seed": seed, "max_tokens": 400, **fields}
    text = json.loads(post(pair, "/v1/completions", body)[0])["choices"][0]["text"]
    return json.loads(text), text


def compact(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"))


Pick = Callable[[Any], str]


def of_chat(answer: Any) -> str:
    return str(answer["choices"][0]["message"]["content"])


def of_completion(answer: Any) -> str:
    return str(answer["choices"][0]["text"])


FORMS: dict[str, tuple[str, dict[str, Any], Pick]] = {
    "completion": ("/v1/completions", {"prompt": "Hi", "response_format": NAMED}, of_completion),
    "chat": ("/v1/chat/completions", {"messages": TURNS, "response_format": NAMED}, of_chat),
    "guided_json": ("/v1/completions", {"prompt": "Hi", "guided_json": SCHEMA}, of_completion),
    "json_schema": (
        "/v1/completions",
        {"prompt": "Hi", "json_schema": json.dumps(SCHEMA)},
        of_completion,
    ),
    "structured_outputs": (
        "/v1/chat/completions",
        {"messages": TURNS, "structured_outputs": {"json": SCHEMA}},
        of_chat,
    ),
    "responses": (
        "/v1/responses",
        {"input": "Hi", "text": {"format": FLAT}},
        lambda answer: str(answer["output"][0]["content"][0]["text"]),
    ),
    "messages": (
        "/v1/messages",
        {"model": "tgi", "messages": TURNS, "output_config": {"format": FLAT}},
        lambda answer: str(answer["content"][0]["text"]),
    ),
    "ollama chat": (
        "/api/chat",
        {**OLLAMA, "messages": TURNS, "format": SCHEMA},
        lambda answer: str(answer["message"]["content"]),
    ),
    "ollama": (
        "/api/generate",
        {**OLLAMA, "prompt": "Hi", "format": SCHEMA},
        lambda answer: str(answer["response"]),
    ),
    "tgi": (
        "/generate",
        {
            "inputs": "Hi",
            "parameters": {"max_new_tokens": 400, "grammar": {"type": "json", "value": SCHEMA}},
        },
        lambda answer: str(answer["generated_text"]),
    ),
}


@pytest.mark.parametrize("form", FORMS)
def test_no_white_space_stands_in_json_whichever_field_asks_for_it(pair: Pair, form: str) -> None:
    path, body, pick = FORMS[form]
    if path.startswith("/v1"):
        body = {**body, "max_output_tokens" if path.endswith("responses") else "max_tokens": 400}
    text = pick(json.loads(post(pair, path, body)[0]))
    value = json.loads(text)
    assert value["kind"] in SCHEMA["properties"]["kind"]["enum"]
    assert text == compact(value)


def test_the_beginning_of_any_object_is_without_white_space_too(pair: Pair) -> None:
    for field in ({"response_format": {"type": "json_object"}},
                  {"structured_outputs": {"json_object": True}}):  # fmt: skip
        begun = [
            json.loads(post(pair, "/v1/completions", {
                "prompt": "Hi", "seed": seed, "max_tokens": 3, **field})[0])
            for seed in range(20)
        ]  # fmt: skip
        for answer in begun:
            assert re.match(r'\{("|\}|$)', answer["choices"][0]["text"])


def test_a_request_that_asks_for_white_space_gets_it(pair: Pair) -> None:
    flexible = {"json": SCHEMA, "disable_any_whitespace": False}
    found = [complete(pair, seed, structured_outputs=flexible) for seed in range(5)]
    assert any(text != compact(value) for value, text in found)
    spaced = {"json": SCHEMA, "whitespace_pattern": " "}
    found = [complete(pair, seed, structured_outputs=spaced) for seed in range(5)]
    assert any(text != compact(value) for value, text in found)
    for value, text in found:
        # Strings have two spaces.
        assert text.replace(" ", "") == compact(value).replace(" ", "")


def test_a_schema_says_itself_how_its_json_is_written(pair: Pair) -> None:
    separators = {"item_separator": ", ", "key_separator": ": "}
    as_python = {**SCHEMA, "x-guidance": {"whitespace_flexible": False, **separators}}
    for seed in range(5):
        value, text = complete(pair, seed, guided_json=as_python)
        assert text == json.dumps(value)


def test_json_in_a_structural_tag_has_the_white_space_that_the_model_likes(pair: Pair) -> None:
    def told(schema: Any, seed: int) -> str:
        part = {"type": "json_schema", "json_schema": schema}
        tag = {"type": "tag", "begin": "<", "content": part, "end": ">"}
        body = {
            **{"prompt": "Hi", "seed": seed, "max_tokens": 400},
            "response_format": {"type": "structural_tag", "format": tag},
        }
        return str(json.loads(post(pair, "/v1/completions", body)[0])["choices"][0]["text"])

    liked = [told(SCHEMA, seed)[1:-1] for seed in range(5)]
    assert any(text != compact(json.loads(text)) for text in liked)
    strict = {**SCHEMA, "x-guidance": {"whitespace_flexible": False}}
    for seed in range(5):
        text = told(strict, seed)[1:-1]
        assert text == compact(json.loads(text))


@pytest.mark.parametrize("schema", [ODD, LONG], ids=["short", "long"])
@pytest.mark.parametrize("stream", [False, True])
def test_keywords_without_effect_are_named_beside_an_answer_that_obeys_the_rest(
    pair: Pair, schema: dict[str, Any], stream: bool
) -> None:
    body = {"prompt": "Hi", "max_tokens": 400, "guided_json": schema, "stream": stream}
    answer, warning = post(pair, "/v1/completions", body)
    assert warning == f"guided_json: {WARNING}"
    assert "error" not in answer
    if not stream:
        text = of_completion(json.loads(answer))
        assert text == compact(json.loads(text))


@pytest.mark.parametrize("user", ["me", "so long " * 10_000], ids=["short", "long"])
@pytest.mark.parametrize("stream", [False, True])
def test_keywords_of_a_tool_that_must_be_called_are_named(
    pair: Pair, user: str, stream: bool
) -> None:
    tool = {"type": "function", "function": {"name": "look", "parameters": ODD}}
    body = {"messages": TURNS, "tools": [tool], "max_tokens": 4, "stream": stream, "user": user}
    warned = [
        post(pair, "/v1/chat/completions", {**body, "tool_choice": choice})[1]
        for choice in ("auto", "required")
    ]
    assert warned == ["", f"tools: look: {WARNING}"]
