"""A published way to start such servers and to ask them, flag for flag and field for field."""

from __future__ import annotations

import asyncio
from typing import Any

import aiohttp
import pytest
from integration.conftest import Served


@pytest.fixture
def url(toy: Served) -> str:
    """The URL of a server that is started with the published flags."""
    return toy.url


async def ask(session: aiohttp.ClientSession, **fields: Any) -> tuple[int, Any]:
    body = {
        "messages": [{"role": "user", "content": "Tell me about the sea."}],
        "temperature": 0.7,
        "length_penalty": 1.0,
        "max_tokens": 100,
        "min_tokens": 100,
        "is_latency_sensitive": "True",
        "slo": 0.05,
        **fields,
    }
    async with session.post("/v1/chat/completions", json=body) as response:
        return response.status, await response.json()


async def test_the_request_runs_as_it_is_written(url: str) -> None:
    async with aiohttp.ClientSession(url) as session:
        async with session.get("/v1/models") as response:
            model = (await response.json())["data"][0]["id"]
        status, body = await ask(session, model=model)
    assert status == 200, body
    [choice] = body["choices"]
    assert body["usage"]["completion_tokens"] == 100
    assert choice["finish_reason"] == "length"
    assert choice["message"]["content"]


async def test_many_of_them_with_and_without_an_objective_run_beside_each_other(url: str) -> None:
    objectives: list[dict[str, Any]] = [
        {},
        {"is_latency_sensitive": "False", "slo": 0.5},
        {"is_latency_sensitive": True},
        {"is_latency_sensitive": None, "slo": None},
    ]
    async with aiohttp.ClientSession(url) as session:
        asked = [ask(session, **objectives[number % 4]) for number in range(12)]
        for status, body in await asyncio.gather(*asked):
            assert (status, body["usage"]["completion_tokens"]) == (200, 100)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("length_penalty", 1.5),
        ("slo", 0),
        ("slo", 1e300),
        ("is_latency_sensitive", "yes"),
        ("min_tokens", 101),
        ("allowed_token_ids", [4_000_000]),
        ("logit_bias", {"4000000": 1}),
        ("stop_token_ids", [4_000_000]),
    ],
)
async def test_what_is_out_of_bounds_is_refused_by_its_own_name(
    url: str, field: str, value: object
) -> None:
    async with aiohttp.ClientSession(url) as session:
        status, body = await ask(session, **{field: value})
        assert (status, body["error"]["param"]) == (400, field)
        assert field in body["error"]["message"]
        # And the next one works.
        assert (await ask(session, max_tokens=2, min_tokens=0))[0] == 200
