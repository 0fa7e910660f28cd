"""Where a body is read and its text worked on: here, in a thread, or in a text process.

The length of the body alone decides, before it is parsed: building objects of megabytes of JSON,
or a list of 300,000 ids, holds the interpreter lock, and with it the event loop, whatever thread
does it. A long body is parsed in a text process; this process gets only its ids, in one block of
memory, and texts that the answer shows. A long stored response is read there too.
"""

from __future__ import annotations

import asyncio
import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from penstock_router.admission.shared_budget import SharedBudget
from penstock_router.apis.responses.stored import Page, read_stored
from penstock_router.errors import ApiError, TooManyRequests
from penstock_router.observe.metrics import Metrics
from penstock_router.offload import request_templates
from penstock_router.offload.body_kinds import KINDS, AnyKind, BodyKind, Reading, read
from penstock_router.offload.request_templates import Programs
from penstock_router.offload.text_messages import (
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
from penstock_router.offload.text_pool import Lease, Reply, TextPool
from penstock_router.served_models import Models, ServedModel
from penstock_router.text.prompts import PreparedPrompts
from penstock_router.text.tokenizer import INLINE_CHARS
from penstock_router.thread_pool import Threads

# Longer bodies go to a text process. JSON of this length is parsed in 15 us where it is text, in
# 0.2 ms where it is ids, and in 1.4 ms where it is made of nothing but brackets; a thread tokenizes
# it in 10 ms, without the interpreter lock. A round trip to a text process costs 0.5 ms.
LONG_BYTES = 64 * 1024
# How many connections with long bodies are read from in one turn of the event loop: some 256 kB
# each, which take a fifth of a millisecond.
_CONNECTIONS_A_TURN = 4
# How many bodies may wait for text processes or be worked on there: enough for a burst.
MAX_BODIES = 64


class Room:
    """What bodies in this process take, by client, until their texts are worked on."""

    def __init__(self, memory: SharedBudget, metrics: Metrics) -> None:
        self.memory = memory
        # Shared as memory is, with 1 for each body.
        self.queue = SharedBudget(MAX_BODIES)
        self.metrics = metrics


class Incoming:
    """A body as it arrives, kept in pieces: joining those of a long one takes milliseconds."""

    def __init__(self, room: Room, client: str) -> None:
        self.client = client
        self.pieces: list[bytes] = []
        self.num_bytes = 0
        self._room = room
        self._memory = room.memory.hold(client)
        self._place = room.queue.hold(client)

    @property
    def is_long(self) -> bool:
        return self.num_bytes > LONG_BYTES

    def add(self, piece: bytes) -> None:
        """Add a piece. Raises `TooManyRequests` if the client holds its share of memory already."""
        self._memory.grow(len(piece), self._out_of_memory)
        self.pieces.append(piece)
        self.num_bytes += len(piece)

    def enqueue(self, more_bytes: int = 0) -> None:
        """Queue it for a text process, together with `more_bytes` of other data.

        Raises `TooManyRequests` if the client has its share of the queue, or of memory, already.
        """
        if more_bytes:
            self._memory.grow(more_bytes, self._out_of_memory)
        if not self._place.amount:
            self._place.grow(1, self._queue_full)

    def _out_of_memory(self, held_bytes: int, max_bytes: int) -> TooManyRequests:
        return self._refusal(f"{held_bytes} bytes of yours are in memory, of {max_bytes}")

    def _queue_full(self, num_bodies: int, max_bodies: int) -> TooManyRequests:
        return self._refusal(f"{num_bodies} long bodies of yours are in the queue of {max_bodies}")

    def _refusal(self, what: str) -> TooManyRequests:
        self._room.metrics.refused.labels("long_bodies").inc()
        return TooManyRequests(
            f"{what} for everybody, and no client may have more than is left free; try again "
            "shortly"
        )

    def leave(self) -> None:
        """Give back what it takes of the room. Idempotent."""
        self._memory.close()
        self._place.close()

    def drop(self) -> None:
        """Free the body's memory, and give back what it takes of the room."""
        self.pieces = []
        self.leave()


class Bodies:
    """Reads bodies. Closing it closes the pools, which are passed in, and nothing else."""

    def __init__(
        self,
        models: Models,
        threads: Threads,
        pool: TextPool,
        programs: Programs,
        memory: SharedBudget,
        metrics: Metrics,
    ) -> None:
        self.models = models
        self.threads = threads
        self.pool = pool
        self.programs = programs
        self.room = Room(memory, metrics)
        self._numbers = itertools.count(1)
        self._turns = asyncio.Semaphore(_CONNECTIONS_A_TURN)
        self._inflating = asyncio.Lock()

    def stop(self) -> None:
        """Refuse the bodies that wait for a process, and any that arrive."""
        self.pool.stop()
        self.programs.pool.stop()

    async def close(self) -> None:
        """Kill all processes."""
        await self.pool.close()
        await self.programs.pool.close()

    async def take_turn(self) -> None:
        """Wait before reading more of a long body, so that many that arrive at once do not occupy
        the event loop.
        """
        async with self._turns:
            await asyncio.sleep(0)

    async def inflate(self, inflate: Callable[[], bytes]) -> bytes:
        """Inflate more of a long body in a thread: of one body at a time, and for half of that time
        at most, as a kilobyte may keep a core busy for as long as a megabyte that is not packed.
        """
        loop = asyncio.get_running_loop()
        async with self._inflating:
            begun_s = loop.time()
            data = await self.threads.run(inflate)
            await asyncio.sleep(loop.time() - begun_s)
        return data

    @contextmanager
    def incoming(self, client: str) -> Iterator[Incoming]:
        """A body of which nothing has arrived yet. What it takes of the room is given back at the
        end of the scope, if not before.
        """
        incoming = Incoming(self.room, client)
        try:
            yield incoming
        finally:
            incoming.leave()

    async def read(self, kind: AnyKind, incoming: Incoming, *, with_digest: bool = False) -> Body:
        """Parse a body that has arrived completely.

        Raises `BadRequest` if not even its kind can be told, `TooManyRequests` if its client has
        too many long bodies here, `Unavailable` and `TimeoutError` as `Lease.ask` does.
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
        self, client: str, response: bytes, messages: bytes, page: Page | None = None
    ) -> bytes | bytearray:
        """`read_stored`, here or in a text process. Raises what `read_stored` raises, and
        the errors of `read`.
        """
        num_bytes = len(response) + len(messages)
        if num_bytes <= LONG_BYTES:
            return read_stored(response, messages, page)
        with self.incoming(client) as incoming:
            incoming.enqueue(num_bytes)
            lease = await self.pool.lease(num_bytes, asyncio.get_running_loop().time())
            task = Show(page, len(response), len(messages))
            report, after = await lease.ask(task, (response, messages))
            lease.give_back()
        if isinstance(report, WasAnswered):
            return after
        raise _error(report)


class Body:
    """A parsed body, whose text can be worked on once."""

    def __init__(
        self,
        bodies: Bodies,
        number: int,
        arrived_s: float,
        incoming: Incoming,
        reading: Reading,
        lease: Lease | None = None,
    ) -> None:
        """`lease` is the text process that parsed it; None: it was parsed here."""
        self.kind = reading.kind
        # The request; without its text if that is in a text process.
        self.asked = reading.asked
        self.refusal = reading.refusal
        self.digest = reading.digest
        self._bodies = bodies
        self._number = number
        self._arrived_s = arrived_s
        self._incoming = incoming
        # The text process that holds a long body, until its text is worked on.
        self._lease = lease
        self.is_long = lease is not None

    async def work(
        self, model: ServedModel, earlier: bytes = b""
    ) -> PreparedPrompts | bytes | bytearray:
        """Run its kind's text work; `earlier` is the JSON of earlier messages of the conversation.

        Raises what that work raises, `TooManyRequests`, `Unavailable` and `TimeoutError`.
        """
        is_program = model.text.trusts_templates and self.asked.brings_template
        try:
            if is_program:
                return await self._run_program(model, earlier)
            if self.is_long or len(earlier) > LONG_BYTES:
                return await self._work_elsewhere(model, earlier)
            work = functools.partial(self.kind.work, self.asked, model.text, earlier)
            if len(earlier) <= INLINE_CHARS and self.kind.is_short(self.asked):
                return work()
            return await self._bodies.threads.run(work)
        finally:
            self._incoming.drop()

    async def _run_program(
        self, model: ServedModel, earlier: bytes
    ) -> PreparedPrompts | bytes | bytearray:
        """The text work of a request that brings its template, which may run for ever even on a
        short text: in a process that can be killed, and that nobody else waits for.
        """
        self.let_go()
        async with self._bodies.programs.lease(self._incoming.client, self._arrived_s) as lease:
            if not lease.has_process:
                # The start of a process is not of the program's few seconds.
                await self._send_files(lease, model)
            pieces = self._incoming.pieces
            return await self._work_with(
                lease, model, pieces, earlier, request_templates.MAX_PROGRAM_S
            )

    async def _work_elsewhere(
        self, model: ServedModel, earlier: bytes
    ) -> PreparedPrompts | bytes | bytearray:
        lease, incoming = self._lease, self._incoming
        pieces: Sequence[bytes] = ()
        # From here on `let_go` must not give the lease back.
        self._lease = None
        if lease is None or not lease.take_up():
            pieces, num_bytes = incoming.pieces, incoming.num_bytes + len(earlier)
            incoming.enqueue(len(earlier))
            lease = await self._bodies.pool.lease(num_bytes, self._arrived_s)
        return await self._work_with(lease, model, pieces, earlier)

    async def _work_with(
        self,
        lease: Lease,
        model: ServedModel,
        pieces: Sequence[bytes],
        earlier: bytes,
        max_s: float | None = None,
    ) -> PreparedPrompts | bytes | bytearray:
        report, after = await self._ask_to_work(lease, model, pieces, earlier, max_s)
        if isinstance(report, NeedsFiles):
            await self._send_files(lease, model)
            report, after = await self._ask_to_work(lease, model, (), earlier, max_s)
        lease.give_back()
        match report:
            case WasPrepared():
                return unpack_prepared(report, memoryview(after))
            case WasAnswered():
                return after
        raise _error(report)

    async def _ask_to_work(
        self,
        lease: Lease,
        model: ServedModel,
        pieces: Sequence[bytes],
        earlier: bytes,
        max_s: float | None,
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
        return await lease.ask(task, (*pieces, earlier), max_s)

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
        """Give the text process back: no work on the text follows there, or not soon."""
        if self._lease is not None and self._lease.take_up():
            self._lease.give_back()


def _reading(report: WasRead) -> Reading:
    kind = KINDS[report.kind]
    assert isinstance(kind, BodyKind)
    return Reading(kind, unpack_asked(report.asked, kind.request_type), digest=report.digest)


def _error(report: object) -> ApiError:
    """The error in a `Failed` report; any other report here is a defect."""
    return unpack_error(report) if isinstance(report, Failed) else ApiError("internal error")
