"""What handlers share: the router's parts, reading bodies, writing JSON, headers and keys."""

from __future__ import annotations

import hmac
import re
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from importlib.metadata import version
from typing import Any

import msgspec
from aiohttp import web

from penstock_router.admission import Admission
from penstock_router.apis.base import ERRORS, ErrorForm
from penstock_router.backend import Fleet
from penstock_router.background import Background
from penstock_router.config import RouterConfig
from penstock_router.errors import BadRequest, BodyTooLarge, Forbidden, Unauthorized
from penstock_router.fields import JsonObject, Table, decode_object, short
from penstock_router.metrics import Metrics
from penstock_router.models import Models, ServedModel
from penstock_router.response_store import ResponseStore
from penstock_router.resumption import CursorCodec, LiveStreams

VERSION = version("penstock")

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@dataclass(frozen=True, slots=True)
class Router:
    """What handlers share."""

    config: RouterConfig
    fleet: Fleet
    models: Models
    admission: Admission
    metrics: Metrics
    cursors: CursorCodec
    live_streams: LiveStreams
    responses: ResponseStore
    background: Background


ROUTER = web.AppKey("router", Router)
REQUEST_ID = web.RequestKey("request_id", str)
# How this request's errors look; a route's own, or what a handler that dispatches has found.
ERROR_FORM = web.RequestKey("error_form", ErrorForm)
# As `time.perf_counter` has it.
RECEIVED_S = web.RequestKey("received_s", float)


@dataclass(frozen=True, slots=True, kw_only=True)
class Route:
    """A path, what serves it, and what is documented of it."""

    method: str
    path: str
    handler: Handler
    summary: str
    # Of a JSON body.
    fields: Table | None = None
    # At least one of these fields must be there.
    needs_one_of: tuple[str, ...] = ()
    # Of a JSON body that has one of several forms.
    bodies: tuple[Table, ...] = ()
    # Read by its handler, and described here.
    query: Table = field(default_factory=dict)
    headers: Table = field(default_factory=dict)
    # A TypedDict, or what else has a JSON schema; None: no JSON.
    answer: Any = None
    # Of an answer that is another text.
    media_type: str = ""
    # Of the events of a stream.
    event: Any = None
    errors: ErrorForm = ERRORS
    # Of requests that turn out to be of another API.
    other_errors: tuple[ErrorForm, ...] = ()
    # Served without an API key.
    is_open: bool = False

    @property
    def canonical_path(self) -> str:
        """The path without the patterns of its variables."""
        return re.sub(r"\{(\w+):[^}]*\}", r"{\1}", self.path)


@asynccontextmanager
async def using_model(request: web.Request, name: str) -> AsyncIterator[ServedModel]:
    """The model of that name, for text work: one place, and as long as a request may take."""
    router = request.app[ROUTER]
    with router.admission.places(1) as limit:
        async with limit.scope():
            yield await router.models.get(name)


def usable_request_id(given: str | None) -> str | None:
    """The caller's id where it can stand in a header and a log line."""
    if given and len(given) <= 256 and given.isascii() and given.isprintable():
        return given
    return None


def bears_key(request: web.Request, key: str) -> bool:
    """Whether it has this key, as a Bearer or as an x-api-key."""
    scheme, _, given = request.headers.get("Authorization", "").partition(" ")
    if scheme.lower() != "bearer":
        given = request.headers.get("x-api-key", "")
    # Takes the same time wherever the two begin to differ. Headers arrive with bytes that are
    # not UTF-8 as surrogates; they must equal nothing.
    return hmac.compare_digest(given.strip().encode("utf-8", "surrogateescape"), key.encode())


def check_admin(request: web.Request) -> None:
    """Raises `Forbidden` where there is no admin key, `Unauthorized` for another one."""
    key = request.app[ROUTER].config.admin_key
    if key is None:
        raise Forbidden(f"{request.path} is closed; start the router with --admin-key to open it")
    if not bears_key(request, key):
        raise Unauthorized("Unauthorized: missing or wrong admin key")


def flag_header(request: web.Request, name: str) -> bool:
    """A header that says 1, or 0 as one that is missing does."""
    value = request.headers.get(name, "0")
    if value not in ("0", "1"):
        raise BadRequest(f"{name}: {value[:100]!r} must be 0 or 1")
    return value == "1"


async def read_object(request: web.Request) -> JsonObject:
    """The request's JSON object."""
    given = request.headers.get("Content-Type")
    if given is not None and not _is_json(request.content_type):
        raise BadRequest(f"Content-Type must be application/json, not {short(given)}")
    try:
        body = await request.read()
    except web.HTTPRequestEntityTooLarge:
        limit = request.app[ROUTER].config.max_body_bytes
        raise BodyTooLarge(f"the body is larger than {limit} bytes") from None
    except web.RequestPayloadError:
        raise BadRequest("the body is damaged: it does not decode or ends too early") from None
    return decode_object(body)


def _is_json(content_type: str) -> bool:
    return content_type == "application/json" or content_type.endswith("+json")


def json_response(body: object, status: int = 200) -> web.Response:
    """An answer of JSON."""
    return web.Response(
        body=msgspec.json.encode(body), status=status, content_type="application/json"
    )
