"""Parts that handlers share: the route, its admission, and the body that it reads first."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

from penstock_router.admission.admission import Ticket
from penstock_router.admission.rate_limits import Charge
from penstock_router.apis.base import ERRORS, EVENTS, AnyKind, ErrorForm, Framing
from penstock_router.json_fields import Table
from penstock_router.offload.dispatch import Body
from penstock_router.routes.warnings import warn
from penstock_router.server.caller import client_of
from penstock_router.server.parts import ERROR_FORM, KEY, RECORD, ROUTER
from penstock_router.server.read_body import check_content_type, receive_body
from penstock_router.server.request_headers import read_timeout_header

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Route:
    """A path, its handler, and what the documentation says of it."""

    method: str
    path: str
    handler: Handler
    summary: str
    # The fields of a JSON body.
    fields: Table | None = None
    # At least one of these fields must be there.
    needs_one_of: tuple[str, ...] = ()
    # The fields of each form of a JSON body that has several.
    bodies: tuple[Table, ...] = ()
    # Query parameters and headers: read by the handler, described here.
    query: Table = field(default_factory=dict)
    headers: Table = field(default_factory=dict)
    # The type of a JSON answer: a TypedDict or another type with a JSON schema; None: no JSON.
    answer: Any = None
    # The media type of an answer that is text other than JSON.
    media_type: str = ""
    # The type of a stream's events, and how they are sent.
    event: Any = None
    framing: Framing = EVENTS
    errors: ErrorForm = ERRORS
    # More forms of errors, where the body decides which API a request is for.
    other_errors: tuple[ErrorForm, ...] = ()
    # Served without an API key.
    is_open: bool = False
    # Served to admins' keys alone.
    is_admins: bool = False
    # Served to nobody: another server's route, which a client may ask for.
    is_refused: bool = False

    @property
    def canonical_path(self) -> str:
        """The path without the patterns of its variables."""
        return re.sub(r"\{(\w+):[^}]*\}", r"{\1}", self.path)


@contextmanager
def admit_request(
    request: web.Request, sequences: int, param: str = "n", timeout_s: float | None = None
) -> Iterator[Ticket]:
    """`Admission.enter` with the limits of the request's API key; its time counts from the
    request's arrival. The request's record is held at least as long.
    """
    router, record, key = request.app[ROUTER], request[RECORD], request.get(KEY)
    limits_s = [limit for limit in (timeout_s, read_timeout_header(request)) if limit is not None]
    entered = router.admission.enter(
        client_of(request),
        sequences,
        param,
        timeout_s=min(limits_s, default=None),
        waited_s=time.perf_counter() - record.arrived_s,
        max_concurrent=None if key is None else key.max_concurrent_requests,
        rates=None if key is None else key.rates,
    )
    with router.records.track(record), entered as ticket:
        record.admitted_s = time.perf_counter()
        yield ticket


def with_body(
    kind: AnyKind, handle: Callable[[web.Request, Body], Awaitable[web.StreamResponse]]
) -> Handler:
    """A handler that reads a body of this kind first."""

    async def read_and_handle(request: web.Request) -> web.StreamResponse:
        router, key = request.app[ROUTER], request.get(KEY)
        if key is not None:
            # Charged before the body is read: reading a wrong one takes as long.
            Charge(key.rates, router.metrics).take_request()
        bodies = router.bodies
        with_digest = request.headers.get("x-penstock-resumable") == "1"
        with bodies.incoming(client_of(request)) as incoming:
            async with asyncio.timeout(_left_s(request)):
                check_content_type(request, any_type=kind.any_type)
                await receive_body(request, incoming, router.config.max_body_bytes)
                body = await bodies.read(kind, incoming, with_digest=with_digest)
            try:
                request[ERROR_FORM] = body.kind.errors
                if body.refusal is not None:
                    raise body.refusal
                warn(request, getattr(body.asked, "warnings", ()))
                return await handle(request, body)
            finally:
                # A raised refusal refers to this frame, which would keep the body in memory.
                del body

    return read_and_handle


def _left_s(request: web.Request) -> float | None:
    """Seconds left for the request, by the limits known before its body is read; None: no limit."""
    limits_s = (request.app[ROUTER].config.request_timeout_s, read_timeout_header(request))
    limit_s = min((limit for limit in limits_s if limit is not None), default=None)
    return None if limit_s is None else limit_s - (time.perf_counter() - request[RECORD].arrived_s)
