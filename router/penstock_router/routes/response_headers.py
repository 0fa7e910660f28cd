"""What every answer says in its headers: whose request it is for, how browsers may use it, and what
is left of its key's rates. Answers to other origins' pages (CORS), where the operator names some.

Knows nothing of what is answered. A page that needs more than nothing brings its own policy.
"""

from __future__ import annotations

import uuid

from aiohttp import web, web_response

from penstock_router.routes.base import KEY, REQUEST_ID, ROUTER, Handler

# Also of what aiohttp refuses by itself, which passes no hook: versions are nobody's business.
web_response.SERVER_SOFTWARE = "penstock"  # type: ignore[attr-defined]

_SECURITY = {
    # An answer is what its Content-Type says, whatever a browser makes of its bytes.
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    # Shown as a page it may load and do nothing, and no other page may frame it.
    "Content-Security-Policy": "default-src 'none'; frame-ancestors 'none'",
    # What a model said to one is in no cache for another.
    "Cache-Control": "no-store",
}
# The operator's: no page of another origin has business there.
_OWN_ORIGIN = ("/admin", "/debug", "/console")
_PREFLIGHT = {
    "Access-Control-Allow-Methods": "GET, POST, DELETE",
    "Access-Control-Max-Age": "600",
}
_MAX_HEADERS_CHARS = 1000


async def complete(request: web.Request, response: web.StreamResponse) -> None:
    """Called before an answer's headers go out; errors and streams included."""
    headers = response.headers
    # What is refused before there is a handler has none yet.
    headers["X-Request-Id"] = request.get(REQUEST_ID) or uuid.uuid4().hex
    for name, value in _SECURITY.items():
        headers.setdefault(name, value)
    key = request.get(KEY)
    if key is not None:
        headers.update(key.rates.headers())
    origins = request.app[ROUTER].config.cors_origins
    if origins and not request.path.startswith(_OWN_ORIGIN):
        headers.update(_cors(origins, request.headers.get("Origin")))


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
    """Browsers ask before they send a page's request; whether it may shows in `complete`."""
    is_preflight = (
        request.method == "OPTIONS" and "Access-Control-Request-Method" in request.headers
    )
    if not (is_preflight and request.app[ROUTER].config.cors_origins):
        return await handler(request)
    asked = request.headers.get("Access-Control-Request-Headers", "")[:_MAX_HEADERS_CHARS]
    # "*" would stand for all but the one that has the key.
    headers = {**_PREFLIGHT, "Access-Control-Allow-Headers": asked or "Authorization, Content-Type"}
    return web.Response(status=204, headers=headers)
