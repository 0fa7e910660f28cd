"""Every input has a bound: lines, headers, paths, names, bodies, depths and numbers."""

from __future__ import annotations

import asyncio
import gzip
import tracemalloc
import zlib
from collections.abc import AsyncIterator

import pytest
from tokenizers import Tokenizer
from unit.router.router_doubles import Answer, FakeFleet, MemoryRouter, memory_router, model_files

from penstock_router.routes import base
from penstock_router.routes.table import ROUTES

MAX_BODY_BYTES = 1_000_000
POSTS = [route.canonical_path for route in ROUTES if route.method == "POST"]
JSON = {"Content-Type": "application/json"}


@pytest.fixture
async def router(fleet: FakeFleet) -> AsyncIterator[MemoryRouter]:
    settings = {"max_body_bytes": MAX_BODY_BYTES, "admin_key": "operator"}
    async with memory_router(fleet, **settings) as served:
        yield served
        # Whatever came, it serves on.
        assert (await served.complete(max_tokens=1)).status == 200


async def _raw(router: MemoryRouter, data: bytes) -> Answer:
    connection = router.connect()
    connection.send_raw(data)
    answer = await connection.read_answer()
    connection.close()
    return answer


# ---- What comes before a body ------------------------------------------------------------------


HEADS = [
    b"GET /%b HTTP/1.1\r\nHost: x\r\n\r\n" % (b"a" * 9000),
    b"GET /health?%b HTTP/1.1\r\nHost: x\r\n\r\n" % (b"a" * 9000),
    b"GET /health HTTP/1.1\r\nHost: x\r\nX-Long: %b\r\n\r\n" % (b"a" * 9000),
    b"GET /health HTTP/1.1\r\nHost: x\r\n%b: x\r\n\r\n" % (b"a" * 9000),
    b"GET /health HTTP/1.1\r\nHost: x\r\n%b\r\n" % (b"X-Many: x\r\n" * 200),
    b"GET /health HTTP/1.1\r\nHost: x\r\nX-Zero: a\0b\r\n\r\n",
    b"GET /health HTTP/1.1\r\nHost: x\r\nX Space: a\r\n\r\n",
    b"GET /health HTTP/1.1\r\nHost: x\r\n folded: a\r\n\r\n",
    b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: -1\r\n\r\n",
    b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 1_0\r\n\r\n",
    b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\n",
    b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\n"
    b"Transfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: gzip, x\r\n\r\n",
]


async def test_a_head_that_is_too_large_or_ambiguous_is_refused(router: MemoryRouter) -> None:
    for head in HEADS:
        assert (await _raw(router, head)).status == 400, head[:200]


PATHS = [
    "/../../etc/passwd",
    "/%2e%2e/%2e%2e/etc/passwd",
    "/..%2f..%2fetc%2fpasswd",
    "/console/../../../etc/passwd",
    "/console/%2e%2e%2fapp.py",
    "/console/..%5c..%5capp.py",
    "/console/index.html%00.js",
    "/static/console/index.html",
    "/v1/models/../../etc/passwd",
    "/v1/models/..%2f..%2f..%2fetc%2fpasswd",
    "/v1/models/%00",
    "/v1/models/" + "a" * 7000,
    "/v1/models/%ff%fe",
    "/v1/responses/..%2f..%2fetc%2fpasswd",
    "/v1/responses/x'%20OR%20'1'='1",
    "/v1/responses/%00",
    "//etc/passwd",
    "/admin/../v1/models",
    "/v1/../admin/shards",
]


async def test_no_path_leads_where_no_route_does(router: MemoryRouter) -> None:
    for path in PATHS:
        answer = await router.get(path)
        assert answer.status in (400, 401, 403, 404), path
        assert len(answer.body) < 1000, path
        assert b"root:" not in answer.body
        assert b"import " not in answer.body


@pytest.mark.parametrize("path", ["..%2fv1", "a:1%00", "x" * 5000, "[::1]%0d%0aX:1", "%ff:1"])
async def test_no_name_of_a_shard_does_either(router: MemoryRouter, path: str) -> None:
    headers = {"Authorization": "Bearer operator"}
    answer = await router.request("DELETE", f"/admin/shards/{path}", headers=headers)
    assert answer.status in (400, 404)
    assert len(answer.body) < 1000


MODELS = [
    *("../../etc/passwd", "/etc/passwd", "a/../../b", "\0", "fake-model\0", "~", "file:///etc"),
    *("a\r\nX-Injected: 1", "{{ 7 * 7 }}", "' OR 1=1 --", "😀" * 100, "a" * 50_000),
]


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/v1/embeddings"])
async def test_a_models_name_is_looked_up_among_those_served_and_no_more(
    router: MemoryRouter, path: str
) -> None:
    for model in MODELS:
        body = {"model": model, "prompt": "x", "input": "x"}
        answer = await router.post(path, {**body, "messages": [{"role": "user", "content": "x"}]})
        assert answer.status in (400, 404), model
        assert len(answer.body) < 2000, model
        assert "x-injected" not in answer.headers


# ---- Bodies ------------------------------------------------------------------------------------

BODIES = {
    "arrays": b"[" * 30_000 + b"]" * 30_000,
    "objects": b'{"a":' * 9_000 + b"1" + b"}" * 9_000,
    "deep field": b'{"prompt": %b%b}' % (b"[" * 5000, b"]" * 5000),
    "deep unknown": b'{"x": %b%b, "prompt": 5}' % (b"[" * 900, b"]" * 900),
    "huge number": b'{"prompt": "x", "max_tokens": 1e400}',
    "many digits": b'{"prompt": "x", "max_tokens": %b}' % (b"9" * 50_000),
    "many decimals": b'{"prompt": "x", "temperature": 0.%b}' % (b"1" * 50_000 + b"e999999999"),
    "nan": b'{"prompt": "x", "temperature": NaN}',
    "lone surrogate": b'{"prompt": "\\ud800", "model": 5}',
    "not UTF-8": b'{"prompt": "\xff\xfe"}',
    "zero bytes": b"\0" * 1000,
    "a string": b'"' + b"a" * 50_000 + b'"',
    "unfinished": b'{"prompt": "',
    "empty": b"",
}


@pytest.mark.parametrize("name", BODIES)
async def test_a_body_that_is_deep_huge_or_broken_is_a_4xx_in_few_words_on_every_route(
    router: MemoryRouter, name: str
) -> None:
    for path in POSTS:
        answer = await router.request("POST", path.replace("{id}", "x"), BODIES[name], JSON)
        assert 400 <= answer.status < 500, path
        assert len(answer.body) < 1000, path


@pytest.mark.parametrize(
    "kind",
    [
        "multipart/form-data; boundary=x",
        "application/x-www-form-urlencoded",
        "text/plain",
        "application/xml",
        "application/x-python-pickle",
        "a" * 5000,
    ],
)
async def test_bodies_are_json_and_nothing_else(router: MemoryRouter, kind: str) -> None:
    body = b'--x\r\nContent-Disposition: form-data; name="prompt"\r\n\r\nx\r\n--x--\r\n'
    answer = await router.request("POST", "/v1/completions", body, {"Content-Type": kind})
    assert answer.status == 400
    message = answer.error["message"]
    assert message.startswith("Content-Type must be application/json, not ")
    assert message.endswith("; with curl: -H 'Content-Type: application/json'")
    assert len(answer.body) < 1000


def _deflated(data: bytes) -> bytes:
    return zlib.compress(data)


@pytest.mark.parametrize(("coding", "pack"), [("gzip", gzip.compress), ("deflate", _deflated)])
async def test_a_small_body_that_unpacks_to_a_large_one_is_refused_and_not_held(
    router: MemoryRouter, coding: str, pack: object
) -> None:
    packed = pack(b" " * 50 * MAX_BODY_BYTES)  # type: ignore[operator]
    assert len(packed) < MAX_BODY_BYTES
    tracemalloc.start()
    try:
        headers = {**JSON, "Content-Encoding": coding}
        answer = await router.request("POST", "/v1/completions", packed, headers)
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert answer.status == 413
    assert peak_bytes < 20 * MAX_BODY_BYTES


async def test_a_body_in_a_coding_of_another_kind_is_refused(router: MemoryRouter) -> None:
    for coding in ("br", "zstd", "compress", "gzip, gzip", "x" * 1000):
        answer = await router.request(
            "POST", "/v1/completions", b"{}", {**JSON, "Content-Encoding": coding}
        )
        assert answer.status == 400


async def test_a_body_that_trickles_in_is_ended_although_it_never_pauses(
    router: MemoryRouter, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(base, "_MAX_PAUSE_S", 0.3)
    connection = router.connect()
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 900000\r\n\r\n"
    connection.send_raw(head)
    answering = asyncio.create_task(connection.read_answer())
    async with asyncio.timeout(10):
        while not answering.done():
            connection.send_raw(b" ")
            await asyncio.sleep(0.01)
    answer = await answering
    assert (answer.status, answer.error["type"]) == (504, "TimeoutError")
    assert "too slowly" in answer.error["message"]
    connection.close()


async def test_one_keys_unfinished_bodies_do_not_keep_others_from_sending_theirs(
    fleet: FakeFleet,
) -> None:
    head = (
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 33000000\r\n"
        b"Authorization: Bearer greedy\r\n\r\n"
    )
    async with memory_router(fleet, api_key="greedy", admin_key="other") as router:
        greedy = [router.connect() for _ in range(20)]
        for connection in greedy:
            connection.send_raw(head)
            connection.send_raw(b" " * 16_775_000)
            await asyncio.sleep(0.02)
        body = b'{"prompt": "x"}' + b" " * 70_000
        other = {"Authorization": "Bearer other"}
        assert (await router.post("/v1/completions", body, **other)).status == 200
        refused = await greedy[-1].read_answer()
        assert refused.status == 429
        assert "bytes of yours are in memory" in refused.error["message"]
        for connection in greedy:
            connection.close()


async def test_long_texts_in_each_place_are_refused_by_their_length(
    byte_level: Tokenizer,
) -> None:
    async with memory_router(FakeFleet(model_files(byte_level))) as router:
        long = "a" * 20_000_000
        for field in ("user", "stop", "suffix"):
            answer = await router.complete("x", **{field: long})
            assert answer.status in (200, 400)
            assert len(answer.body) < 2000
        answer = await router.complete(long)
        assert answer.status == 400
        assert len(answer.body) < 1000
