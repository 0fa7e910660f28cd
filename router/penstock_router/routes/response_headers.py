"""Headers of every answer: the request's id, security headers for browsers, what of the request has
no effect, what is left of the key's rate limits, and CORS headers if the operator allows other
origins.

A page that has to load anything brings its own policy.
"""

from __future__ import annotations

import uuid
from collections.abc import MutableMapping

from aiohttp import web, web_response

from penstock_router.routes import warnings
from penstock_router.routes.base import Handler
from penstock_router.routes.table import ROUTES
from penstock_router.server.parts import ERROR_FORM, KEY, REQUEST_ID, ROUTER

# Set globally: what aiohttp refuses by itself runs no hook. The header must not tell versions.
web_response.SERVER_SOFTWARE = "penstock"  # type: ignore[attr-defined]

_SECURITY = {
    # Browsers must take the Content-Type as it is, not guess a type from the bytes.
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    # Opened as a page, an answer may load and run nothing, and no other page may frame it.
    "Content-Security-Policy": "default-src 'none'; frame-ancestors 'none'",
    # No cache may give one client's answer to another.
    "Cache-Control": "no-store",
}
# The operator's routes: closed to pages of other origins.
_OWN_ORIGIN = ("/admin", "/console", *(route.path for route in ROUTES if route.is_admins))
_PREFLIGHT = {
    "Access-Control-Allow-Methods": "GET, POST, DELETE",
    "Access-Control-Max-Age": "600",
}
_MAX_HEADERS_CHARS = 1000


def add(headers: MutableMapping[str, str], request_id: str) -> None:
    """Add those that do not depend on the request."""
    headers["X-Request-Id"] = request_id
    for name, value in _SECURITY.items():
        headers.setdefault(name, value)


async def complete(request: web.Request, response: web.StreamResponse) -> None:
    """Called before an answer's headers go out; errors and streams included."""
    headers = response.headers
    # A request that is refused before its handler runs has no id yet.
    request_id = request.get(REQUEST_ID) or uuid.uuid4().hex
    add(headers, request_id)
    form = request.get(ERROR_FORM)
    if form is not None:
        headers.update(form.headers(request_id))
    warnings.add(headers, request)
    key = request.get(KEY)
    if key is not None:
        headers.update(key.rates.headers())
    origins = _origins(request)
    if origins:
        headers.update(_cors(origins, request.headers.get("Origin")))


def _origins(request: web.Request) -> tuple[str, ...]:
    """The other origins whose pages may call this route."""
    is_operators = request.path.startswith(_OWN_ORIGIN)
    return () if is_operators else request.app[ROUTER].config.cors_origins


def _cors(origins: tuple[str, ...], origin: str | None) -> dict[str, str]:
    if "*" in origins:
        allowed = {"Access-Control-Allow-Origin": "*"}
    elif origin in origins:
        assert origin is not None
        allowed = {"Access-Control-Allow-Origin": origin, "Vary": "Origin"}
    else:
        return {"Vary": "Origin"}
    return {**allowed, "Access-Control-Expose-Headers": "*"}


@web.middleware
async def answer_preflight(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Answer CORS preflight requests; `complete` adds the header that allows the origin."""
    is_preflight = (
        request.method == "OPTIONS" and "Access-Control-Request-Method" in request.headers
    )
    if not (is_preflight and _origins(request)):
        return await handler(request)
    asked = request.headers.get("Access-Control-Request-Headers", "")[:_MAX_HEADERS_CHARS]
    # "*" would stand for all headers but Authorization, which has the key.
    headers = {**_PREFLIGHT, "Access-Control-Allow-Headers": asked or "Authorization, Content-Type"}
    return web.Response(status=204, headers=headers)
