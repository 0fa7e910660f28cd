"""Keywords of schemas that forbid nothing are named in the answer's header, on every route that
takes a schema, however it takes it.
"""

from __future__ import annotations

import json
import logging
from typing import Any

import pytest
from support.router_doubles import (
    CHATML,
    INFO,
    FakeFleet,
    MemoryRouter,
    memory_router,
    model_files,
)
from tokenizers import Tokenizer

from penstock_router.routes.warnings import HEADER

TURNS = [{"role": "user", "content": "The fox"}]
# What looks like a keyword and is none is in every place where there may be such.
SCHEMA: dict[str, Any] = {
    "type": "object",
    "propertyOrder": ["name"],
    "title": "A part",
    "x-order": 1,
    "properties": {
        "propertyOrder": {"enum": [{"inEnum": 1}], "default": {"inDefault": 1}},
        "name": {"type": "string", "errorMessage": "no", "examples": [{"inExample": 1}]},
        "kind": {"const": {"inConst": 1}, "propertyOrder": 2, "nothing": None},
    },
    "required": ["propertyOrder"],
    "$defs": {"inDefs": {"items": {"widget": "box"}}},
}
NAMED = "'propertyOrder', 'errorMessage', 'widget'"
MESSAGES = {"model": INFO.model, "max_tokens": 4, "messages": TURNS}
OLLAMA = {"model": INFO.model, "stream": False}
OUTPUT = {"format": {"type": "json_schema", "schema": SCHEMA}}
STRUCTURES = {"structures": [{"begin": "<f>", "schema": SCHEMA, "end": "</f>"}], "triggers": ["<"]}
PART = {"type": "json_schema", "json_schema": SCHEMA}
TAGS = {"type": "sequence", "elements": [{"type": "const_string", "value": "x"}, PART]}


def completion(**fields: Any) -> tuple[str, dict[str, Any]]:
    return "/v1/completions", {"prompt": "a", "max_tokens": 4, **fields}


# By the field that the warning names: where a schema goes, and in which body.
FORMS: list[tuple[str, tuple[str, dict[str, Any]]]] = [
    *(
        ("response_format", (path, {**body, "response_format": form}))
        for path, body in (completion(), ("/v1/chat/completions", {"messages": TURNS}))
        for form in (
            {"type": "json_schema", "json_schema": {"schema": SCHEMA}},
            {"type": "json_object", "schema": json.dumps(SCHEMA)},
            {"type": "structural_tag", **STRUCTURES},
            {"type": "structural_tag", "format": TAGS},
        )
    ),
    ("structured_outputs", completion(structured_outputs={"json": SCHEMA})),
    ("structured_outputs", completion(structured_outputs={"json": json.dumps(SCHEMA)})),
    ("structured_outputs", completion(structured_outputs={"structural_tag": json.dumps(
        {"type": "structural_tag", "format": TAGS})})),
    ("guided_json", completion(guided_json=json.dumps(SCHEMA))),
    ("json_schema", completion(json_schema=json.dumps(SCHEMA))),
    ("text.format", ("/v1/responses", {
        "input": "a", "text": {"format": {"type": "json_schema", "name": "n", "schema": SCHEMA}}})),
    ("output_config", ("/v1/messages", {**MESSAGES, "output_config": OUTPUT})),
    ("output_format", ("/v1/messages", {**MESSAGES, "output_format": OUTPUT["format"]})),
    ("format", ("/api/chat", {**OLLAMA, "messages": TURNS, "format": SCHEMA})),
    ("format", ("/api/generate", {**OLLAMA, "prompt": "a", "format": SCHEMA})),
    ("format", ("/api/generate", {**OLLAMA, "prompt": "a", "raw": True, "format": SCHEMA})),
    ("grammar", ("/generate", {
        "inputs": "a",
        "parameters": {"max_new_tokens": 4, "grammar": {"type": "json", "value": SCHEMA}}})),
]  # fmt: skip


@pytest.mark.parametrize(("field", "asked"), FORMS)
async def test_keywords_that_no_draft_defines_are_named_in_the_answer(
    router: MemoryRouter, field: str, asked: tuple[str, dict[str, Any]]
) -> None:
    answer = await router.post(*asked)
    assert answer.status == 200, answer.body
    assert answer.headers[HEADER] == f"{field}: keywords without effect: {NAMED}"


async def test_a_stream_and_a_long_body_name_them_too(router: MemoryRouter) -> None:
    wanted = f"guided_json: keywords without effect: {NAMED}"
    long = {**SCHEMA, "description": "so long " * 10_000}
    for schema in (SCHEMA, long):
        for stream in (False, True):
            answer = await router.complete(guided_json=schema, stream=stream, max_tokens=4)
            assert (answer.status, answer.headers[HEADER]) == (200, wanted)


async def test_keywords_are_logged_once(
    router: MemoryRouter, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "penstock_router.routes.warnings"):
        for _ in range(2):
            await router.complete(guided_json=SCHEMA)
    text = f"POST /v1/completions: guided_json: keywords without effect: {NAMED}"
    assert [record.getMessage() for record in caplog.records] == [text]


async def test_a_schema_of_defined_keywords_needs_no_warning(router: MemoryRouter) -> None:
    plain = {"type": "object", "properties": {"a": {"type": "string", "x-y": 1}}, "nullable": True}
    assert HEADER not in (await router.complete(guided_json=plain)).headers


async def test_names_of_keywords_cannot_make_a_header_or_a_line_of_their_own(
    router: MemoryRouter, caplog: pytest.LogCaptureFixture
) -> None:
    odd = {"ü\r\nX-Evil: 1\x1b[31m": 1, "long" * 500: 1}
    with caplog.at_level(logging.INFO, "penstock_router.routes.warnings"):
        answer = await router.complete(guided_json=odd)
    assert "x-evil" not in answer.headers
    assert answer.headers[HEADER] == (
        r"guided_json: keywords without effect: '\xfc\r\nX-Evil: 1\x1b[31m', "
        f"'{'long' * 10}'"
    )
    [record] = caplog.records
    assert record.getMessage().isprintable()


async def test_of_many_keywords_twenty_are_named_in_their_order(router: MemoryRouter) -> None:
    many = {f"k{number}": 1 for number in range(9, 1009)}
    answer = await router.complete(guided_json=many)
    names = ", ".join(f"'k{number}'" for number in range(9, 29))
    assert answer.headers[HEADER] == f"guided_json: keywords without effect: {names} and 980 more"


# ---- Tools -------------------------------------------------------------------------------------


def tool(name: str, **more: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": SCHEMA, **more}}


def line(*names: str) -> str:
    return "; ".join(f"tools: {name}: keywords without effect: {NAMED}" for name in names)


BOTH = [tool("look"), tool("add")]
LOOK = {"type": "function", "function": {"name": "look"}}
FLAT = {"type": "function", "name": "look", "parameters": SCHEMA}


@pytest.mark.parametrize(
    ("fields", "wanted"),
    [
        ({"tools": BOTH}, ""),
        ({"tools": BOTH, "parallel_tool_calls": False}, ""),
        ({"tools": BOTH, "tool_choice": "none"}, ""),
        ({"tools": [tool("look", strict=True)], "tool_choice": "none"}, ""),
        ({"tools": BOTH, "tool_choice": "required"}, line("look", "add")),
        ({"tools": BOTH, "tool_choice": LOOK}, line("look")),
        ({"tools": [tool("look", strict=True), tool("add")]}, line("look")),
        ({"tools": BOTH, "guided_regex": "a"}, line("look", "add")),
    ],
)
async def test_keywords_of_tools_are_named_where_calls_must_obey_them(
    byte_level: Tokenizer, fields: dict[str, Any], wanted: str
) -> None:
    async with calling_router(byte_level) as router:
        for stream in (False, True):
            answer = await router.chat(**fields, stream=stream)
            assert answer.status == 200, answer.body
            assert answer.headers.get(HEADER, "") == wanted
        long = await router.chat(**fields, user="so long " * 10_000)
        assert long.headers.get(HEADER, "") == wanted


async def test_a_model_whose_calls_have_no_known_form_is_held_to_no_tool(
    byte_level: Tokenizer,
) -> None:
    async with calling_router(byte_level, tool_call_parser="none") as router:
        answer = await router.chat(tools=[tool("look", strict=True)])
        assert answer.status == 200
        assert HEADER not in answer.headers


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/responses", {"input": "a", "tools": [FLAT], "tool_choice": "required"}),
        ("/v1/messages", {
            **MESSAGES, "tools": [{"name": "look", "input_schema": SCHEMA}],
            "tool_choice": {"type": "any"}}),
        ("/api/chat", {
            **OLLAMA, "messages": TURNS, "tools": [tool("look", strict=True)]}),
    ],
)  # fmt: skip
async def test_keywords_of_tools_are_named_on_every_route(
    byte_level: Tokenizer, path: str, body: dict[str, Any]
) -> None:
    async with calling_router(byte_level) as router:
        answer = await router.post(path, body)
        assert answer.status == 200, answer.body
        assert line("look") in answer.headers[HEADER]


def calling_router(tokenizer: Tokenizer, tool_call_parser: str = "hermes") -> Any:
    """A router whose model writes calls in this form."""
    files = model_files(tokenizer, CHATML + "{{ (tools or []) | length }}")
    return memory_router(FakeFleet(files), tool_call_parser=tool_call_parser)
