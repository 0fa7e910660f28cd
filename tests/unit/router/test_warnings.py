"""Fields that have no effect are named in a header of the answer, wherever a route takes a body."""

from __future__ import annotations

import logging
from typing import Any

import pytest
from support.router_doubles import (
    INFO,
    FakeFleet,
    MemoryRouter,
    memory_router,
    model_files,
)
from tokenizers import Tokenizer

from penstock_router.routes.warnings import HEADER

TURNS = [{"role": "user", "content": "The fox"}]
BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "a"},
    "/v1/chat/completions": {"messages": TURNS},
    "/v1/messages": {"model": INFO.model, "max_tokens": 4, "messages": TURNS},
    "/v1/responses": {"input": "a"},
    "/generate": {"inputs": "a", "parameters": {"max_new_tokens": 4}},
    "/api/generate": {"model": INFO.model, "prompt": "a", "stream": False},
    "/api/chat": {"model": INFO.model, "messages": TURNS, "stream": False},
}


@pytest.mark.parametrize("path", BODIES)
async def test_an_unknown_field_is_named_in_the_answer(router: MemoryRouter, path: str) -> None:
    body = BODIES[path]
    plain = await router.post(path, body)
    warned = await router.post(path, {**body, "nonsense": 1, "nothing": None})
    assert (plain.status, warned.status) == (200, 200), warned.body
    assert HEADER not in plain.headers
    assert warned.headers[HEADER] == "unknown fields without effect: 'nonsense'"


async def test_what_a_header_cannot_hold_is_escaped_and_cut(router: MemoryRouter) -> None:
    odd = {f"ü\r\nX-Evil: {'y' * 200}{number}": 1 for number in range(100)}
    warned = await router.complete(**odd)
    assert warned.status == 200
    assert "x-evil" not in warned.headers
    assert warned.headers[HEADER].isascii()
    assert len(warned.headers[HEADER]) <= 2000


async def test_a_stream_warns_too(router: MemoryRouter) -> None:
    answer = await router.complete(stream=True, nonsense=1)
    assert answer.headers[HEADER] == "unknown fields without effect: 'nonsense'"


async def test_a_warning_is_logged_once(
    router: MemoryRouter, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "penstock_router.routes.warnings"):
        for _ in range(3):
            await router.complete(nonsense=1)
    text = "POST /v1/completions: unknown fields without effect: 'nonsense'"
    assert [record.getMessage() for record in caplog.records] == [text]


async def test_the_context_bounds_max_tokens_where_the_operator_says_so(
    byte_level: Tokenizer,
) -> None:
    limit = INFO.max_model_len
    async with memory_router(FakeFleet(model_files(byte_level))) as router:
        refused = await router.complete(max_tokens=limit)
        assert refused.status == 400
        assert f"you requested {limit} output tokens" in refused.error["message"]
    async with memory_router(FakeFleet(model_files(byte_level)), bound_max_tokens=True) as router:
        assert (await router.complete(max_tokens=limit)).status == 200
        [request] = router.fleet.requests
        assert request.max_tokens == limit - len(request.prompt_token_ids)
        assert (await router.complete("fox " * limit, max_tokens=1)).status == 400


@pytest.mark.parametrize(
    ("method", "path", "form"),
    [
        ("POST", "/api/nothing", {"error": "no such route: POST /api/nothing"}),
        ("GET", "/api/chat", {"error": "wrong method: GET /api/chat; allowed: POST"}),
        (
            "GET",
            "/v1/messages/x",
            {
                "type": "error",
                "error": {
                    "type": "not_found_error",
                    "message": "no such route: GET /v1/messages/x",
                },
            },
        ),
    ],
)
async def test_a_path_without_a_route_is_refused_in_the_form_of_its_api(
    router: MemoryRouter, method: str, path: str, form: object
) -> None:
    answer = await router.request(method, path)
    assert answer.status in (404, 405)
    shown = answer.json()
    # The id of the request, in the form that has it.
    assert isinstance(shown.pop("request_id", ""), str)
    assert shown == form
