"""The session of a request, by whichever name its client gives it."""

from __future__ import annotations

import json
from typing import Any

import pytest
from support.router_doubles import (
    INFO,
    FakeFleet,
    byte_level_tokenizer,
    memory_router,
    model_files,
)

from penstock_router.errors import BadRequest
from penstock_router.server.parts import ROUTER
from penstock_router.sessions import CLIENTS_HEADERS, session_of, session_of_metadata

ID = "57a121ec-f78c-48c3-a745-e3036a3ecc33"
USER = json.dumps({"device_id": "d", "account_uuid": "", "session_id": ID})
SAID = {"model": INFO.model, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}
INPUT = {"input": "hi", "max_output_tokens": 2, "store": False}


@pytest.mark.parametrize("header", CLIENTS_HEADERS)
def test_a_session_may_be_named_in_any_client_s_header(header: str) -> None:
    assert session_of({header: ID}, "") == ID
    # One that is too long is not penstock's to refuse.
    assert session_of({header: "x" * 257}, "") == ""
    assert session_of({header: ""}, "") == ""


def test_a_session_is_text_that_can_be_shown() -> None:
    for odd in ("caf\udce9", "a\x00b", "a\nb", "\ud800"):
        assert session_of({"x-session-id": odd, "thread-id": "t"}, "") == "t"
        assert session_of_metadata("metadata", {"user_id": f"user_1_session_{odd}"}) == ""
        with pytest.raises(BadRequest, match="x-penstock-session: has characters"):
            session_of({"x-penstock-session": odd}, "")
    assert session_of({"x-session-id": "caf\u00e9 1"}, "") == "caf\u00e9 1"


def test_penstock_s_header_counts_before_the_body_and_that_before_clients_headers() -> None:
    headers = {"x-penstock-session": "own", "x-session-id": "client's"}
    assert session_of(headers, "body's") == "own"
    headers["x-penstock-session"] = ""
    assert session_of(headers, "body's") == "body's"
    del headers["x-penstock-session"]
    assert session_of(headers, "body's") == "body's"
    assert session_of(headers, "") == "client's"
    assert session_of({"session-id": "whole", "thread-id": "one agent's"}, "") == "one agent's"


@pytest.mark.parametrize(
    ("metadata", "session"),
    [
        ({"user_id": USER}, ID),
        ({"user_id": f"user_0a1b_account_9_session_{ID}"}, ID),
        ({"user_id": f"user_0a1b_account__session_{ID}"}, ID),
        ({"user_id": "me"}, ""),
        ({"user_id": '{"device_id":"1"}'}, ""),
        ({"user_id": '{"session_id":7}'}, ""),
        ({"user_id": json.dumps({"session_id": "x" * 257})}, ""),
        ({"user_id": "[" * 1000}, ""),
        ({"user_id": "[]"}, ""),
        ({"user_id": '{"session_id":"' + "x" * 10_000}, ""),
        ({"user_id": None}, ""),
        ({"user_id": {"session_id": ID}}, ""),
        ({}, ""),
        ("me", ""),
        (None, ""),
    ],
)
def test_claude_code_s_metadata_name_a_session_or_none(metadata: Any, session: str) -> None:
    assert session_of_metadata("metadata", metadata) == session


@pytest.mark.parametrize(
    ("route", "body", "headers"),
    [
        ("/v1/messages", {**SAID, "metadata": {"user_id": USER}}, {}),
        ("/v1/messages", {**SAID, "metadata": {"user_id": USER}}, {"x-session-id": "another"}),
        ("/v1/messages", SAID, {"X-Claude-Code-Session-Id": ID}),
        ("/v1/messages", {**SAID, "session_id": ID, "metadata": {"user_id": "me"}}, {}),
        ("/v1/responses", {**INPUT, "prompt_cache_key": ID}, {"session_id": "another"}),
        ("/v1/responses", INPUT, {"Session-Id": ID}),
        ("/v1/chat/completions", SAID, {"X-Session-ID": ID}),
        ("/v1/chat/completions", {**SAID, "session_id": ID}, {}),
        ("/v1/chat/completions", {**SAID, "prompt_cache_key": ID}, {}),
        ("/v1/completions", {"prompt": "hi", "max_tokens": 2}, {"x-dynamo-session-id": ID}),
    ],
)
async def test_the_session_reaches_the_fleet_and_the_record(
    route: str, body: dict[str, Any], headers: dict[str, str]
) -> None:
    fleet = FakeFleet(model_files(byte_level_tokenizer()))
    async with memory_router(fleet) as router:
        sessions: list[str] = []
        router.app[ROUTER].records.on_end.append(lambda record: sessions.append(record.session))
        answer = await router.post(route, body, **headers)
        assert answer.status == 200, answer.json()
        (request,) = fleet.requests
        assert request.session == ID
    assert sessions == [ID]
