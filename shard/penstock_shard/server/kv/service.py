"""The RPC by which other shards fetch KV blocks."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

import grpc

from penstock_proto.codec import kv
from penstock_shard.server.kv.transfers import BlockTransfers, TooManyExports


class KvTransferServicer:
    """Answers peers, after `KeyCheck` has checked their key."""

    def __init__(self, transfers: BlockTransfers) -> None:
        self._transfers = transfers

    async def fetch_blocks(self, request: Any, context: Any) -> AsyncGenerator[memoryview, None]:
        try:
            namespace, prefix = kv.fetch_request(request)
        except ValueError as error:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
        if namespace != self._transfers.namespace or not namespace:
            return
        try:
            # Close `records` as soon as the caller is gone: an open export keeps slots from being
            # reused.
            async with aclosing(self._transfers.export(prefix, request.num_known)) as records:
                async for record in records:
                    yield record
        except TooManyExports:
            text = "it serves other shards at the moment"
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, text)
