"""The headers that every answer has, and the origins whose pages may call the API."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
from support.router_doubles import FakeFleet, MemoryRouter, memory_router, model_files
from tokenizers import Tokenizer

from penstock_router.routes.table import ROUTES

SECURITY = {
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "server": "penstock",
}
PAGE = "https://chat.example.com"


async def _head(
    router: MemoryRouter, method: str, path: str, body: bytes, headers: Mapping[str, str]
) -> tuple[int, dict[str, str]]:
    connection = router.connect()
    connection.send(method, path, body, {"Content-Type": "application/json", **headers})
    found = await connection.read_head()
    connection.close()
    return found


@pytest.mark.parametrize("route", ROUTES, ids=lambda route: f"{route.method} {route.path}")
async def test_every_route_answers_with_them_and_is_framed_by_nobody(
    router: MemoryRouter, route: object
) -> None:
    path = route.canonical_path.replace("{id}", "x")  # type: ignore[attr-defined]
    _, headers = await _head(router, route.method, path, b"{}", {})  # type: ignore[attr-defined]
    assert SECURITY.items() <= headers.items()
    assert "frame-ancestors 'none'" in headers["content-security-policy"]
    assert headers["cache-control"] in ("no-store", "no-cache")


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [("GET", "/nothing", 404), ("PUT", "/health", 405), ("POST", "/v1/completions", 400)],
)
async def test_errors_say_them_too(
    router: MemoryRouter, method: str, path: str, status: int
) -> None:
    found, headers = await _head(router, method, path, b"[", {})
    assert found == status
    assert SECURITY.items() <= headers.items()
    assert headers["cache-control"] == "no-store"


async def test_a_stream_says_them_and_is_kept_by_no_cache(router: MemoryRouter) -> None:
    body = b'{"prompt": "x", "stream": true, "max_tokens": 2}'
    status, headers = await _head(router, "POST", "/v1/completions", body, {})
    assert (status, headers["content-type"]) == (200, "text/event-stream; charset=utf-8")
    assert SECURITY.items() <= headers.items()
    assert headers["cache-control"] == "no-store"
    assert headers["x-accel-buffering"] == "no"


@pytest.mark.parametrize(
    "sent", [b"\x16\x03\x01\x02\x00\x01\r\n\r\n", b"GET / HTTP/9.9\r\n\r\n", b"\0\r\n\r\n"]
)
async def test_what_is_no_http_learns_nothing_of_what_serves_here(
    router: MemoryRouter, sent: bytes
) -> None:
    connection = router.connect()
    connection.send_raw(sent)
    status, headers = await connection.read_head()
    assert status == 400
    assert headers["server"] == "penstock"
    body = b"".join([part async for part in connection.chunks(headers)])
    assert b"aiohttp" not in body
    assert b"Python" not in body
    connection.close()


# ---- Other origins -----------------------------------------------------------------------------


def _cors(headers: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in headers.items() if name.startswith("access-control")}


def _preflight(origin: str) -> dict[str, str]:
    return {
        "Origin": origin,
        "Access-Control-Request-Method": "POST",
        "Access-Control-Request-Headers": "authorization,content-type,x-penstock-session",
    }


async def test_without_the_flag_no_other_origin_is_let_in(router: MemoryRouter) -> None:
    answer = await router.get("/v1/models", Origin=PAGE)
    assert (answer.status, _cors(answer.headers)) == (200, {})
    status, headers = await _head(router, "OPTIONS", "/v1/completions", b"", _preflight(PAGE))
    assert (status, _cors(headers)) == (405, {})


async def test_pages_of_an_origin_that_is_named_may_call_the_api(byte_level: Tokenizer) -> None:
    fleet = FakeFleet(model_files(byte_level))
    settings = {"cors_origins": (PAGE, "http://localhost:3000"), "api_key": "sesame"}
    async with memory_router(fleet, **settings) as router:
        status, headers = await _head(router, "OPTIONS", "/v1/completions", b"", _preflight(PAGE))
        assert status == 204
        assert headers["access-control-allow-origin"] == PAGE
        assert "POST" in headers["access-control-allow-methods"]
        assert headers["access-control-allow-headers"].startswith("authorization,content-type")
        assert headers["vary"] == "Origin"
        body = b'{"prompt": "x", "stream": true, "max_tokens": 2}'
        given = {"Origin": PAGE, "Authorization": "Bearer sesame"}
        status, headers = await _head(router, "POST", "/v1/completions", body, given)
        assert (status, headers["access-control-allow-origin"]) == (200, PAGE)
        # A page is told why it was refused.
        answer = await router.get("/v1/models", Origin=PAGE)
        assert (answer.status, answer.headers["access-control-allow-origin"]) == (401, PAGE)


@pytest.mark.parametrize("origin", ["https://evil.example", PAGE + ".evil", "null", ""])
async def test_pages_of_others_may_not(byte_level: Tokenizer, origin: str) -> None:
    fleet = FakeFleet(model_files(byte_level))
    async with memory_router(fleet, cors_origins=(PAGE,)) as router:
        _, headers = await _head(router, "OPTIONS", "/v1/models", b"", _preflight(origin))
        assert "access-control-allow-origin" not in headers
        assert headers["vary"] == "Origin"


async def test_all_origins_may_be_let_in_but_never_to_what_is_the_operators(
    byte_level: Tokenizer,
) -> None:
    fleet = FakeFleet(model_files(byte_level))
    async with memory_router(fleet, cors_origins=("*",), admin_key="operator") as router:
        answer = await router.get("/v1/models", Origin=PAGE)
        assert answer.headers["access-control-allow-origin"] == "*"
        for path in ("/admin/shards", "/console/feed"):
            assert (await router.get(path, Origin=PAGE)).status == 401


async def test_no_route_that_users_are_refused_is_open_to_pages_of_other_origins(
    byte_level: Tokenizer,
) -> None:
    settings = {"cors_origins": ("*",), "api_key": "sesame", "admin_key": "operator"}
    given = {"Origin": PAGE, "Authorization": "Bearer sesame"}
    refused = set()
    async with memory_router(FakeFleet(model_files(byte_level)), **settings) as router:
        for route in router.app.router.routes():
            assert route.resource is not None
            path = route.resource.canonical.replace("{", "").replace("}", "")
            status, headers = await _head(router, route.method, path, b"{}", given)
            admin = {"Authorization": "Bearer operator"}
            # What is refused to everybody says so to whoever asks.
            for_admins, _ = await _head(router, route.method, path, b"{}", admin)
            operators = status == 403 != for_admins
            assert bool(_cors(headers)) != (operators or path.startswith("/console")), path
            _, headers = await _head(router, "OPTIONS", path, b"", _preflight(PAGE))
            assert not operators or not _cors(headers), path
            refused |= {path} if operators else set()
    assert {"/admin/shards", "/v1/load_lora_adapter", "/v1/unload_lora_adapter"} <= refused
    assert {route.path for route in ROUTES if route.is_admins} <= refused
