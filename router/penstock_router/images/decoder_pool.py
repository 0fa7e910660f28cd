"""Processes that start with the first image, and decode one image at a time each.

An image that ends its process, or takes too long, is refused; the next one gets a new process.
"""

from __future__ import annotations

import asyncio
import logging
import signal
from dataclasses import dataclass
from mmap import mmap

from penstock_common.child_process.framing import encode_frame
from penstock_common.image_digest import DIGEST_BYTES
from penstock_router.config import RouterConfig
from penstock_router.errors import TooManyRequests, Unavailable
from penstock_router.images.decoder_messages import MAX_DECODE_S, REPLIES, Refused
from penstock_router.images.image import ImageRefused, Pieces
from penstock_router.task_process import TaskProcess

logger = logging.getLogger(__name__)

_MODULE = "penstock_router.images.decoder_process"
# Wall-clock seconds: more than CPU seconds, because the machine may be busy.
_MAX_S = 3 * MAX_DECODE_S


@dataclass(frozen=True, slots=True)
class Pixels:
    """An image's rows, three bytes a pixel."""

    width: int
    height: int
    digest: bytes
    rows: mmap


class DecoderPool:
    """Processes that each decode one image at a time."""

    def __init__(self, config: RouterConfig) -> None:
        limits = config.max_image_pixels, config.max_image_bytes
        self._arguments = config.log_level, config.log_format, *map(str, limits)
        # The last one is taken first.
        self._free: list[TaskProcess] = []
        # Tasks may outlive their callers.
        self._work: set[asyncio.Task[Pixels]] = set()

    async def decode(self, encoded: Pieces) -> Pixels:
        """Decode an image. Raises `ImageRefused`, `TooManyRequests` if decoding takes too long, and
        `Unavailable` if no process starts. If cancelled, still waits for the image: that is faster
        than a new process.
        """
        work = asyncio.create_task(self._decode(encoded))
        self._work.add(work)
        work.add_done_callback(self._work.discard)
        try:
            return await asyncio.shield(work)
        except asyncio.CancelledError:
            await asyncio.wait([work])
            raise
        finally:
            # Break the reference cycle of frame, task and error.
            del work

    async def _decode(self, encoded: Pieces) -> Pixels:
        process = await self._take()
        try:
            async with asyncio.timeout(_MAX_S):
                pixels = await _ask(process, encoded)
        except TimeoutError:
            await process.kill()
            raise TooManyRequests("decoding takes too long at present; try again shortly") from None
        except (OSError, EOFError):
            status = await process.kill()
            logger.warning("image process %d ended with status %d", process.pid, status)
            raise ImageRefused(_why_it_ended(status)) from None
        except asyncio.CancelledError:
            await process.kill()
            raise
        self._free.append(process)
        if isinstance(pixels, Refused):
            raise ImageRefused(pixels.reason)
        return pixels

    async def _take(self) -> TaskProcess:
        while self._free:
            process = self._free.pop()
            if process.is_alive:
                return process
            await process.kill()
        try:
            process = TaskProcess(_MODULE, *self._arguments)
        except OSError as error:
            logger.error("no image process can be started: %s", error)
            raise Unavailable("no process to decode images can be started; try again") from None
        logger.info("image process %d started", process.pid)
        return process

    async def close(self) -> None:
        for work in self._work:
            work.cancel()
        await asyncio.gather(*self._work, return_exceptions=True)
        for process in self._free:
            await process.kill()


def _why_it_ended(status: int) -> str:
    if status == -signal.SIGXCPU:
        return f"decoding the image takes more than {MAX_DECODE_S:g} s"
    return "the image cannot be decoded: its decoder ended"


async def _ask(process: TaskProcess, encoded: Pieces) -> Pixels | Refused:
    await process.send(encode_frame(sum(map(len, encoded))), encoded)
    reply = REPLIES.decode(await process.receive_message())
    if isinstance(reply, Refused):
        return reply
    rows = await process.receive(reply.num_bytes)
    digest = bytes(await process.receive(DIGEST_BYTES))
    return Pixels(reply.width, reply.height, digest, rows)
