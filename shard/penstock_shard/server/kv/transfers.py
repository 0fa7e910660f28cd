"""Passes KV blocks between the engine's host memory and other shards.

The engine knows the content of slots, and decides which blocks it accepts; this module reads and
writes the bytes. After a failure it tells the engine that no more blocks will arrive, and the
engine computes them.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections import defaultdict
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing, suppress
from typing import NoReturn, Protocol

from penstock_proto.types import PrefixNames
from penstock_shard.ipc.block_messages import (
    Arrival,
    Distrust,
    Export,
    Exported,
    Fetch,
    FetchOver,
    InboundSlots,
    Slot,
)
from penstock_shard.ipc.messages import FromEngine
from penstock_shard.ipc.runner_info import RunnerInfo
from penstock_shard.kv_transfer.arena import Arena, RecordName, namespace_of

logger = logging.getLogger(__name__)

# Each running export keeps slots from being reused. Others wait for at most `_TURN_S`.
_MOST_EXPORTS = 2
_MOST_WAITING = 32
_TURN_S = 2.0
_MOST_FETCHES = 8
# Time for the engine to provide copies.
_EXPORT_S = 10.0
# The longest wait for the first block is `_FIRST_S`, because the peer's host may be gone, or
# `_FIRST_SHARE` of the deadline if that is less, because the peer may be overloaded.
_FIRST_S = 3.0
_FIRST_SHARE = 1 / 3
# Report arrivals to the engine when they have this size or are complete, or when slots run out.
_ARRIVAL_BYTES = 2**20

Tell = Callable[[Export | Arrival | int], None]


class TooManyExports(Exception):
    """Too many other peers are being served."""


class FetchFailed(Exception):
    """No more blocks of a fetch will arrive. The text gives the reason."""


class Distrusted(FetchFailed):
    """A peer sent forbidden data."""


class Peers(Protocol):
    def fetch(
        self, source: str, namespace: bytes, prefix: PrefixNames, num_known: int
    ) -> AsyncGenerator[memoryview, None]:
        """Yield a peer's records of a prefix, without its first `num_known` blocks.

        Raises:
            FetchFailed: `source` is no peer, or the call failed.
        """

    def note_late(self, source: str) -> None:
        """Note that a peer took longer than computing would have."""

    def distrust(self, source: str, reason: str) -> NoReturn:
        """Stop trusting a peer, and raise Distrusted."""


class BlockTransfers:
    """The exports and fetches of one engine after another."""

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
        # Free slots to write into, by pool.
        self._inbound: defaultdict[int, list[int]] = defaultdict(list)
        self._slots_came = asyncio.Event()
        # Namespace of the engine's block names; empty without an engine.
        self.namespace = b""

    def on_engine_ready(self, info: RunnerInfo, tell: Tell) -> None:
        """Begin with a new engine, which owns the memory's content. `tell` sends it messages."""
        self._arena, self._tell, self.namespace = (
            Arena(self._memory, info),
            tell,
            namespace_of(info),
        )

    def on_engine_death(self) -> None:
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

    async def export(self, prefix: PrefixNames, num_known: int) -> AsyncGenerator[memoryview, None]:
        """Yield the engine's records of a prefix, parents first. Each record is valid until the
        next.

        Raises:
            TooManyExports: too many other peers are being served.
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
        """Write arriving records into slots. `came` are the slots not yet reported to the
        engine.
        """
        num_bytes = 0
        found = self._peers.fetch(fetch.source, self.namespace, fetch.prefix, fetch.num_known)
        async with aclosing(found) as records:
            async for record in records:
                on_record()
                num_bytes += await self._put(fetch, arena, record, came)
                # The engine gives new slots only for reported ones.
                if num_bytes >= _ARRIVAL_BYTES or self._lacks_slots:
                    self._tell(Arrival(fetch.number, came.copy()))
                    came.clear()
                    num_bytes = 0

    async def _put(self, fetch: Fetch, arena: Arena, record: memoryview, came: list[Slot]) -> int:
        """Put a record into a slot; return the record's length."""
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
    """True if a block is part of the prefix; the next engine could not find another block."""
    if name.index >= len(prefix.digests):
        return False
    num_bytes = len(prefix.token_ids) // len(prefix.digests)
    start = name.index * num_bytes
    packed = memoryview(prefix.token_ids)[start : start + num_bytes].cast("I")
    parent = prefix.digests[name.index - 1] if name.index else prefix.root
    found = (name.digest, name.parent, name.token_ids)
    return found == (prefix.digests[name.index], parent, tuple(packed))
