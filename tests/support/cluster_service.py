"""A service of a cluster on this machine: which of several addresses each connection gets to."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from support.chaos import Proxy, Streams


class ClusterService(Proxy):
    """Passes each connection on to one of these ports, as kube-proxy does: by turns, or with the
    affinity ClientIP to where its client was before. One that takes no connection is left out, as
    a pod is that is not ready.
    """

    def __init__(self, ports: Sequence[int], *, by_client: bool) -> None:
        super().__init__(f"127.0.0.1:{ports[0]}")
        self._ports, self._by_client = ports, by_client
        self._turns = itertools.count()
        # The port that each client got to.
        self.known: dict[str, int] = {}

    @property
    def url(self) -> str:
        return f"http://{self.address}"

    async def _connect(self, client: asyncio.StreamWriter) -> Streams:
        address: str = client.get_extra_info("peername")[0]
        first = next(self._turns) % len(self._ports)
        ports = [*self._ports[first:], *self._ports[:first]]
        if self._by_client and address in self.known:
            ports.insert(0, self.known[address])
        for port in ports:
            with contextlib.suppress(OSError):
                streams = await asyncio.open_connection("127.0.0.1", port)
                self.known[address] = port
                return streams
        raise ConnectionRefusedError(f"nobody listens at {ports}")


@asynccontextmanager
async def cluster_service(
    ports: Sequence[int], *, by_client: bool
) -> AsyncIterator[ClusterService]:
    service = ClusterService(ports, by_client=by_client)
    await service.start()
    try:
        yield service
    finally:
        await service.close()
