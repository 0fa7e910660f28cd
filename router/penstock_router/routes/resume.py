"""Streams that a client can resume where its connection broke, if a header asks for it."""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import time
from typing import Any

import msgspec
from aiohttp import web

from penstock_router import sse
from penstock_router.admission import TimeLimit
from penstock_router.apis.base import Shape
from penstock_router.delivered import Progress, skip_delivered
from penstock_router.deltas import spaced
from penstock_router.errors import BadRequest
from penstock_router.fields import STRING, Field, one_of, table
from penstock_router.generation import Generation
from penstock_router.job import Job
from penstock_router.resumption import (
    EVENTS_A_TURN,
    MAX_SEQUENCES,
    Cursor,
    Event,
    LiveStream,
    job_digest,
)
from penstock_router.routes.base import RECORD, REQUEST_ID, ROUTER, client_of, flag_header
from penstock_router.routes.generate import (
    Call,
    entered,
    generation_of,
    make_shape,
    prepared,
    take_places,
)
from penstock_router.threads import Threads

HEADERS = table(
    [
        Field(
            "x-penstock-resumable",
            one_of("0", "1"),
            "1: give the events of the stream ids, so that it can be resumed.",
        ),
        Field(
            "Last-Event-ID",
            STRING,
            "Id of the last event received; needs x-penstock-resumable and the same body.",
        ),
    ]
)


async def resumable(call: Call[Any]) -> web.StreamResponse | None:
    """Answer a call for a resumable stream; None: it asks for none."""
    request = call.request
    if not flag_header(request, "x-penstock-resumable"):
        return None
    router = request.app[ROUTER]
    _check(call)
    last_id = request.headers.get("Last-Event-ID")
    cursor = _cursor(call, last_id)
    request[REQUEST_ID] = request[RECORD].request_id = cursor.request_id
    reader = router.live_streams.join(cursor) if last_id else None
    if last_id:
        router.metrics.resumed_streams.labels("again" if reader is None else "live").inc()
    if reader is None:
        reader = router.live_streams.begin(
            cursor, functools.partial(_make, _again(call, cursor), cursor), client_of(request)
        )
    with reader:
        return await sse.follow(
            request,
            reader,
            router.cursors.write,
            call.api.errors.frames,
            request_id=cursor.request_id,
            config=router.config,
        )


def _check(call: Call[Any]) -> None:
    if not call.asked.stream:
        raise BadRequest(
            "x-penstock-resumable: only a stream can be taken up again", param="stream"
        )
    sequences, param = call.asked.places
    if sequences > MAX_SEQUENCES:
        raise BadRequest(
            f"x-penstock-resumable: the request asks for {sequences} sequences; at most "
            f"{MAX_SEQUENCES} can be taken up again",
            param=param,
        )


def _cursor(call: Call[Any], last_id: str | None) -> Cursor:
    """The client's position: after an event, or before the first event of a new answer."""
    body = call.body.digest
    if not last_id:
        request_id = call.request[REQUEST_ID]
        return Cursor(body, request_id, created=int(time.time()), seed=call.drawn_seed)
    cursor = call.request.app[ROUTER].cursors.read(last_id)
    if cursor.body != body:
        raise BadRequest("Last-Event-ID: is of the answer to another request")
    return cursor


def _again(call: Call[Any], cursor: Cursor) -> Call[Any]:
    """The call for which the cursor's answer was begun: its id and seed."""
    asked = dataclasses.replace(call.asked, request_id=cursor.request_id)
    response_id = call.api.name_answer(cursor.request_id, call.named)
    return dataclasses.replace(call, asked=asked, response_id=response_id, drawn_seed=cursor.seed)


async def _make(call: Call[Any], cursor: Cursor, live: LiveStream) -> None:
    """Generate what the client does not have yet, whether or not anybody reads it: up to a bound,
    and beyond that when it was read.
    """
    if cursor.choices and not cursor.numerics:
        raise BadRequest(
            "Last-Event-ID: the answer comes from shards with several numerics, so it cannot be "
            "made again; send the request without an id"
        )
    with entered(call) as ticket:
        job = await prepared(call, call.asked, ticket)
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
        await take_places(call, job, ticket)
        after: Cursor | None = msgspec.structs.replace(cursor, job=made_of)
        while after is not None:
            after = await _make_some(call, job, after, live, ticket.limit)
            async with ticket.limit.scope():
                # What was made keeps its places until it is sent, as any stream does.
                await live.wait_read(by_nobody=after is None)


async def _make_some(
    call: Call[Any], job: Job, cursor: Cursor, live: LiveStream, limit: TimeLimit
) -> Cursor | None:
    """Put the events after the cursor until the stream is full, and return the cursor to go on
    from; None at the answer's end.
    """
    async with generation_of(call, job, limit, cursor.point) as generation, limit.scope():
        shape = make_shape(call, job, generation, cursor.created)
        threads = call.request.app[ROUTER].threads
        after = await _put_events(live, generation, shape, cursor, threads)
        if after is not None:
            generation.put_down()
        return after


async def _put_events(
    live: LiveStream, generation: Generation, shape: Shape, cursor: Cursor, threads: Threads
) -> Cursor | None:
    job, point = generation.job, generation.point
    progress = Progress(point, len(job.requests))
    opening = [] if cursor.choices else shape.opening()

    def here() -> Cursor:
        return msgspec.structs.replace(
            cursor,
            numerics=generation.numerics,
            choices=progress.choices,
            counts=generation.counts,
        )

    num_deltas = 0
    rest = skip_delivered(generation, point, generation.usage)
    async for delta in spaced(rest, job.options.stream_interval):
        num_deltas += 1
        if num_deltas % EVENTS_A_TURN == 0:
            await asyncio.sleep(0)
        for frame in opening[:-1]:
            live.put(Event(frame))
        for frame in opening[-1:]:
            # Only the last opening event has a cursor: a client with all of them can resume here.
            live.put(Event(frame, here()))
        opening = []
        progress.add(delta)
        chunk = await sse.frame_of(shape, delta, threads)
        if chunk is None:
            continue
        live.put(Event(chunk, here()))
        if live.is_full and not generation.ended:
            if generation.numerics:
                return here()
            # Tokens of several numerics cannot be made again. Those that come now wait where they
            # arrive, without events.
            await live.wait_read()
    for frame in shape.closing():
        live.put(Event(frame))
    return None
