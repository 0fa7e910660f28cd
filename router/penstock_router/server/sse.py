"""Writes all bytes of a stream: headers, frames, comments and errors.

Headers are sent with the first delta, so that an earlier failure can have its HTTP status. A later
error is the stream's last event. A delta becomes an event in the call that received it. A task
waits only if a socket's buffer is full; the next event then has all deltas that arrived meanwhile.
"""

from __future__ import annotations

import asyncio
import functools
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from typing import Self

from aiohttp import web

from penstock_router.admission.admission import TimeLimit
from penstock_router.apis.base import EVENTS, Framing, Shape
from penstock_router.config import RouterConfig
from penstock_router.errors import ApiError, log_error
from penstock_router.generation.choice import Delta
from penstock_router.generation.deltas import Deltas, Wait, for_each
from penstock_router.generation.event_ids import Cursor
from penstock_router.generation.generation import Generation
from penstock_router.generation.resumable_streams import EventReader
from penstock_router.server.connections import end_answer
from penstock_router.server.write_timeout import write_timeout_of
from penstock_router.thread_pool import Threads

logger = logging.getLogger(__name__)

HEADERS = {
    "Cache-Control": "no-store",
    # nginx must not buffer events.
    "X-Accel-Buffering": "no",
}
# The most bytes written to the socket at once: bytes that the socket does not accept are copied.
PIECE_BYTES = 256 * 1024
# Up to this many log-probabilities are encoded on the event loop (about 1 µs each).
_INLINE_LOGPROBS = 1000


class EventStream:
    """An answer of events. Leaving its scope stops the comments; `end` ends the answer."""

    def __init__(self, request: web.Request, framing: Framing, *, keep_alive_s: float) -> None:
        content_type = f"{framing.media_type}; charset=utf-8"
        self.response = web.StreamResponse(headers={"Content-Type": content_type, **HEADERS})
        self._comment_bytes = framing.keep_alive
        self._request = request
        self._protocol = request.protocol
        self._write_timeout = write_timeout_of(request.transport)
        self._keep_alive_s = keep_alive_s
        self._loop = asyncio.get_running_loop()
        self._written_at = self._loop.time()
        self._timer: asyncio.TimerHandle | None = None
        self._is_chunked = False
        # The unsent rest of partly sent frames.
        self._rest: deque[memoryview] = deque()

    async def __aenter__(self) -> Self:
        await self.response.prepare(self._request)
        self._is_chunked = "Transfer-Encoding" in self.response.headers
        if not self._is_chunked:
            # In HTTP/1.0, only closing the connection ends the body, even with keep-alive.
            self.response.force_close()
        self._timer = self._loop.call_later(self._keep_alive_s, self._tick)
        return self

    async def __aexit__(self, *raised: object) -> None:
        self._stop_comments()

    @property
    def _transport(self) -> asyncio.Transport:
        transport = self._protocol.transport
        if transport is None or transport.is_closing():
            raise ConnectionResetError("the client left")
        return transport

    @property
    def busy(self) -> bool:
        """True if the socket has not accepted all sent bytes."""
        return self._write_timeout.has_unsent

    def send_now(self, frames: bytes) -> None:
        """Send frames in one write. Do not call it while `busy`."""
        self._written_at = self._loop.time()
        if self._is_chunked:
            frames = b"%x\r\n%b\r\n" % (len(frames), frames)
        self._transport.write(frames)

    async def send(self, frames: bytes) -> None:
        """Send frames after the socket has accepted everything; long frames in several writes. If
        an earlier call was cancelled within its frames, send their rest first.
        """
        if self._rest:
            await self._send_rest()
        if not frames:
            return
        await self.drain()
        if len(frames) <= PIECE_BYTES:
            self.send_now(frames)
            return
        data = memoryview(frames)
        starts = range(0, len(frames), PIECE_BYTES)
        self._rest.extend(data[start : start + PIECE_BYTES] for start in starts)
        await self._send_rest()

    async def _send_rest(self) -> None:
        while self._rest:
            await self.drain()
            self.send_now(bytes(self._rest.popleft()))
            if self._rest:
                await asyncio.sleep(0)

    async def send_with_id(self, frame: bytes, event_id: str) -> None:
        """Send a frame with an id, from which a client can resume."""
        await self.send(b"id: %b\n%b" % (event_id.encode(), frame))

    async def drain(self) -> None:
        """Wait until the socket has accepted everything. Raise `ConnectionError` if the client
        left, or was disconnected for reading too slowly.
        """
        if self.busy:
            await self._write_timeout.wait_sent()

    async def end(self) -> None:
        self._stop_comments()
        await self.drain()
        await end_answer(self._request, self.response)
        await self.drain()

    def _tick(self) -> None:
        wait_s = self._written_at + self._keep_alive_s - self._loop.time()
        if wait_s <= 0:
            wait_s = self._keep_alive_s
            self._comment()
        self._timer = self._loop.call_later(wait_s, self._tick)

    def _comment(self) -> None:
        # Send no comment within a frame, or while the client still has bytes to read.
        if self._comment_bytes and not self.busy and not self._rest:
            try:
                self.send_now(self._comment_bytes)
            except ConnectionError:
                logger.debug("the client left while it was kept waiting")

    def _stop_comments(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


async def stream(
    request: web.Request,
    generation: Generation,
    deltas: Deltas,
    shape: Shape,
    *,
    request_id: str,
    config: RouterConfig,
    framing: Framing,
    limit: TimeLimit,
    threads: Threads,
    run_work: Callable[[Callable[[], bytes]], Awaitable[bytes]] | None = None,
    before_end: Callable[[], Awaitable[None]] | None = None,
) -> web.StreamResponse:
    """Stream a generation's deltas. Await `before_end` before the closing frames. `run_work` makes
    the first and last frames, if they may be long.
    """

    async def show_error(error: ApiError) -> bytes:
        return await make_edge(lambda: (shape.failure(error),))

    async def make_edge(make_frames: Callable[[], Sequence[bytes]]) -> bytes:
        def work() -> bytes:
            return b"".join(make_frames())

        return work() if run_work is None else await run_work(work)

    async def send_all(events: EventStream) -> None:
        try:
            async with limit.scope():
                delta = await first
                opening = await make_edge(shape.opening)
                if len(opening) > PIECE_BYTES:
                    await events.send(opening)
                    opening = b""
                if delta is not None:
                    opening += await make_frame(shape, delta, threads) or b""
                await events.send(opening)
                await send_each(events, deltas, shape, threads)
                if before_end is not None:
                    await before_end()
                await events.send(await make_edge(shape.closing))
        except Exception as error:  # the generation learns of any failure
            generation.abandon(error)
            raise

    first = asyncio.ensure_future(anext(deltas, None))
    try:
        async with limit.scope():
            await asyncio.wait((first,), timeout=config.keep_alive_s)
        if first.done():
            first.result()
        # Use a separate task: each wake-up resumes the whole chain of awaiting coroutines, about 12
        # in a handler.
        answering = _answer(request, send_all, show_error, request_id, config, framing)
        return await asyncio.create_task(answering)
    finally:
        first.cancel()


async def follow(
    request: web.Request,
    reader: EventReader,
    write_id: Callable[[Cursor], str],
    frames_of: Callable[[ApiError], bytes],
    *,
    request_id: str,
    config: RouterConfig,
) -> web.StreamResponse:
    """Answer with a live stream's events from the reader's position on, each with an id."""

    async def show_error(error: ApiError) -> bytes:
        return frames_of(error)

    async def send_all(events: EventStream) -> None:
        event = await first
        while event is not None:
            if event.cursor is None:
                await events.send(event.frame)
            else:
                await events.send_with_id(event.frame, write_id(event.cursor))
            event = await reader.next()

    first = asyncio.ensure_future(reader.next())
    try:
        await asyncio.wait((first,), timeout=config.keep_alive_s)
        if first.done():
            first.result()
        return await _answer(request, send_all, show_error, request_id, config, EVENTS)
    finally:
        first.cancel()


async def _answer(
    request: web.Request,
    send_all: Callable[[EventStream], Awaitable[None]],
    show_error: Callable[[ApiError], Awaitable[bytes]],
    request_id: str,
    config: RouterConfig,
    framing: Framing,
) -> web.StreamResponse:
    """Answer with events. If making or sending them fails, send an error as the last event."""
    async with EventStream(request, framing, keep_alive_s=config.keep_alive_s) as events:
        try:
            await send_all(events)
        except ConnectionError:
            raise
        except Exception as error:  # noqa: BLE001 - the status is sent: this is the last resort
            await events.send(await show_error(log_error(error, request_id)))
        await events.end()
        return events.response


async def make_frame(shape: Shape, delta: Delta, threads: Threads) -> bytes | None:
    """Make a delta's frame, in a thread if its log-probabilities take long to encode."""
    if is_quick(delta):
        return shape.chunk(delta)
    return await threads.run(functools.partial(shape.chunk, delta))


def is_quick(delta: Delta) -> bool:
    if delta.logprobs is None and delta.prompt_logprobs is None:
        return True
    columns = [one for one in (delta.logprobs, delta.prompt_logprobs) if one is not None]
    shown = sum(len(one.chosen) * (1 + one.top_n) + len(one.requested) for one in columns)
    return shown <= _INLINE_LOGPROBS


async def send_each(events: EventStream, deltas: Deltas, shape: Shape, threads: Threads) -> None:
    """Send deltas in the call that delivers them, unless the reader is slow or a thread makes the
    frame.
    """

    def send(delta: Delta) -> Wait | None:
        if events.busy or not is_quick(delta):
            return functools.partial(send_later, delta)
        frame = shape.chunk(delta)
        # An empty chunk would end the body.
        if frame:
            events.send_now(frame)
        return drain if events.busy else None

    async def send_later(delta: Delta) -> None:
        await events.send(await make_frame(shape, delta, threads) or b"")
        await drain()

    async def drain() -> None:
        # The closing frames need not wait until the client has read the last delta.
        if not deltas.ended:
            await events.drain()

    await drain()
    await for_each(deltas, send)
