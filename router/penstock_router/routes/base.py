"""Parts that handlers share: the router's parts, reading bodies, writing JSON, headers and keys."""

from __future__ import annotations

import asyncio
import functools
import hashlib
import itertools
import re
import secrets
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import msgspec
from aiohttp import HttpVersion11, Payload, StreamReader, web
from aiohttp.abc import AbstractStreamWriter

from penstock_client import Fleet
from penstock_router.admission.admission import Admission, Ticket
from penstock_router.admission.api_keys import Key, Keys
from penstock_router.admission.rate_limits import Charge
from penstock_router.admission.shared_budget import SharedBudget
from penstock_router.apis.base import ERRORS, EVENTS, TIMEOUT, AnyKind, ErrorForm, Framing
from penstock_router.apis.json_in_thread import cut
from penstock_router.config import RouterConfig
from penstock_router.errors import (
    BadRequest,
    BodyTooLarge,
    Forbidden,
    TimedOut,
    TooManyRequests,
    Unauthorized,
)
from penstock_router.generation.event_ids import CursorCodec
from penstock_router.generation.resumable_streams import LiveStreams
from penstock_router.generation.tool_pauses import ToolPauses
from penstock_router.images.images import Images
from penstock_router.json_fields import Field, JsonObject, Table, decode_object, shorten, table
from penstock_router.observe.exposition import Exposition
from penstock_router.observe.key_usage import KeyUsage
from penstock_router.observe.metrics import Metrics
from penstock_router.observe.request_record import Records, RequestRecord
from penstock_router.offload.dispatch import Bodies, Body, Incoming
from penstock_router.request import MAX_REQUEST_ID_CHARS
from penstock_router.routes.warnings import warn
from penstock_router.served_models import Models
from penstock_router.server.client_address import network_of
from penstock_router.server.connections import end_answer
from penstock_router.server.content_coding import DAMAGED, Inflater, inflater_of
from penstock_router.server.write_timeout import write_timeout_of
from penstock_router.store.background_responses import Background
from penstock_router.store.response_store import ResponseStore
from penstock_router.thread_pool import Threads

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@dataclass(frozen=True, slots=True)
class Router:
    """The parts of the router that handlers use."""

    config: RouterConfig
    fleet: Fleet
    models: Models
    threads: Threads
    bodies: Bodies
    images: Images
    # What slow clients hold: bodies that arrive, answers that are not read, streams nobody reads.
    memory: SharedBudget
    admission: Admission
    metrics: Metrics
    exposition: Exposition
    cursors: CursorCodec
    live_streams: LiveStreams
    responses: ResponseStore
    background: Background
    keys: Keys
    usage: KeyUsage
    pauses: ToolPauses
    records: Records = field(default_factory=Records)


ROUTER = web.AppKey("router", Router)
REQUEST_ID = web.RequestKey("request_id", str)
# The form of this request's errors: the route's, or that of the API its body turned out to be for.
ERROR_FORM = web.RequestKey("error_form", ErrorForm)
RECORD = web.RequestKey("record", RequestRecord)
# The API key of the request, if it is a known one.
KEY = web.RequestKey("key", Key)

TIMEOUT_HEADER = "x-penstock-timeout-s"
# Headers of all routes that do not answer at once.
HEADERS = table(
    [Field(TIMEOUT_HEADER, TIMEOUT.kind, "Like the field timeout; the shorter one counts.")]
)
# An answer of more bytes counts as memory that its client holds.
LONG_ANSWER_BYTES = 64 * 1024
# How long bodies of routes may be that take a few fields.
_MAX_PLAIN_BYTES = 64 * 1024
# How long a body may fall behind the slowest transfer, or pause: what has arrived takes memory
# meanwhile. However much of it came in time, it cannot fall behind by more than this later.
_MAX_PAUSE_S = 60.0
_MIN_BYTES_A_SECOND = 8192
# Inflating so much takes a fraction of a millisecond, even if it is nothing but empty gzip members.
_SHORT_PACKED_BYTES = 4096
# How much is inflated at a time here.
_INFLATED_HERE_BYTES = 64 * 1024
# How much a thread inflates at a time, in a few milliseconds. It holds the interpreter lock while
# the memory of a piece is made ready.
_PIECES_A_TURN = 8
_PIECE_BYTES = 128 * 1024
# Of this process: a shard tells clients apart on each call for itself.
_CALLER_KEY = secrets.token_bytes(16)
# The same text for a key that is missing, unknown, revoked or expired.
WRONG_KEY = "Unauthorized: missing or wrong API key"


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
    limits_s = [limit for limit in (timeout_s, _timeout_header(request)) if limit is not None]
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


def _timeout_header(request: web.Request) -> float | None:
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


def client_of(request: web.Request) -> str:
    """Say who the client is, for fairness and bounds: the name of its API key, or else its address.
    A key that is not known says nothing: anybody can make up another for each request.
    """
    key: Key | None = request.get(KEY)
    return network_of(request.remote or "") if key is None else key.name


def caller_of(request: web.Request) -> str:
    """The client's name for shards, which have those of one router take turns: says nothing of the
    key's name or the address.
    """
    client = client_of(request).encode("utf-8", "surrogateescape")
    return hashlib.blake2b(client, digest_size=8, key=_CALLER_KEY).hexdigest()


def is_anthropics(request: web.Request) -> bool:
    """Tell whether the client speaks Anthropic's API: none but its clients send this header."""
    return "anthropic-version" in request.headers


def usable_request_id(given: str | None) -> str | None:
    """The caller's id if it is fit for a header and a log line, else None."""
    if given and len(given) <= MAX_REQUEST_ID_CHARS and given.isascii() and given.isprintable():
        return given
    return None


def read_api_key(request: web.Request) -> bytes:
    """The API key of the request, as a Bearer or as an x-api-key; empty without one."""
    scheme, _, given = request.headers.get("Authorization", "").partition(" ")
    if scheme.lower() != "bearer":
        given = request.headers.get("x-api-key", "")
    # aiohttp decodes bytes that are not UTF-8 to surrogates; such a key must match none.
    return given.strip().encode("utf-8", "surrogateescape")


def check_admin(request: web.Request, what: str = "") -> None:
    """Raises `Forbidden` for a key that is not an admin's, or if the router has no admin keys;
    `Unauthorized` without a known key. `what` is asked for, if it is not the whole route.
    """
    what = what or request.path
    if not request.app[ROUTER].keys.has_admins:
        raise Forbidden(
            f"{what} is closed; start the router with --admin-key or --api-keys-file to open it"
        )
    key = request.get(KEY)
    if key is None:
        raise Unauthorized(WRONG_KEY)
    if not key.is_admin:
        raise Forbidden(f"{what} is for keys of the scope admin; this one is a user's")


def flag_header(request: web.Request, name: str) -> bool:
    """Tell whether the header is 1; it may be 0 or missing."""
    value = request.headers.get(name, "0")
    if value not in ("0", "1"):
        raise BadRequest(f"{name}: {value[:100]!r} must be 0 or 1")
    return value == "1"


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
                _check_type(request, any_type=kind.any_type)
                await _receive(request, incoming, router.config.max_body_bytes)
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
    limits_s = (request.app[ROUTER].config.request_timeout_s, _timeout_header(request))
    limit_s = min((limit for limit in limits_s if limit is not None), default=None)
    return None if limit_s is None else limit_s - (time.perf_counter() - request[RECORD].arrived_s)


async def read_object(request: web.Request, *, any_type: bool = False) -> JsonObject:
    """The request's JSON object, on routes whose bodies are short; `any_type` is as
    `BodyKind.any_type`.
    """
    _check_type(request, any_type=any_type)
    with request.app[ROUTER].bodies.incoming(client_of(request)) as incoming:
        await _receive(request, incoming, _MAX_PLAIN_BYTES)
        return decode_object(b"".join(incoming.pieces))


async def _receive(request: web.Request, incoming: Incoming, max_bytes: int) -> None:
    """Receive the whole body of the request, and inflate it."""
    inflater = inflater_of(request.headers.getall("Content-Encoding", ()))
    if (request.content_length or 0) > max_bytes:
        raise _too_large(max_bytes)
    _say_continue(request)
    router, loop = request.app[ROUTER], asyncio.get_running_loop()
    until_s = loop.time() + _MAX_PAUSE_S
    try:
        while piece := await _next_piece(request.content, until_s):
            until_s += len(piece) / _MIN_BYTES_A_SECOND
            until_s = min(until_s, loop.time() + _MAX_PAUSE_S)
            if inflater is None:
                _add(incoming, piece, max_bytes)
            else:
                inflater.feed(piece)
                is_short = len(piece) <= _SHORT_PACKED_BYTES
                while data := await _inflate(router.bodies, inflater, is_short, incoming):
                    for each in data:
                        _add(incoming, each, max_bytes)
            if incoming.is_long:
                await router.bodies.take_turn()
    except web.RequestPayloadError:
        raise BadRequest(DAMAGED) from None
    if inflater is not None:
        inflater.end()


def _check_type(request: web.Request, *, any_type: bool) -> None:
    """Refuse a body that is not said to be JSON, unless `any_type`; and one that a page of another
    origin sent. Browsers ask before they send JSON there, but not before anything else.
    """
    given = request.headers.get("Content-Type")
    if given is not None and _is_json(request.content_type):
        return
    if given is not None and not any_type:
        raise BadRequest(
            f"Content-Type must be application/json, not {shorten(given)}; with curl: "
            "-H 'Content-Type: application/json'"
        )
    if not _is_welcome(request):
        origin = shorten(request.headers.get("Origin"))
        raise Forbidden(
            f"Origin: pages of {origin} may not send this (--cors-origin), or only as "
            "Content-Type application/json"
        )


def _is_welcome(request: web.Request) -> bool:
    """Tell whether the request comes from no page, from this router's own, or from a page of an
    origin that the operator allows.
    """
    origin, allowed = request.headers.get("Origin"), request.app[ROUTER].config.cors_origins
    if origin is None or "*" in allowed or origin in allowed:
        return True
    scheme, _, host = origin.partition("://")
    return scheme in ("http", "https") and host.lower() == request.headers.get("Host", "").lower()


def _say_continue(request: web.Request) -> None:
    """Tell a client that waits for it that its body is wanted."""
    waits = request.headers.get("Expect", "").lower() == "100-continue"
    if waits and request.version >= HttpVersion11 and request.transport is not None:
        request.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")


def _add(incoming: Incoming, piece: bytes, max_bytes: int) -> None:
    incoming.add(piece)
    if incoming.num_bytes > max_bytes:
        raise _too_large(max_bytes)


def _too_large(max_bytes: int) -> BodyTooLarge:
    return BodyTooLarge(f"the body is larger than {max_bytes} bytes")


async def _inflate(
    bodies: Bodies, inflater: Inflater, is_short: bool, incoming: Incoming
) -> list[bytes]:
    """The next bytes that are inflated, in pieces: in a thread if that may take longer than a
    thread's start.
    """
    if is_short and not incoming.is_long:
        return _inflate_pieces(inflater, 1, _INFLATED_HERE_BYTES)
    inflate = functools.partial(_inflate_pieces, inflater, _PIECES_A_TURN, _PIECE_BYTES)
    return await bodies.inflate(inflate)


def _inflate_pieces(inflater: Inflater, num_pieces: int, piece_bytes: int) -> list[bytes]:
    pieces = iter(functools.partial(inflater.inflate, piece_bytes), b"")
    return list(itertools.islice(pieces, num_pieces))


async def _next_piece(content: StreamReader, until_s: float) -> bytes:
    """The bytes that have arrived or arrive until then; empty at the end."""
    # A timeout costs as much as all else here.
    if (piece := content.read_nowait()) or content.at_eof():
        return piece
    try:
        async with asyncio.timeout_at(until_s):
            return await content.readany()
    except TimeoutError:
        raise TimedOut("the body comes too slowly") from None


def _is_json(content_type: str) -> bool:
    return content_type == "application/json" or content_type.endswith("+json")


def json_response(body: object, status: int = 200) -> web.Response:
    """An answer of JSON."""
    return encoded_response(msgspec.json.encode(body), status)


def encoded_response(data: bytes, status: int = 200) -> web.Response:
    """An answer of encoded JSON."""
    return web.Response(body=data, status=status, content_type="application/json")


async def send(request: web.Request, response: web.StreamResponse) -> None:
    """Send a whole answer; returns when the client has taken all of it. A long one counts as memory
    that the client holds until then. Does nothing if it is being sent already, as a stream is.

    Raises `TooManyRequests` before anything is sent, and `ConnectionError`.
    """
    if response.prepared:
        return
    router, num_bytes = request.app[ROUTER], _num_bytes(response)
    with router.memory.hold(client_of(request)) as held:
        if num_bytes > LONG_ANSWER_BYTES:
            held.grow(num_bytes, functools.partial(too_much_unread, router.metrics, num_bytes))
            _divide(response)
        if not request.content.is_eof():
            # Nothing is read after a body that was not read.
            response.force_close()
        await response.prepare(request)
        await end_answer(request, response)
        await write_timeout_of(request.transport).wait_sent()


def _divide(response: web.StreamResponse) -> None:
    if isinstance(response, web.Response) and isinstance(response.body, bytes):
        response.body = _Divided(response.body)


class _Divided(Payload):
    """A long body, written in pieces: over TLS, what is written at once counts as sent. aiohttp's
    own for `BytesIO` copies the whole body at first.
    """

    _value: bytes

    def __init__(self, body: bytes) -> None:
        super().__init__(body)
        self._size = len(body)

    def decode(self, encoding: str = "utf-8", errors: str = "strict") -> str:
        return self._value.decode(encoding, errors)

    async def write(self, writer: AbstractStreamWriter) -> None:
        for piece in cut(memoryview(self._value)):
            await asyncio.sleep(0)
            await writer.write(piece)


def _num_bytes(response: web.StreamResponse) -> int:
    body = response.body if isinstance(response, web.Response) else None
    return len(body) if isinstance(body, bytes) else 0


def too_much_unread(
    metrics: Metrics, num_bytes: int, held_bytes: int, max_bytes: int
) -> TooManyRequests:
    """The refusal of an answer for which its client's share of memory is too small now."""
    metrics.refused.labels("unread_answers").inc()
    return TooManyRequests(
        f"this answer takes {num_bytes} bytes, and the server holds {held_bytes} for this client "
        f"already (of {max_bytes} for all); read the answers before it, then try again"
    )
