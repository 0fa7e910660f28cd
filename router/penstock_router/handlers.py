"""One function for each route: read, hand over, answer. No text work and no policy in here."""

from __future__ import annotations

import dataclasses
import functools
import hmac
import time
import uuid
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any, Generic, TypedDict, TypeVar

import msgspec
from aiohttp import web

from penstock_client.membership import check_address
from penstock_client.types import ShardInfo, random_seed
from penstock_router import metrics as router_metrics
from penstock_router import sse
from penstock_router.admission import Admission, TimeLimit
from penstock_router.backend import Fleet
from penstock_router.config import RouterConfig
from penstock_router.errors import BadRequest, BodyTooLarge, NotFound, Unavailable
from penstock_router.generation import Generation, Usage, collect
from penstock_router.job import Job, prepare_chat, prepare_completion
from penstock_router.models import Models
from penstock_router.responses import ChatShape, CompletionShape, Shape
from penstock_router.resumption import (
    MAX_SEQUENCES,
    Cursor,
    CursorCodec,
    Event,
    LiveStream,
    LiveStreams,
    Progress,
    body_digest,
    job_digest,
)
from penstock_router.schema import (
    ChatRequest,
    JsonObject,
    Options,
    decode_object,
    parse_chat,
    parse_completion,
)

VERSION = version("penstock")
_MAX_SESSION_CHARACTERS = 256


@dataclass(frozen=True, slots=True)
class Router:
    """What handlers share."""

    config: RouterConfig
    fleet: Fleet
    models: Models
    admission: Admission
    metrics: router_metrics.Metrics
    cursors: CursorCodec
    live_streams: LiveStreams


ROUTER = web.AppKey("router", Router)
REQUEST_ID = web.RequestKey("request_id", str)

AnyRequest = TypeVar("AnyRequest", bound=Options)
MakeShape = Callable[[Job, str, int, Usage], Shape]


async def completions(request: web.Request) -> web.StreamResponse:
    """POST /v1/completions"""
    given = await read_object(request)
    body = parse_completion(given)
    places = len(body.prompts) * body.best_of
    param = "best_of" if body.best_of > body.n else "n" if body.n > 1 else "prompt"
    call = Call(request, given, (places, param), prepare_completion, CompletionShape)
    return await _generate(call, body)


async def chat_completions(request: web.Request) -> web.StreamResponse:
    """POST /v1/chat/completions"""
    given = await read_object(request)
    body = parse_chat(given)
    return await _generate(Call(request, given, (body.n, "n"), prepare_chat, ChatShape), body)


@dataclass(frozen=True, slots=True)
class Call(Generic[AnyRequest]):
    """A request to generate, on either route: its JSON, its places, what prepares and shows it."""

    request: web.Request
    given: JsonObject
    # How many, and the field that asks for so many.
    places: tuple[int, str]
    prepare: Callable[[AnyRequest, Models], Awaitable[Job]]
    make_shape: MakeShape


async def _generate(call: Call[AnyRequest], body: AnyRequest) -> web.StreamResponse:
    request = call.request
    router = request.app[ROUTER]
    response_id = _name_request(request, body)
    body = dataclasses.replace(body, request_id=request[REQUEST_ID], **_wishes(request))
    if _flag(request, "x-penstock-resumable"):
        return await _generate_resumable(call, body)
    with router.admission.places(*call.places) as limit:
        job = await _prepared(call, body, limit)
        async with Generation(job, router.fleet, router.metrics) as generation:
            shape = call.make_shape(job, response_id, int(time.time()), generation.usage)
            if body.stream:
                return await sse.stream(
                    request,
                    generation,
                    shape,
                    request_id=request[REQUEST_ID],
                    config=router.config,
                    limit=limit,
                )
            async with limit.scope():
                deltas = await collect(generation)
            response = json_response(shape.whole(deltas))
            if generation.usage.approximate:
                response.headers["x-penstock-continued"] = "approximate"
            return response


async def _prepared(call: Call[AnyRequest], body: AnyRequest, limit: TimeLimit) -> Job:
    models = call.request.app[ROUTER].models
    async with limit.scope():
        job = await call.prepare(body, models)
    # Its last shard may have left meanwhile; the fleet would call the model unknown.
    model = models.info(job.model.info.model).model
    for shard in call.request.app[ROUTER].fleet.shards:
        # It would be waited for, in vain.
        if shard.address == body.shard and shard.info is not None and shard.info.model != model:
            raise BadRequest(f"x-penstock-shard: {shard.address} does not serve {model}")
    return job


# ---- Answers that can be taken up again --------------------------------------------------------


async def _generate_resumable(call: Call[AnyRequest], body: AnyRequest) -> web.StreamResponse:
    request = call.request
    router = request.app[ROUTER]
    _check_resumable(call, body)
    last_id = request.headers.get("Last-Event-ID")
    cursor = _cursor(call, last_id)
    request[REQUEST_ID] = cursor.request_id
    reader = router.live_streams.join(cursor) if last_id else None
    if last_id:
        router.metrics.resumed_streams.labels("again" if reader is None else "live").inc()
    if reader is None:
        body = dataclasses.replace(
            body, request_id=cursor.request_id, drawn_seed=cursor.seed, numerics=cursor.numerics
        )
        reader = router.live_streams.begin(cursor, functools.partial(_make, call, body, cursor))
    with reader:
        return await sse.follow(
            request,
            reader,
            router.cursors.write,
            request_id=cursor.request_id,
            config=router.config,
        )


def _check_resumable(call: Call[AnyRequest], body: AnyRequest) -> None:
    if not body.stream:
        raise BadRequest(
            "x-penstock-resumable: only a stream can be taken up again", param="stream"
        )
    sequences, param = call.places
    if sequences > MAX_SEQUENCES:
        raise BadRequest(
            f"x-penstock-resumable: the request asks for {sequences} sequences; at most "
            f"{MAX_SEQUENCES} can be taken up again",
            param=param,
        )


def _cursor(call: Call[AnyRequest], last_id: str | None) -> Cursor:
    """Where the client is: after an event, or before the first of a new answer."""
    body = body_digest(call.given)
    if not last_id:
        request_id = call.request[REQUEST_ID]
        return Cursor(body, request_id, created=int(time.time()), seed=random_seed())
    cursor = call.request.app[ROUTER].cursors.read(last_id)
    if cursor.body != body:
        raise BadRequest("Last-Event-ID: is of the answer to another request")
    return cursor


async def _make(call: Call[AnyRequest], body: AnyRequest, cursor: Cursor, live: LiveStream) -> None:
    """Generate what a client does not have yet, whether or not anybody reads it."""
    router = call.request.app[ROUTER]
    if cursor.choices and not cursor.numerics:
        raise BadRequest(
            "Last-Event-ID: the answer comes from shards with several numerics, so it cannot be "
            "made again; send the request without an id"
        )
    with router.admission.places(*call.places) as limit:
        job = await _prepared(call, body, limit)
        made_of = job_digest(job)
        if cursor.job not in (b"", made_of):
            raise BadRequest(
                "Last-Event-ID: the request means another prompt by now, as the tokenizer, the "
                "chat template or the model's defaults are others; send it without an id"
            )
        if not (cursor.numerics or job.model.info.numerics_fingerprint):
            raise BadRequest(
                "x-penstock-resumable: what this model gives depends on what runs beside it, so "
                "that no answer of it can be made again"
            )
        cursor = msgspec.structs.replace(cursor, job=made_of)
        job = dataclasses.replace(job, delivered=cursor.delivered)
        response_id = _name_request(call.request, body)
        async with Generation(job, router.fleet, router.metrics) as generation, limit.scope():
            shape = call.make_shape(job, response_id, cursor.created, generation.usage)
            await _put_events(live, generation, shape, cursor)


async def _put_events(
    live: LiveStream, generation: Generation, shape: Shape, cursor: Cursor
) -> None:
    job = generation.job
    progress = Progress.of(job.delivered, len(job.requests))
    opening = [] if cursor.choices else shape.opening()

    def here() -> Cursor:
        return msgspec.structs.replace(
            cursor, numerics=generation.numerics, choices=progress.choices
        )

    async for delta in generation:
        for payload in opening[:-1]:
            live.put(Event(payload))
        for payload in opening[-1:]:
            # Whoever has all of them can go on from here.
            live.put(Event(payload, here()))
        opening = []
        progress.add(delta)
        chunk = shape.chunk(delta)
        if chunk is not None:
            live.put(Event(chunk, here()))
    if job.options.include_usage:
        live.put(Event(shape.usage_chunk()))


# ---- What headers ask for ----------------------------------------------------------------------


class _Wishes(TypedDict):
    """What headers ask for, on every route that generates."""

    exact: bool
    session: str
    shard: str


def _wishes(request: web.Request) -> _Wishes:
    session = request.headers.get("x-penstock-session", "")
    if len(session) > _MAX_SESSION_CHARACTERS:
        raise BadRequest(
            f"x-penstock-session: {len(session)} characters; at most {_MAX_SESSION_CHARACTERS}"
        )
    return _Wishes(
        exact=_flag(request, "x-penstock-exact"), session=session, shard=_pinned_shard(request)
    )


def _pinned_shard(request: web.Request) -> str:
    given = request.headers.get("x-penstock-shard", "")
    if not given:
        return ""
    try:
        address = check_address(given)
    except ValueError as error:
        raise BadRequest(f"x-penstock-shard: {error}") from None
    if all(shard.address != address for shard in request.app[ROUTER].fleet.shards):
        raise BadRequest(f"x-penstock-shard: {address} is not in this fleet")
    return address


def _flag(request: web.Request, name: str) -> bool:
    value = request.headers.get(name, "0")
    if value not in ("0", "1"):
        raise BadRequest(f"{name}: {value[:100]!r} must be 0 or 1")
    return value == "1"


def _name_request(request: web.Request, body: Options) -> str:
    """The answer's id; notes the request's own, of its header, its body or a new one."""
    chat = isinstance(body, ChatRequest)
    prefix = "chatcmpl" if chat else "cmpl"
    if "X-Request-Id" not in request.headers and body.request_id is not None:
        request[REQUEST_ID] = usable_request_id(body.request_id)
    elif "X-Request-Id" not in request.headers:
        return f"{prefix}-{request[REQUEST_ID]}"
    # One choice of a completion is a request of its own; clients expect the first one's id.
    return f"{prefix}-{request[REQUEST_ID]}" + ("" if chat else "-0")


def usable_request_id(given: str | None) -> str:
    """The caller's id where it can stand in a header and a log line, else a new one."""
    if given and len(given) <= 256 and given.isascii() and given.isprintable():
        return given
    return uuid.uuid4().hex


def bears_key(request: web.Request, key: str) -> bool:
    """Whether it has this key, as a Bearer."""
    scheme, _, given = request.headers.get("Authorization", "").partition(" ")
    # Takes the same time wherever the two begin to differ. Headers arrive with bytes that are
    # not UTF-8 as surrogates; they must equal nothing.
    same = hmac.compare_digest(given.strip().encode("utf-8", "surrogateescape"), key.encode())
    return same and scheme.lower() == "bearer"


async def read_object(request: web.Request) -> JsonObject:
    """The request's JSON object."""
    given = request.headers.get("Content-Type")
    if given is not None and not _is_json(request.content_type):
        raise BadRequest(f"Content-Type must be application/json, not {given[:100]}")
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


async def list_models(request: web.Request) -> web.Response:
    """GET /v1/models"""
    models = request.app[ROUTER].models
    cards = [_card(info, models.started_at) for info in models.infos()]
    if not cards:
        raise Unavailable("no shard serves at present; try again shortly")
    return json_response({"object": "list", "data": cards})


async def get_model(request: web.Request) -> web.Response:
    """GET /v1/models/{id}"""
    models = request.app[ROUTER].models
    name = request.match_info["id"]
    info = models.info(name)
    if name not in (info.model, *info.model_aliases):
        raise NotFound(f"The model `{name[:200]}` does not exist.", param="model")
    return json_response(_card(info, models.started_at))


def _card(info: ShardInfo, created: int) -> dict[str, Any]:
    return {
        "id": info.model,
        "object": "model",
        "created": created,
        "owned_by": "penstock",
        "root": info.model,
        "parent": None,
        "max_model_len": info.max_model_len,
        "permission": [],
    }


async def health(request: web.Request) -> web.Response:
    """GET /health, /ping: this process answers."""
    return web.Response()


async def ready(request: web.Request) -> web.Response:
    """GET /ready: requests would be served."""
    router = request.app[ROUTER]
    reason = router.models.not_ready_because
    if router.admission.stopping:
        reason = "the router is shutting down"
    if reason is not None:
        raise Unavailable(f"not ready: {reason}")
    return json_response({"status": "ready"})


async def metrics(request: web.Request) -> web.Response:
    """GET /metrics"""
    text = request.app[ROUTER].metrics.exposition()
    return web.Response(body=text, headers={"Content-Type": router_metrics.CONTENT_TYPE})


async def show_version(request: web.Request) -> web.Response:
    """GET /version"""
    return json_response({"version": VERSION})
