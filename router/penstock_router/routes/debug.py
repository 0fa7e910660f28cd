"""GET /debug/profile: a flame graph of the worker that answers. Closed without --admin-key."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import os

from aiohttp import web

from penstock_router.errors import TooManyRequests
from penstock_router.json_fields import Kind, integer, refusal
from penstock_router.observe import profiler
from penstock_router.routes.base import ROUTER, check_admin

_SECONDS = integer(1, 60)
_RATE_HZ = integer(1, 1000)
_STYLE_HASH = base64.b64encode(hashlib.sha256(profiler.STYLE.encode()).digest()).decode()
_HEADERS = {
    "Content-Security-Policy": (
        f"default-src 'none'; style-src 'sha256-{_STYLE_HASH}'; base-uri 'none'; "
        "form-action 'none'; frame-ancestors 'none'"
    ),
}

# Held while a profile is taken.
_TURN = web.AppKey("profile_turn", asyncio.Lock)


def add_routes(app: web.Application) -> None:
    """All of /debug."""
    app[_TURN] = asyncio.Lock()
    app.router.add_get("/debug/profile", profile, allow_head=False)


async def profile(request: web.Request) -> web.Response:
    """GET /debug/profile?seconds=5&rate=200"""
    check_admin(request)
    seconds = _read(request, "seconds", _SECONDS, default=5)
    rate_hz = _read(request, "rate", _RATE_HZ, default=200)
    turn = request.app[_TURN]
    if turn.locked():
        raise TooManyRequests(f"worker {os.getpid()} is taking a profile; try again later")
    async with turn:
        taken = await _sample(seconds, rate_hz)
    title = f"penstock router, process {os.getpid()}, {rate_hz} samples a second"
    svg = await request.app[ROUTER].threads.run(lambda: profiler.render(taken, title))
    return web.Response(text=svg, content_type="image/svg+xml", charset="utf-8", headers=_HEADERS)


async def _sample(seconds: int, rate_hz: int) -> profiler.Profile:
    sampler = profiler.Sampler(rate_hz)
    sampler.start()
    try:
        await asyncio.sleep(seconds)
    finally:
        taken = sampler.stop()
    return taken


def _read(request: web.Request, name: str, kind: Kind, *, default: int) -> int:
    given = request.query.get(name)
    if given is None:
        return default
    try:
        number = int(given)
    except ValueError:
        raise refusal(name, "an integer", given) from None
    value: int = kind.read(name, number)
    return value
