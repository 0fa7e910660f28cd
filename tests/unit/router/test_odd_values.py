"""Odd values in every documented field of every route: refused or answered, within a second."""

from __future__ import annotations

import copy
import json
import random
import time
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
from support.budget import budget, seeded
from support.checked_fleet import CheckedFleet
from support.router_doubles import INFO, Answer, memory_router, model_files
from tokenizers import Tokenizer

from penstock_router.json_fields import JsonObject
from penstock_router.routes.base import Route
from penstock_router.routes.table import ROUTES

# The machine does much besides in `make test`.
MAX_S = budget(20, 1)
TEMPLATE = (
    "{% for tool in tools or [] %}{{ tool | tojson }}{% endfor %}"
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n"
    "{% for call in message.tool_calls or [] %}<tool_call>{{ call | tojson }}</tool_call>"
    "{% endfor %}"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TURNS = [{"role": "user", "content": "The fox"}]
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}}
CALL = {"id": "call_1", "type": "function", "function": {"name": "look", "arguments": "{}"}}
# A body of each route that is answered, with what clients often send.
BODIES: Mapping[str, JsonObject] = {
    "/v1/completions": {"prompt": "a", "max_tokens": 4, "stop": ["x"], "logit_bias": {"7": 1}},
    "/v1/chat/completions": {
        "messages": [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": [{"type": "text", "text": "The fox"}]},
            {"role": "assistant", "content": None, "tool_calls": [CALL]},
            {"role": "tool", "tool_call_id": "call_1", "content": "yes"},
        ],
        "tools": [
            {
                "type": "function",
                "function": {"name": "look", "description": "looks", "parameters": SCHEMA},
            }
        ],
        "tool_choice": "auto",
        "max_tokens": 4,
    },
    "/v1/messages": {
        "model": INFO.model,
        "max_tokens": 4,
        "system": [{"type": "text", "text": "Be brief."}],
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "The fox"}]},
            {
                "role": "assistant",
                "content": [{"type": "tool_use", "id": "t1", "name": "look", "input": {}}],
            },
            {
                "role": "user",
                "content": [{"type": "tool_result", "tool_use_id": "t1", "content": "yes"}],
            },
        ],
        "tools": [{"name": "look", "input_schema": SCHEMA}],
        "tool_choice": {"type": "auto"},
        "thinking": {"type": "adaptive"},
        "metadata": {"user_id": "u"},
    },
    "/v1/messages/count_tokens": {"model": INFO.model, "messages": TURNS, "system": "Be brief."},
    "/v1/responses": {
        "input": [
            {"type": "message", "role": "developer", "content": "Be brief."},
            {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "a"}]},
            {"type": "reasoning", "summary": [], "content": None},
            {"type": "function_call", "call_id": "c1", "name": "look", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "c1", "output": "yes"},
        ],
        "tools": [{"type": "function", "name": "look", "parameters": SCHEMA}],
        "reasoning": {"summary": "auto"},
        "include": ["reasoning.encrypted_content"],
        "text": {"format": {"type": "text"}},
        "max_output_tokens": 4,
        "store": False,
    },
    "/v1/embeddings": {"input": "a"},
    "/generate": {"inputs": "a", "parameters": {"max_new_tokens": 4}},
    "/generate_stream": {"inputs": "a", "parameters": {"max_new_tokens": 4}},
    "/": {"inputs": "a", "parameters": {"max_new_tokens": 4}},
    "/chat_tokenize": {"messages": TURNS},
    "/invocations": {"messages": TURNS, "max_tokens": 4},
    "/api/chat": {
        "model": INFO.model,
        "messages": [
            *TURNS,
            {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": {}}}]},
            {"role": "tool", "tool_name": "f", "content": "yes"},
        ],
        "options": {"num_predict": 4, "temperature": 0.5, "stop": ["x"]},
        "stream": False,
    },
    "/api/generate": {"model": INFO.model, "prompt": "a", "options": {"num_predict": 4}},
    "/api/embed": {"model": INFO.model, "input": "a"},
    "/api/embeddings": {"model": INFO.model, "prompt": "a"},
    "/api/show": {"model": INFO.model},
    "/api/pull": {"model": INFO.model},
    "/tokenize": {"prompt": "a"},
    "/detokenize": {"tokens": [5]},
}
ODD: tuple[Any, ...] = (
    *(None, True, False, 0, 1, -1, -2, 3, 2**31 - 1, 2**31, -(2**31) - 1, 2**63, -(2**63) - 1),
    *(10**400, 0.0, -0.0, 0.5, 1e-300, 1e308, -1e308, "", " ", "a", "0", "-1", "true", "null"),
    *("\x00", "\ud800", "😀" * 50, "a" * 5000, "{}", "[", "(?=a)", "../../etc/passwd", "http://x"),
    *([], [[]], [None], [0], [-1], ["a"], [""], ["a", 1], [{}], [[0, 1]], ["x"] * 300),
    *({}, {"": ""}, {"type": None}, {"type": "x"}, {"type": "object"}, {"a": {"b": [1]}}),
    *({"type": "function"}, {"type": "json_schema"}, {"7": 1e999}, {str(n): n for n in range(300)}),
    json.loads("[" * 150 + "]" * 150),
)


def _places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Every place in a body: its keys, and those within."""
    entries: Any = ()
    if isinstance(value, dict):
        entries = value.items()
    elif isinstance(value, list):
        entries = enumerate(value)
    for key, item in entries:
        yield (*path, key)
        yield from _places(item, (*path, key))


def _with(body: JsonObject, path: tuple[Any, ...], value: Any) -> JsonObject:
    changed = copy.deepcopy(body)
    holder: Any = changed
    for key in path[:-1]:
        holder = holder[key]
    holder[path[-1]] = value
    return changed


def _fields_of(route: Route) -> list[str]:
    tables = route.bodies if route.fields is None else (route.fields,)
    return list(dict.fromkeys(name for fields in tables for name in fields))


def _odd_bodies(rng: random.Random) -> Iterator[tuple[str, JsonObject]]:
    """Yield bodies at random, each with the path that it is for: all values in all fields, and in
    all places of usual bodies.
    """
    cases = []
    for route in ROUTES:
        body = BODIES.get(route.path)
        if route.method == "POST" and body is not None:
            places = [(name,) for name in _fields_of(route)] + list(_places(body))
            cases += [(route.path, body, place, value) for place in places for value in ODD]
    rng.shuffle(cases)
    for path, body, place, value in cases:
        changed = _with(body, place, value)
        if rng.random() < 0.2:
            changed["stream"] = True
        yield path, changed


def encoded(body: JsonObject) -> bytes:
    return json.dumps(body).replace("Infinity", "1e999").encode()


def _check(answer: Answer, path: str, body: JsonObject) -> None:
    told = f"{path} {encoded(body)[:300]!r}: {answer.status} {answer.body[:300]!r}"
    assert answer.status < 500, told
    if answer.status >= 400:
        assert len(answer.body) < 2000, told
        assert answer.json(), told
    assert b"internal error" not in answer.body, told


def test_every_route_with_a_body_has_a_usual_one() -> None:
    posts = {route.path for route in ROUTES if route.method == "POST" and not route.is_admins}
    with_fields = {
        route.path for route in ROUTES if route.path in posts and (route.fields or route.bodies)
    }
    assert with_fields - BODIES.keys() == set()


@pytest.mark.timeout(budget(120, 3600))
async def test_odd_values_are_refused_or_answered_within_a_second(byte_level: Tokenizer) -> None:
    rng = seeded("odd values")
    fleet = CheckedFleet(
        model_files(byte_level, TEMPLATE),
        script=lambda request: [5] * min(request.max_tokens or 4, 8),
    )
    slowest = 0.0
    statuses: dict[int, int] = {}
    async with memory_router(fleet) as router:
        for number, (path, body) in enumerate(_odd_bodies(rng)):
            if number == budget(1_500, 10**9):
                break
            begun_s = time.perf_counter()
            answer = await router.post(path, encoded(body))
            took_s = time.perf_counter() - begun_s
            fleet.requests.clear()
            fleet.submits.clear()
            _check(answer, path, body)
            statuses[answer.status] = statuses.get(answer.status, 0) + 1
            slowest = max(slowest, took_s)
            assert took_s < MAX_S, f"{path} took {took_s:.2f} s: {encoded(body)[:300]!r}"
    print(f"{sum(statuses.values())} bodies: {statuses}; slowest {slowest * 1e3:.0f} ms")
    assert statuses[200] > 0
    assert statuses[400] > 0


@pytest.mark.parametrize("path", BODIES)
async def test_the_usual_bodies_are_answered(byte_level: Tokenizer, path: str) -> None:
    fleet = CheckedFleet(model_files(byte_level, TEMPLATE), script=lambda request: [5, 6])
    async with memory_router(fleet) as router:
        answer = await router.post(path, BODIES[path])
        assert answer.status == 200, answer.body
