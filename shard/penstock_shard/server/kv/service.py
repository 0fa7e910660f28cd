"""The call by which other shards fetch KV blocks."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

import grpc

from penstock_shard.server import proto_codec
from penstock_shard.server.kv.transfers import BlockTransfers, TooManyExports


class KvTransferServicer:
    """Answers peers from what is here; who may call is checked before."""

    def __init__(self, transfers: BlockTransfers) -> None:
        self._transfers = transfers

    async def fetch_blocks(self, request: Any, context: Any) -> AsyncGenerator[memoryview, None]:
        """The records of the prefix that is asked for."""
        try:
            namespace, prefix = proto_codec.fetch_request(request)
        except ValueError as error:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
        if namespace != self._transfers.namespace or not namespace:
            return
        try:
            # Closed as soon as the caller is gone: what it keeps is needed.
            async with aclosing(self._transfers.export(prefix, request.num_known)) as records:
                async for record in records:
                    yield record
        except TooManyExports:
            text = "it serves other shards at the moment"
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, text)
