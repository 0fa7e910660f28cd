"""Tasks that last as long as their process: an unforeseen error does not end them."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

logger = logging.getLogger(__name__)

# Long enough that a recurring error does not fill the log.
_PAUSE_S = 1.0


async def run_lasting(
    work: Callable[[], Awaitable[None]], what: str, pause_s: float = _PAUSE_S
) -> None:
    """Run `work` until it returns. After a failure, log it under the name `what`, and run `work`
    again after a pause.
    """
    while True:
        try:
            return await work()
        except Exception:  # nobody awaits this task
            logger.exception("%s failed; trying again in %g s", what, pause_s)
        await asyncio.sleep(pause_s)
