"""A runner's images and their features."""

from __future__ import annotations

import hashlib
import time
from collections import OrderedDict
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Protocol

import torch
from torch import Tensor

from penstock_proto.types import PromptImage
from penstock_shard.device.background import lower_priority
from penstock_shard.device.gpu_memory import PeakMemory
from penstock_shard.errors import ImageUnusable
from penstock_shard.images.features import ImageFeatures

# The most images whose facts are remembered. Their features may be dropped earlier.
_MOST_FACTS = 100_000
# Sizes of test images. Processors enlarge the first, and shrink the second in one direction.
_FIXED_SIZES = ((67, 45), (40, 310))
# The side of the largest test image, in pixels. Processors shrink larger images below this.
_LARGEST = 4096
# A request's salt and the pixels' digest. The salt is None if only facts are wanted.
_Key = tuple[str | None, bytes]
# An image's number of rows, and its grid.
_Facts = tuple[int, tuple[int, int]]


class Processor(Protocol):
    """See `image_processor.ImageProcessor`."""

    def process(self, pixels: bytes, width: int, height: int) -> Mapping[str, Tensor]: ...


class Encoder(Protocol):
    """See `tower.Tower`."""

    def encode(self, inputs: Mapping[str, Tensor]) -> ImageFeatures: ...

    def grid(self, inputs: Mapping[str, Tensor]) -> tuple[int, int]: ...


class ImageEncoder:
    """Implements `penstock_shard.worker.base.ImageEncoder`. Encodes one image at a time, in a
    thread of lower priority than the one that runs steps.
    """

    def __init__(
        self,
        processor: Processor,
        encoder: Encoder,
        token_id: int,
        cache_bytes: int,
        axis_of_frequencies: tuple[int, ...] = (),
    ) -> None:
        self.token_id = token_id
        self.axis_of_frequencies = axis_of_frequencies
        self._processor = processor
        self._encoder = encoder
        self._cache_bytes = cache_bytes
        self._pixels: dict[bytes, bytes] = {}
        # The last used is at the end.
        self._features: OrderedDict[_Key, ImageFeatures] = OrderedDict()
        self._held_bytes = 0
        self._facts: OrderedDict[bytes, _Facts] = OrderedDict()
        self._pool = ThreadPoolExecutor(1, "image encoder", initializer=lower_priority)
        self._encoding: dict[_Key, Future[tuple[_Facts, ImageFeatures | None]]] = {}
        # Keys of `_encoding` that no request waits for. One of them may be running.
        self._unwanted: set[_Key] = set()
        self.num_encoded = 0
        self.encode_s = 0.0

    def counts(self) -> dict[str, float]:
        return {
            "images_encoded_total": self.num_encoded,
            "image_encode_seconds_total": self.encode_s,
        }

    def fingerprint(self) -> str:
        """A hash of fixed pixels' features: it depends on the weights, the processor's resizing and
        the machine. Empty if two tries differ. Raises what processor and encoder raise.
        """
        once, again = (self._pool.submit(self._features_of_fixed).result() for _ in range(2))
        return once if once == again else ""

    def peak_bytes(self, device: torch.device) -> int:
        """The most GPU memory that encoding an image takes; 0 on cpu. Raises what `fingerprint`
        raises.
        """
        if device.type == "cpu":
            return 0
        inputs = self._processor.process(bytes(3 * _LARGEST**2), _LARGEST, _LARGEST)
        peak = PeakMemory(device)
        self._pool.submit(self._encoder.encode, inputs).result()
        return peak.extra_bytes()

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

    def has(self, salt: str | None, image: PromptImage) -> bool:
        if salt is None:
            return not self.axis_of_frequencies or image.digest in self._facts
        return (salt, image.digest) in self._features

    def encode(self, salt: str | None, image: PromptImage) -> bool:
        self._drop_unwanted()
        if self.has(salt, image):
            return True
        if not self._begin(salt, image).done():
            return False
        self._take(salt, image)
        return True

    def cancel(self, salt: str | None, image: PromptImage) -> None:
        key = salt, image.digest
        if key in self._encoding:
            self._encoding[key].cancel()
            self._unwanted.add(key)
            self._drop_unwanted()

    def _drop_unwanted(self) -> None:
        """Drop results that no request waits for. A request that needs one asks again."""
        for key in [key for key in self._unwanted if self._encoding[key].done()]:
            self._unwanted.discard(key)
            del self._encoding[key]

    def features(self, salt: str, image: PromptImage) -> ImageFeatures:
        """The image's features; encodes them if they are not kept. Raises `ImageUnusable` if that
        fails.
        """
        if not self.has(salt, image):
            self._begin(salt, image)
            self._take(salt, image)
        key = salt, image.digest
        self._features.move_to_end(key)
        return self._features[key]

    def grid(self, salt: str, image: PromptImage) -> tuple[int, int]:
        """The features' numbers of rows and columns. Raises `ImageUnusable` if they cannot be
        found.
        """
        if image.digest not in self._facts:
            self._begin(None, image)
            self._take(None, image)
        return self._facts[image.digest][1]

    def _begin(
        self, salt: str | None, image: PromptImage
    ) -> Future[tuple[_Facts, ImageFeatures | None]]:
        key = salt, image.digest
        if key not in self._encoding:
            pixels = self._pixels.get(image.digest)
            if pixels is None:
                raise ImageUnusable("its pixels are not here any more")
            self._encoding[key] = self._pool.submit(self._encode, salt, image, pixels)
        self._unwanted.discard(key)
        return self._encoding[key]

    def _encode(
        self, salt: str | None, image: PromptImage, pixels: bytes
    ) -> tuple[_Facts, ImageFeatures | None]:
        """Encode an image; without a salt, only find its `_Facts`. Raises `ImageUnusable`, also for
        errors of processor and encoder.
        """
        began_s = time.monotonic()
        try:
            inputs = self._processor.process(pixels, image.width, image.height)
            if salt is None:
                grid = self._encoder.grid(inputs)
                return (grid[0] * grid[1], grid), None
            made = self._encoder.encode(inputs)
        except (ArithmeticError, IndexError, RuntimeError, TypeError, ValueError) as error:
            raise ImageUnusable(f"the encoder cannot take it: {type(error).__name__}") from error
        finally:
            self.encode_s += time.monotonic() - began_s
        self.num_encoded += 1
        return (len(made.rows), made.grid), made

    def _take(self, salt: str | None, image: PromptImage) -> None:
        """Wait for a result and keep it. Raises `ImageUnusable` if there is none."""
        key = salt, image.digest
        self._facts[image.digest], features = self._encoding.pop(key).result()
        if len(self._facts) > _MOST_FACTS:
            self._facts.popitem(last=False)
        if features is None:
            return
        self._features[key] = features
        self._held_bytes += features.nbytes
        while self._held_bytes > self._cache_bytes and len(self._features) > 1:
            _, dropped = self._features.popitem(last=False)
            self._held_bytes -= dropped.nbytes
