"""Answers that can be taken up again: what an event's id says, and streams that outlive a client.

An id holds all that another worker, or another router with the same key, needs to make the same
answer again from the same request: the seed, the numerics, and how much the client has of each
choice. Nothing is stored for that; tokens are computed anew and the known part is not shown. Where
the stream still runs here, its rest is sent instead. Knows no HTTP and writes nothing.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import hashlib
import hmac
from collections.abc import AsyncGenerator, Awaitable, Callable
from dataclasses import dataclass

import msgspec

from penstock_router.choice import Delta
from penstock_router.errors import BadRequest, Unavailable
from penstock_router.job import NOTHING_DELIVERED, Delivered

_MAC_BYTES = 16
_MAX_ID_CHARACTERS = 16_384


class Cursor(msgspec.Struct, frozen=True, array_like=True):
    """Which answer, and how much of it a client has."""

    # Of the request's JSON.
    body: bytes
    request_id: str
    created: int
    seed: int
    numerics: str
    # (tokens, characters, finished) of each choice.
    choices: tuple[tuple[int, int, bool], ...]

    @property
    def answer(self) -> tuple[bytes, str, int, int]:
        """The same for all events of one answer, and for no other answer."""
        return self.body, self.request_id, self.created, self.seed

    @property
    def delivered(self) -> tuple[Delivered, ...]:
        return tuple(Delivered(*choice) for choice in self.choices)


def body_digest(body: object) -> bytes:
    """The same for two requests of the same JSON, whatever the order of their fields."""
    return hashlib.blake2b(msgspec.json.encode(body, order="sorted"), digest_size=16).digest()


class CursorCodec:
    """Cursors as the ids of events, signed: a client cannot make one up."""

    def __init__(self, key: str) -> None:
        self._key = hashlib.blake2b(
            key.encode(), digest_size=32, person=b"penstock-cursor"
        ).digest()

    def write(self, cursor: Cursor) -> str:
        data = msgspec.msgpack.encode(cursor)
        return base64.urlsafe_b64encode(self._mac(data) + data).rstrip(b"=").decode()

    def read(self, text: str) -> Cursor:
        """Raises `BadRequest` for an id that was not written with this key."""
        try:
            if not text.isascii() or len(text) > _MAX_ID_CHARACTERS:
                raise ValueError
            signed = base64.b64decode(text + "=" * (-len(text) % 4), b"-_", validate=True)
            mac, data = signed[:_MAC_BYTES], signed[_MAC_BYTES:]
            if not hmac.compare_digest(mac, self._mac(data)):
                raise ValueError
            return msgspec.msgpack.decode(data, type=Cursor)
        except (ValueError, binascii.Error, msgspec.DecodeError):
            raise BadRequest(
                "Last-Event-ID: is not the id of an event of this server, or it has another "
                "--resume-key by now"
            ) from None

    def _mac(self, data: bytes) -> bytes:
        return hashlib.blake2b(data, digest_size=_MAC_BYTES, key=self._key).digest()


class Progress:
    """How much of each choice went out."""

    def __init__(self, delivered: tuple[Delivered, ...]) -> None:
        self._choices = [(d.tokens, d.characters, d.finished) for d in delivered]

    @classmethod
    def of(cls, delivered: tuple[Delivered, ...], num_choices: int) -> Progress:
        return cls(delivered or (NOTHING_DELIVERED,) * num_choices)

    @property
    def choices(self) -> tuple[tuple[int, int, bool], ...]:
        return tuple(self._choices)

    def add(self, delta: Delta) -> None:
        tokens, characters, _ = self._choices[delta.index]
        self._choices[delta.index] = (
            tokens + len(delta.token_ids),
            characters + len(delta.text),
            delta.finish_reason is not None,
        )


@dataclass(frozen=True, slots=True)
class Event:
    """One event of an answer. `cursor` is None for what is no part of a choice."""

    payload: bytes
    cursor: Cursor | None = None


class LiveStream:
    """An answer that is made whether or not anybody reads it, until nobody has for a while.

    All its events are kept: whoever joins gets those it lacks. They are bounded as the answer is.
    """

    def __init__(self, grace_s: float) -> None:
        self._grace_s = grace_s
        self._events: list[Event] = []
        self._news = asyncio.Event()
        self._readers = 0
        self._task: asyncio.Future[None] | None = None
        self._error: BaseException | None = None
        self._ended = False
        self._expiry: asyncio.TimerHandle | None = None

    def start(
        self, make: Callable[[LiveStream], Awaitable[None]], forget: Callable[[], None]
    ) -> None:
        """Begin; `make` puts the events, `forget` is called when nobody can join any more."""
        self._forget = forget
        self._task = asyncio.ensure_future(make(self))
        self._task.add_done_callback(self._made)

    def _made(self, task: asyncio.Future[None]) -> None:
        self._ended = True
        if task.cancelled():
            self._error = Unavailable("the answer was given up")
        else:
            self._error = task.exception()
        self._news.set()

    def put(self, event: Event) -> None:
        self._events.append(event)
        self._news.set()

    def has(self, cursor: Cursor) -> bool:
        """Whether it gave the event with this cursor."""
        return self._index_after(cursor) is not None

    def _index_after(self, cursor: Cursor) -> int | None:
        for index, event in enumerate(self._events):
            if event.cursor == cursor:
                return index + 1
        return None

    async def read(self, after: Cursor | None) -> AsyncGenerator[Event, None]:
        """Events from the first one, or from the one after a cursor; raises what ended it."""
        index = 0 if after is None else self._index_after(after) or 0
        self._readers += 1
        if self._expiry is not None:
            self._expiry.cancel()
        try:
            while True:
                while index < len(self._events):
                    index += 1
                    yield self._events[index - 1]
                if self._ended:
                    if self._error is not None:
                        raise self._error
                    return
                self._news.clear()
                await self._news.wait()
        finally:
            self._readers -= 1
            if self._readers == 0:
                loop = asyncio.get_running_loop()
                self._expiry = loop.call_later(self._grace_s, self._expire)

    def _expire(self) -> None:
        if self._task is not None:
            self._task.cancel()
        self._forget()

    async def close(self) -> None:
        """End it now."""
        if self._expiry is not None:
            self._expiry.cancel()
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)


class LiveStreams:
    """The live streams of one worker, by answer."""

    def __init__(self, grace_s: float) -> None:
        self._grace_s = grace_s
        self._streams: dict[tuple[bytes, str, int, int], LiveStream] = {}

    def find(self, cursor: Cursor) -> LiveStream | None:
        """The stream that gave this event, if it is still here."""
        stream = self._streams.get(cursor.answer)
        return stream if stream is not None and stream.has(cursor) else None

    def begin(self, cursor: Cursor, make: Callable[[LiveStream], Awaitable[None]]) -> LiveStream:
        """A new stream of the cursor's answer; one that was resumed takes the place of another."""
        stream = LiveStream(self._grace_s)
        self._streams[cursor.answer] = stream

        def forget() -> None:
            if self._streams.get(cursor.answer) is stream:
                del self._streams[cursor.answer]

        stream.start(make, forget)
        return stream

    async def close(self) -> None:
        await asyncio.gather(*(stream.close() for stream in list(self._streams.values())))
