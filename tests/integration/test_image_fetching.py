"""Images by URL: hosts that do all they can, and names that lead where nobody should go.

All traffic stays on loopback: a stub resolver says where names lead.
"""

from __future__ import annotations

import asyncio
import gzip
import ipaddress
import ssl
from collections.abc import AsyncIterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

import pytest
import trustme
from support.image_host import (
    IMAGE,
    ImageHost,
    Script,
    StubResolver,
    answer,
    image_host,
    note_connections,
    redirect,
)

from penstock_router.config import RouterConfig
from penstock_router.errors import BadRequest, TooManyRequests
from penstock_router.images import fetcher
from penstock_router.images.image import Image
from penstock_router.images.images import Images
from penstock_router.observe.metrics import Metrics
from penstock_router.thread_pool import Threads

CONFIG = RouterConfig(
    shards="a:1",
    max_image_bytes=200_000,
    allowed_media_domains=("image.example", "*.cdn.example", "127.0.0.1", "::1", "10.1.2.3"),
    allowed_media_networks=(ipaddress.ip_network("127.0.0.1/32"),),
)
FAILED = "p: the image could not be fetched"
NO_ANSWER = f"{FAILED}: its host gave no answer, or a broken one"
NOT_ALLOWED = f"{FAILED}: it is redirected to a URL that is not allowed"


@dataclass
class Fetching:
    images: Images
    host: ImageHost
    resolver: StubResolver
    tried: list[str]

    async def load(self, url: str) -> Image:
        url = url.replace("PORT", str(self.host.port))
        return await self.images.load(url, param="p", client="a")

    async def refusal(self, url: str) -> str:
        with pytest.raises(BadRequest) as refused:
            await self.load(url)
        return refused.value.message


@pytest.fixture
async def fetching(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Fetching]:
    monkeypatch.setattr(fetcher, "_FETCH_S", 1.0)
    resolver = StubResolver()
    resolver.names["image.example"] = [["127.0.0.1"]]
    with ThreadPoolExecutor(1) as executor:
        images = Images(CONFIG, Threads(executor, 100), Metrics(), resolver)
        async with image_host() as host:
            host.scripts["/image"] = [answer()]
            yield Fetching(images, host, resolver, note_connections(monkeypatch))
            await images.close()
    assert asyncio.all_tasks() == {asyncio.current_task()}


async def test_an_image_is_fetched_from_an_allowed_host(fetching: Fetching) -> None:
    scripts: list[Script] = [
        [answer()],
        [answer(IMAGE, "Content-Type: text/html")],
        [answer(IMAGE, "Content-Encoding: identity")],
        [answer()[:200], 0.1, answer()[200:]],
        [answer(b"%x\r\n%s\r\n0\r\n\r\n" % (len(IMAGE), IMAGE), "Transfer-Encoding: chunked")],
        [answer(IMAGE, "Connection: close")],
        [b"HTTP/1.0 200 OK\r\n\r\n" + IMAGE],
    ]
    for script in scripts:
        for noted in (fetching.resolver.asked, fetching.tried, fetching.host.heads):
            noted.clear()
        fetching.host.scripts["/a.png"] = script
        image = await fetching.load("http://image.example:PORT/a.png")
        assert (image.width, image.height) == (60, 40)
        assert fetching.resolver.asked == ["image.example"]
        assert fetching.tried == ["127.0.0.1"]
        [head] = fetching.host.heads
        assert f"Host: image.example:{fetching.host.port}" in head
        assert "Accept-Encoding: identity" in head


async def test_without_the_flag_nothing_is_looked_up_and_the_flag_is_named(
    fetching: Fetching,
) -> None:
    resolver = fetching.resolver
    with ThreadPoolExecutor(1) as executor:
        config = replace(CONFIG, allowed_media_domains=())
        images = Images(config, Threads(executor, 9), Metrics(), resolver)
        with pytest.raises(BadRequest, match=r"this router has no --allowed-media-domains"):
            await images.load("http://image.example/", param="p", client="a")
        await images.close()
    assert (resolver.asked, fetching.tried) == ([], [])


MEGABYTE = bytes(2**20)
CHUNK = b"10000\r\n" + bytes(65_536) + b"\r\n"
CHUNKED = answer(b"", "Transfer-Encoding: chunked")
TOO_LARGE = "p: the image has more than 200000 bytes (--max-image-bytes)"


def dripping(piece: bytes) -> Script:
    """Return a script that sends the piece every 0.05 s, for 50 s."""
    return [piece, 0.05] * 1000


TROUBLES: Sequence[tuple[Script, str]] = [
    ([answer(b"secret", status="404 Not Found")], f"{FAILED}: HTTP 404"),
    ([answer(b"secret", status="500 Oh")], f"{FAILED}: HTTP 500"),
    ([answer(b"", status="204 No Content")], f"{FAILED}: HTTP 204"),
    ([answer(IMAGE, status="206 Part")], f"{FAILED}: HTTP 206"),
    ([answer(b"", status="304 Same")], f"{FAILED}: HTTP 304"),
    ([answer(b"", status="302 Found")], f"{FAILED}: HTTP 302"),
    ([answer(b"")], "p: the image is empty"),
    ([answer(b"<html>")], "p: the image is none of JPEG, PNG, WebP and GIF"),
    ([answer(MEGABYTE)], TOO_LARGE),
    ([CHUNKED, *[CHUNK] * 100], TOO_LARGE),
    ([b"HTTP/1.0 200 OK\r\n\r\n", *[MEGABYTE] * 100], TOO_LARGE),
    ([answer(IMAGE, "Content-Length: 200001")], TOO_LARGE),
    ([answer(b"", "Content-Length: 99999999999999999999")], NO_ANSWER),
    ([answer(IMAGE, "Content-Length: 100000")], NO_ANSWER),
    ([answer(IMAGE, "Content-Length: -1")], NO_ANSWER),
    ([answer(IMAGE, "Content-Length: 1", "Content-Length: 2")], NO_ANSWER),
    (
        [answer(gzip.compress(bytes(10**8), 1)[:150_000], "Content-Encoding: gzip")],
        f"{FAILED}: its server compresses it",
    ),
    ([answer(gzip.compress(IMAGE))], "p: the image is none of JPEG, PNG, WebP and GIF"),
    ([b"220 mail.example ESMTP\r\n"], NO_ANSWER),
    ([b""], NO_ANSWER),
    ([b"HTTP/1.1 200 OK\r\n" + b"X: y\r\n" * 100_000], NO_ANSWER),
    ([b"HTTP/1.1 200 OK\r\nX: " + MEGABYTE], NO_ANSWER),
    ([3.0, answer()], f"{FAILED} within 1 s"),
    ([answer()[:20], 3.0], f"{FAILED} within 1 s"),
    ([answer()[:500], 3.0], f"{FAILED} within 1 s"),
    (
        [answer(b"", "Content-Length: 1000"), *dripping(b"x")],
        f"{FAILED} within 1 s",
    ),
    (
        [b"HTTP/1.1 200 OK\r\n", *dripping(b"X: y\r\n")],
        f"{FAILED} within 1 s",
    ),
]


async def test_a_host_that_does_all_it_can_costs_one_request_a_clear_refusal(
    fetching: Fetching,
) -> None:
    for script, words in TROUBLES:
        fetching.host.scripts["/a.png"] = script
        message = await fetching.refusal("http://image.example:PORT/a.png")
        assert message.startswith(words), script
        assert "secret" not in message
        assert "127.0.0.1" not in message
        assert (await fetching.load("http://image.example:PORT/image")).width == 60


FORBIDDEN = [
    *("169.254.169.254", "127.0.0.2", "10.0.0.1", "172.16.0.1", "192.168.1.1", "100.64.0.1"),
    *("0.0.0.0", "0.1.2.3", "224.0.0.1", "240.0.0.1", "255.255.255.255", "192.0.0.1"),
    *("192.0.2.1", "198.18.0.1", "100.100.100.200", "168.63.129.16"),
    *("::", "::1", "fe80::1", "fc00::1", "fd00:ec2::254", "fec0::1", "ff02::1", "2001:db8::1"),
    *("::ffff:127.0.0.2", "::ffff:169.254.169.254", "::127.0.0.1", "64:ff9b::10.0.0.1"),
    *("64:ff9b::169.254.169.254", "64:ff9b:1::a00:1", "2002:7f00:2::1", "2002:a9fe:a9fe::1"),
    *("2001::1", "100::1"),
]


async def test_no_connection_is_tried_to_where_a_name_must_not_lead(fetching: Fetching) -> None:
    for address in FORBIDDEN:
        await refuses(fetching, address)


async def refuses(fetching: Fetching, address: str) -> None:
    names, scripts = fetching.resolver.names, fetching.host.scripts
    fetching.tried.clear()
    names["odd.cdn.example"] = [[address]]
    assert await fetching.refusal("http://odd.cdn.example/latest/meta-data") == NO_ANSWER, address
    assert fetching.tried == [], address
    # Nor by a redirect from where it may.
    scripts["/r"] = [redirect("http://odd.cdn.example/")]
    assert await fetching.refusal("http://image.example:PORT/r") == NO_ANSWER, address
    assert fetching.tried == ["127.0.0.1"], address
    # Nor where the name has another address too, or had one when it was last asked.
    names["odd.cdn.example"] = [[address, "127.0.0.1"]]
    assert (await fetching.load("http://odd.cdn.example:PORT/image")).width == 60, address
    names["odd.cdn.example"] = [["127.0.0.1"], [address]]
    scripts["/s"] = [redirect("/image")]
    assert await fetching.refusal("http://odd.cdn.example:PORT/s") == NO_ANSWER, address
    assert set(fetching.tried) == {"127.0.0.1"}, address


@pytest.mark.parametrize(
    "url",
    [
        *("ftp://image.example/a", "gopher://image.example/a", "javascript:alert(1)", "image.png"),
        *("", "//image.example/a", "http://", "http:///a", "http:image.example", "https://:443/"),
        *("about:blank", "ws://image.example/", "unix:///run/a", "HTTP+UNIX://a/b", "blob:a"),
        *("http://user@image.example/", "http://u:p@image.example/", "http://:p@image.example/"),
        *("http://image.example:99999/", "http://image.example:x/", "http://[::1/", "http://[x]/"),
        *("http://other.example/", "http://image.example.other.example/", "http://cdn.example/"),
        *("http://notcdn.example/", "http://image.example./", "http://ximage.example/"),
        *("http://other.example\\@image.example/", "http://other.example#@image.example/"),
        *("http://other.example?@image.example/", "http://other.example/\\@image.example"),
        *("http://image.example\\.other.example/", "http://image.example%2eother.example/"),
        *("http://image.example%00.other.example/", "http://other.example%23@image.example/"),
        *("http://2130706433/", "http://0x7f.1/", "http://0177.0.0.1/", "http://127.1/"),
        *("http://[::ffff:127.0.0.1]/", "http://localhost/"),
        "http://image.example/" + "a" * 8192,
        "A" * 1_000_000,
    ],
)
async def test_a_url_that_may_not_be_fetched_is_refused_before_anything_is_looked_up(
    fetching: Fetching, url: str
) -> None:
    message = await fetching.refusal(url)
    assert message.startswith("p: ")
    assert len(message) < 250
    assert (fetching.resolver.asked, fetching.tried, fetching.host.heads) == ([], [], [])


@pytest.mark.parametrize("url", ["http://[::1]:PORT/image", "http://10.1.2.3/"])
async def test_an_allowed_host_that_is_an_address_needs_its_network_too(
    fetching: Fetching, url: str
) -> None:
    assert await fetching.refusal(url) == NO_ANSWER
    assert fetching.tried == []
    assert (await fetching.load("http://127.0.0.1:PORT/image")).width == 60


@pytest.mark.parametrize(
    "to",
    [
        *("http://other.example/", "ftp://image.example/", "file:///etc/hostname", "data:,x"),
        *("http://u:p@image.example/", "//other.example/", "http://[", "http://image.example:0x/"),
    ],
)
async def test_each_redirect_is_checked_as_the_first_url_is(fetching: Fetching, to: str) -> None:
    fetching.resolver.names["other.example"] = [["127.0.0.1"]]
    fetching.host.scripts["/r"] = [redirect(to)]
    assert await fetching.refusal("http://image.example:PORT/r") == NOT_ALLOWED
    assert fetching.resolver.asked == ["image.example"]


async def test_three_redirects_are_followed_and_no_fourth(fetching: Fetching) -> None:
    for status in ("301 a", "302 a", "303 a", "307 a", "308 a"):
        await follows(fetching, status)


async def follows(fetching: Fetching, status: str) -> None:
    fetching.resolver.names["b.cdn.example"] = [["127.0.0.1"]]
    scripts, port = fetching.host.scripts, fetching.host.port
    scripts["/3"] = [
        answer(b"x", f"Location: //b.cdn.example:{port}/2", "Set-Cookie: a=b", status=status)
    ]
    scripts["/2"] = [redirect("1", status)]
    scripts["/1"] = [redirect(f"http://image.example:{port}/image#a", status)]
    scripts["/4"] = [redirect("/3", status)]
    assert (await fetching.load("http://image.example:PORT/3")).width == 60
    assert not any("cookie" in head.lower() for head in fetching.host.heads)
    message = await fetching.refusal("http://image.example:PORT/4")
    assert message == "p: the image could not be fetched: more than 3 redirects"


async def test_nothing_tells_a_closed_port_from_a_forbidden_address_or_an_unknown_name(
    fetching: Fetching, caplog: pytest.LogCaptureFixture
) -> None:
    fetching.resolver.names["private.cdn.example"] = [["10.0.0.1"]]
    caplog.set_level("INFO")
    closed = await fetching.refusal("http://image.example:1/")
    assert closed == await fetching.refusal("http://private.cdn.example:1/") == NO_ANSWER
    assert closed == await fetching.refusal("http://unknown.cdn.example:1/")
    assert closed == await fetching.refusal(f"http://{'a' * 64}.cdn.example/?token=secret")
    # But the operator is told.
    assert "10.0.0.1 is not public, nor of --allowed-media-networks" in caplog.text
    assert "secret" not in caplog.text


async def test_a_host_without_a_certificate_that_is_trusted_is_not_asked(
    fetching: Fetching,
) -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    trustme.CA().issue_cert("image.example").configure_cert(context)
    async with image_host(context) as host:
        url = f"https://image.example:{host.port}/image"
        assert await fetching.refusal(url) == NO_ANSWER
    assert host.heads == []


async def test_no_proxy_is_asked(fetching: Fetching, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")
    assert (await fetching.load("http://image.example:PORT/image")).width == 60


async def test_a_client_that_leaves_ends_its_fetch(fetching: Fetching) -> None:
    fetching.host.scripts["/slow"] = [answer()[:100], 30.0]
    task = asyncio.create_task(fetching.load("http://image.example:PORT/slow"))
    while not fetching.host.heads:
        await asyncio.sleep(0.01)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert fetching.images._fetcher._line._turns.num_working == 0
    assert fetching.images._memory.held == 0


async def test_few_are_fetched_at_once_and_those_that_wait_are_bounded(fetching: Fetching) -> None:
    fetching.host.scripts["/slow"] = [0.3, answer()]
    outcomes = await asyncio.gather(
        *(fetching.load("http://image.example:PORT/slow") for _ in range(160)),
        return_exceptions=True,
    )
    refused = [each for each in outcomes if isinstance(each, TooManyRequests)]
    assert all("too many images wait to be fetched" in each.message for each in refused)
    # Sixteen at once, and of the 256 that may wait half for one client.
    assert len(refused) == 160 - fetcher._MAX_FETCHES - 128
    others = [each for each in outcomes if not isinstance(each, Image | TooManyRequests)]
    assert others == []
    assert len(fetching.host.heads) == 160 - len(refused)
