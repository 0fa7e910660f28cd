"""Chooses where a body is parsed and its text worked on: here, in a thread, or in a text process.

The body's length and its number of values decide, before it is parsed. Some work holds the
interpreter lock, and blocks the event loop, even in a thread: building megabytes of objects or a
list of 300,000 ids, rendering a thousand messages, writing a constraint of a hundred arguments. So
a text process parses long bodies, and reads long stored responses. This process gets only a body's
ids, in one block of memory, and texts that the answer shows.
"""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

from penstock_router.admission.shared_budget import Holding, SharedBudget
from penstock_router.apis.base import AnyKind
from penstock_router.apis.responses.stored import Page, read_stored
from penstock_router.errors import TooManyRequests
from penstock_router.images.image import NO_IMAGES
from penstock_router.images.images import Images
from penstock_router.images.request_images import load_images
from penstock_router.observe.metrics import Metrics
from penstock_router.offload import request_templates
from penstock_router.offload.body_kinds import Reading, read, work
from penstock_router.offload.request_templates import Programs
from penstock_router.offload.text_messages import MAX_TASK_S, ModelFacts, Read, Show, Work
from penstock_router.offload.text_pool import SECONDS_A_BYTE, Arrival, TextPool
from penstock_router.request import ChatRequest, ImageSizes
from penstock_router.served_models import ServedModel
from penstock_router.text.answer_constraint import tools_held_to
from penstock_router.text.prompts import PreparedPrompts, TextModel, takes_no_images
from penstock_router.thread_pool import Threads

# Shorter texts are worked on here, in less than half a millisecond: tokenizing takes about 0.15 us
# a character, and passing it to a thread may cost as much.
SHORT_BYTES = 2 * 1024
# Longer bodies go to a text process. JSON of this length is parsed in at most 0.4 ms. A thread
# tokenizes it in 2.5 ms without the interpreter lock, but competes with the event loop for the CPU.
# A text process has lower priority; a round trip costs 0.5 ms.
LONG_BYTES = 16 * 1024
# A body with more values is also long: Python takes up to 10 us for each value.
MANY_VALUES = 256
# With enforced tools, a body with more values is long: the constraint may repeat each value.
MANY_ENFORCED_VALUES = 64
# Connections with long bodies that are read in one turn of the event loop. Each gives about 256 kB,
# which takes 0.2 ms.
_CONNECTIONS_A_TURN = 4
# Maximum of bodies in text processes or waiting for them. Their memory has its own bound.
MAX_BODIES = 2048


class Incoming:
    """A body as it arrives, in pieces: joining a long body takes milliseconds."""

    def __init__(self, client: str, memory: Holding, queue: Holding, metrics: Metrics) -> None:
        self.client = client
        self.pieces: list[bytes] = []
        self.num_bytes = 0
        self._memory = memory
        self._queue = queue
        self._metrics = metrics

    @property
    def is_long(self) -> bool:
        return self.num_bytes > LONG_BYTES

    def add(self, piece: bytes) -> None:
        """Add a piece. Raises `TooManyRequests` if the client already holds its share of memory."""
        self._memory.grow(len(piece), self._out_of_memory)
        self.pieces.append(piece)
        self.num_bytes += len(piece)

    def hold(self, more_bytes: int) -> None:
        """Count other data as part of the body. Raises as `add` does."""
        self._memory.grow(more_bytes, self._out_of_memory)

    def enqueue(self) -> None:
        """Queue the body for a text process. Raises `TooManyRequests` if the queue has no room for
        the client.
        """
        if not self._queue.amount:
            self._queue.grow(1, self._queue_full)

    def _out_of_memory(self, held_bytes: int, max_bytes: int) -> TooManyRequests:
        return self._refusal(f"{held_bytes} bytes of yours are in memory, of {max_bytes}")

    def _queue_full(self, num_bodies: int, max_bodies: int) -> TooManyRequests:
        return self._refusal(f"{num_bodies} long bodies of yours are in the queue of {max_bodies}")

    def _refusal(self, what: str) -> TooManyRequests:
        self._metrics.refused.labels("long_bodies").inc()
        return TooManyRequests(
            f"{what} for everybody, and no client may have more than is left free; try again "
            "shortly"
        )

    def drop(self) -> None:
        """Free the body's memory and place in the queue. Idempotent."""
        self.pieces = []
        self._memory.close()
        self._queue.close()


class Bodies:
    def __init__(
        self,
        threads: Threads,
        pool: TextPool,
        programs: Programs,
        memory: SharedBudget,
        metrics: Metrics,
        images: Images,
        max_images: int,
    ) -> None:
        """Prepare to read bodies of requests with up to `max_images` images each."""
        self.images = images
        self.max_images = max_images
        self.threads = threads
        self.pool = pool
        self.programs = programs
        # Memory of bodies, by client, until their text work is done.
        self.memory = memory
        # Each body counts as 1.
        self.queue = SharedBudget(MAX_BODIES)
        self._metrics = metrics
        self._numbers = itertools.count(1)
        self._turns = asyncio.Semaphore(_CONNECTIONS_A_TURN)
        self._inflating = asyncio.Lock()

    def stop(self) -> None:
        """Refuse new bodies and those that wait for a process."""
        self.pool.stop()
        self.programs.pool.stop()

    async def close(self) -> None:
        await self.pool.close()
        await self.programs.pool.close()

    async def take_turn(self) -> None:
        """Wait before reading more of a long body, so that many long bodies do not block the event
        loop.
        """
        async with self._turns:
            await asyncio.sleep(0)

    async def inflate(self, inflate: Callable[[], list[bytes]]) -> list[bytes]:
        """Inflate more of a long body in a thread: one body at a time, and at most half of the
        time. A compressed kilobyte may cost as much CPU time as a plain megabyte.
        """
        loop = asyncio.get_running_loop()
        async with self._inflating:
            begun_s = loop.time()
            data = await self.threads.run(inflate)
            await asyncio.sleep(loop.time() - begun_s)
        return data

    @contextmanager
    def incoming(self, client: str) -> Iterator[Incoming]:
        """Begin a body; the end of the scope drops it."""
        memory, queue = self.memory.hold(client), self.queue.hold(client)
        incoming = Incoming(client, memory, queue, self._metrics)
        try:
            yield incoming
        finally:
            incoming.drop()

    def _arrive(self, num_bytes: int) -> Arrival:
        """Return a body's time of arrival and number. A long body counts as arriving later."""
        now_s = asyncio.get_running_loop().time()
        return now_s + SECONDS_A_BYTE * num_bytes, next(self._numbers)

    async def read(self, kind: AnyKind, incoming: Incoming, *, with_digest: bool = False) -> Body:
        """Parse a complete body.

        Raises `BadRequest` if not even its kind is clear, `TooManyRequests` if its client has too
        many long bodies here, `Unavailable` and `TimeoutError` as `TextPool.run` does.
        """
        arrival = self._arrive(incoming.num_bytes)
        if not (incoming.is_long or count_values(incoming.pieces) > MANY_VALUES):
            reading = read(kind, b"".join(incoming.pieces), with_digest=with_digest)
            return Body(self, arrival, incoming, reading, is_long=False)
        incoming.enqueue()
        task = Read(arrival[1], kind.name, with_digest)
        outcome = await self.pool.run(incoming.client, arrival, task, [incoming.pieces])
        assert isinstance(outcome, Reading)
        return Body(self, arrival, incoming, outcome, is_long=True)

    async def show(
        self, client: str, response: bytes, messages: bytes, page: Page | None = None
    ) -> bytes:
        """Run `read_stored`, here or in a text process. Raises its errors and those of `read`."""
        num_bytes = len(response) + len(messages)
        if num_bytes <= LONG_BYTES:
            return read_stored(response, messages, page)
        with self.incoming(client) as incoming:
            incoming.hold(num_bytes)
            incoming.enqueue()
            parts = [[response], [messages]]
            arrival = self._arrive(num_bytes)
            outcome = await self.pool.run(client, arrival, Show(page), parts)
        assert isinstance(outcome, bytes)
        return outcome


def count_values(pieces: Iterable[bytes]) -> int:
    """Count the values in objects and lists of JSON. Commas and brackets in strings count too."""
    return sum(piece.count(mark) for piece in pieces for mark in (b",", b"[", b"{"))


class Body:
    """A parsed body. Its text work can be done only once."""

    def __init__(
        self,
        bodies: Bodies,
        arrival: Arrival,
        incoming: Incoming,
        reading: Reading,
        *,
        is_long: bool,
    ) -> None:
        self.kind = reading.kind
        # Sources of the body's images, perhaps megabytes of base64. They are removed from the
        # request, because it lives as long as its answer.
        self._sources = getattr(reading.asked, "images", ())
        # The request of a long body has no text.
        self.asked = reading.asked
        if self._sources:
            self.asked = dataclasses.replace(reading.asked, images=())
        self.refusal = reading.refusal
        self.digest = reading.digest
        self.is_long = is_long
        # Stored items: first the conversation before the request, then each answer that items refer
        # to.
        self._earlier: list[bytes] = []
        self.images = NO_IMAGES
        self._bodies = bodies
        self._arrival = arrival
        self._incoming = incoming

    def add_earlier(self, items: bytes) -> None:
        """Add stored items, as JSON, for the text work. Raises `TooManyRequests`, because they
        count as part of the body.
        """
        self._incoming.hold(len(items))
        self._earlier.append(items)
        is_long = self._incoming.num_bytes + self._earlier_bytes > LONG_BYTES
        self.is_long = self.is_long or is_long or count_values(self._earlier) > MANY_VALUES

    async def work(self, model: ServedModel) -> PreparedPrompts | bytes:
        """Load the body's images into `images`, then do the text work of its kind.

        Raises the errors of that work and of `Images.load`, `TooManyRequests`, `Unavailable` and
        `TimeoutError`.
        """
        try:
            await self._load_images(model)
            return await self._work(model, self.images.sizes)
        finally:
            self._earlier = []
            self._incoming.drop()

    async def _load_images(self, model: ServedModel) -> None:
        sources, self._sources = self._sources, ()
        if sources and model.text.image_tokens is None:
            if wanted := [source for source in sources if not source.in_result]:
                raise takes_no_images(model.text, wanted[0].param)
            # These images are in tool results. The prompt's text says that the model cannot see
            # them.
            return
        bodies = self._bodies
        self.images = await load_images(
            bodies.images, sources, self._incoming.client, bodies.max_images
        )

    async def _work(self, model: ServedModel, image_sizes: ImageSizes) -> PreparedPrompts | bytes:
        bodies = self._bodies
        num_bytes = self._incoming.num_bytes + self._earlier_bytes
        if model.text.trusts_templates and self.asked.brings_template:
            return await self._run_program(model, image_sizes)
        if self.is_long or self._is_enforced(model.text):
            self._incoming.enqueue()
            return await self._work_there(bodies.pool, model, image_sizes)
        earlier = b"".join(self._earlier_pieces())
        made = functools.partial(work, self.kind, self.asked, model.text, earlier, image_sizes)
        # A link to an image is short, but the image may be thousands of tokens.
        if num_bytes <= SHORT_BYTES and not image_sizes:
            return made()
        return await bodies.threads.run(made, self._incoming.client)

    def _is_enforced(self, model: TextModel) -> bool:
        """True if the body has many values, and its tools constrain the answer."""
        asked = self.asked
        return (
            isinstance(asked, ChatRequest)
            and bool(tools_held_to(asked, model.conventions.tool_format))
            and count_values(self._incoming.pieces) > MANY_ENFORCED_VALUES
        )

    @property
    def _earlier_bytes(self) -> int:
        return sum(map(len, self._earlier))

    def _earlier_pieces(self) -> list[bytes]:
        """Join all stored items to a JSON array, in pieces; empty if there are none."""
        pieces = [piece for items in self._earlier for piece in (b",", items)]
        return [b"[", *pieces[1:], b"]"] if pieces else []

    async def _run_program(
        self, model: ServedModel, image_sizes: ImageSizes
    ) -> PreparedPrompts | bytes:
        """Do the text work of a request with its own template, which may never end. It gets a
        process that can be killed and that no other client waits for.
        """
        programs = self._bodies.programs
        with programs.scope(self._incoming.client):
            max_s = request_templates.MAX_PROGRAM_S
            return await self._work_there(programs.pool, model, image_sizes, max_s)

    async def _work_there(
        self,
        pool: TextPool,
        model: ServedModel,
        image_sizes: ImageSizes,
        max_s: float = MAX_TASK_S,
    ) -> PreparedPrompts | bytes:
        info, (arrived_s, number) = model.info, self._arrival
        facts = ModelFacts(
            info.model,
            info.tokenizer_hash,
            info.max_model_len,
            info.vocab_size,
            model.text.trusts_templates,
            *model.text.conventions.asked,
        )
        task = Work(number, self.kind.name, facts, image_sizes=image_sizes, max_s=max_s)
        parts = [self._incoming.pieces, self._earlier_pieces()]
        arrived_s += SECONDS_A_BYTE * self._earlier_bytes
        client, arrival = self._incoming.client, (arrived_s, number)
        outcome = await pool.run(client, arrival, task, parts, model.files)
        assert not isinstance(outcome, Reading)
        return outcome
