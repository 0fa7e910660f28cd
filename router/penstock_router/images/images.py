"""Makes an `Image` from a URL or base64 text, and pixels from an `Image`.

A repeated image is recognized by the hash of its encoded bytes, and not decoded again. Encoded
images and pixels are charged to the client that caused them, in a shared budget: each client may
hold at most as much as is still free. Images that are only cached are dropped if memory is needed.
"""

from __future__ import annotations

import asyncio
import functools
import hashlib
import time
import weakref
from collections.abc import Awaitable, Callable
from mmap import mmap

from aiohttp.abc import AbstractResolver

from penstock_router.admission.shared_budget import Holding, SharedBudget
from penstock_router.config import RouterConfig
from penstock_router.errors import ImageUnusable, TooManyRequests, Unavailable
from penstock_router.images.decoder_pool import DecoderPool, Pixels
from penstock_router.images.fetcher import Fetcher
from penstock_router.images.file_urls import read_file
from penstock_router.images.image import Image, ImageRefused, Pieces
from penstock_router.images.kept import Kept
from penstock_router.images.line import Line
from penstock_router.images.pieces import PIECE_BYTES, Incoming, add_base64, base64_start
from penstock_router.json_fields import shorten
from penstock_router.observe.metrics import Metrics
from penstock_router.thread_pool import Threads

# Maximum of bytes: for all encoded images and pixels, for cached images, for cached pixels.
_MEMORY_BYTES = 512 * 1024 * 1024
_KEPT_IMAGES_BYTES = 64 * 1024 * 1024
_KEPT_PIXELS_BYTES = 128 * 1024 * 1024
# The overhead of a cached image: a file may have only some dozens of bytes.
_BYTES_BESIDE = 1024
# The longest URL, except data: URLs.
_MAX_URL_CHARS = 8192
# Pixels are cached long enough to make and send a prompt.
_KEPT_PIXELS_S = 30.0


class Images:
    def __init__(
        self,
        config: RouterConfig,
        threads: Threads,
        metrics: Metrics,
        resolver: AbstractResolver | None = None,
    ) -> None:
        """Start no process before the first image. By default, the machine's `resolver` resolves
        host names.
        """
        self._config = config
        self._threads = threads
        self._metrics = metrics
        self._fetcher = Fetcher(config, resolver)
        self._decoders = DecoderPool(config)
        # Held while base64 text is decoded on the event loop.
        self._turn = asyncio.Lock()
        self._memory = SharedBudget(_MEMORY_BYTES, metrics.image_held_bytes)
        # Images by the SHA-256 of their encoded bytes.
        self._images = Kept[Image](_KEPT_IMAGES_BYTES)
        # Pixels by the image's digest.
        self._pixels = Kept[mmap](_KEPT_PIXELS_BYTES)
        # Images to decode, by SHA-256 of the encoded bytes or by digest.
        self._line = Line(config.image_processes, "decoded")
        self._is_closed = False

    async def load(self, url: str, *, param: str, client: str) -> Image:
        """Load the image that a data:, http:, https: or file: URL names.

        Raises `ImageUnusable`, which begins with `param`, `TooManyRequests` if the client's share
        of memory or of places in the line is used up, and `Unavailable`.
        """
        return await self._load(lambda incoming: self._read(url, incoming, client), param, client)

    async def load_base64(self, data: str, *, param: str, client: str) -> Image:
        """Load the image of a base64 text; raises as `load` does."""
        return await self._load(
            lambda incoming: add_base64(incoming, data, 0, self._turn), param, client
        )

    async def pixels(self, image: Image, *, client: str) -> memoryview:
        """Return the rows from top to bottom, each pixel as red, green, blue: bytes, read-only.

        Raises `TooManyRequests` as `load` does, and `Unavailable`.
        """
        rows = self._pixels.get(image.digest)
        if rows is None:
            again = functools.partial(self._decode_again, image)
            rows = await self._line.do(image.digest, again, client)
        return memoryview(rows).toreadonly()

    async def close(self) -> None:
        self._is_closed = True
        await asyncio.gather(self._line.close(), self._decoders.close())
        await self._fetcher.close()
        self._images.clear()
        self._pixels.clear()

    # ---- from a name to an image ----

    async def _load(
        self, read: Callable[[Incoming], Awaitable[None]], param: str, client: str
    ) -> Image:
        if self._is_closed:
            raise Unavailable("the router is shutting down")
        try:
            with self._memory.hold(client) as holding:
                grow = functools.partial(self._grow, holding)
                incoming = Incoming(self._config.max_image_bytes, grow)
                await read(incoming)
                image = await self._decoded(incoming.pieces(), client)
        except ImageRefused as error:
            self._metrics.images.labels("refused").inc()
            raise ImageUnusable(f"{param}: {error}", param=param) from None
        except TooManyRequests:
            self._metrics.refused.labels("images").inc()
            raise
        self._metrics.image_bytes.inc(image.num_encoded_bytes)
        return image

    async def _read(self, url: str, incoming: Incoming, client: str) -> None:
        scheme = url[:8].partition(":")[0].lower()
        if scheme == "data":
            return await add_base64(incoming, url, base64_start(url), self._turn)
        if scheme not in ("http", "https", "file"):
            raise ImageRefused(
                f"must begin with data:, https://, http:// or file:; given: {shorten(url)}"
            )
        if len(url) > _MAX_URL_CHARS:
            raise ImageRefused(f"may have {_MAX_URL_CHARS} characters; given: {len(url)}")
        if scheme == "file":
            return await self._read_file(url, incoming)
        return await self._fetcher.fetch(url, incoming, client)

    async def _read_file(self, url: str, incoming: Incoming) -> None:
        folder, max_bytes = self._config.allowed_media_folder, self._config.max_image_bytes
        work = functools.partial(read_file, url, folder, max_bytes)
        for piece in await self._threads.run(work):
            incoming.add(piece)

    async def _decoded(self, encoded: Pieces, client: str) -> Image:
        hash_it = functools.partial(_sha256, encoded)
        is_short = len(encoded) == 1 and len(encoded[0]) <= PIECE_BYTES
        name = hash_it() if is_short else await self._threads.run(hash_it)
        image = self._images.get(name)
        is_known = image is not None or self._line.has(name)
        if image is None:
            new = functools.partial(self._decode_new, name, encoded, time.perf_counter())
            image = await self._line.do(name, new, client)
        self._metrics.images.labels("known" if is_known else "decoded").inc()
        return image

    async def _decode_new(self, name: bytes, encoded: Pieces, came_s: float, client: str) -> Image:
        try:
            pixels = await self._decoders.decode(encoded)
        finally:
            self._metrics.image_decode_seconds.observe(time.perf_counter() - came_s)
        image = Image(pixels.digest, pixels.width, pixels.height, encoded)
        num_bytes = image.num_encoded_bytes + _BYTES_BESIDE
        self._charge(image, num_bytes, client)
        self._images.put(name, image, num_bytes)
        self._keep_pixels(pixels, client)
        return image

    # ---- pixels ----

    async def _decode_again(self, image: Image, client: str) -> mmap:
        try:
            with self._memory.hold(client) as holding:
                self._grow(holding, image.width * image.height * 3)
                pixels = await self._decoders.decode(image.encoded)
        except ImageRefused:
            raise Unavailable("an image could not be decoded again; try again") from None
        self._keep_pixels(pixels, client)
        return pixels.rows

    def _keep_pixels(self, pixels: Pixels, client: str) -> None:
        self._charge(pixels.rows, len(pixels.rows), client)
        self._pixels.put(pixels.digest, pixels.rows, len(pixels.rows))
        loop = asyncio.get_running_loop()
        loop.call_later(_KEPT_PIXELS_S, self._pixels.drop, pixels.digest)

    # ---- memory ----

    def _charge(self, held: Image | mmap, num_bytes: int, client: str) -> None:
        """Charge `held` to the client until its last reference is gone."""
        holding = self._memory.hold(client)
        holding.add(num_bytes)
        weakref.finalize(held, holding.close).atexit = False
        while self._memory.held > self._memory.total and self._make_room():
            pass

    def _grow(self, holding: Holding, num_bytes: int) -> None:
        """Charge `num_bytes` more, dropping cached images if needed; raises `TooManyRequests` if
        that does not free enough.
        """
        while True:
            try:
                return holding.grow(num_bytes, _no_room)
            except TooManyRequests:
                if not self._make_room():
                    raise

    def _make_room(self) -> bool:
        """Drop the oldest cached pixels or image; return false if the caches are empty."""
        return self._pixels.drop_oldest() or self._images.drop_oldest()


def _no_room(held: int, total: int) -> TooManyRequests:
    return TooManyRequests(
        f"the images of this client's requests hold {held} bytes, its share of {total}; try again "
        "shortly"
    )


def _sha256(pieces: Pieces) -> bytes:
    found = hashlib.sha256()
    for piece in pieces:
        found.update(piece)
    return found.digest()
