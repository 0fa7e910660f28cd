"""GET /openapi.json and /docs: what the API is, for programs and for people.

The page is one file that loads nothing but the document; a Content-Security-Policy enforces that.
"""

from __future__ import annotations

import base64
import hashlib
import re
from importlib.resources import files

from aiohttp import web

# The encoded document. The application sets it, as this module cannot import it: it describes the
# table of routes, which names the handlers below.
DOCUMENT = web.AppKey("document", bytes)

_PAGE = files("penstock_router").joinpath("static/docs.html").read_bytes()


def _policy(page: bytes) -> str:
    """Allows the page's inline scripts and styles, by hash, and requests to its origin."""
    sources = {}
    for tag in ("script", "style"):
        inlined = re.findall(rb"<%b>(.*?)</%b>" % (tag.encode(), tag.encode()), page, re.DOTALL)
        hashes = (base64.b64encode(hashlib.sha256(text).digest()).decode() for text in inlined)
        sources[tag] = " ".join(f"'sha256-{value}'" for value in hashes)
    return (
        f"default-src 'none'; script-src {sources['script']}; style-src {sources['style']}; "
        "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )


_PAGE_HEADERS = {
    "Content-Security-Policy": _policy(_PAGE),
    "Cache-Control": "no-cache",
}


async def document(request: web.Request) -> web.Response:
    """GET /openapi.json"""
    return web.Response(body=request.app[DOCUMENT], content_type="application/json")


async def page(request: web.Request) -> web.Response:
    """GET /docs"""
    return web.Response(
        body=_PAGE, content_type="text/html", charset="utf-8", headers=_PAGE_HEADERS
    )
