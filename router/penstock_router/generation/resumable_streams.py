"""Streams that outlive a client's connection, for those who resume them in time.

A stream keeps a bounded part of its events. Whoever makes it stops when that part is full, and goes
on from the last event when all of them were read.
"""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Self

from penstock_router.admission.shared_budget import Holding, SharedBudget
from penstock_router.errors import TooManyRequests, Unavailable
from penstock_router.generation.event_ids import Cursor

# How many sent events are kept, for a client whose connection broke with some on the way. For a
# client that lacks more, the answer is made again.
_EVENTS_KEPT = 1000
_KEPT_BYTES = 512 * 1024
# How much of a stream may wait for its readers: some ten thousand events. It may be less where
# its client holds much besides, but never less than the reserve, which it has from the beginning.
MAX_WAITING_BYTES = 4 * 1024 * 1024
RESERVED_BYTES = 64 * 1024
# What an event takes beside its frame, and for each choice in its cursor.
_EVENT_BYTES = 256
_CHOICE_BYTES = 16
# How many events are made, or sent, before the event loop gets a turn: each takes some 30 us.
_EVENTS_A_TURN = 16


@dataclass(frozen=True, slots=True)
class Event:
    """An event of an answer. `cursor` is None if the event is no part of a choice."""

    frame: bytes
    cursor: Cursor | None = None

    @property
    def num_bytes(self) -> int:
        """Roughly what it takes in memory."""
        num_choices = 0 if self.cursor is None else len(self.cursor.choices)
        return len(self.frame) + _EVENT_BYTES + _CHOICE_BYTES * num_choices


class LiveStream:
    """An answer that is made whether or not a client reads it, until none has for `grace_s`."""

    def __init__(self, after: Cursor, grace_s: float, held: Holding) -> None:
        """The first event comes directly after the one with the cursor `after`. `held` counts the
        events' bytes, and has the reserve already.
        """
        self._after = after
        self._grace_s = grace_s
        self._held = held
        # The kept events; `_num_dropped` earlier ones are not kept any more.
        self._events: deque[Event] = deque()
        self._num_dropped = 0
        # The bytes of the kept events that all readers have, and of the others.
        self._sent_bytes = self._waiting_bytes = 0
        self._num_sent = 0
        self._news = asyncio.Event()
        # Set when readers took something, came or left.
        self._read = asyncio.Event()
        self._readers: set[EventReader] = set()
        self._error: BaseException | None = None
        self._ended = False
        self._expiry: asyncio.TimerHandle | None = None
        self._task: asyncio.Future[None]
        self._forget: Callable[[], None]

    def start(
        self, make: Callable[[LiveStream], Awaitable[None]], forget: Callable[[], None]
    ) -> EventReader:
        """Begin. `make` puts the events; `forget` is called when no reader may join any more."""
        self._forget = forget
        self._task = asyncio.ensure_future(make(self))
        self._task.add_done_callback(self._made)
        return EventReader(self, 0)

    def _made(self, task: asyncio.Future[None]) -> None:
        self._ended = True
        if task.cancelled():
            self._error = Unavailable("the answer was given up")
        else:
            self._error = task.exception()
        self._held.shrink(min(RESERVED_BYTES, self._held.amount))
        if self._error is not None:
            # A client that resumes must not get the same error: a new attempt may succeed.
            self._forget()
        self._news.set()

    # ---- called by whoever makes it ----

    def put(self, event: Event) -> None:
        """Add an event. Once the stream is full, stop and wait until it is read."""
        num_bytes = event.num_bytes
        self._held.add(num_bytes)
        self._waiting_bytes += num_bytes
        self._events.append(event)
        self._news.set()

    @property
    def is_full(self) -> bool:
        """True if so much waits for readers that no more should be generated."""
        if self._waiting_bytes <= RESERVED_BYTES:
            return False
        return self._waiting_bytes > MAX_WAITING_BYTES or self._held.is_over

    async def wait_read(self, *, by_nobody: bool = False) -> None:
        """Return when readers have sent all events; with `by_nobody` also when there are none."""
        while self._num_sent_by_all(by_nobody) < self._num_dropped + len(self._events):
            self._read.clear()
            await self._read.wait()

    def _num_sent_by_all(self, by_nobody: bool) -> float:
        nobody = math.inf if by_nobody else -1
        return min((reader.sent for reader in self._readers), default=nobody)

    def read_after(self, cursor: Cursor) -> EventReader | None:
        """A reader of the events after the one with this cursor; None if that one is not kept."""
        if cursor == self._after and not self._num_dropped:
            return EventReader(self, 0)
        for position, event in enumerate(self._events, self._num_dropped + 1):
            if event.cursor == cursor:
                return EventReader(self, position)
        return None

    # ---- called by readers ----

    def join(self, reader: EventReader) -> None:
        self._readers.add(reader)
        if self._expiry is not None:
            self._expiry.cancel()

    def leave(self, reader: EventReader) -> None:
        self._readers.discard(reader)
        self.note_sent()
        if not self._readers:
            loop = asyncio.get_running_loop()
            self._expiry = loop.call_later(self._grace_s, self._expire)

    async def event_at(self, position: int) -> Event | None:
        """Wait for this event; None after the last. Raises the error that ended the answer."""
        while position >= self._num_dropped + len(self._events):
            if self._error is not None:
                raise self._error
            if self._ended:
                return None
            self._news.clear()
            await self._news.wait()
        return self._events[position - self._num_dropped]

    def note_sent(self) -> None:
        """Keep only the last of the events that every reader has sent."""
        sent = min((reader.sent for reader in self._readers), default=0)
        while self._num_sent < sent:
            num_bytes = self._events[self._num_sent - self._num_dropped].num_bytes
            self._num_sent += 1
            self._waiting_bytes -= num_bytes
            self._sent_bytes += num_bytes
        while self._num_sent - self._num_dropped > _EVENTS_KEPT or self._sent_bytes > _KEPT_BYTES:
            num_bytes = self._events.popleft().num_bytes
            self._num_dropped += 1
            self._sent_bytes -= num_bytes
            self._held.shrink(num_bytes)
        self._read.set()

    # ---- its end ----

    def _expire(self) -> None:
        self._task.cancel()
        self._forget()
        self._events.clear()
        self._held.close()

    def stop(self) -> None:
        """No reader will join any more: go on only while there are readers."""
        self._grace_s = 0.0
        if not self._readers:
            self._expire()

    async def wait_ended(self) -> None:
        """Return when the answer is made, or given up."""
        await asyncio.wait((self._task,))


class EventReader:
    """The position of a client in a live stream. It counts as reading until its scope is left."""

    def __init__(self, stream: LiveStream, position: int) -> None:
        self._stream = stream
        # The index of the next event, counted from the stream's first, and how many are sent.
        self.position = self.sent = position
        stream.join(self)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        self._stream.leave(self)

    async def next(self) -> Event | None:
        """The next event; None after the last. Raises the error that ended the answer."""
        if self.position % _EVENTS_A_TURN == _EVENTS_A_TURN - 1:
            await asyncio.sleep(0)
        # Whoever asks for the next is done with those before.
        self.sent = self.position
        self._stream.note_sent()
        event = await self._stream.event_at(self.position)
        if event is not None:
            self.position += 1
        return event


def _too_much_held(held_bytes: int, max_bytes: int) -> TooManyRequests:
    return TooManyRequests(
        f"x-penstock-resumable: the server holds {held_bytes} bytes for this client already (of "
        f"{max_bytes} for all); read the streams before it, then try again"
    )


class LiveStreams:
    """The live streams of one worker, by answer; their events count in `memory`."""

    def __init__(self, grace_s: float, memory: SharedBudget) -> None:
        self._grace_s = grace_s
        self._memory = memory
        self._streams: dict[tuple[bytes, str, int, int], LiveStream] = {}

    def join(self, cursor: Cursor) -> EventReader | None:
        """A reader of what follows the event with this cursor, if its stream is still here."""
        stream = self._streams.get(cursor.answer)
        return None if stream is None else stream.read_after(cursor)

    def begin(
        self, cursor: Cursor, make: Callable[[LiveStream], Awaitable[None]], client: str = ""
    ) -> EventReader:
        """Begin a stream of what follows the cursor, in place of an older one; its reader.

        Raises `TooManyRequests` if this client's streams, bodies and answers hold too much.
        """
        held = self._memory.hold(client)
        held.grow(RESERVED_BYTES, _too_much_held)
        older = self._streams.get(cursor.answer)
        if older is not None:
            older.stop()
        stream = self._streams[cursor.answer] = LiveStream(cursor, self._grace_s, held)

        def forget() -> None:
            if self._streams.get(cursor.answer) is stream:
                del self._streams[cursor.answer]

        return stream.start(make, forget)

    def stop(self) -> None:
        """The router stops: end the streams that have no reader now."""
        for stream in list(self._streams.values()):
            stream.stop()

    async def wait_ended(self) -> None:
        """Return when no stream is being made."""
        await asyncio.gather(*(stream.wait_ended() for stream in list(self._streams.values())))
