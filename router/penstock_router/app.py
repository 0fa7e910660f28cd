"""Routes, what surrounds every handler, and what starts and ends with the application."""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import AsyncIterator
from concurrent.futures import Executor

import msgspec
from aiohttp import HttpVersion11, web

from penstock_router import openapi
from penstock_router.admission import Admission
from penstock_router.apis.base import ERRORS
from penstock_router.backend import Fleet
from penstock_router.background import Background
from penstock_router.bodies import Bodies
from penstock_router.config import RouterConfig
from penstock_router.errors import (
    ApiError,
    BadRequest,
    MethodNotAllowed,
    NotFound,
    Unauthorized,
    noted,
)
from penstock_router.loop_lag import watch_loop
from penstock_router.metrics import Metrics
from penstock_router.models import Models
from penstock_router.response_store import ResponseStore
from penstock_router.resumption import CursorCodec, LiveStreams
from penstock_router.routes import admin, debug, docs
from penstock_router.routes.base import (
    ERROR_FORM,
    RECEIVED_S,
    REQUEST_ID,
    ROUTER,
    Handler,
    Route,
    Router,
    bears_key,
    json_response,
    usable_request_id,
)
from penstock_router.routes.table import ROUTES
from penstock_router.text_pool import TextPool
from penstock_router.threads import Threads

logger = logging.getLogger(__name__)

# Models that are loaded at once, and the like.
_THREAD_WORK_OF_ITS_OWN = 64

# By (method, path), as aiohttp names a path.
_BY_PATH = {(route.method, route.canonical_path): route for route in ROUTES}


def build_app(
    config: RouterConfig, fleet: Fleet, executor: Executor, metrics: Metrics
) -> web.Application:
    """The HTTP application in front of `fleet`, which the caller opens and closes."""
    app = web.Application(
        middlewares=[_answer_errors, _require_key], client_max_size=config.max_body_bytes
    )
    # A name of its own: another router may have the same file.
    responses = ResponseStore(
        config.response_store,
        max_bytes=config.response_store_bytes,
        ttl_s=config.response_ttl_s,
        owner=uuid.uuid4().hex,
    )
    # Whoever was let in finds room, whatever was left running there or is the router's own.
    let_in = config.max_concurrent_requests + config.max_queued_requests
    max_pending = let_in + config.tokenizer_threads + _THREAD_WORK_OF_ITS_OWN
    threads = Threads(executor, max_pending)
    models = Models(fleet, threads, config)
    pool = TextPool(config.text_processes, config.log_level)
    app[ROUTER] = Router(
        config=config,
        fleet=fleet,
        models=models,
        threads=threads,
        bodies=Bodies(models, threads, pool, metrics),
        admission=Admission(config, metrics),
        metrics=metrics,
        cursors=CursorCodec(config.resume_key),
        live_streams=LiveStreams(config.resume_grace_s),
        responses=responses,
        background=Background(responses),
    )
    app[docs.DOCUMENT] = msgspec.json.encode(openapi.describe(ROUTES))
    for route in ROUTES:
        methods = ("GET", "HEAD") if route.method == "GET" else (route.method,)
        for method in methods:
            app.router.add_route(method, route.path, route.handler, expect_handler=_expect)
    admin.add_routes(app)
    debug.add_routes(app)
    app[admin.CHANGES] = admin.Changes(fleet, config.changes_file)
    app.cleanup_ctx.append(_watch_loop)
    app.cleanup_ctx.append(_follow_changes)
    app.cleanup_ctx.append(_end_text_processes)
    app.cleanup_ctx.append(_load_models)
    app.cleanup_ctx.append(_store_responses)
    app.on_shutdown.append(_end_requests)
    app.on_response_prepare.append(_name_answer)
    return app


async def _load_models(app: web.Application) -> AsyncIterator[None]:
    models = app[ROUTER].models
    task = asyncio.create_task(models.keep_loading())
    yield
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    await models.close()


async def _end_text_processes(app: web.Application) -> AsyncIterator[None]:
    yield
    await app[ROUTER].bodies.pool.close()


async def _watch_loop(app: web.Application) -> AsyncIterator[None]:
    task = asyncio.create_task(watch_loop(app[ROUTER].metrics.loop_was_late))
    yield
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def _follow_changes(app: web.Application) -> AsyncIterator[None]:
    task = asyncio.create_task(app[admin.CHANGES].follow())
    yield
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def _store_responses(app: web.Application) -> AsyncIterator[None]:
    async with app[ROUTER].responses:
        yield


async def _end_requests(app: web.Application) -> None:
    router = app[ROUTER]
    waiting = (router.admission.in_flight, router.admission.queued)
    logger.info("stopping: waiting for %d sequences in flight and %d queued", *waiting)
    router.live_streams.stop()
    await router.admission.stop(router.config.shutdown_timeout_s)
    await router.live_streams.wait_ended()
    await router.background.close()
    # Of bodies that wait to be read only: the others have ended by now.
    router.bodies.pool.stop()


async def _name_answer(request: web.Request, response: web.StreamResponse) -> None:
    """Every answer, errors included, says which request it is for."""
    # What aiohttp refuses before there is a handler has none yet.
    response.headers["X-Request-Id"] = request.get(REQUEST_ID) or uuid.uuid4().hex


async def _expect(request: web.Request) -> None:
    """Send for the body that a client holds back. Whatever else one expects is as good as unsaid:
    aiohttp would refuse it in no API's form.
    """
    waits = request.headers.get("Expect", "").lower() == "100-continue"
    if waits and request.version >= HttpVersion11 and request.transport is not None:
        request.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")


@web.middleware
async def _answer_errors(request: web.Request, handler: Handler) -> web.StreamResponse:
    """The edge: whatever a request ends in, the client gets a status and the reason."""
    named = usable_request_id(request.headers.get("X-Request-Id"))
    request[REQUEST_ID] = named or uuid.uuid4().hex
    route = _route_of(request)
    request[ERROR_FORM] = ERRORS if route is None else route.errors
    # What is counted when the client left before there was an answer.
    request[RECEIVED_S], status = time.perf_counter(), 499
    try:
        response = await _answer(request, handler)
        status = response.status
        return response
    finally:
        _count(request, status, time.perf_counter() - request[RECEIVED_S])


async def _answer(request: web.Request, handler: Handler) -> web.StreamResponse:
    try:
        return await handler(request)
    except web.HTTPException as error:
        return _error_response(request, _from_http(error, request))
    except ConnectionError:
        # The client left in the middle of a write; there is nobody to answer.
        raise
    except Exception as error:  # noqa: BLE001 - the process's edge
        return _error_response(request, noted(error, request[REQUEST_ID]))


def _count(request: web.Request, status: int, seconds: float) -> None:
    resource = request.match_info.route.resource
    route = resource.canonical if resource is not None else "unknown"
    metrics = request.app[ROUTER].metrics
    metrics.requests.labels(route, str(status)).inc()
    metrics.request_seconds.labels(route).observe(seconds)


def _from_http(error: web.HTTPException, request: web.Request) -> ApiError:
    """aiohttp's own refusals (no such route, wrong method) in the API's form."""
    where = f"{request.method} {request.path[:200]}"
    if isinstance(error, web.HTTPNotFound):
        return NotFound(f"no such route: {where}")
    if isinstance(error, web.HTTPMethodNotAllowed):
        allowed = ", ".join(sorted(error.allowed_methods))
        return MethodNotAllowed(f"wrong method: {where}; allowed: {allowed}")
    return BadRequest(error.reason)


def _error_response(request: web.Request, error: ApiError) -> web.Response:
    form = request[ERROR_FORM]
    response = json_response(form.body(error), status=form.status(error))
    response.headers.update(error.headers())
    return response


def _route_of(request: web.Request) -> Route | None:
    resource = request.match_info.route.resource
    method = "GET" if request.method == "HEAD" else request.method
    return None if resource is None else _BY_PATH.get((method, resource.canonical))


@web.middleware
async def _require_key(request: web.Request, handler: Handler) -> web.StreamResponse:
    key = request.app[ROUTER].config.api_key
    route = _route_of(request)
    if route is None:
        closed = request.path.startswith("/v1/") and request.method != "OPTIONS"
    else:
        closed = not route.is_open
    if closed and key is not None and not bears_key(request, key):
        raise Unauthorized("Unauthorized: missing or wrong API key")
    return await handler(request)
