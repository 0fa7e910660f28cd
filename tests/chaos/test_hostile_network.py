"""A router and a shard on a hostile network: everything is refused or ended, and nothing changes
for those who ask properly.
"""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import random
import statistics
import time
import zlib
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import grpc
import pytest
from support.budget import budget, seeded
from support.certificates import Authority
from support.hostile import (
    MARK,
    Prober,
    Usage,
    echo,
    garbage,
    http_post,
    many,
    messages,
    nested,
    send,
    status_of,
)
from support.processes import Router, Service, Shard, running, wait_until

from penstock_client import GenerationRequest, ShardClient
from penstock_proto import shard_pb2 as pb

_KEY = "a-key-that-no-log-may-show"
# A server that goes on with a connection does not end it.
_ONCE = ("Connection: close",)
_BEARER = f"Authorization: Bearer {_KEY}"
_HEADER_TIMEOUT_S = 1.0
_MAX_BODY_BYTES = 4 * 2**20
# What allocators keep of what was free again, and the interpreters' own noise: most was 8 MB, of
# 2,500 TLS connections. Of what the soak opens to one port it is a few kB each,
# and none could leave less than that behind.
_GROWTH_MB = 24.0
# Of answers that take a hundredth of it when the machine has nothing else to do.
_MEDIAN_S = 1.0


@dataclass
class Site:
    """Two pairs, one in the clear and one over TLS; the second only for what TLS changes."""

    router: Router
    shard: Shard
    tls_router: Router
    tls_shard: Shard
    lines: dict[Service, int] = field(default_factory=dict)
    growth_mb: float = _GROWTH_MB

    @property
    def services(self) -> tuple[Service, ...]:
        return (self.router, self.shard, self.tls_router, self.tls_shard)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    folder = tmp_path_factory.mktemp("hostile")
    authority = Authority(folder, "a")
    # Of the router and of the shard: to both it is a server's and a client's.
    pair = authority.issue("127.0.0.1")
    of_shards = ("--api-key", _KEY, "--step-ms", "2", "--max-num-seqs", "64")
    shard = Shard(folder / "shard", *of_shards)
    tls_shard = Shard(
        folder / "tls-shard",
        *(*of_shards, *pair.server_flags, "--tls-client-ca-file", str(authority.file)),
        tls=authority.tls(pair),
    )
    of_routers = (
        *("--api-key", _KEY, "--header-timeout-s", str(_HEADER_TIMEOUT_S)),
        *("--max-body-bytes", str(_MAX_BODY_BYTES)),
    )
    router = Router(folder / "router", [shard.address], *of_routers)
    tls_router = Router(
        folder / "tls-router",
        [tls_shard.address],
        *(*of_routers, *pair.server_flags, "--shard-tls-ca-file", str(authority.file)),
        *("--shard-tls-cert-file", str(pair.cert), "--shard-tls-key-file", str(pair.key)),
    )
    made = Site(router, shard, tls_router, tls_shard)
    with running(shard, tls_shard, router, tls_router):
        for each in (router, tls_router):
            # What checks constraints starts once a shard can serve.
            body = {"prompt": "x", "max_tokens": 1, "guided_regex": "[a-z]"}
            bearer = {"Authorization": f"Bearer {_KEY}"}
            assert each.ask("/v1/completions", body, bearer)[0] == 200
        yield made


@pytest.fixture
async def unharmed(site: Site) -> AsyncIterator[Site]:
    """The service, asked all the while; looked at after what happens to it."""
    site.growth_mb = _GROWTH_MB
    prober = Prober(site.router.url, {"Authorization": f"Bearer {_KEY}"})
    # What is made once is made now: a text process takes long bodies.
    await send(site.router.address, http_post(nested(100_000), _BEARER, *_ONCE), wait_s=10)
    async with prober.asking():
        before = {service: Usage.of(service) for service in site.services}
        yield site
    print(prober.summary())
    assert statistics.median(prober.took_s) < _MEDIAN_S
    for service, was in before.items():
        assert service.process.poll() is None

        def fds_are_back(service: Service = service, was: Usage = was) -> bool:
            # A kept-alive connection of the prober, one of the router to its shard.
            return Usage.of(service).fds <= was.fds + 4

        wait_until(fds_are_back, timeout_s=20, what=f"open files of {service.address} are closed")
        grown_mb = Usage.of(service).rss_mb - was.rss_mb
        print(f"{service.address} ({was.rss_mb:.0f} MB) has grown by {grown_mb:.1f} MB")
        assert grown_mb < site.growth_mb
        _look_at_log(site, service)


def _look_at_log(site: Site, service: Service) -> None:
    lines = messages(service.log)
    new, site.lines[service] = lines[site.lines.get(service, 0) :], len(lines)
    for line in new:
        assert "Traceback" not in line
        assert _KEY not in line
        assert echo(line) <= 200
        assert len(line) < 1000
    # Strangers cannot fill the log; of requests that are answered, and of calls that bear the key,
    # each may have a line.
    noted = [line for line in new if not line.startswith(("request ", "a call ends: "))]
    assert len(noted) < 50, noted[:50]


# ---- Connections -------------------------------------------------------------------------------


async def test_random_bytes_to_every_port_change_nothing(unharmed: Site) -> None:
    rng = seeded("random bytes")
    count = budget(50, 2500)
    targets = [
        (unharmed.router.address, False),
        (unharmed.shard.address, False),
        (unharmed.tls_router.address, True),
        (unharmed.tls_shard.address, False),
    ]
    jobs = [
        partial(send, address, garbage(rng), wait_s=0.3, tls=tls and rng.random() < 0.5)
        for address, tls in targets * count
    ]
    await many(jobs)


async def test_connections_that_say_nothing_are_ended_or_cost_nothing(unharmed: Site) -> None:
    """Open connections that send nothing, or only the start of a TLS handshake or of HTTP/2."""
    begun = (b"", b"\x16\x03\x01\x02\x00", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n")
    jobs = [
        partial(send, service.address, begin, wait_s=_HEADER_TIMEOUT_S + 1)
        for service in unharmed.services
        for begin in begun
        for _ in range(10)
    ]
    await asyncio.gather(*(job() for job in jobs))


async def test_headers_that_come_a_byte_at_a_time_are_cut_off(unharmed: Site) -> None:
    async def drip(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError):
            for byte in http_post(b"{}", f"X-Slow: {'a' * 1000}"):
                writer.write(bytes([byte]))
                await writer.drain()
                await asyncio.sleep(0.05)

    async def slow() -> float:
        host, port = unharmed.router.address.split(":")
        begun_s = time.monotonic()
        reader, writer = await asyncio.open_connection(host, int(port))
        dripping = asyncio.create_task(drip(reader, writer))
        with contextlib.suppress(ConnectionError):
            assert status_of(await reader.read()) in (0, 408)
        dripping.cancel()
        await asyncio.gather(dripping, return_exceptions=True)
        writer.transport.abort()
        return time.monotonic() - begun_s

    async with asyncio.timeout(20):
        took_s = await asyncio.gather(*(slow() for _ in range(100)))
    assert max(took_s) < 10


async def test_bodies_that_never_end_hold_up_nobody(unharmed: Site) -> None:
    """Send bodies that never end. The router ends them after a minute; the clients leave before."""
    begun = http_post(b"", _BEARER, "Content-Length: 100000") + b'{"prompt": "'
    jobs = [partial(send, unharmed.router.address, begun, wait_s=2) for _ in range(200)]
    await asyncio.gather(*(job() for job in jobs))


async def test_other_protocols_than_the_ports_own_are_hung_up_on(unharmed: Site) -> None:
    hello = b"\x16\x03\x01\x00\xf8\x01\x00\x00\xf4\x03\x03" + b"\x01" * 240
    preface = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\x00\x00\x00\x04\x00\x00\x00\x00\x00"
    for address in (unharmed.router.address, unharmed.tls_router.address):
        for said in (hello, preface):
            assert status_of(await send(address, said)) in (0, 400, 505)
    request = http_post(b"{}", _BEARER)
    assert status_of(await send(unharmed.tls_router.address, request)) == 0
    for address in (unharmed.shard.address, unharmed.tls_shard.address):
        assert status_of(await send(address, request)) == 0


# ---- HTTP --------------------------------------------------------------------------------------

_HELLO = b'{"prompt": "Hello", "max_tokens": 1}'
_CHUNK = b"%x\r\n%s\r\n0\r\n\r\n" % (len(_HELLO), _HELLO)
_LONG = MARK * 3000
_INSIDE = b"GET /v1/models HTTP/1.1\r\nHost: x\r\n\r\n"

# What might be understood otherwise by a proxy before us.
_SMUGGLED = {
    "length and chunks": http_post(
        _CHUNK, _BEARER, f"Content-Length: {len(_CHUNK)}", "Transfer-Encoding: chunked"
    ),
    "chunks and length": http_post(
        b"0\r\n\r\n" + _INSIDE, _BEARER, "Transfer-Encoding: chunked", "Content-Length: 5"
    ),
    "two lengths": http_post(
        _HELLO, _BEARER, "Content-Length: 5", f"Content-Length: {len(_HELLO)}"
    ),
    "a length with a sign": http_post(_HELLO, _BEARER, f"Content-Length: +{len(_HELLO)}"),
    "a length that is negative": http_post(_HELLO, _BEARER, "Content-Length: -1"),
    "a length of other digits": http_post(_HELLO, _BEARER, "Content-Length: 0x10"),
    "chunked twice": http_post(_CHUNK, _BEARER, "Transfer-Encoding: chunked, chunked"),
    "another coding last": http_post(_CHUNK, _BEARER, "Transfer-Encoding: chunked, identity"),
    "a tab in the coding": http_post(_CHUNK, _BEARER, "Transfer-Encoding:\tchunked\x0b"),
    "a space before the colon": http_post(_HELLO, _BEARER, "Content-Length : 3"),
    "a chunk's size with a sign": http_post(
        b"+5\r\nhello\r\n0\r\n\r\n", _BEARER, "Transfer-Encoding: chunked"
    ),
    "a chunk's size that is none": http_post(
        b"zz\r\nhello\r\n0\r\n\r\n", _BEARER, "Transfer-Encoding: chunked"
    ),
    "a chunk's size beyond all numbers": http_post(
        b"fffffffffffffffff\r\nhello", _BEARER, "Transfer-Encoding: chunked"
    ),
    "a chunk that ends elsewhere": http_post(
        b"3\r\nhello\r\n0\r\n\r\n", _BEARER, "Transfer-Encoding: chunked"
    ),
    "bare line feeds": http_post(_HELLO, _BEARER).replace(b"\r\n", b"\n"),
    "a bare return": b"GET /health HTTP/1.1\r\nHost: x\r\nA: b\rContent-Length: 5\r\n\r\n",
    "a header in two lines": b"GET /health HTTP/1.1\r\nHost: x\r\nA: b\r\n c: d\r\n\r\n",
    "a zero byte": b"GET /health HTTP/1.1\r\nHost: x\r\nA: \x00\r\n\r\n",
    "a version to come": b"GET /health HTTP/9.9\r\nHost: x\r\n\r\n",
    "no version": b"GET /health\r\n\r\n",
}


@pytest.mark.parametrize("name", _SMUGGLED)
async def test_a_request_that_can_be_read_in_two_ways_is_refused_or_ends_its_connection(
    site: Site, name: str
) -> None:
    """A second request must never come out of the first one's body."""
    answer = await send(site.router.address, _SMUGGLED[name], wait_s=_HEADER_TIMEOUT_S + 1)
    assert answer.count(b"HTTP/1.1 ") <= 1
    assert b'"object":"list"' not in answer
    assert status_of(answer) in (0, 400, 413, 505)


_BODIES = {
    "nested deep": (nested(100_000), [], 400),
    "nested deep and long": (nested(1_000_000), [], 400),
    "larger than may be": (b" " * (_MAX_BODY_BYTES + 1), [], 413),
    "a number of a megabyte": (b'{"max_tokens": ' + b"9" * 2**20 + b"}", [], 400),
    "a key a hundred thousand times": (b'{"a":1' + b',"a":1' * 100_000 + b"}", [], 400),
    "no text in any coding": (b'{"prompt": "\xff\xfe"}', [], 400),
    "a half of a pair": (rb'{"prompt": "\ud800", "max_tokens": 1}', [], 400),
    "a bomb": (gzip.compress(bytes(32 * 2**20), 1), ["Content-Encoding: gzip"], 413),
    "a bomb of another make": (
        zlib.compress(bytes(32 * 2**20), 1),
        ["Content-Encoding: deflate"],
        413,
    ),
    "compressed by half": (gzip.compress(_HELLO)[:20], ["Content-Encoding: gzip"], 400),
    "a coding that is unknown": (b"\x00" * 1000, ["Content-Encoding: lzma"], 400),
}


async def test_bodies_made_to_hurt_are_refused(unharmed: Site) -> None:
    answers = {
        name: await send(
            unharmed.router.address, http_post(body, _BEARER, *_ONCE, *headers), wait_s=10
        )
        for name, (body, headers, _) in _BODIES.items()
        for _ in range(2)
    }
    found = {name: status_of(answer) for name, answer in answers.items()}
    assert found == {name: status for name, (_, _, status) in _BODIES.items()}
    for answer in answers.values():
        assert b"Traceback" not in answer
        assert len(answer) < 2000


_HEADERS = {
    "a long one": [f"X-Long: {_LONG * 10}"],
    "many": [f"X-{number}: {MARK}" for number in range(10_000)],
    "a long name": [f"{_LONG * 10}: 1"],
    "a request id of another line": ["X-Request-Id: a\x0bb"],
    "a long request id": [f"X-Request-Id: {MARK * 900}"],
    "a long key": [f"Authorization: Bearer {MARK * 900}"],
    "a key in other letters": ["Authorization: Bearer \xc3\xa4\xc3\xb6"],
}


async def test_headers_made_to_hurt_are_refused(unharmed: Site) -> None:
    for headers in _HEADERS.values():
        answer = await send(unharmed.router.address, http_post(_HELLO, *_ONCE, *headers))
        # Some are no trouble but lack the key.
        assert status_of(answer) in (0, 400, 401, 431)
        assert echo(answer.decode(errors="replace")) <= 200
    long_line = f"GET /{_LONG * 10} HTTP/1.1\r\nHost: x\r\n\r\n".encode()
    assert status_of(await send(unharmed.router.address, long_line)) in (0, 400, 414)


_PATHS = (
    *("/../../etc/passwd", "/static/../../../etc/passwd", "/console/..%2f..%2f..%2fetc/passwd"),
    *("/%2e%2e/%2e%2e/etc/passwd", "/..%5c..%5cetc", "//etc/passwd", "/v1/models/../../etc/passwd"),
    *("/v1/models/%2e%2e%2f%2e%2e%2fetc%2fpasswd", "/v1/models/%00", "/docs/%2e%2e/%2e%2e/x"),
    *("http://elsewhere.example/v1/models", "*", "/v1/models?x=%", "/v1/responses/..%2f..%2fx"),
    *("/console/%2e%2e/app.py", "/console/%2fetc%2fpasswd", "/;/v1/models", "/V1/MODELS"),
)
_NAMES = ("../../etc/passwd", "/etc/passwd", "..\\..\\x", "file:///etc/passwd", "a\x00b", "%2e%2e")


async def test_tricks_with_paths_and_names_of_models_lead_nowhere(unharmed: Site) -> None:
    for path in _PATHS:
        request = f"GET {path} HTTP/1.1\r\nHost: x\r\n{_BEARER}\r\nConnection: close\r\n\r\n"
        answer = await send(unharmed.router.address, request.encode())
        assert status_of(answer) != 500, path
        assert b"root:" not in answer, path
        assert b"import " not in answer, path
    for name in _NAMES:
        body = f'{{"model": "{name}", "prompt": "x"}}'.encode("unicode_escape")
        answer = await send(unharmed.router.address, http_post(body, _BEARER, *_ONCE))
        assert status_of(answer) in (400, 404), name


async def test_wrong_keys_are_refused_and_no_log_has_them(unharmed: Site) -> None:
    async def wrong(number: int) -> None:
        bearer = f"Authorization: Bearer {_KEY[:-1]}{number}"
        asked = http_post(_HELLO, bearer, *_ONCE)
        assert status_of(await send(unharmed.router.address, asked)) == 401

    await many([partial(wrong, number) for number in range(budget(200, 5000))])


# ---- gRPC --------------------------------------------------------------------------------------

_METADATA = (("authorization", f"Bearer {_KEY}"),)
_SERVICE = "/penstock.v1.Shard/"


async def _refused(call: Callable[[], object]) -> grpc.StatusCode:
    """The status that a call ends with."""
    try:
        await call()  # type: ignore[misc]
    except grpc.aio.AioRpcError as error:
        ended = error
    else:
        return grpc.StatusCode.OK
    assert len(ended.details() or "") < 500
    return ended.code()


@contextlib.asynccontextmanager
async def _channel(shard: Shard) -> AsyncIterator[Any]:
    """Yield a channel to a shard. It has no types: tests send bytes over it, not messages."""
    options = [("grpc.max_send_message_length", -1), ("grpc.use_local_subchannel_pool", 1)]
    async with grpc.aio.insecure_channel(shard.address, options=options) as channel:
        yield channel


async def test_calls_without_the_key_are_refused_whatever_they_bring(unharmed: Site) -> None:
    async with _channel(unharmed.shard) as channel:
        for metadata in ((), (("authorization", f"Bearer {MARK * 50}"),)):
            for name in ("GetInfo", "Abort", "Embed"):
                call = partial(channel.unary_unary(_SERVICE + name), b"", metadata=metadata)
                assert await _refused(call) is grpc.StatusCode.UNAUTHENTICATED
            # Each two bytes are an id, which takes 30 once it is parsed.
            ids = partial(channel.unary_unary(_SERVICE + "Abort"), b"\x0a\x00" * 2**23)
            for _ in range(5):
                assert await _refused(partial(ids, metadata=metadata)) is (
                    grpc.StatusCode.UNAUTHENTICATED
                )
            for name in ("GetTokenizer", "WatchLoad", "Drain"):
                stream = channel.unary_stream(_SERVICE + name)(b"", metadata=metadata)
                assert await _refused(stream.read) is grpc.StatusCode.UNAUTHENTICATED
            both = channel.stream_stream(_SERVICE + "Generate")(metadata=metadata)
            assert await _refused(both.read) is grpc.StatusCode.UNAUTHENTICATED


async def test_messages_that_are_too_large_or_cannot_be_read_end_their_call_alone(
    unharmed: Site,
) -> None:
    rng = seeded("messages")
    async with (
        _channel(unharmed.shard) as channel,
        ShardClient(unharmed.shard.address, api_key=_KEY) as client,
    ):
        stream = client.submit(GenerationRequest([1], max_tokens=300))
        num_tokens = len((await anext(stream)).token_ids)
        giant = partial(channel.unary_unary(_SERVICE + "Abort"), bytes(65 * 2**20))
        assert await _refused(partial(giant, metadata=_METADATA)) is (
            grpc.StatusCode.RESOURCE_EXHAUSTED
        )
        for _ in range(budget(50, 2000)):
            data = b"\x0a\xff\xff\xff\xff\x0f" + rng.randbytes(rng.randrange(100))
            abort = channel.unary_unary(_SERVICE + "Abort")
            assert await _refused(partial(abort, data, metadata=_METADATA)) is not (
                grpc.StatusCode.OK
            )
            call = channel.stream_stream(_SERVICE + "Generate")(metadata=_METADATA)
            with contextlib.suppress(grpc.RpcError, asyncio.InvalidStateError):
                await call.write(data)
            assert await _refused(call.read) is not grpc.StatusCode.OK
        # What runs beside them goes on to its end.
        assert num_tokens + sum([len(output.token_ids) async for output in stream]) == 300


async def test_thousands_of_streams_that_are_opened_and_dropped_leave_nothing(
    unharmed: Site,
) -> None:
    rng = seeded("streams")
    request = pb.GenerateRequest(request_id="x", prompt_token_ids=[1])

    async def open_and_drop(channel: Any, number: int) -> None:
        metadata = _METADATA if rng.random() < 0.7 else ()
        call = channel.stream_stream(_SERVICE + "Generate")(metadata=metadata)
        with contextlib.suppress(grpc.RpcError, asyncio.InvalidStateError):
            if rng.random() < 0.5:
                request.request_id = f"{MARK}-{number}"
                await call.write(request.SerializeToString())
            if rng.random() < 0.3:
                await asyncio.sleep(0.005)
        call.cancel()

    async with _channel(unharmed.shard) as channel:
        numbers = range(budget(1000, 20_000))
        await many([partial(open_and_drop, channel, number) for number in numbers])
        async with ShardClient(unharmed.shard.address, api_key=_KEY) as client, asyncio.timeout(10):
            async for load in client.watch_load():
                # But for the prober's.
                if load.running + load.waiting <= 1:
                    break


async def test_floods_of_aborts_are_forgotten(unharmed: Site) -> None:
    """More ids than a shard remembers, in as many calls as it takes."""
    # It remembers 200,000 for half a minute; these take up to 500 bytes each.
    unharmed.growth_mb += 100
    ids = [f"{MARK}{random.getrandbits(64):016x}" for _ in range(20_000)]
    async with ShardClient(unharmed.shard.address, api_key=_KEY) as client:
        for round_ in range(budget(12, 200)):
            await client.abort([f"{round_}{each}" for each in ids])
        too_many = pb.AbortRequest(request_ids=["x"] * 100_000).SerializeToString()
        async with _channel(unharmed.shard) as channel:
            abort = channel.unary_unary(_SERVICE + "Abort")
            assert await _refused(partial(abort, too_many, metadata=_METADATA)) is (
                grpc.StatusCode.INVALID_ARGUMENT
            )
