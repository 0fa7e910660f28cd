"""Where a body is read and its text worked on: here, in a thread, or in a text process.

Its length alone says so, before anybody has looked into it: building objects of megabytes of JSON,
or a list of 300,000 ids, holds the interpreter lock, and with it the event loop, whatever thread it
is done in. Of a long body nothing but ids in one block of memory, and texts that an answer shows,
ever is in this process. A stored response that is long is looked into there too.
"""

from __future__ import annotations

import asyncio
import functools
import itertools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from penstock_router.apis.responses_stored import Page, shown
from penstock_router.errors import ApiError, TooManyRequests
from penstock_router.metrics import Metrics
from penstock_router.models import Models, ServedModel
from penstock_router.prompts import Prepared
from penstock_router.text_messages import (
    Failed,
    Files,
    ModelFacts,
    NeedsFiles,
    Read,
    Show,
    WasAnswered,
    WasLoaded,
    WasPrepared,
    WasRead,
    Work,
    unpack_asked,
    unpack_error,
    unpack_prepared,
)
from penstock_router.text_pool import Lease, Reply, TextPool
from penstock_router.text_work import KINDS, AnyKind, BodyKind, Reading, read
from penstock_router.threads import Threads
from penstock_router.tokenizer import INLINE_CHARS

# Longer bodies go to a text process. JSON of this length is parsed in 15 us where it is text, in
# 0.2 ms where it is ids, and in 1.4 ms where it is made of nothing but brackets; a thread tokenizes
# it in 10 ms, without the interpreter lock. To go there and back costs half a millisecond.
LONG_BYTES = 64 * 1024
# So many connections with long bodies are read from in one turn of the event loop: some 256 kB
# each, which take a fifth of a millisecond.
_CONNECTIONS_A_TURN = 4
# Of long bodies that wait or are worked on: enough for a burst.
MAX_BODIES = 64
# Of those that are still coming, too: little beside a router's memory.
MAX_BYTES = 256 * 1024 * 1024


class Room:
    """For the long bodies in this process, until their text is worked on."""

    def __init__(self, metrics: Metrics) -> None:
        self.metrics = metrics
        self.num_bodies = 0
        self.num_bytes = 0


class Incoming:
    """A body as it comes: to join the pieces of a long one takes milliseconds."""

    def __init__(self, room: Room) -> None:
        self.pieces: list[bytes] = []
        self.num_bytes = 0
        self._room = room
        # What it takes of the room.
        self._is_queued = False
        self._counted_bytes = 0

    @property
    def is_long(self) -> bool:
        return self.num_bytes > LONG_BYTES

    def add(self, piece: bytes) -> None:
        """Take a piece more. Raises `TooManyRequests` where long bodies take too much already."""
        self.pieces.append(piece)
        self.num_bytes += len(piece)
        if self.is_long:
            self._count(self.num_bytes)

    def enqueue(self, more_bytes: int = 0) -> None:
        """It is to be worked on in a text process, with so much beside it.

        Raises `TooManyRequests` where too many are, or take too much.
        """
        self._count(self.num_bytes + more_bytes)
        if not self._is_queued:
            if self._room.num_bodies >= MAX_BODIES:
                raise self._refusal()
            self._is_queued = True
            self._room.num_bodies += 1

    def _count(self, num_bytes: int) -> None:
        more = num_bytes - self._counted_bytes
        others = self._room.num_bytes - self._counted_bytes
        # One may always come, however long it may be.
        if more > 0 and others and others + num_bytes > MAX_BYTES:
            raise self._refusal()
        self._room.num_bytes += max(0, more)
        self._counted_bytes += max(0, more)

    def _refusal(self) -> TooManyRequests:
        room = self._room
        room.metrics.refused.labels("long_bodies").inc()
        return TooManyRequests(
            f"{room.num_bodies} long bodies wait and {room.num_bytes} bytes of long bodies are "
            f"here (at most {MAX_BODIES} and {MAX_BYTES}); try again shortly"
        )

    def leave(self) -> None:
        """Give back what it takes of the room. Nothing happens the second time."""
        self._room.num_bodies -= self._is_queued
        self._room.num_bytes -= self._counted_bytes
        self._is_queued, self._counted_bytes = False, 0

    def drop(self) -> None:
        """Nobody needs it any more."""
        self.pieces = []
        self.leave()


class Bodies:
    """Reads bodies. What it is made of belongs to the caller."""

    def __init__(self, models: Models, threads: Threads, pool: TextPool, metrics: Metrics) -> None:
        self.models = models
        self.threads = threads
        self.pool = pool
        self.room = Room(metrics)
        self._numbers = itertools.count(1)
        self._turns = asyncio.Semaphore(_CONNECTIONS_A_TURN)

    async def take_turn(self) -> None:
        """Wait before more of a long body is taken in, so that the event loop is not all taken up
        by many that come at once.
        """
        async with self._turns:
            await asyncio.sleep(0)

    @contextmanager
    def incoming(self) -> Iterator[Incoming]:
        """A body that nothing has come of yet; what it takes of the room is given back in the end,
        if not before.
        """
        incoming = Incoming(self.room)
        try:
            yield incoming
        finally:
            incoming.leave()

    async def read(self, kind: AnyKind, incoming: Incoming, *, with_digest: bool = False) -> Body:
        """Read a body, all of which has come.

        Raises `BadRequest` where it does not even show of which kind it is, `TooManyRequests`
        where too many long ones are at hand, `Unavailable` and `TimeoutError` as `Lease.ask`.
        """
        number, arrived_s = next(self._numbers), asyncio.get_running_loop().time()
        if not incoming.is_long:
            reading = read(kind, b"".join(incoming.pieces), with_digest=with_digest)
            return Body(self, number, arrived_s, incoming, reading)
        incoming.enqueue()
        lease = await self.pool.lease(incoming.num_bytes, arrived_s)
        report, _ = await lease.ask(Read(number, kind.name, with_digest), incoming.pieces)
        if isinstance(report, WasRead):
            lease.hold()
            return Body(self, number, arrived_s, incoming, _reading(report), lease)
        lease.give_back()
        incoming.drop()
        error = _error(report)
        known = KINDS.get(report.kind) if isinstance(report, Failed) else None
        if not isinstance(known, BodyKind):
            raise error
        return Body(self, number, arrived_s, incoming, Reading(known, refusal=error))

    async def show(
        self, response: bytes, messages: bytes, page: Page | None = None
    ) -> bytes | bytearray:
        """What `shown` makes of a stored response, and may raise; others as `read`."""
        num_bytes = len(response) + len(messages)
        if num_bytes <= LONG_BYTES:
            return shown(response, messages, page)
        with self.incoming() as incoming:
            incoming.enqueue(num_bytes)
            lease = await self.pool.lease(num_bytes, asyncio.get_running_loop().time())
            task = Show(page, len(response), len(messages))
            report, after = await lease.ask(task, (response, messages))
            lease.give_back()
        if isinstance(report, WasAnswered):
            return after
        raise _error(report)


class Body:
    """A body that was read, and work on its text, once."""

    def __init__(
        self,
        bodies: Bodies,
        number: int,
        arrived_s: float,
        incoming: Incoming,
        reading: Reading,
        lease: Lease | None = None,
    ) -> None:
        """`lease` is of the text process that has read it; None: that was here."""
        self.kind = reading.kind
        # What it asks; without its text where that is elsewhere.
        self.asked = reading.asked
        self.refusal = reading.refusal
        self.digest = reading.digest
        self._bodies = bodies
        self._number = number
        self._arrived_s = arrived_s
        self._incoming = incoming
        # Of a long body, until its text is worked on.
        self._lease = lease
        self.is_long = lease is not None

    async def work(self, model: ServedModel, earlier: bytes = b"") -> Prepared | bytes | bytearray:
        """What its kind makes of its text; `earlier` is the JSON of what was said before.

        Raises what that raises, `TooManyRequests`, `Unavailable` and `TimeoutError`.
        """
        # What a request's own template does with little text nobody knows: it must be possible to
        # put an end to it.
        is_program = model.text.trusts_templates and self.asked.brings_template
        try:
            if self.is_long or is_program or len(earlier) > LONG_BYTES:
                return await self._work_elsewhere(model, earlier)
            work = functools.partial(self.kind.work, self.asked, model.text, earlier)
            if len(earlier) <= INLINE_CHARS and self.kind.is_short(self.asked):
                return work()
            return await self._bodies.threads.run(work)
        finally:
            self._incoming.drop()

    async def _work_elsewhere(
        self, model: ServedModel, earlier: bytes
    ) -> Prepared | bytes | bytearray:
        lease, incoming = self._lease, self._incoming
        pieces: Sequence[bytes] = ()
        # Whoever lets go of the body meanwhile must not take it away.
        self._lease = None
        if lease is None or not lease.take_up():
            pieces, num_bytes = incoming.pieces, incoming.num_bytes + len(earlier)
            incoming.enqueue(len(earlier))
            lease = await self._bodies.pool.lease(num_bytes, self._arrived_s)
        report, after = await self._ask_to_work(lease, model, pieces, earlier)
        if isinstance(report, NeedsFiles):
            await self._send_files(lease, model)
            report, after = await self._ask_to_work(lease, model, (), earlier)
        lease.give_back()
        match report:
            case WasPrepared():
                return unpack_prepared(report, memoryview(after))
            case WasAnswered():
                return after
        raise _error(report)

    async def _ask_to_work(
        self, lease: Lease, model: ServedModel, pieces: Sequence[bytes], earlier: bytes
    ) -> Reply:
        info = model.info
        facts = ModelFacts(
            info.model,
            info.tokenizer_hash,
            info.max_model_len,
            info.vocab_size,
            model.text.trusts_templates,
            *model.text.conventions.names,
        )
        body_bytes = sum(map(len, pieces))
        task = Work(self._number, self.kind.name, facts, body_bytes, len(earlier))
        return await lease.ask(task, (*pieces, earlier))

    async def _send_files(self, lease: Lease, model: ServedModel) -> None:
        info, files = model.info, model.files
        sizes = {name: len(data) for name, data in files.items()}
        template = self._bodies.models.chat_template
        task = Files(info.model, info.tokenizer_hash, template, sizes)
        report, _ = await lease.ask(task, list(files.values()))
        if not isinstance(report, WasLoaded):
            lease.give_back()
            raise _error(report)

    def let_go(self) -> None:
        """No work follows, or not soon."""
        if self._lease is not None and self._lease.take_up():
            self._lease.give_back()


def _reading(report: WasRead) -> Reading:
    kind = KINDS[report.kind]
    assert isinstance(kind, BodyKind)
    return Reading(kind, unpack_asked(report.asked, kind.request_type), digest=report.digest)


def _error(report: object) -> ApiError:
    """Of a report that something failed; any other is a defect."""
    return unpack_error(report) if isinstance(report, Failed) else ApiError("internal error")
