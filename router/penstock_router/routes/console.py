"""GET / and /console: a page that shows the fleet, chats and sends requests; and its feed.

The page is static files that load nothing from elsewhere, which a Content-Security-Policy enforces.
The files hold nothing of this router. The feed does, and needs an admin's key if the router has any
keys.
"""

from __future__ import annotations

import base64
import hashlib
from dataclasses import dataclass
from importlib.resources import files
from pathlib import PurePath

from aiohttp import web

from penstock_router.apis.base import EVENTS
from penstock_router.console.feed import Console
from penstock_router.errors import NotFound
from penstock_router.routes import info
from penstock_router.server.caller import check_admin
from penstock_router.server.parts import ROUTER
from penstock_router.server.request_headers import read_api_key
from penstock_router.server.sse import EventStream

CONSOLE = web.AppKey("console", Console)
# The path of the page's files.
FILES = "/console/{name}"

_POLICY = (
    "default-src 'self'; img-src 'self' data:; object-src 'none'; base-uri 'none'; "
    "form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'"
)
_HEADERS = {
    "Content-Security-Policy": _POLICY,
    # Browsers cache the files and revalidate them each time: an upgraded router has other files.
    "Cache-Control": "no-cache",
}
_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}


@dataclass(frozen=True, slots=True)
class _File:
    body: bytes
    headers: dict[str, str]
    etag: str


def _read_files() -> dict[str, _File]:
    found = {}
    for path in files("penstock_router").joinpath("static/console").iterdir():
        kind = _TYPES.get(PurePath(path.name).suffix)
        if kind is not None:
            body = path.read_bytes()
            etag = base64.urlsafe_b64encode(hashlib.sha256(body).digest()[:12]).decode()
            headers = {**_HEADERS, "Content-Type": kind, "ETag": f'"{etag}"'}
            found[path.name] = _File(body, headers, etag)
    return found


# By name: a request's path is never used as a path in a file system.
_FILES = _read_files()


def add_routes(app: web.Application) -> None:
    """Handlers of all paths under /console. The page itself is in the table of routes."""
    app.router.add_get("/console/feed", feed, allow_head=False)
    app.router.add_get(FILES, file)


async def page(request: web.Request) -> web.Response:
    """GET /"""
    if not request.app[ROUTER].config.console:
        return await info.health(request)
    return _answer(request, "index.html")


async def file(request: web.Request) -> web.Response:
    """GET /console/NAME"""
    return _answer(request, request.match_info["name"])


def _answer(request: web.Request, name: str) -> web.Response:
    found = _FILES.get(name)
    if found is None:
        raise NotFound(f"the console has no file {name[:100]!r}")
    known = request.if_none_match or ()
    if any(etag.value in (found.etag, "*") for etag in known):
        return web.Response(status=304, headers=found.headers)
    return web.Response(body=found.body, headers=found.headers)


async def feed(request: web.Request) -> web.StreamResponse:
    """GET /console/feed: events named fleet and requests, until the client leaves."""
    config, keys = request.app[ROUTER].config, request.app[ROUTER].keys
    is_closed = keys.are_asked_for or keys.has_admins
    if is_closed:
        check_admin(request)
    with request.app[CONSOLE].watched() as frames:
        async with EventStream(request, EVENTS, keep_alive_s=config.keep_alive_s) as events:
            while (frame := await frames.get()) is not None:
                key = keys.find(read_api_key(request)) if is_closed else None
                if is_closed and (key is None or not key.is_admin):
                    # The key was revoked or has expired.
                    break
                await events.send(frame)
            await events.end()
            return events.response
