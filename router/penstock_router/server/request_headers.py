"""Reads headers of requests: API keys, ids, flags, time limits."""

from __future__ import annotations

from typing import Any

from aiohttp import web

from penstock_router.apis.base import TIMEOUT
from penstock_router.errors import (
    BadRequest,
)
from penstock_router.json_fields import Field, table
from penstock_router.request import MAX_REQUEST_ID_CHARS

TIMEOUT_HEADER = "x-penstock-timeout-s"
# Headers of all routes that do not answer at once.
HEADERS = table(
    [Field(TIMEOUT_HEADER, TIMEOUT.kind, "Like the field timeout; the shorter one counts.")]
)


def read_timeout_header(request: web.Request) -> float | None:
    """Return the seconds in the header; None without it. Raise `BadRequest` if it is no number."""
    given = request.headers.get(TIMEOUT_HEADER)
    if given is None:
        return None
    try:
        # A header does not accept what only Python reads as a number: 1_0, or digits beyond ASCII.
        value: Any = float(given) if given.isascii() and "_" not in given else given
    except ValueError:
        value = given
    timeout_s: float = TIMEOUT.kind.read(TIMEOUT_HEADER, value)
    return timeout_s


def is_anthropics(request: web.Request) -> bool:
    """Tell whether the client speaks Anthropic's API. Only its clients send this header."""
    return "anthropic-version" in request.headers


def usable_request_id(given: str | None) -> str | None:
    """Return the client's id if it fits a header and a log line, else None."""
    if given and len(given) <= MAX_REQUEST_ID_CHARS and given.isascii() and given.isprintable():
        return given
    return None


def read_api_key(request: web.Request) -> bytes:
    """Return the API key in `Authorization: Bearer` or `x-api-key`; empty without one."""
    scheme, _, given = request.headers.get("Authorization", "").partition(" ")
    if scheme.lower() != "bearer":
        given = request.headers.get("x-api-key", "")
    # aiohttp decodes bytes that are not UTF-8 to surrogates. Such a key matches no known one.
    return given.strip().encode("utf-8", "surrogateescape")


def flag_header(request: web.Request, name: str) -> bool:
    """Return True if the header is 1, False if it is 0 or missing. Raise `BadRequest` otherwise."""
    value = request.headers.get(name, "0")
    if value not in ("0", "1"):
        raise BadRequest(f"{name}: {value[:100]!r} must be 0 or 1")
    return value == "1"
