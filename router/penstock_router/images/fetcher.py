"""Fetches images from allowed hosts. Errors tell clients almost nothing about the network.

A URL is parsed once, so the checked URL is the requested one. Names are resolved anew for each
connection, and the address is checked where its socket is made, so no connection to a forbidden
address is tried.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from typing import Any

import aiohttp
from aiohttp.abc import AbstractResolver
from yarl import URL

from penstock_common.version import VERSION
from penstock_router.config import RouterConfig
from penstock_router.images.image import ImageRefused
from penstock_router.images.line import Line
from penstock_router.images.pieces import Incoming, check_size
from penstock_router.images.web_addresses import is_allowed_address, is_allowed_domain
from penstock_router.json_fields import shorten

logger = logging.getLogger(__name__)

_MAX_FETCHES = 16
_FETCH_S = 5.0
_MAX_REDIRECTS = 3
_REDIRECTS = frozenset((301, 302, 303, 307, 308))
_HEADERS = {
    "Accept": "image/jpeg, image/png, image/webp, image/gif",
    # The size is counted as data arrives, so data must not be compressed.
    "Accept-Encoding": "identity",
    "User-Agent": f"penstock/{VERSION}",
}
_FAILED = "the image could not be fetched"


class AddressRefused(OSError):
    """Images may not be fetched from the host's address."""


class Fetcher:
    def __init__(self, config: RouterConfig, resolver: AbstractResolver | None = None) -> None:
        """`resolver` is the machine's resolver by default, in threads."""
        self._domains = config.allowed_media_domains
        self._networks = config.allowed_media_networks
        self._resolver = resolver
        self._line = Line(_MAX_FETCHES, "fetched")
        # Made with the first fetch.
        self._session: aiohttp.ClientSession | None = None

    async def fetch(self, text: str, incoming: Incoming, client: str) -> None:
        """Fetch a URL's data into `incoming`. Raises `ImageRefused` and `TooManyRequests`."""
        url = self._parse(text)
        # Fetches are never shared, because each `incoming` charges its own client.
        await self._line.do(incoming, lambda _: self._fetch(url, incoming), client)

    async def _fetch(self, url: URL, incoming: Incoming) -> None:
        try:
            async with asyncio.timeout(_FETCH_S):
                await self._follow(url, incoming)
        except TimeoutError:
            raise ImageRefused(f"{_FAILED} within {_FETCH_S:g} s") from None
        except (aiohttp.ClientError, OSError, ValueError) as error:
            # Log for the operator, without the URL. The client must not learn if an address is
            # refused, does not answer, or does not resolve.
            why = getattr(error, "os_error", None) or type(error).__name__
            logger.info("no image of %s: %s", url.raw_host, why)
            raise ImageRefused(f"{_FAILED}: its host gave no answer, or a broken one") from None

    async def close(self) -> None:
        await self._line.close()
        if self._session is not None:
            await self._session.close()

    def _parse(self, text: str) -> URL:
        """Parse the URL of an image that may be fetched. Raises `ImageRefused`."""
        given = shorten(text)
        try:
            url = URL(text)
            host, _ = url.raw_host, url.port
        except ValueError:
            raise ImageRefused(f"must be a valid URL; given: {given}") from None
        if url.scheme not in ("http", "https") or not host:
            raise ImageRefused(f"must be a URL of https:// or http://; given: {given}")
        if url.raw_user is not None or url.raw_password is not None:
            raise ImageRefused("an image's URL may have no user and no password in it")
        if not self._domains:
            raise ImageRefused(
                "no image is fetched: this router has no --allowed-media-domains; send data: URLs"
            )
        if not is_allowed_domain(host.lower(), self._domains):
            raise ImageRefused(f"its host must be one of --allowed-media-domains; given: {given}")
        return url

    async def _follow(self, url: URL, incoming: Incoming) -> None:
        for _ in range(1 + _MAX_REDIRECTS):
            location = await self._get(url, incoming)
            if location is None:
                return
            url = self._redirected(url, location)
        raise ImageRefused(f"{_FAILED}: more than {_MAX_REDIRECTS} redirects")

    def _redirected(self, url: URL, location: str) -> URL:
        try:
            return self._parse(str(url.join(URL(location))))
        except (ImageRefused, ValueError):
            pass
        raise ImageRefused(f"{_FAILED}: it is redirected to a URL that is not allowed")

    async def _get(self, url: URL, incoming: Incoming) -> str | None:
        """Fetch a URL into `incoming`, or return the location that it redirects to."""
        if self._session is None:
            self._session = self._make_session()
        async with self._session.get(url, allow_redirects=False) as response:
            if response.status in _REDIRECTS and "Location" in response.headers:
                return response.headers["Location"]
            if response.status != 200:
                raise ImageRefused(f"{_FAILED}: HTTP {response.status}")
            if response.headers.get("Content-Encoding", "identity").lower() != "identity":
                raise ImageRefused(f"{_FAILED}: its server compresses it")
            check_size(response.content_length or 0, incoming.max_bytes)
            async for data in response.content.iter_any():
                incoming.add(data)
        return None

    def _make_session(self) -> aiohttp.ClientSession:
        connector = aiohttp.TCPConnector(
            resolver=self._resolver or aiohttp.ThreadedResolver(),
            use_dns_cache=False,
            force_close=True,
            limit=0,
            socket_factory=self._make_socket,
        )
        return aiohttp.ClientSession(
            connector=connector,
            headers=_HEADERS,
            cookie_jar=aiohttp.DummyCookieJar(),
            timeout=aiohttp.ClientTimeout(total=None),
            auto_decompress=False,
            trust_env=False,
        )

    def _make_socket(self, info: tuple[Any, ...]) -> socket.socket:
        family, kind, protocol, _, address = info
        if not is_allowed_address(address[0], self._networks):
            raise AddressRefused(f"{address[0]} is not public, nor of --allowed-media-networks")
        return socket.socket(family, kind, protocol)
