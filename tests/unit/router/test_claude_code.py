"""Requests as Claude Code sends them, turn after turn, and everything that may be odd in them."""

from __future__ import annotations

import copy
import random
import re
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
from support.budget import budget, seeded
from support.router_doubles import (
    INFO,
    FakeFleet,
    FakeShard,
    MemoryRouter,
    memory_router,
    model_files,
)
from tokenizers import Tokenizer
from unit.router.chat_template_styles import STYLES
from unit.router.test_messages import events_of

from penstock_router.apis.messages.requests import FIELDS
from penstock_router.routes.warnings import HEADER

CONTEXT = 8192
CACHED = {"cache_control": {"type": "ephemeral"}}
LONG_AGO = "# Environment\nWorking directory: /srv/code\nToday's date is 2026-11-27."
READ = {
    "name": "Read",
    "description": "Reads a file.",
    "input_schema": {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "type": "object",
        "properties": {
            "file_path": {"type": "string"},
            "limit": {"type": "integer", "exclusiveMinimum": 0},
        },
        "required": ["file_path"],
        "additionalProperties": False,
    },
}
SEARCH = {"name": "ToolSearch", "description": "Finds tools.", "input_schema": {"type": "object"}}
PLACEHOLDER = {
    **{"name": "Placeholder", "description": "Never call it.", "defer_loading": True},
    "input_schema": {"type": "object", "properties": {}},
}
FETCH = {**READ, "name": "WebFetch", "description": "Fetches a page.", "defer_loading": True}
FIRST = {
    "role": "user",
    "content": [
        {"type": "text", "text": "<system-reminder>Be kind.</system-reminder>"},
        {"type": "text", "text": "Change hello to goodbye in a.txt"},
    ],
}


def call(id_: str, name: str, **given: Any) -> dict[str, Any]:
    return {"type": "tool_use", "id": id_, "name": name, "input": given}


def result(id_: str, content: Any, **more: Any) -> dict[str, Any]:
    return {"tool_use_id": id_, "type": "tool_result", "content": content, **more}


def body_of(*turns: Any, tools: Any = (READ, SEARCH, PLACEHOLDER), **more: Any) -> dict[str, Any]:
    return {
        "model": INFO.model,
        "messages": [FIRST, *turns],
        "system": [
            {"type": "text", "text": "x-anthropic-billing-header: cc_version=2.1.332.b0a;"},
            {"type": "text", "text": "You are an agent.", **CACHED},
            {"type": "text", "text": "\nUse your own judgment.", **CACHED},
        ],
        "tools": list(tools),
        "metadata": {"user_id": '{"device_id":"1"}'},
        "max_tokens": 32000,
        "thinking": {"type": "adaptive", "display": "updates"},
        "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        "output_config": {"effort": "high"},
        **more,
    }


def later(text: str) -> dict[str, Any]:
    return {"role": "system", "content": text}


SAID_FIRST = [
    {"type": "text", "text": "I read the file."},
    call("toolu_1", "Read", file_path="/srv/code/a.txt"),
    call("toolu_2", "ToolSearch", query="select:WebFetch"),
]
FOUND = [{"type": "tool_reference", "tool_name": "WebFetch"}]
# What is last has a mark for the cache, and in the next request none.
SESSION = (
    body_of({"role": "system", "content": [{"type": "text", "text": LONG_AGO, **CACHED}]}),
    body_of(
        later(LONG_AGO),
        {"role": "assistant", "content": SAID_FIRST},
        {
            "role": "user",
            "content": [
                result("toolu_2", FOUND),
                result("toolu_1", "No such file.", is_error=True, **CACHED),
            ],
        },
        tools=(READ, SEARCH, FETCH, PLACEHOLDER),
    ),
    body_of(
        later(LONG_AGO),
        {"role": "assistant", "content": SAID_FIRST},
        {
            "role": "user",
            "content": [
                result("toolu_2", FOUND),
                result("toolu_1", "No such file.", is_error=True),
            ],
        },
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "What now?", "signature": "c2ln"},
                call("toolu_3", "WebFetch", file_path="x"),
            ],
        },
        {
            "role": "user",
            "content": [
                result("toolu_3", [{"type": "text", "text": "A page."}]),
                {"type": "text", "text": "Go on."},
            ],
        },
        {"role": "system", "content": [{"type": "text", "text": "It is late.", **CACHED}]},
        tools=(READ, SEARCH, FETCH, PLACEHOLDER),
    ),
)


def fleet_of(tokenizer: Tokenizer, template: str | None = None) -> FakeFleet:
    files = model_files(tokenizer) if template is None else model_files(tokenizer, template)
    return FakeFleet(files, members=[FakeShard(info=replace(INFO, max_model_len=CONTEXT))])


@pytest.fixture
async def served(byte_level: Tokenizer) -> AsyncIterator[MemoryRouter]:
    async with memory_router(fleet_of(byte_level)) as router:
        yield router


async def ask(router: MemoryRouter, body: Any, path: str = "/v1/messages?beta=true") -> Any:
    return await router.post(path, body, **{"anthropic-version": "2023-06-01"})


def prompt_of(router: MemoryRouter, tokenizer: Tokenizer, at: int = -1) -> str:
    ids = list(router.fleet.requests[at].prompt_token_ids)
    return tokenizer.decode(ids, skip_special_tokens=False)


# ---- A session ---------------------------------------------------------------------------------


async def test_each_turn_of_a_session_is_answered_without_a_warning(served: MemoryRouter) -> None:
    for body in SESSION:
        answer = await ask(served, {**body, "stream": True})
        assert answer.status == 200, answer.body
        assert HEADER not in answer.headers
        assert answer.headers["request-id"].startswith("req_")
        names = [name for name, _ in events_of(answer.body)]
        assert (names[0], names[-1]) == ("message_start", "message_stop")


# Mistral's own puts systems and tools into the last turn.
@pytest.mark.parametrize("style", [style for style in STYLES if style != "mistral"])
async def test_each_turn_finds_the_prompt_of_the_turn_before(
    style: str, byte_level: Tokenizer
) -> None:
    template = STYLES[style].replace("bos_token", "'<|eos|>'")
    async with memory_router(fleet_of(byte_level, template)) as router:
        prompts = []
        for body in SESSION:
            answered = await ask(router, {**body, "max_tokens": 1})
            assert answered.status == 200, answered.body
            prompts.append(prompt_of(router, byte_level))
    first, second, third = prompts
    # All that was said so far; what invites an answer comes behind it.
    assert second.startswith(first[: first.index("2026-11-27.")])
    told = max(map(second.rindex, ("No such file.", "Fetches a page.")))
    assert third.startswith(second[:told])


async def test_prompts_do_not_change_with_the_accounting(
    served: MemoryRouter, byte_level: Tokenizer
) -> None:
    for version in ("1", "2"):
        body = copy.deepcopy(SESSION[1])
        body["system"][0]["text"] = f"x-anthropic-billing-header: cc_version={version};"
        await ask(served, body)
    first, second = served.fleet.requests
    assert first.prompt_token_ids == second.prompt_token_ids
    assert "billing" not in prompt_of(served, byte_level)


async def test_a_deferred_tool_is_shown_where_it_was_found_and_nowhere_else(
    served: MemoryRouter, byte_level: Tokenizer
) -> None:
    await ask(served, SESSION[2])
    prompt = prompt_of(served, byte_level)
    assert prompt.count("Fetches a page.") == 1
    assert prompt.index("Fetches a page.") > prompt.index("I read the file.")
    assert "Never call it." not in prompt


async def test_what_is_counted_is_what_is_used(served: MemoryRouter) -> None:
    for body in SESSION:
        counted = await ask(served, body, "/v1/messages/count_tokens?beta=true")
        usage = (await ask(served, {**body, "max_tokens": 1})).json()["usage"]
        assert counted.json() == {"input_tokens": usage["input_tokens"]}
        assert HEADER not in counted.headers


# ---- Limits ------------------------------------------------------------------------------------

TOO_LONG = re.compile(r"^prompt is too long: (\d+) tokens > (\d+) maximum$")


@pytest.mark.parametrize("words", [CONTEXT, 40 * CONTEXT])
async def test_a_prompt_that_is_too_long_is_refused_in_words_that_have_the_client_shorten_it(
    served: MemoryRouter, words: int
) -> None:
    # The longer one is not counted.
    body = body_of({"role": "user", "content": "fox " * words})
    answer = await ask(served, body)
    assert (answer.status, answer.error["type"]) == (400, "invalid_request_error")
    told = TOO_LONG.match(answer.error["message"])
    assert told is not None
    given, limit = map(int, told.groups())
    assert limit == CONTEXT
    assert given > limit


async def test_an_answer_ends_with_the_context_or_with_its_limit(served: MemoryRouter) -> None:
    answer = (await ask(served, SESSION[0])).json()
    assert answer["stop_reason"] == "model_context_window_exceeded"
    assert answer["usage"]["input_tokens"] + answer["usage"]["output_tokens"] == CONTEXT
    short = (await ask(served, {**SESSION[0], "max_tokens": 7})).json()
    assert (short["stop_reason"], short["usage"]["output_tokens"]) == ("max_tokens", 7)


async def test_a_cache_can_be_warmed(served: MemoryRouter) -> None:
    answer = (await ask(served, {**SESSION[0], "max_tokens": 0})).json()
    assert (answer["stop_reason"], answer["usage"]["output_tokens"]) == ("max_tokens", 0)
    assert answer["content"] == [{"type": "text", "text": ""}]


async def test_a_budget_of_a_model_that_does_not_mark_its_reasoning_is_named(
    served: MemoryRouter,
) -> None:
    thinking = {"type": "enabled", "budget_tokens": 31999}
    answer = await ask(served, {**SESSION[0], "max_tokens": 5, "thinking": thinking})
    assert answer.status == 200
    assert answer.headers[HEADER].startswith("thinking.budget_tokens: the model does not mark")
    [request] = served.fleet.requests
    assert request.thinking_budget is None
    chat = await served.chat(thinking_token_budget=5)
    assert (chat.status, chat.error["param"]) == (400, "thinking_token_budget")


async def test_an_image_for_a_model_that_takes_none_is_refused_in_words_that_have_it_left_out(
    served: MemoryRouter,
) -> None:
    source = {"type": "base64", "media_type": "image/png", "data": "AAAA"}
    image = {"role": "user", "content": [{"type": "image", "source": source}]}
    answer = await ask(served, body_of(image))
    assert answer.status == 400
    assert answer.error["message"].startswith("Could not process image: messages[1].content[0]")


async def test_what_is_for_servers_of_anthropic_is_named(served: MemoryRouter) -> None:
    more = {
        **{"mcp_servers": [{"type": "url", "url": "https://x", "name": "x"}], "container": "c"},
        "context_management": {"edits": [{"type": "clear_tool_uses_20250919"}]},
        "output_config": {"task_budget": {"type": "tokens", "total": 9}},
        **{"service_tier": "auto", "speed": "fast", "diagnostics": {}, "inference_geo": None},
    }
    answer = await ask(served, {**SESSION[0], "max_tokens": 2, **more})
    assert answer.status == 200
    named = [line.partition(":")[0] for line in answer.headers[HEADER].split("; ")]
    assert sorted(named) == sorted(
        ["container", "mcp_servers", "context_management", "output_config.task_budget", "speed"]
    )
    assert answer.json()["context_management"] == {"applied_edits": []}


# ---- Anything may be odd -----------------------------------------------------------------------

ODD: tuple[Any, ...] = (
    None,
    True,
    0,
    -1,
    1.5,
    10**30,
    "",
    "x",
    [],
    [None],
    {},
    {"type": "text"},
    [[]],
)
Change = Callable[[Any, Any, random.Random], None]


def _drop(holder: Any, key: Any, rng: random.Random) -> None:
    del holder[key]


def _replace(holder: Any, key: Any, rng: random.Random) -> None:
    holder[key] = copy.deepcopy(rng.choice(ODD))


def _double(holder: Any, key: Any, rng: random.Random) -> None:
    if isinstance(holder, list):
        holder.insert(key, copy.deepcopy(holder[key]))
    else:
        holder[key] = [holder[key], holder[key]]


def _unwrap(holder: Any, key: Any, rng: random.Random) -> None:
    inside = holder[key]
    values = list(inside.values()) if isinstance(inside, dict) else inside
    holder[key] = rng.choice(values) if isinstance(values, list) and values else inside


CHANGES: tuple[Change, ...] = (_drop, _replace, _replace, _double, _unwrap)


def places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Every key and index in a body, at any depth."""
    items: Any = ()
    if isinstance(value, dict):
        items = list(value.items())
    elif isinstance(value, list):
        items = list(enumerate(value))
    for key, inside in items:
        yield value, key
        yield from places(inside)


async def test_whatever_is_odd_is_answered_or_refused_by_field(served: MemoryRouter) -> None:
    rng = seeded("odd requests of Claude Code")
    statuses = set()
    for _ in range(budget(1000, 20_000)):
        body = copy.deepcopy({**rng.choice(SESSION), "max_tokens": 3})
        for _ in range(rng.choice((1, 1, 2, 3))):
            holder, key = rng.choice(list(places(body)))
            rng.choice(CHANGES)(holder, key, rng)
        counts = rng.random() < 0.2
        answer = await ask(served, body, "/v1/messages" + "/count_tokens" * counts)
        statuses.add(answer.status)
        assert answer.status in (200, 400, 404), (answer.body, body)
        if answer.status == 400:
            message = answer.error["message"]
            root = re.split(r"[.:\[]", message)[0]
            assert root in FIELDS or TOO_LONG.match(message), (message, body)
    assert {200, 400} <= statuses
