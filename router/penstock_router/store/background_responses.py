"""Generates responses while no client waits for them, and stores their ends.

Cancellations are read from the store, because another worker may get the request to cancel.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import AsyncExitStack

from penstock_common.tasks import run_lasting
from penstock_router.store.response_store import ResponseStore, StoreUnavailable

logger = logging.getLogger(__name__)

_CANCEL_POLL_S = 0.25
# The pause before storing is tried again, for example after a full disk.
_STORE_RETRY_S = 1.0
# Seconds in which a stopping router may store the ends of the responses that it stops.
_CLOSE_TIMEOUT_S = 2.0

# Called with the response's end: None, a cancellation or an error. May raise `StoreUnavailable`.
Keep = Callable[[BaseException | None], Awaitable[None]]


class Background:
    def __init__(self, store: ResponseStore) -> None:
        self._store = store
        self._making: dict[str, asyncio.Task[None]] = {}
        self._keeping: set[asyncio.Task[None]] = set()
        self._watching: asyncio.Task[None] | None = None

    def start(
        self,
        response_id: str,
        make: Coroutine[None, None, None],
        scope: AsyncExitStack,
        keep: Keep,
    ) -> None:
        """Run `make` to its end, leave `scope`, and call `keep` until it succeeds."""
        making = self._making[response_id] = asyncio.create_task(make)
        keeping = asyncio.create_task(self._keep(making, scope, keep))
        self._keeping.add(keeping)
        keeping.add_done_callback(self._keeping.discard)
        making.add_done_callback(lambda _: self._making.pop(response_id))
        if self._watching is None or self._watching.done():
            self._watching = asyncio.create_task(
                run_lasting(self._watch, "watching for responses to cancel")
            )

    def cancel(self, response_id: str) -> None:
        """Cancel the response, if this worker generates it."""
        making = self._making.get(response_id)
        if making is not None:
            making.cancel()

    async def _keep(self, making: asyncio.Task[None], scope: AsyncExitStack, keep: Keep) -> None:
        # Leave the scope here, not in `making`: a task that is cancelled before its first step
        # never enters a scope.
        async with scope:
            try:
                await asyncio.wait((making,))
            finally:
                making.cancel()
        # The scope has given back the places, without waiting for the disk. Few ends wait here: no
        # response begins while the store fails.
        ended = asyncio.CancelledError() if making.cancelled() else making.exception()
        while True:
            try:
                return await keep(ended)
            except StoreUnavailable as error:
                logger.warning("%s", error)
                await asyncio.sleep(_STORE_RETRY_S)

    async def _watch(self) -> None:
        """While responses are generated here, cancel those for which any worker got a cancel
        request.
        """
        while self._making:
            await asyncio.sleep(_CANCEL_POLL_S)
            try:
                requested = await self._store.cancel_requested(list(self._making))
            except StoreUnavailable as error:
                logger.warning("%s", error)
                continue
            for response_id in requested:
                self.cancel(response_id)

    async def close(self) -> None:
        """Wait a while until the ends of all responses are stored. The store marks responses
        without an end as failed.
        """
        if self._keeping:
            await asyncio.wait(self._keeping, timeout=_CLOSE_TIMEOUT_S)
        tasks = [*self._keeping, *([self._watching] if self._watching else ())]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
