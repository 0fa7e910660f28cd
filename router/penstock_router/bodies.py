"""Where a body is read and its text worked on: here, in a thread, or in a text process.

Its length alone says so, before anybody has looked into it: building objects of megabytes of JSON,
or a list of 300,000 ids, holds the interpreter lock, and with it the event loop, whatever thread it
is done in. Of a long body nothing but ids in one block of memory, and texts that an answer shows,
ever is in this process.
"""

from __future__ import annotations

import asyncio
import functools
import itertools
from collections.abc import Sequence

from penstock_router import text_messages as messages
from penstock_router.errors import ApiError
from penstock_router.models import Models, ServedModel
from penstock_router.prompts import Prepared
from penstock_router.text_messages import (
    Failed,
    Files,
    ModelFacts,
    NeedsFiles,
    Read,
    WasAnswered,
    WasLoaded,
    WasPrepared,
    WasRead,
    Work,
)
from penstock_router.text_pool import Lease, Said, TextPool
from penstock_router.text_work import SORTS, AnySort, Reading, Sort, read
from penstock_router.threads import Threads
from penstock_router.tokenizer import INLINE_CHARS

# Longer bodies go to a text process. JSON of this length is parsed in 15 us where it is text, in
# 0.2 ms where it is ids, and in 1.4 ms where it is made of nothing but brackets; a thread tokenizes
# it in 10 ms, without the interpreter lock. To go there and back costs half a millisecond.
LONG_BYTES = 64 * 1024
# So many connections with long bodies are read from in one turn of the event loop: some 256 kB
# each, which take a fifth of a millisecond.
_CONNECTIONS_A_TURN = 4


class Bodies:
    """Reads bodies. What it is made of belongs to the caller."""

    def __init__(self, models: Models, threads: Threads, pool: TextPool) -> None:
        self.models = models
        self.threads = threads
        self.pool = pool
        self._numbers = itertools.count(1)
        self._turns = asyncio.Semaphore(_CONNECTIONS_A_TURN)

    async def take_turn(self) -> None:
        """Wait before more of a long body is taken in, so that the event loop is not all taken up
        by many that come at once.
        """
        async with self._turns:
            await asyncio.sleep(0)

    async def read(
        self, sort: AnySort, pieces: Sequence[bytes], *, with_digest: bool = False
    ) -> Body:
        """Read a body, which came in pieces.

        Raises `BadRequest` where it does not even show of which sort it is, `TooManyRequests`
        where too many long ones are at hand, `Unavailable` and `TimeoutError` as `Lease.ask`.
        """
        number, arrived_s = next(self._numbers), asyncio.get_running_loop().time()
        num_bytes = sum(map(len, pieces))
        if num_bytes <= LONG_BYTES:
            reading = read(sort, b"".join(pieces), with_digest=with_digest)
            return Body(self, number, arrived_s, pieces, reading)
        lease = await self.pool.lease(num_bytes, arrived_s)
        said, _ = await lease.ask(Read(number, sort.name, with_digest), pieces)
        if isinstance(said, WasRead):
            lease.hold()
            return Body(self, number, arrived_s, pieces, _reading(said), lease)
        lease.give_back()
        error = _error(said)
        known = SORTS.get(said.sort) if isinstance(said, Failed) else None
        if not isinstance(known, Sort):
            raise error
        return Body(self, number, arrived_s, (), Reading(known, refusal=error))


class Body:
    """A body that was read, and work on its text, once."""

    def __init__(
        self,
        bodies: Bodies,
        number: int,
        arrived_s: float,
        pieces: Sequence[bytes],
        reading: Reading,
        lease: Lease | None = None,
    ) -> None:
        """`lease` is of the text process that has read it; None: that was here."""
        self.sort = reading.sort
        # What it asks; without its text where that is elsewhere.
        self.asked = reading.asked
        self.refusal = reading.refusal
        self.digest = reading.digest
        self._bodies = bodies
        self._number = number
        self._arrived_s = arrived_s
        self._pieces = pieces
        # Of a long body, until its text is worked on.
        self._lease = lease
        self._is_long = lease is not None

    async def work(self, model: ServedModel, earlier: bytes = b"") -> Prepared | bytes:
        """What its sort makes of its text; `earlier` is the JSON of what was said before.

        Raises what that raises, `TooManyRequests`, `Unavailable` and `TimeoutError`.
        """
        # What a request's own template does with little text nobody knows: it must be possible to
        # put an end to it.
        is_program = model.trusts_templates and self.asked.brings_template
        if self._is_long or is_program or len(earlier) > LONG_BYTES:
            return await self._work_elsewhere(model, earlier)
        work = functools.partial(self.sort.work, self.asked, model.text, earlier)
        if len(earlier) <= INLINE_CHARS and self.sort.is_short(self.asked):
            return work()
        return await self._bodies.threads.run(work)

    async def _work_elsewhere(self, model: ServedModel, earlier: bytes) -> Prepared | bytes:
        lease, pieces = self._lease, self._pieces
        # Whoever lets go of the body meanwhile must not take it away.
        self._lease = None
        if lease is not None and lease.take_up():
            pieces = ()
        else:
            num_bytes = sum(map(len, pieces)) + len(earlier)
            pool = self._bodies.pool
            lease = await pool.lease(num_bytes, self._arrived_s, admitted=True)
        said, after = await self._ask_to_work(lease, model, pieces, earlier)
        if isinstance(said, NeedsFiles):
            await self._send_files(lease, model)
            said, after = await self._ask_to_work(lease, model, (), earlier)
        lease.give_back()
        self._pieces = ()
        match said:
            case WasPrepared():
                return messages.unpack_prepared(said, after)
            case WasAnswered():
                return bytes(after)
        raise _error(said)

    async def _ask_to_work(
        self, lease: Lease, model: ServedModel, pieces: Sequence[bytes], earlier: bytes
    ) -> Said:
        info = model.info
        facts = ModelFacts(
            info.model,
            info.tokenizer_hash,
            info.max_model_len,
            info.vocab_size,
            model.trusts_templates,
        )
        body_bytes = sum(map(len, pieces))
        task = Work(self._number, self.sort.name, facts, body_bytes, len(earlier))
        return await lease.ask(task, (*pieces, earlier))

    async def _send_files(self, lease: Lease, model: ServedModel) -> None:
        info, models = model.info, self._bodies.models
        try:
            files = await models.files(info)
        except BaseException:
            lease.give_back()
            raise
        sizes = {name: len(data) for name, data in files.items()}
        task = Files(info.model, info.tokenizer_hash, models.chat_template, sizes)
        said, _ = await lease.ask(task, list(files.values()))
        if not isinstance(said, WasLoaded):
            lease.give_back()
            raise _error(said)

    def let_go(self) -> None:
        """No work follows, or not soon."""
        if self._lease is not None and self._lease.take_up():
            self._lease.give_back()


def _reading(said: WasRead) -> Reading:
    sort = SORTS[said.sort]
    assert isinstance(sort, Sort)
    return Reading(sort, messages.unpack_asked(said.asked, sort.asked), digest=said.digest)


def _error(said: object) -> ApiError:
    """Of a report that something failed; any other is a defect."""
    return messages.unpack_error(said) if isinstance(said, Failed) else ApiError("internal error")
