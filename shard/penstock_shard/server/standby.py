"""A spare engine process that has imported everything, for when the engine ends (--standby)."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable

from penstock_shard.ipc.child_process import ChildProcess

logger = logging.getLogger(__name__)

StartProcess = Callable[[], Awaitable[ChildProcess]]


class Standby:
    """Gives engine processes: the spare if there is one, else one that is started then."""

    def __init__(self, start: StartProcess, start_spare: StartProcess) -> None:
        self._start = start
        self._start_spare = start_spare
        self._spare: ChildProcess | None = None

    async def take(self) -> ChildProcess:
        """Raises OSError if the system refuses a process."""
        spare, self._spare = self._spare, None
        if spare is None:
            return await self._start()
        if not spare.reader.at_eof():
            logger.info("the spare engine process takes over")
            return spare
        logger.warning("the spare engine process has ended; another is started")
        await _end(spare)
        return await self._start()

    async def prepare(self) -> None:
        """Have a spare. Without memory or descriptors for one there is none, which is logged."""
        if self._spare is not None:
            return
        try:
            self._spare = await self._start_spare()
        except OSError as error:
            logger.warning("no spare engine process: %s", error)

    async def close(self) -> None:
        spare, self._spare = self._spare, None
        if spare is not None:
            await _end(spare)


async def _end(process: ChildProcess) -> None:
    # It waits for its first message, or imports, and has nothing to finish.
    process.writer.close()
    process.kill()
    await process.wait()
