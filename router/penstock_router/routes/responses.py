"""OpenAI's Responses: stored, continued, generated in the background, retrieved and cancelled.

The store keeps a response's answer, and the conversation up to and including it. An answer that
cannot be stored is still sent, with `store: false`. One that fails, or whose client leaves, is
stored only if it is generated in the background. A response requested with an API key is visible to
keys of the same name and to admins' keys; for others it does not exist.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import logging
import time
from collections.abc import Iterator
from contextlib import AsyncExitStack

from aiohttp import web

from penstock_router.admission.admission import TimeLimit
from penstock_router.apis.base import Shape
from penstock_router.apis.responses.answers import (
    CANCELLED,
    COMPLETED,
    INCOMPLETE,
    DeletedAnswer,
    ResponseShape,
)
from penstock_router.apis.responses.request_type import ResponsesRequest
from penstock_router.apis.responses.stored import Page
from penstock_router.errors import BadRequest, NotFound, PreviousNotFound, Unavailable, log_error
from penstock_router.generation.deltas import Hold, bound, for_each
from penstock_router.generation.generation import Generation
from penstock_router.json_fields import STRING, Field, integer, one_of, shorten, table
from penstock_router.routes.generate import (
    Call,
    admit,
    answer,
    hold_memory,
    make_generation,
    make_shape,
    prepare_job,
    run_work,
    take_places,
)
from penstock_router.server.caller import client_of
from penstock_router.server.parts import KEY, REQUEST_ID, ROUTER
from penstock_router.server.send import encoded_response, json_response, too_much_unread
from penstock_router.store.response_store import (
    FAILED,
    UNFINISHED,
    ResponseTooLarge,
    StoredResponse,
    StoreUnavailable,
)

logger = logging.getLogger(__name__)

# How long a cancellation waits for the worker that makes the response, and how often it looks.
_CANCEL_WAIT_S = 5.0
_CANCEL_POLL_S = 0.05

# To how many responses the items of a request may refer.
_MAX_REFERRED = 256
_PAGE_ITEMS = 20
_LIMIT = integer(1, 100)
_ORDER = one_of("asc", "desc")
RETRIEVE_QUERY = table([Field("stream", one_of("false"), "Stored responses are not streamed.")])
ITEMS_QUERY = table(
    [
        Field("limit", _LIMIT, f"Items of a page; default {_PAGE_ITEMS}."),
        Field("order", _ORDER, "Default desc: the last one first."),
        Field("after", STRING, "The id of the item that the page comes after."),
    ]
)


# ---- POST /v1/responses ------------------------------------------------------------------------


async def respond(call: Call[ResponsesRequest]) -> web.StreamResponse:
    """Answer, continuing the previous response if one is named, and store the answer."""
    asked = call.asked
    if asked.previous_response_id is not None or asked.references:
        await _add_earlier(call)
    if asked.background:
        # Not cancelled when the client leaves: a response that is in the store must reach an end.
        return await asyncio.shield(_begin(call))
    return await answer(call, functools.partial(_keep, call) if asked.store else None)


async def _add_earlier(call: Call[ResponsesRequest]) -> None:
    """Give the body what it refers to, for `ResponsesRequest.after`: the conversation before it,
    and answers of which it repeats items.
    """
    request, asked, before = call.request, call.asked, b"[]"
    if asked.previous_response_id is not None:
        before = await _find_conversation(request, asked.previous_response_id)
    call.body.add_earlier(before)
    stems = dict.fromkeys(map(_stem_of, asked.references))
    if len(stems) > _MAX_REFERRED:
        text = f"input: references to at most {_MAX_REFERRED} responses; given: {len(stems)}"
        raise BadRequest(text, param="input")
    responses = request.app[ROUTER].responses
    for stem in filter(None, stems):
        with _store_errors():
            output = await responses.get_output(f"resp_{stem}", *_reader(request))
        if output is not None:
            call.body.add_earlier(output)


def _stem_of(item_id: str) -> str:
    """The part of an item's id that its response's id has too."""
    return [*item_id.split("_", 2), ""][1]


async def _find_conversation(request: web.Request, previous: str) -> bytes:
    stored = await _find(request, previous)
    if stored is None:
        text = f"Previous response with id {shorten(previous)} not found."
        raise PreviousNotFound(text, param="previous_response_id")
    if stored.status not in (COMPLETED, INCOMPLETE):
        text = f"previous_response_id: that response is {stored.status}; nothing can follow it"
        raise BadRequest(text, param="previous_response_id")
    return stored.messages


async def _keep(call: Call[ResponsesRequest], shape: Shape) -> None:
    assert isinstance(shape, ResponseShape)
    shape.finish()
    try:
        await _put(call, shape)
    except (ResponseTooLarge, StoreUnavailable) as error:
        logger.warning("request %s: not stored: %s", call.request[REQUEST_ID], error)
        shape.answer["store"] = False


async def _put(call: Call[ResponsesRequest], shape: ResponseShape) -> bytes:
    """Store the response as it is now; returns its answer as JSON."""
    key, status = call.request.get(KEY), shape.answer["status"]
    response, messages = await run_work(call, shape.usage, shape.stored)
    await call.request.app[ROUTER].responses.put(
        call.response_id,
        response,
        messages,
        status=status,
        key_name="" if key is None else key.name,
    )
    return response


# ---- background --------------------------------------------------------------------------------


async def _begin(call: Call[ResponsesRequest]) -> web.Response:
    """Start the generation and answer at once; a bad request is refused before."""
    router = call.request.app[ROUTER]
    # As for a stream: the output so far is available even if the generation ends early.
    call = dataclasses.replace(call, asked=dataclasses.replace(call.asked, stream=True))
    async with AsyncExitStack() as scope:
        ticket = scope.enter_context(admit(call))
        job = await prepare_job(call, ticket)
        hold = scope.enter_context(hold_memory(call, job))
        await take_places(call, job, ticket)
        made = make_generation(call, job, ticket.limit)
        generation = await scope.enter_async_context(made)
        shape = make_shape(call, job, generation, int(time.time()))
        assert isinstance(shape, ResponseShape)
        shape.queue()
        with _store_errors():
            begun = encoded_response(await _put(call, shape))
        router.background.start(
            call.response_id,
            _make(call, generation, shape, ticket.limit, hold),
            scope.pop_all(),
            functools.partial(_keep_end, call, shape),
        )
    return begun


async def _make(
    call: Call[ResponsesRequest],
    generation: Generation,
    shape: ResponseShape,
    limit: TimeLimit,
    hold: Hold,
) -> None:
    max_bytes = call.request.app[ROUTER].config.max_answer_bytes
    try:
        async with limit.scope():
            shape.begin()
            with contextlib.suppress(ResponseTooLarge, StoreUnavailable):
                await _put(call, shape)
            deltas = bound(generation, generation.job.options, max_bytes, hold)
            await for_each(deltas, shape.take)
    except asyncio.CancelledError:
        generation.abandon(None)
        raise
    except Exception as error:  # whatever it was, the generation learns it
        generation.abandon(error)
        raise
    shape.finish()


async def _keep_end(
    call: Call[ResponsesRequest], shape: ResponseShape, ended: BaseException | None
) -> None:
    if isinstance(ended, Exception):
        shape.fail(log_error(ended, call.request[REQUEST_ID]))
    elif ended is not None:
        shape.cancel()
    try:
        await _put(call, shape)
    except ResponseTooLarge as error:
        shape.fail(BadRequest(str(error)), show_output=False)
        try:
            await _put(call, shape)
        except ResponseTooLarge:
            # Too large even with only its error: better unknown than in progress for ever.
            await call.request.app[ROUTER].responses.delete(call.response_id)


# ---- what is stored ----------------------------------------------------------------------------


async def retrieve(request: web.Request) -> web.Response:
    """GET /v1/responses/{id}"""
    if request.query.get("stream", "false") != "false":
        text = "stream: stored responses are not streamed; ask again until it is finished"
        raise BadRequest(text, param="stream")
    return await _show(request, await _get(request))


async def delete(request: web.Request) -> web.Response:
    """DELETE /v1/responses/{id}; a response in progress is cancelled."""
    response_id = request.match_info["id"]
    with _store_errors():
        if not await request.app[ROUTER].responses.delete(response_id, *_reader(request)):
            raise _not_found(response_id)
    deleted: DeletedAnswer = {"id": response_id, "object": "response", "deleted": True}
    return json_response(deleted)


async def cancel(request: web.Request) -> web.Response:
    """POST /v1/responses/{id}/cancel, whichever worker generates it."""
    router, response_id = request.app[ROUTER], request.match_info["id"]
    stored = await _get(request)
    if stored.status == CANCELLED:
        return await _show(request, stored)
    if stored.status not in UNFINISHED:
        raise BadRequest(
            f"Cannot cancel a response that is {stored.status}: only one that is still made in the "
            "background can be."
        )
    with _store_errors():
        await router.responses.request_cancel(response_id)
    router.background.cancel(response_id)
    until_s = time.monotonic() + _CANCEL_WAIT_S
    while stored.status in UNFINISHED and time.monotonic() < until_s:
        await asyncio.sleep(_CANCEL_POLL_S)
        stored = await _get(request)
    return await _show(request, stored)


async def input_items(request: web.Request) -> web.Response:
    """GET /v1/responses/{id}/input_items: the conversation that the response answers."""
    limit = _read_limit(request.query.get("limit"))
    order = _ORDER.read("order", request.query.get("order", "desc"))
    page = Page(limit, order, request.query.get("after"))
    stored = await _get(request)
    listed = await request.app[ROUTER].bodies.show(
        client_of(request), stored.response, stored.messages, page
    )
    return encoded_response(listed)


def _read_limit(given: str | None) -> int:
    if given is None:
        return _PAGE_ITEMS
    is_number = given.isascii() and given.isdecimal() and len(given) < 10
    limit: int = _LIMIT.read("limit", int(given) if is_number else given)
    return limit


async def _get(request: web.Request) -> StoredResponse:
    response_id = request.match_info["id"]
    stored = await _find(request, response_id)
    if stored is None:
        raise _not_found(response_id)
    return stored


async def _find(request: web.Request, response_id: str) -> StoredResponse | None:
    router = request.app[ROUTER]
    with router.memory.hold(client_of(request)) as held, _store_errors():

        def hold(num_bytes: int) -> None:
            held.grow(num_bytes, functools.partial(too_much_unread, router.metrics, num_bytes))

        # Whatever is done with it counts it anew.
        return await router.responses.get(response_id, *_reader(request), hold)


def _reader(request: web.Request) -> tuple[str | None, str]:
    """The name of the key whose responses it may see, besides those without one, or None for all;
    and the client in whose turn they are read.
    """
    key, client = request.get(KEY), client_of(request)
    if key is None:
        return "", client
    return None if key.is_admin else key.name, client


def _not_found(response_id: str) -> NotFound:
    return NotFound(f"Response with id {shorten(response_id)} not found.")


async def _show(request: web.Request, stored: StoredResponse) -> web.Response:
    """The stored JSON, not decoded, except of a failed response: its process may be gone."""
    if stored.status != FAILED:
        return encoded_response(stored.response)
    bodies = request.app[ROUTER].bodies
    return encoded_response(await bodies.show(client_of(request), stored.response, b""))


@contextlib.contextmanager
def _store_errors() -> Iterator[None]:
    try:
        yield
    except ResponseTooLarge as error:
        raise BadRequest(str(error), param="store") from None
    except StoreUnavailable as error:
        logger.warning("%s", error)
        raise Unavailable("responses cannot be stored at present; try again shortly") from None
