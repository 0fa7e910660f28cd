"""Passes KV blocks between the host memory that the engine fills and other shards.

The engine says which slots hold what, and decides what is taken over; here bytes are read and
written. Whatever fails, the engine hears that nothing more comes, and computes.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections import defaultdict
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing, suppress
from typing import NoReturn, Protocol

from penstock_shard.ipc.block_messages import (
    Arrival,
    Distrust,
    Export,
    Exported,
    Fetch,
    FetchOver,
    InboundSlots,
    PrefixNames,
    Slot,
)
from penstock_shard.ipc.messages import FromEngine
from penstock_shard.ipc.runner_info import RunnerInfo
from penstock_shard.kv_transfer.arena import Arena, RecordName, namespace_of

logger = logging.getLogger(__name__)

# More at once are not begun: each keeps slots from being reused. So many wait for so long.
_MOST_EXPORTS = 2
_MOST_WAITING = 32
_TURN_S = 2.0
_MOST_FETCHES = 8
# How long the engine may take to have copies of what is asked for.
_EXPORT_S = 10.0
# From a peer of which nothing comes for so long nothing will: its host may be gone. And if the
# first block takes so large a share of the time for all, it is asked by too many.
_FIRST_S = 3.0
_FIRST_SHARE = 1 / 3
# The engine hears of what came once it is this much, or all, or no slot is left.
_ARRIVAL_BYTES = 2**20

Tell = Callable[[Export | Arrival | int], None]


class TooManyExports(Exception):
    """Others are being served."""


class FetchFailed(Exception):
    """Nothing more comes of a fetch; the text says why."""


class Distrusted(FetchFailed):
    """A peer sent what it must not."""


class Peers(Protocol):
    """Where blocks are fetched from."""

    def fetch(
        self, source: str, namespace: bytes, prefix: PrefixNames, num_known: int
    ) -> AsyncGenerator[memoryview, None]:
        """The records that a peer has of a prefix, without its first blocks.

        Raises:
            FetchFailed: it is no peer, or the call failed.
        """

    def note_late(self, source: str) -> None:
        """It took longer than computing would have."""

    def distrust(self, source: str, reason: str) -> NoReturn:
        """It sent what it must not. Raises Distrusted."""


class BlockTransfers:
    """Exports and fetches of one engine after another."""

    def __init__(self, memory: memoryview, peers: Peers) -> None:
        self._memory = memory
        self._peers = peers
        self._arena: Arena | None = None
        self._tell: Tell = lambda message: None
        self._numbers = itertools.count(1)
        self._turns = asyncio.Semaphore(_MOST_EXPORTS)
        self._num_waiting = 0
        self._exports: dict[int, asyncio.Future[list[Slot]]] = {}
        self._fetches: dict[int, asyncio.Task[None]] = {}
        # Slots to write into, by pool.
        self._inbound: defaultdict[int, list[int]] = defaultdict(list)
        self._slots_came = asyncio.Event()
        # Names of the engine's blocks; empty without an engine.
        self.namespace = b""

    def on_engine_ready(self, info: RunnerInfo, tell: Tell) -> None:
        """What the memory holds is the engine's from now on; `tell` tells it of blocks."""
        self._arena, self._tell, self.namespace = (
            Arena(self._memory, info),
            tell,
            namespace_of(info),
        )

    def on_engine_death(self) -> None:
        """Its slots mean nothing any more."""
        self._arena, self.namespace = None, b""
        self._inbound.clear()
        for export in self._exports.values():
            if not export.done():
                export.set_result([])
        for fetch in self._fetches.values():
            fetch.cancel()
        self._exports.clear()
        self._fetches.clear()

    def take(self, message: FromEngine) -> None:
        """A message of the engine about blocks."""
        match message:
            case InboundSlots():
                for pool, slot in message.slots:
                    self._inbound[pool].append(slot)
                self._slots_came.set()
            case Exported():
                waiting = self._exports.get(message.number)
                if waiting is None or waiting.done():
                    self._tell(message.number)
                else:
                    waiting.set_result(message.slots)
            case Fetch():
                self._begin(message)
            case Distrust():
                with suppress(FetchFailed):
                    self._peers.distrust(message.source, "a block is not what is computed here")
            case FetchOver():
                fetch = self._fetches.get(message.number)
                if fetch is not None:
                    fetch.cancel()

    # ---- to other shards ----

    async def export(self, prefix: PrefixNames, num_known: int) -> AsyncGenerator[memoryview, None]:
        """The records that the engine has of a prefix, parents first. Each is valid until the next.

        Raises:
            TooManyExports: others are being served.
        """
        await self._wait_for_turn()
        try:
            async with aclosing(self._export(prefix, num_known)) as records:
                async for record in records:
                    yield record
        finally:
            self._turns.release()

    async def _wait_for_turn(self) -> None:
        if self._num_waiting >= _MOST_WAITING:
            raise TooManyExports
        self._num_waiting += 1
        try:
            async with asyncio.timeout(_TURN_S):
                await self._turns.acquire()
        except TimeoutError:
            raise TooManyExports from None
        finally:
            self._num_waiting -= 1

    async def _export(
        self, prefix: PrefixNames, num_known: int
    ) -> AsyncGenerator[memoryview, None]:
        number, arena = next(self._numbers), self._arena
        if arena is None:
            return
        slots = self._exports[number] = asyncio.get_running_loop().create_future()
        self._tell(Export(number, prefix, num_known))
        try:
            async with asyncio.timeout(_EXPORT_S):
                found = await slots
            for pool, slot in found:
                if self._arena is not arena:
                    return
                yield arena.record_in(pool, slot)
        except TimeoutError:
            logger.warning("the engine had no time for a peer that asks for KV blocks")
        finally:
            self._exports.pop(number, None)
            if self._arena is arena:
                self._tell(number)

    # ---- from other shards ----

    def _begin(self, fetch: Fetch) -> None:
        if len(self._fetches) >= _MOST_FETCHES or self._arena is None:
            self._tell(Arrival(fetch.number, [], is_last=True))
            return
        task = asyncio.create_task(self._fetch(fetch, self._arena))
        self._fetches[fetch.number] = task
        task.add_done_callback(lambda _: self._fetches.pop(fetch.number, None))

    async def _fetch(self, fetch: Fetch, arena: Arena) -> None:
        came: list[Slot] = []
        is_damaged = False
        ends_s = asyncio.get_running_loop().time() + fetch.deadline_s
        try:
            async with asyncio.timeout(min(_FIRST_SHARE * fetch.deadline_s, _FIRST_S)) as limit:
                await self._receive(fetch, arena, came, lambda: limit.reschedule(ends_s))
        except TimeoutError:
            self._peers.note_late(fetch.source)
        except FetchFailed as error:
            is_damaged = isinstance(error, Distrusted)
            logger.info("KV blocks of %s: %s; they are computed", fetch.source, error)
        finally:
            if self._arena is arena:
                self._tell(Arrival(fetch.number, came, is_last=True, is_damaged=is_damaged))

    async def _receive(
        self, fetch: Fetch, arena: Arena, came: list[Slot], on_record: Callable[[], None]
    ) -> None:
        """Put what comes into slots; `came` has those that the engine has not been told of."""
        num_bytes = 0
        found = self._peers.fetch(fetch.source, self.namespace, fetch.prefix, fetch.num_known)
        async with aclosing(found) as records:
            async for record in records:
                on_record()
                num_bytes += await self._put(fetch, arena, record, came)
                # The engine gives others for slots that it hears of, and for no others.
                if num_bytes >= _ARRIVAL_BYTES or self._lacks_slots:
                    self._tell(Arrival(fetch.number, came.copy()))
                    came.clear()
                    num_bytes = 0

    async def _put(self, fetch: Fetch, arena: Arena, record: memoryview, came: list[Slot]) -> int:
        """Put a record into a slot; its length."""
        name = arena.name_of(record)
        if name is None or not arena.is_whole(record, name):
            self._peers.distrust(fetch.source, "a block came that is damaged")
        if not _is_asked_for(name, fetch.prefix):
            self._peers.distrust(fetch.source, "a block came that was not asked for")
        pool = arena.pool_of(name.group)
        slot = await self._next_slot(pool)
        came.append((pool, slot))
        arena.put(slot, name.group, record, is_proven=False)
        return len(record)

    @property
    def _lacks_slots(self) -> bool:
        return not all(self._inbound.values())

    async def _next_slot(self, pool: int) -> int:
        while not self._inbound[pool]:
            self._slots_came.clear()
            await self._slots_came.wait()
        return self._inbound[pool].pop()


def _is_asked_for(name: RecordName, prefix: PrefixNames) -> bool:
    """Only such blocks may be where the next engine looks for copies."""
    if name.index >= len(prefix.digests):
        return False
    num_bytes = len(prefix.token_ids) // len(prefix.digests)
    start = name.index * num_bytes
    packed = memoryview(prefix.token_ids)[start : start + num_bytes].cast("I")
    parent = prefix.digests[name.index - 1] if name.index else prefix.root
    found = (name.digest, name.parent, name.token_ids)
    return found == (prefix.digests[name.index], parent, tuple(packed))
