"""The shards from which KV blocks are fetched: their addresses, and which of them are paused."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncGenerator, Sequence
from typing import NoReturn

import grpc

from penstock_common.clock import Clock
from penstock_common.tls import Tls
from penstock_proto.codec import kv
from penstock_proto.transport import Connector
from penstock_proto.types import PrefixNames
from penstock_shard.server.kv.transfers import Distrusted, FetchFailed

logger = logging.getLogger(__name__)

# Pause after a peer sent damaged blocks.
_DISTRUST_S = 600.0
# Pause after a peer was late or unreachable.
_PAUSE_S = 5.0
# Names are resolved again after this time.
_LOOK_UP_S = 30.0


class KvPeers:
    """Calls only configured peers, even if a request names another address."""

    def __init__(
        self,
        addresses: Sequence[str],
        key: str,
        tls: Tls | None = None,
        clock: Clock = time.monotonic,
    ) -> None:
        """Raises `TlsFilesUnusable` if the TLS files cannot be used."""
        self._addresses = addresses
        self._key = key
        self._connector = Connector(tls)
        self._clock = clock
        self._channels: dict[str, grpc.aio.Channel] = {}
        # address -> time until which the peer is not asked.
        self._paused_until_s: dict[str, float] = {}
        # Addresses of the configured names.
        self._looked_up: frozenset[str] = frozenset()
        self._looked_up_at_s = -_LOOK_UP_S
        self._looking_up = asyncio.Lock()

    def look_at_certificates(self) -> None:
        """Reload changed TLS files even while nobody connects."""
        self._connector.credentials()

    async def fetch(
        self, source: str, namespace: bytes, prefix: PrefixNames, num_known: int
    ) -> AsyncGenerator[memoryview, None]:
        if not await self._is_peer(source):
            raise FetchFailed("it is not among --kv-peers")
        if self._paused_until_s.get(source, 0.0) > self._clock():
            raise FetchFailed("it failed a short while ago")
        if source not in self._channels:
            credentials = self._connector.credentials()
            self._channels[source] = self._connector.open_aio(source, credentials)
        call = kv.fetch_blocks(self._channels[source], self._key, namespace, prefix, num_known)
        try:
            async for record in call:
                yield record
        except grpc.aio.AioRpcError as error:
            if error.code() is not grpc.StatusCode.RESOURCE_EXHAUSTED:
                self._pause(source, _PAUSE_S)
            raise FetchFailed(f"{error.code().name}: {error.details()}") from None
        finally:
            call.cancel()

    def note_late(self, source: str) -> None:
        self._pause(source, _PAUSE_S)

    def distrust(self, source: str, reason: str) -> NoReturn:
        self._pause(source, _DISTRUST_S)
        logger.error(
            "KV blocks of %s: %s; none are fetched from there for %d s",
            *(source, reason, _DISTRUST_S),
        )
        raise Distrusted(reason)

    async def close(self) -> None:
        for channel in self._channels.values():
            await channel.close()

    def _pause(self, source: str, seconds: float) -> None:
        until_s = self._clock() + seconds
        self._paused_until_s[source] = max(until_s, self._paused_until_s.get(source, 0.0))

    async def _is_peer(self, address: str) -> bool:
        if address in self._addresses or address in self._looked_up:
            return True
        # Other callers wait here for the result.
        async with self._looking_up:
            if self._clock() - self._looked_up_at_s >= _LOOK_UP_S:
                found = await asyncio.gather(*map(_look_up, self._addresses))
                self._looked_up = frozenset().union(*found)
                self._looked_up_at_s = self._clock()
        return address in self._looked_up


async def _look_up(address: str) -> set[str]:
    """Return the addresses of a host name with a port; none if it does not resolve."""
    host, _, port = address.rpartition(":")
    # UnicodeError: not a possible host name.
    with contextlib.suppress(OSError, UnicodeError):
        infos = await asyncio.get_running_loop().getaddrinfo(host, int(port))
        return {
            f"[{info[4][0]}]:{port}" if ":" in str(info[4][0]) else f"{info[4][0]}:{port}"
            for info in infos
        }
    return set()
