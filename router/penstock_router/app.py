"""The aiohttp application: routes, middlewares, startup and shutdown."""

from __future__ import annotations

import asyncio
import functools
import logging
import time
import uuid
from collections.abc import AsyncIterator, Callable, Coroutine
from concurrent.futures import Executor
from typing import Any

import msgspec
from aiohttp import HttpVersion10, HttpVersion11, web, web_urldispatcher

from penstock_client import Fleet
from penstock_common.tasks import run_lasting
from penstock_common.tracing.spans import SpanSink
from penstock_common.version import VERSION
from penstock_router.admission.admission import Admission
from penstock_router.admission.api_keys import Keys
from penstock_router.admission.shared_budget import MEMORY_BYTES, SharedBudget
from penstock_router.apis.base import ERRORS
from penstock_router.config import RouterConfig
from penstock_router.console.feed import Console
from penstock_router.errors import (
    ApiError,
    BadRequest,
    MethodNotAllowed,
    NotFound,
    Unauthorized,
    UpgradeRefused,
    log_error,
)
from penstock_router.generation.event_ids import CursorCodec
from penstock_router.generation.resumable_streams import LiveStreams
from penstock_router.generation.tool_pauses import ToolPauses
from penstock_router.images.images import Images
from penstock_router.json_fields import shorten
from penstock_router.observe.ended_request_metrics import RequestMetrics
from penstock_router.observe.exposition import Exposition
from penstock_router.observe.fleet_metrics import FleetCollector
from penstock_router.observe.key_usage import KeyUsage
from penstock_router.observe.loop_lag import watch_loop
from penstock_router.observe.metrics import Metrics
from penstock_router.observe.request_log_line import log_request
from penstock_router.observe.request_record import Records, RequestRecord
from penstock_router.observe.tracing import RequestTraces
from penstock_router.offload.dispatch import Bodies
from penstock_router.offload.request_templates import Programs
from penstock_router.offload.text_pool import TextPool
from penstock_router.openapi import document as openapi
from penstock_router.routes import admin, console, docs, response_headers, warnings
from penstock_router.routes.base import Handler, Route
from penstock_router.routes.table import ROUTES, errors_of
from penstock_router.served_models import Models
from penstock_router.server.caller import WRONG_KEY
from penstock_router.server.parts import ERROR_FORM, KEY, RECORD, REQUEST_ID, ROUTER, Router
from penstock_router.server.request_headers import read_api_key, usable_request_id
from penstock_router.server.send import json_response, send
from penstock_router.store.background_responses import Background
from penstock_router.store.response_store import ResponseStore
from penstock_router.thread_pool import Threads

logger = logging.getLogger(__name__)

# The maximum of thread tasks that belong to no request, such as loading models.
_THREAD_WORK_OF_ITS_OWN = 64

_TRACES = web.AppKey("traces", RequestTraces)
_PROBES = web.AppKey("probes", Records)
# Routes by (method, path), with the path in aiohttp's canonical form.
_BY_PATH = {(route.method, route.canonical_path): route for route in ROUTES}


def _response_store(config: RouterConfig, metrics: Metrics) -> ResponseStore:
    return ResponseStore(
        config.response_store,
        max_bytes=config.response_store_bytes,
        ttl_s=config.response_ttl_s,
        owner=uuid.uuid4().hex,
        on_failure=metrics.store_failures.inc,
    )


def build_app(
    config: RouterConfig,
    fleet: Fleet,
    executor: Executor,
    metrics: Metrics,
    spans: SpanSink | None = None,
) -> web.Application:
    """Build the HTTP application. The caller opens and closes `fleet` and `spans`."""
    app = web.Application(
        middlewares=[_answer_errors, response_headers.answer_preflight, _require_key],
        client_max_size=config.max_body_bytes,
    )
    responses = _response_store(config, metrics)
    # `max_pending` has room for admitted requests, for work left running by abandoned requests, and
    # for the router's own work.
    let_in = config.max_concurrent_requests + config.max_queued_requests
    max_pending = let_in + config.tokenizer_threads + _THREAD_WORK_OF_ITS_OWN
    threads = Threads(executor, max_pending, config.tokenizer_threads)
    models = Models(fleet, threads, config, metrics.count_held)
    pool = TextPool(config.text_processes, config.log_level, config.log_format)
    memory = SharedBudget(MEMORY_BYTES, metrics.buffered_bytes)
    programs = Programs(TextPool(1, config.log_level, config.log_format), metrics)
    images = Images(config, threads, metrics)
    usage = KeyUsage(config)
    app[ROUTER] = Router(
        config=config,
        fleet=fleet,
        models=models,
        threads=threads,
        bodies=Bodies(threads, pool, programs, memory, metrics, images, config.max_images),
        images=images,
        memory=memory,
        admission=Admission(config, metrics),
        metrics=metrics,
        exposition=Exposition(
            metrics,
            FleetCollector(fleet, models.shards_serving),
            names=config.metrics_names,
            usage=usage if config.metrics_by_key else None,
        ),
        cursors=CursorCodec(config.resume_key),
        live_streams=LiveStreams(config.resume_grace_s, memory),
        responses=responses,
        background=Background(responses),
        keys=Keys(config, usage.keep_keys, metrics.keys_refused_reloads.inc),
        usage=usage,
        pauses=ToolPauses(config.tool_pause_s),
    )
    app[warnings.LOG] = warnings.WarningLog()
    _tell_of_requests(app, spans)
    app[docs.DOCUMENT] = _openapi_document()
    for route in ROUTES:
        methods = ("GET", "HEAD") if route.method == "GET" else (route.method,)
        for method in methods:
            app.router.add_route(method, route.path, route.handler)
    admin.add_routes(app)
    if config.console:
        console.add_routes(app)
    app[console.CONSOLE] = _console(app[ROUTER])
    app[admin.CHANGES] = admin.Changes(fleet, config.changes_file)
    app.cleanup_ctx.append(
        _meanwhile(lambda: watch_loop(metrics.observe_loop_lag), "watching the event loop")
    )
    app.cleanup_ctx.append(_meanwhile(app[admin.CHANGES].follow, "following /admin"))
    app.cleanup_ctx.append(_meanwhile(app[ROUTER].keys.follow, "following the file of keys"))
    app.cleanup_ctx.append(_meanwhile(usage.write_regularly, "writing the usage of keys"))
    app.cleanup_ctx.append(_close_parts)
    app.cleanup_ctx.append(_meanwhile(models.keep_loading, "loading models"))
    app.cleanup_ctx.append(_store_responses)
    # The console's streams never end by themselves, so end them first.
    app.on_shutdown.append(_end_console)
    app.on_shutdown.append(_end_requests)
    app.on_response_prepare.append(response_headers.complete)
    return app


@functools.cache
def _openapi_document() -> bytes:
    return msgspec.json.encode(openapi.describe(ROUTES))


def _tell_of_requests(app: web.Application, spans: SpanSink | None) -> None:
    router = app[ROUTER]
    tracing = router.config.tracing
    app[_TRACES] = RequestTraces(spans, 1.0 if tracing is None else tracing.share)
    request_metrics = RequestMetrics(router.metrics.registry)
    app[_PROBES] = Records()
    app[_PROBES].on_end.append(request_metrics.on_request_end)
    router.records.on_end += [
        request_metrics.on_request_end,
        router.usage.on_request_end,
        app[_TRACES].on_request_end,
    ]
    if router.config.log_requests:
        router.records.on_end.append(log_request)


def _console(router: Router) -> Console:
    config = router.config
    return Console(
        router.fleet,
        router.admission,
        router.metrics,
        router.records,
        version=VERSION,
        worker=config.worker,
        workers=config.workers,
    )


async def _end_console(app: web.Application) -> None:
    app[console.CONSOLE].close()


def _meanwhile(
    work: Callable[[], Coroutine[Any, Any, None]], what: str
) -> Callable[[web.Application], AsyncIterator[None]]:
    """Run a task as long as the application runs."""

    async def context(app: web.Application) -> AsyncIterator[None]:
        task = asyncio.create_task(run_lasting(work, what))
        yield
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    return context


async def _close_parts(app: web.Application) -> AsyncIterator[None]:
    yield
    await app[ROUTER].models.close()
    await app[ROUTER].bodies.close()
    await app[ROUTER].images.close()


async def _store_responses(app: web.Application) -> AsyncIterator[None]:
    async with app[ROUTER].responses:
        yield


async def _end_requests(app: web.Application) -> None:
    router = app[ROUTER]
    timeout_s = router.config.shutdown_timeout_s
    in_flight, queued = router.admission.in_flight, router.admission.queued
    sequences = f"{in_flight} {'sequence' if in_flight == 1 else 'sequences'}"
    logger.info(
        "stopping: waiting at most %g s for %s in flight and %d queued",
        *(timeout_s, sequences, queued),
    )
    router.live_streams.stop()
    await router.admission.stop(timeout_s)
    await router.live_streams.wait_ended()
    await router.background.close()
    # All other requests have ended. Refuse bodies that still wait to be parsed.
    router.bodies.stop()


async def _expect(request: web.Request) -> None:
    """Ignore `Expect` here: the reader of the body sends 100 Continue (`server/read_body.py`)."""


# Set globally, because aiohttp uses a separate handler for unknown paths.
web_urldispatcher._default_expect_handler = _expect


def error_of_http(reason: str) -> web.Response:
    """Return the usual error response to bytes that are not an HTTP request."""
    error = BadRequest(f"not a request of HTTP/1.1: {reason}")
    response = json_response(ERRORS.body(error), status=ERRORS.status(error))
    response_headers.add(response.headers, uuid.uuid4().hex)
    return response


@web.middleware
async def _answer_errors(request: web.Request, handler: Handler) -> web.StreamResponse:
    """The outermost handler: after any failure, the client gets a status and the reason."""
    named = usable_request_id(request.headers.get("X-Request-Id"))
    request[REQUEST_ID] = named or uuid.uuid4().hex
    route = _route_of(request)
    request[ERROR_FORM] = errors_of(request, route)
    record = request[RECORD] = _begin_record(request)
    records = request.app[ROUTER].records
    if record.route == console.FILES or (route is not None and route.is_open):
        # Probes and console files are counted in metrics, but neither logged nor traced.
        records = request.app[_PROBES]
        record.record_outcome("probe")
    with records.track(record):
        # The status in metrics if the client disconnects early.
        record.status = 499
        response = await _answer(request, handler)
        record.status = response.status
        return response


def _begin_record(request: web.Request) -> RequestRecord:
    resource = request.match_info.route.resource
    headers = request.headers.getall("traceparent", ())
    traceparent, parent_span_id = request.app[_TRACES].begin(headers)
    return RequestRecord(
        request_id=request[REQUEST_ID],
        method=request.method,
        route=resource.canonical if resource is not None else "unknown",
        arrived_s=time.perf_counter(),
        traceparent=traceparent,
        parent_span_id=parent_span_id,
        client=(request.remote or "") if request.app[ROUTER].config.log_clients else "",
    )


async def _answer(request: web.Request, handler: Handler) -> web.StreamResponse:
    if (refusal := _refusal_of_head(request)) is not None:
        response = _error_response(request, refusal)
        response.force_close()
        return response
    try:
        answer = await handler(request)
        # Send the answer here, so that the request counts as running until it is sent, and errors
        # are handled below.
        await send(request, answer)
        return answer
    except web.HTTPException as error:
        return _error_response(request, _from_http(error, request))
    except ConnectionError:
        # The client disconnected during a write, so no answer can reach it.
        raise
    except Exception as error:  # noqa: BLE001 - the process's edge
        return _error_response(request, log_error(error, request[REQUEST_ID]))


def _refusal_of_head(request: web.Request) -> BadRequest | None:
    """Return an error for a head whose length proxies may read differently, which allows request
    smuggling. aiohttp accepts such heads.
    """
    version = request.version
    if version not in (HttpVersion10, HttpVersion11):
        return BadRequest(f"HTTP/{version.major}.{version.minor}: must be HTTP/1.1 or HTTP/1.0")
    coding = request.headers.get("Transfer-Encoding")
    if coding is None:
        return None
    if coding.lower() != "chunked":
        return BadRequest(f"Transfer-Encoding: {shorten(coding)} must be chunked")
    if version == HttpVersion10:
        return BadRequest("Transfer-Encoding: HTTP/1.0 has none; send Content-Length")
    return None


def _from_http(error: web.HTTPException, request: web.Request) -> ApiError:
    where = f"{request.method} {request.path[:200]}"
    if isinstance(error, web.HTTPNotFound):
        return NotFound(f"no such route: {where}")
    if isinstance(error, web.HTTPMethodNotAllowed):
        if request.headers.get("Upgrade", "").lower() == "websocket":
            return UpgradeRefused(f"no WebSocket is served: {where}; send a POST over HTTP")
        allowed = ", ".join(sorted(error.allowed_methods))
        return MethodNotAllowed(f"wrong method: {where}; allowed: {allowed}")
    return BadRequest(error.reason)


def _error_response(request: web.Request, error: ApiError) -> web.Response:
    form = request[ERROR_FORM]
    answer = form.name_request(form.body(error), request[REQUEST_ID])
    response = json_response(answer, status=form.status(error))
    request[RECORD].record_error(error.type, error.param, error.model)
    response.headers.update(error.headers())
    return response


def _route_of(request: web.Request) -> Route | None:
    resource = request.match_info.route.resource
    method = "GET" if request.method == "HEAD" else request.method
    return None if resource is None else _BY_PATH.get((method, resource.canonical))


@web.middleware
async def _require_key(request: web.Request, handler: Handler) -> web.StreamResponse:
    keys, route = request.app[ROUTER].keys, _route_of(request)
    shown = read_api_key(request)
    key = keys.find(shown) if shown else None
    if key is not None:
        request[KEY] = key
        request[RECORD].key_name = key.name
    if route is None:
        closed = request.path.startswith("/v1/") and request.method != "OPTIONS"
    else:
        closed = not route.is_open
    if closed and keys.are_asked_for and key is None:
        raise Unauthorized(WRONG_KEY)
    return await handler(request)
