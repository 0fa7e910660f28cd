"""The images that a runner has, and what its encoder makes of them."""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Protocol

from torch import Tensor

from penstock_shard.errors import ImageUnusable
from penstock_shard.images.features import ImageFeatures
from penstock_shard.images.sliced_run import SlicedRun
from penstock_shard.ipc.request import PlacedImage

# Of how many images it remembers what they were encoded to, if not that itself.
_MOST_FACTS = 100_000
_FOREVER_S = 1e9
# Pixels that are enlarged, and such as are shrunk in one direction.
_FIXED_SIZES = ((67, 45), (40, 310))
# The salt of requests, and the digest of the pixels.
_Key = tuple[str, bytes]


class Processor(Protocol):
    """See `image_processor.ImageProcessor`."""

    def process(self, pixels: bytes, width: int, height: int) -> Mapping[str, Tensor]: ...


class Encoder(Protocol):
    """See `tower.Tower`."""

    def encode(
        self, inputs: Mapping[str, Tensor], pause: Callable[[], None] = lambda: None
    ) -> ImageFeatures: ...


class ImageEncoder:
    """See `penstock_shard.worker.base.ImageEncoder`. One image is encoded at a time."""

    def __init__(
        self,
        processor: Processor,
        encoder: Encoder,
        token_id: int,
        cache_bytes: int,
        axis_of_frequencies: tuple[int, ...] = (),
    ) -> None:
        """Features of up to `cache_bytes` are kept once nobody uses them."""
        self.token_id = token_id
        self.axis_of_frequencies = axis_of_frequencies
        self._processor = processor
        self._encoder = encoder
        self._cache_bytes = cache_bytes
        self._pixels: dict[bytes, bytes] = {}
        # By salt and digest, the one that was used last at the end.
        self._features: OrderedDict[_Key, ImageFeatures] = OrderedDict()
        self._held_bytes = 0
        # Of images that were encoded once: the number of rows, and the grid.
        self._facts: OrderedDict[bytes, tuple[int, tuple[int, int]]] = OrderedDict()
        # Resizing takes no time of the engine's thread.
        self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="image processor")
        self._processing: dict[bytes, Future[Mapping[str, Tensor]]] = {}
        self._run: tuple[_Key, SlicedRun[ImageFeatures]] | None = None
        # Of images that were tried for nobody who asks again: at most one.
        self._failed: dict[_Key, ImageUnusable] = {}

    def fingerprint(self) -> str:
        """A hash of what comes of fixed pixels, which depends on the weights, the processor's
        resizing and the machine; empty if it is not the same twice. Raises `ImageUnusable`.
        """
        once, again = (self._features_of_fixed() for _ in range(2))
        return once if once == again else ""

    def _features_of_fixed(self) -> str:
        total = hashlib.blake2b(digest_size=16)
        for width, height in _FIXED_SIZES:
            pixels = hashlib.shake_128(b"pixels").digest(3 * width * height)
            made = self._encoder.encode(self._processor.process(pixels, width, height))
            for each in (made.rows, *made.deep):
                total.update(each.float().cpu().numpy().tobytes())
        return total.hexdigest()

    def put(self, digest: bytes, pixels: bytes) -> None:
        self._pixels[digest] = pixels

    def drop(self, digest: bytes) -> None:
        self._pixels.pop(digest, None)

    def num_rows(self, digest: bytes) -> int | None:
        known = self._facts.get(digest)
        return None if known is None else known[0]

    def has(self, salt: str, image: PlacedImage) -> bool:
        return (salt, image.digest) in self._features

    def encode(self, salt: str, image: PlacedImage, seconds: float) -> bool:
        key = salt, image.digest
        if self._run is None and not self.has(salt, image):
            inputs = self._inputs(image)
            if seconds < _FOREVER_S and not inputs.done():
                return False
            del self._processing[image.digest]
            self._failed.clear()
            self._run = key, SlicedRun(lambda pause: self._encoder.encode(inputs.result(), pause))
        if self._run is not None:
            self._advance(*self._run, seconds)
        if key in self._failed:
            raise self._failed.pop(key)
        return self.has(salt, image)

    def features(self, salt: str, image: PlacedImage) -> ImageFeatures:
        """What stands in the image's places; encoded now if that was not done, or is forgotten.
        Raises `ImageUnusable`.
        """
        while not self.encode(salt, image, _FOREVER_S):
            pass
        key = salt, image.digest
        self._features.move_to_end(key)
        return self._features[key]

    def grid(self, salt: str, image: PlacedImage) -> tuple[int, int]:
        """In how many rows and columns its features are arranged. Raises `ImageUnusable`."""
        if image.digest not in self._facts:
            self.features(salt, image)
        return self._facts[image.digest][1]

    def _inputs(self, image: PlacedImage) -> Future[Mapping[str, Tensor]]:
        if image.digest not in self._processing:
            self._processing[image.digest] = self._pool.submit(self._process, image)
        return self._processing[image.digest]

    def _advance(self, key: _Key, run: SlicedRun[ImageFeatures], seconds: float) -> None:
        if not run.advance(seconds):
            return
        self._run = None
        try:
            self._keep(key, _result(run))
        except ImageUnusable as error:
            self._failed[key] = error

    def _process(self, image: PlacedImage) -> Mapping[str, Tensor]:
        pixels = self._pixels.get(image.digest)
        if pixels is None:
            raise ImageUnusable("its pixels are not here any more")
        return self._processor.process(pixels, image.width, image.height)

    def _keep(self, key: _Key, features: ImageFeatures) -> None:
        self._facts[key[1]] = len(features.rows), features.grid
        if len(self._facts) > _MOST_FACTS:
            self._facts.popitem(last=False)
        self._features[key] = features
        self._held_bytes += features.nbytes
        while self._held_bytes > self._cache_bytes and len(self._features) > 1:
            _, dropped = self._features.popitem(last=False)
            self._held_bytes -= dropped.nbytes


def _result(run: SlicedRun[ImageFeatures]) -> ImageFeatures:
    """Whatever the code of a processor or an encoder stumbles over in an image is that image's
    fault alone.
    """
    try:
        return run.result()
    except ImageUnusable:
        raise
    except (ArithmeticError, IndexError, RuntimeError, TypeError, ValueError) as error:
        raise ImageUnusable(f"the encoder cannot take it: {type(error).__name__}") from error
