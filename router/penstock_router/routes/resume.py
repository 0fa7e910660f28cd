"""Streams that a client can resume where its connection broke, if a header asks for it."""

from __future__ import annotations

import dataclasses
import functools
import time
from dataclasses import dataclass
from typing import Any

import msgspec
from aiohttp import web

from penstock_router.admission.admission import TimeLimit
from penstock_router.apis.base import Shape
from penstock_router.errors import BadRequest
from penstock_router.generation.choice import Delta
from penstock_router.generation.client_progress import ClientProgress, skip_delivered
from penstock_router.generation.deltas import Wait, bundle, for_each
from penstock_router.generation.event_ids import MAX_SEQUENCES, Cursor, job_digest
from penstock_router.generation.generation import Generation
from penstock_router.generation.job import Job
from penstock_router.generation.resumable_streams import Event, LiveStream
from penstock_router.json_fields import STRING, Field, one_of, table
from penstock_router.routes.generate import (
    Call,
    admit,
    answer,
    make_generation,
    make_shape,
    prepare_job,
    take_places,
)
from penstock_router.server import sse
from penstock_router.server.caller import client_of
from penstock_router.server.parts import KEY, RECORD, REQUEST_ID, ROUTER
from penstock_router.server.request_headers import flag_header
from penstock_router.thread_pool import Threads

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


async def answer_resumable(call: Call[Any]) -> web.StreamResponse:
    """Answer a call: by a resumable stream, if it asks for one."""
    request = call.request
    if not flag_header(request, "x-penstock-resumable"):
        return await answer(call)
    router = request.app[ROUTER]
    _check(call)
    last_id = request.headers.get("Last-Event-ID")
    cursor = _read_cursor(call, last_id)
    request[REQUEST_ID] = request[RECORD].request_id = cursor.request_id
    reader = router.live_streams.join(cursor) if last_id else None
    if last_id:
        router.metrics.resumed_streams.labels("again" if reader is None else "live").inc()
    if reader is None:
        reader = router.live_streams.begin(
            cursor, functools.partial(_make, _resume(call, cursor), cursor), client_of(request)
        )
    with reader:
        return await sse.follow(
            request,
            reader,
            functools.partial(router.cursors.write, owner=_owner_of(request)),
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


def _read_cursor(call: Call[Any], last_id: str | None) -> Cursor:
    """The client's position: after an event, or before the first event of a new answer."""
    body = call.body.digest
    if not last_id:
        request_id = call.request[REQUEST_ID]
        return Cursor(body, request_id, created=int(time.time()), seed=call.drawn_seed)
    cursor = call.request.app[ROUTER].cursors.read(last_id, _owner_of(call.request))
    if cursor.body != body:
        raise BadRequest("Last-Event-ID: is of the answer to another request")
    return cursor


def _owner_of(request: web.Request) -> str:
    """The name of the key whose streams these are, however often the key itself is replaced; ""
    without one: a client that reconnects may have another address.
    """
    key = request.get(KEY)
    return "" if key is None else key.name


def _resume(call: Call[Any], cursor: Cursor) -> Call[Any]:
    """The call for which the cursor's answer was begun: its id and seed."""
    sender = dataclasses.replace(call.sender, request_id=cursor.request_id)
    response_id = call.api.name_answer(cursor.request_id, call.named)
    return dataclasses.replace(call, sender=sender, response_id=response_id, drawn_seed=cursor.seed)


async def _make(call: Call[Any], cursor: Cursor, live: LiveStream) -> None:
    """Generate what the client does not have yet, whether or not anybody reads it: up to a bound,
    and beyond that when it was read.
    """
    if cursor.choices and not cursor.numerics:
        raise BadRequest(
            "Last-Event-ID: the answer comes from shards with several numerics, so it cannot be "
            "made again; send the request without an id"
        )
    with admit(call) as ticket:
        job = await prepare_job(call, ticket)
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
    async with make_generation(call, job, limit, cursor.point) as generation, limit.scope():
        shape = make_shape(call, job, generation, cursor.created)
        threads = call.request.app[ROUTER].threads
        return await EventMaker(live, generation, shape, cursor, threads).run()


@dataclass
class EventMaker:
    """Puts a generation's deltas into a live stream, as events that say where to go on."""

    live: LiveStream
    generation: Generation
    shape: Shape
    cursor: Cursor
    threads: Threads
    # Where to go on, as the stream was full.
    after: Cursor | None = None

    def __post_init__(self) -> None:
        self._progress = ClientProgress(self.generation.point, len(self.generation.job.requests))
        self._opening = [] if self.cursor.choices else self.shape.opening()

    async def run(self) -> Cursor | None:
        """Do what `_make_some` does."""
        generation = self.generation
        rest = skip_delivered(generation, generation.point, generation.usage)
        await for_each(bundle(rest, generation.job.options.stream_interval), self._put)
        if self.after is None:
            for frame in self.shape.closing():
                self.live.put(Event(frame))
        return self.after

    def _put(self, delta: Delta) -> Wait | None:
        self._open()
        self._progress.add(delta)
        if not sse.is_quick(delta):
            return functools.partial(self._put_later, delta)
        return self._put_frame(self.shape.chunk(delta))

    async def _put_later(self, delta: Delta) -> None:
        wait = self._put_frame(await sse.make_frame(self.shape, delta, self.threads))
        if wait is not None:
            await wait()

    def _open(self) -> None:
        opening, self._opening = self._opening, ()
        for frame in opening[:-1]:
            self.live.put(Event(frame))
        for frame in opening[-1:]:
            # Only the last opening event has a cursor: a client with all of them can resume here.
            self.live.put(Event(frame, self._here()))

    def _put_frame(self, frame: bytes | None) -> Wait | None:
        if frame is None:
            return None
        self.live.put(Event(frame, self._here()))
        if not self.live.is_full or self.generation.ended:
            return None
        if not self.generation.numerics:
            # Tokens of several numerics cannot be made again. Those that come now wait where they
            # arrive, without events.
            return self.live.wait_read
        self.after = self._here()
        self.generation.put_down()
        return None

    def _here(self) -> Cursor:
        return msgspec.structs.replace(
            self.cursor,
            numerics=self.generation.numerics,
            choices=self._progress.choices,
            counts=self.generation.counts,
        )
