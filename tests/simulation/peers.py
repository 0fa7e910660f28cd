"""Peers without gRPC: a shard fetches KV blocks of another one, on a wire that may do anything."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import AsyncGenerator, Callable
from typing import NoReturn

from penstock_proto.types import PrefixNames
from penstock_shard.server.kv.transfers import (
    BlockTransfers,
    Distrusted,
    FetchFailed,
    TooManyExports,
)
from simulation.network import LATENCY_S

# Records since the process began: carried, and damaged.
SEEN = Counter[str]()
# Of a thousand records, how many are damaged, cut short, the last, very late, or of other tokens.
_DAMAGED = 10


class SimulatedPeers:
    """The peers of a shard: all shards, each of which is asked again whatever it sent."""

    def __init__(
        self, find: Callable[[str], BlockTransfers | None], random_: random.Random
    ) -> None:
        """`find` gives the transfers of the shard at an address, if there is one."""
        self._find = find
        self._random = random_

    async def fetch(
        self, source: str, namespace: bytes, prefix: PrefixNames, num_known: int
    ) -> AsyncGenerator[memoryview, None]:
        transfers = self._find(source)
        if transfers is None or namespace != transfers.namespace:
            raise FetchFailed("nobody is there")
        if self._random.randrange(1000) < _DAMAGED:
            prefix = _other_tokens(prefix)
        try:
            async for record in transfers.export(prefix, num_known):
                await asyncio.sleep(LATENCY_S)
                if self._find(source) is not transfers:
                    raise FetchFailed("it is gone")
                yield await self._carried(record)
        except TooManyExports:
            raise FetchFailed("it serves others") from None

    async def _carried(self, record: memoryview) -> memoryview:
        """Return a record as it arrives: whole, damaged, short or late. Raises if it is lost."""
        luck = self._random.randrange(1000)
        copy = bytearray(record)
        SEEN["carried"] += 1
        if luck < _DAMAGED:
            copy[self._random.randrange(len(copy))] ^= 1 << self._random.randrange(8)
        elif luck < 2 * _DAMAGED:
            del copy[self._random.randrange(len(copy)) :]
        elif luck < 3 * _DAMAGED:
            raise FetchFailed("the connection was cut")
        elif luck < 4 * _DAMAGED:
            await asyncio.sleep(self._random.uniform(0, 20))
        return memoryview(copy)

    def note_late(self, source: str) -> None:
        return

    def distrust(self, source: str, reason: str) -> NoReturn:
        SEEN["damaged"] += 1
        raise Distrusted(reason)


def _other_tokens(prefix: PrefixNames) -> PrefixNames:
    """Another prefix of as many blocks, with the same names."""
    return PrefixNames(prefix.root, prefix.digests, prefix.token_ids[4:] + prefix.token_ids[:4])
