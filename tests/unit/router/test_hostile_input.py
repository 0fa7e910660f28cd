"""Every input has a bound: lines, headers, paths, names, bodies, depths and numbers."""

from __future__ import annotations

import asyncio
import gzip
import random
import threading
import time
import tracemalloc
import zlib
from collections.abc import AsyncIterator

import pytest
from support.router_doubles import Answer, FakeFleet, MemoryRouter, memory_router, model_files
from tokenizers import Tokenizer

from penstock_router.routes.table import ROUTES
from penstock_router.server import read_body
from penstock_router.server.content_coding import Inflater

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
    b"GET /health HTTP/1.1\r\nHost: x\r\nHost: y\r\n\r\n",
    b"GET /health HTTP/1.1\r\n\r\n",
    b"GET /health HTTP/1.1\r\nHost: x\r\nX-A: b\r\n folded: a\r\n\r\n",
    b"GET /health HTTP/1.1\nHost: x\n\n",
    b"GET /health HTTP/1.1\r\nHost : x\r\n\r\n",
    b"GET health HTTP/1.1\r\nHost: x\r\n\r\n",
    b"GET /health\r\nHost: x\r\n\r\n",
    b"GET /health HTTP/0.9\r\nHost: x\r\n\r\n",
    b"GET /health HTTP/2.0\r\nHost: x\r\n\r\n",
    b"GET /health HTTP/1.2\r\nHost: x\r\n\r\n",
    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
    b"nonsense\r\n\r\n",
    *(
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %b\r\n\r\n{}" % length
        for length in (b"+2", b"0x2", b"2 2", b"2, 2", b"2\r\nContent-Length: 2", b"9" * 30, b"")
    ),
    *(
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: %b\r\n\r\n"
        b"2\r\n{}\r\n0\r\n\r\n" % coding
        for coding in (b"gzip, chunked", b"chunked, chunked", b"identity", b"chunked, identity")
    ),
    b"POST /v1/completions HTTP/1.0\r\nTransfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n\r\n",
]


@pytest.mark.parametrize("head", HEADS, ids=range(len(HEADS)))
async def test_a_head_that_is_too_large_or_ambiguous_is_refused_as_all_else_is(
    router: MemoryRouter, head: bytes
) -> None:
    connection = router.connect()
    connection.send_raw(head)
    answer = await connection.read_answer()
    assert answer.status == 400
    assert set(answer.error) == {"message", "type", "param", "code"}
    assert "\n" not in answer.error["message"]
    assert len(answer.body) < 1000
    assert answer.headers["x-request-id"]
    assert answer.headers["x-content-type-options"] == "nosniff"
    # Where the next request begins is not known.
    assert await connection.reader.read() == b""
    assert connection.transport.closed


@pytest.mark.parametrize(
    "head",
    [
        b"GET http://elsewhere:1/health HTTP/1.1\r\nHost: x\r\n\r\n",
        b"GET /health HTTP/1.1\r\nHost: x\r\nContent-Length:   0  \r\n\r\n",
        b"GET /health HTTP/1.0\r\n\r\n",
        b"GET /health HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: Chunked\r\n\r\n0\r\n\r\n",
    ],
)
async def test_a_head_that_is_unusual_but_clear_is_answered(
    router: MemoryRouter, head: bytes
) -> None:
    assert (await _raw(router, head)).status == 200


# ---- Expect: 100-continue ----------------------------------------------------------------------


async def _first_line(router: MemoryRouter, path: str, **headers: str) -> bytes:
    connection = router.connect()
    lines = [f"POST {path} HTTP/1.1", "Host: x", "Expect: 100-continue"]
    lines += [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
    connection.send_raw("\r\n".join([*lines, "", ""]).encode())
    line = await connection.reader.readline()
    connection.close()
    return line


async def test_who_waits_to_be_told_is_told_to_send_only_a_body_that_is_wanted(
    fleet: FakeFleet,
) -> None:
    good = {"Authorization": "Bearer secret", "Content_Length": "15"}
    async with memory_router(fleet, api_key="secret", max_body_bytes=1000) as router:
        for path, headers, told in (
            ("/v1/completions", good, b"100"),
            ("/v1/completions", {**good, "Authorization": "Bearer other"}, b"401"),
            ("/v1/completions", {**good, "Content_Length": "1001"}, b"413"),
            ("/v1/completions", {**good, "Content_Type": "text/plain"}, b"400"),
            ("/v1/completions", {**good, "Content_Encoding": "br"}, b"400"),
            ("/v1/nothing", good, b"404"),
            ("/nothing", good, b"404"),
            ("/v1/models", good, b"405"),
        ):
            assert (await _first_line(router, path, **headers)).split()[1] == told, (path, headers)


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
        assert answer.error["message"].startswith("Content-Encoding: ")
        assert answer.error["message"].endswith(" must be gzip, deflate or identity")
        assert len(answer.body) < 1000


def _raw_deflated(data: bytes) -> bytes:
    packer = zlib.compressobj(wbits=-15)
    return packer.compress(data) + packer.flush()


BODY = b'{"prompt": "Hello"}'
PACKED: list[tuple[str, bytes, int]] = [
    ("identity", BODY, 200),
    ("gzip", gzip.compress(BODY), 200),
    ("X-GZIP", gzip.compress(BODY), 200),
    ("deflate", zlib.compress(BODY), 200),
    ("deflate", _raw_deflated(BODY), 200),
    ("gzip", gzip.compress(BODY[:5]) + gzip.compress(b"") + gzip.compress(BODY[5:]), 200),
    ("gzip", gzip.compress(b"") * 3000 + gzip.compress(BODY), 200),
    ("gzip", gzip.compress(BODY + b" " * 900_000), 200),
    ("deflate", zlib.compress(BODY + b" " * 900_000), 200),
    ("gzip", gzip.compress(BODY) + b"\0", 400),
    ("gzip", gzip.compress(BODY) + gzip.compress(b" ")[:-1], 400),
    ("gzip", gzip.compress(BODY)[:-8] + b"\0" * 8, 400),
    ("gzip", gzip.compress(BODY)[:-1], 400),
    ("gzip", gzip.compress(BODY)[:5], 400),
    ("gzip", zlib.compress(BODY), 400),
    ("gzip", b"", 400),
    ("gzip", BODY, 400),
    ("deflate", zlib.compress(BODY) + b"\0", 400),
    ("deflate", zlib.compress(BODY)[:-1], 400),
    ("deflate", b"\xff" * 100, 400),
]


@pytest.mark.parametrize(("coding", "packed", "status"), PACKED, ids=range(len(PACKED)))
@pytest.mark.parametrize("piece_bytes", [1_000_000, 7])
async def test_a_packed_body_is_unpacked_in_whatever_pieces_it_comes(
    router: MemoryRouter, coding: str, packed: bytes, status: int, piece_bytes: int
) -> None:
    connection = router.connect()
    head = f"Host: x\r\nContent-Encoding: {coding}\r\nContent-Length: {len(packed)}\r\n\r\n"
    connection.send_raw(f"POST /v1/completions HTTP/1.1\r\n{head}".encode())
    for start in range(0, len(packed), piece_bytes):
        connection.send_raw(packed[start : start + piece_bytes])
        await asyncio.sleep(0)
    answer = await connection.read_answer()
    assert answer.status == status
    assert b"\n" not in answer.body
    connection.close()


async def test_a_long_body_is_unpacked_off_the_loop(
    router: MemoryRouter, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads: set[int] = set()
    inflate = Inflater.inflate

    def recorded(self: Inflater, max_bytes: int) -> bytes:
        threads.add(threading.get_ident())
        return inflate(self, max_bytes)

    monkeypatch.setattr(Inflater, "inflate", recorded)
    headers = {**JSON, "Content-Encoding": "gzip"}
    for body, here in (
        (BODY, True),
        (BODY + random.Random(1).randbytes(20_000).hex().encode(), False),
    ):
        threads.clear()
        await router.request("POST", "/v1/completions", gzip.compress(body), headers)
        assert (threads == {threading.get_ident()}) == here


@pytest.mark.parametrize("path", ["/v1/completions", "/nothing"])
async def test_a_packed_body_that_nobody_asked_for_is_not_unpacked(
    fleet: FakeFleet, path: str
) -> None:
    packed = gzip.compress(b" " * 10_000_000) * 50
    head = f"Host: x\r\nContent-Encoding: gzip\r\nContent-Length: {len(packed) + 1}\r\n\r\n"
    async with memory_router(fleet, api_key="secret") as router:
        connection = router.connect()
        begun_s = time.process_time()
        connection.send_raw(f"POST {path} HTTP/1.1\r\n{head}".encode() + packed)
        answer = await connection.read_answer()
        assert answer.status in (401, 404)
        assert answer.headers["connection"] == "close"
        connection.send_raw(b" ")
        await asyncio.sleep(0.1)
        # Half a gigabyte takes more than that.
        assert time.process_time() - begun_s < 0.3
        connection.close()


@pytest.mark.parametrize("first_bytes", [0, 500_000])
async def test_a_body_that_trickles_in_is_ended_whatever_came_of_it_in_time(
    router: MemoryRouter, monkeypatch: pytest.MonkeyPatch, first_bytes: int
) -> None:
    monkeypatch.setattr(read_body, "_MAX_PAUSE_S", 0.3)
    connection = router.connect()
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 900000\r\n\r\n"
    connection.send_raw(head + b" " * first_bytes)
    answering = asyncio.create_task(connection.read_answer())
    async with asyncio.timeout(10):
        while not answering.done():
            connection.send_raw(b" ")
            await asyncio.sleep(0.01)
    answer = await answering
    assert (answer.status, answer.error["type"]) == (504, "TimeoutError")
    assert "too slowly" in answer.error["message"]
    connection.close()


async def test_a_body_over_a_slow_line_arrives(
    router: MemoryRouter, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(read_body, "_MAX_PAUSE_S", 0.3)
    connection = router.connect()
    size, body = 16_000, BODY.ljust(16_000)
    connection.send_raw(
        f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {size}\r\n\r\n".encode()
    )
    # 32 kB a second.
    for start in range(0, size, 3200):
        await asyncio.sleep(0.1)
        connection.send_raw(body[start : start + 3200])
    assert (await connection.read_answer()).status == 200
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
