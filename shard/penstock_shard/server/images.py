"""Tracks the images that the engine has. If memory is short, unused images are dropped."""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

from penstock_common.image_digest import DIGEST_BYTES, begin_digest
from penstock_proto.engine_request import EngineRequest
from penstock_proto.errors import Code
from penstock_proto.types import PromptImage, RequestOutput
from penstock_shard.ipc.messages import ImageDrop, ImagePiece
from penstock_shard.server.validation import Refusal

# Image processors refuse longer sides, or make a single row of patches.
MAX_SIDE_PIXELS = 65_535
_COLOURS = 3
# Hashing a chunk takes less than a millisecond.
MAX_CHUNK_BYTES = 2**20
# An image takes half a kilobyte besides its pixels, which may be only 3 bytes.
_MOST_IMAGES = 100_000


@dataclass(slots=True)
class _Kept:
    num_bytes: int
    # Width, height in pixels.
    size: tuple[int, int]
    # Live requests that name the image.
    num_users: int = 0


class EngineImages:
    def __init__(self, most_bytes: int, tell: Callable[[ImagePiece | ImageDrop], None]) -> None:
        self._most_bytes = most_bytes
        self._tell = tell
        self._numbers = itertools.count(1)
        # By digest; the most recently named is last.
        self._kept: OrderedDict[bytes, _Kept] = OrderedDict()
        # Bytes of kept and arriving images.
        self.num_bytes = 0
        self.num_engines = 0
        self.num_put = 0

    def begin_engine(self) -> None:
        """Forget all images: a new engine has none."""
        self.num_engines += 1
        self.num_bytes -= sum(kept.num_bytes for kept in self._kept.values())
        self._kept.clear()

    def __contains__(self, digest: bytes) -> bool:
        return digest in self._kept

    def begin(self, digest: bytes, width: int, height: int) -> IncomingImage:
        """Make room for an arriving image. Raises `Refusal` for lack of room, or for an impossible
        digest or size.
        """
        if len(digest) != DIGEST_BYTES:
            raise _refusal("digest", f"{len(digest)} bytes", f"{DIGEST_BYTES} bytes")
        for name, side in (("width", width), ("height", height)):
            if not 1 <= side <= MAX_SIDE_PIXELS:
                raise _refusal(name, side, f"1..{MAX_SIDE_PIXELS} pixels")
        num_bytes = _COLOURS * width * height
        if num_bytes > self._most_bytes:
            bound = f"at most {self._most_bytes} bytes (--image-cache-bytes)"
            raise _refusal("pixels", f"{num_bytes} bytes", bound)
        self._make_room(num_bytes)
        self.num_bytes += num_bytes
        return IncomingImage(self, next(self._numbers), digest, (width, height), num_bytes)

    def _make_room(self, num_bytes: int) -> None:
        while self._is_full(num_bytes):
            idle = (digest for digest, kept in self._kept.items() if not kept.num_users)
            digest = next(idle, None)
            if digest is None:
                raise Refusal(
                    Code.RESOURCE_EXHAUSTED,
                    f"images of requests that run take {self.num_bytes} bytes; "
                    f"--image-cache-bytes is {self._most_bytes}",
                    field="pixels",
                )
            self.num_bytes -= self._kept.pop(digest).num_bytes
            self._tell(ImageDrop(digest))

    def _is_full(self, num_bytes: int) -> bool:
        is_over = self.num_bytes + num_bytes > self._most_bytes
        return is_over or len(self._kept) >= _MOST_IMAGES

    def tell(self, piece: ImagePiece) -> None:
        self._tell(piece)

    def end(self, incoming: IncomingImage, *, is_whole: bool) -> None:
        """Keep an arrived image; drop it if it is incomplete or already known."""
        if is_whole and incoming.digest not in self._kept:
            self._tell(ImagePiece(incoming.number, incoming.num_bytes, b"", incoming.digest))
            self._kept[incoming.digest] = _Kept(incoming.num_bytes, incoming.size)
            self.num_put += 1
        else:
            self._tell(ImagePiece(incoming.number, 0, b""))
            self.num_bytes -= incoming.num_bytes

    def hold(
        self, request: EngineRequest, deliver: Callable[[RequestOutput], None]
    ) -> Callable[[RequestOutput], None]:
        """Keep a request's images until its last output is delivered. Raises `Refusal` if one is
        missing or has another size.
        """
        if not request.images:
            return deliver
        by_digest = {image.digest: image for image in request.images}
        digests = list(by_digest)
        num_bytes = sum(_COLOURS * image.width * image.height for image in by_digest.values())
        if num_bytes > self._most_bytes:
            # Sending the images again would not help, because they never fit together.
            bound = f"at most {self._most_bytes} bytes (--image-cache-bytes)"
            raise _refusal("images", f"{num_bytes} bytes of pixels", bound)
        for index, image in enumerate(request.images):
            self._check(index, image)
        held = [self._kept[digest] for digest in digests]
        for digest, kept in zip(digests, held, strict=True):
            kept.num_users += 1
            self._kept.move_to_end(digest)

        def deliver_and_let_go(output: RequestOutput) -> None:
            if output.is_last:
                for kept in held:
                    kept.num_users -= 1
            deliver(output)

        return deliver_and_let_go

    def _check(self, index: int, image: PromptImage) -> None:
        kept = self._kept.get(image.digest)
        if kept is None:
            raise Refusal(
                Code.NOT_FOUND,
                f"images[{index}]: its pixels are not here; put them first",
                field="pixels",
                value=image.digest.hex(),
            )
        # Requests share cached features, so the size must be right.
        if (image.width, image.height) != kept.size:
            width, height = kept.size
            given = f"{image.width}x{image.height}"
            raise _refusal(f"images[{index}]", given, f"{width}x{height}, as it was put")


class IncomingImage:
    def __init__(
        self,
        images: EngineImages,
        number: int,
        digest: bytes,
        size: tuple[int, int],
        num_bytes: int,
    ) -> None:
        self.number = number
        self.digest = digest
        self.size = size
        self.num_bytes = num_bytes
        self._images = images
        self._engine = images.num_engines
        self._hash = begin_digest(*size)
        self._num_come = 0

    def add(self, data: bytes) -> None:
        """Add pixels. Raises `Refusal` if they exceed the image's or a chunk's size."""
        if len(data) > MAX_CHUNK_BYTES:
            raise _refusal("pixels", f"a chunk of {len(data)} bytes", f"{MAX_CHUNK_BYTES} bytes")
        self._num_come += len(data)
        if self._num_come > self.num_bytes:
            raise _refusal("pixels", f"{self._num_come} bytes", f"{self.num_bytes} bytes")
        self._hash.update(data)
        self._images.tell(ImagePiece(self.number, self.num_bytes, data))

    def check(self) -> None:
        """Raise `Refusal` if the image differs from what was announced, or its engine has died."""
        if self._engine != self._images.num_engines:
            raise Refusal(Code.UNAVAILABLE, "the engine died while the image came")
        if self._num_come != self.num_bytes:
            raise _refusal("pixels", f"{self._num_come} bytes", f"{self.num_bytes} bytes")
        if self._hash.digest() != self.digest:
            raise _refusal("digest", self.digest.hex(), "that of the size and the pixels")


def _refusal(field: str, value: object, bound: str) -> Refusal:
    text = f"{field}: {value} is out of bounds; allowed: {bound}"
    return Refusal(Code.INVALID_ARGUMENT, text, field=field, value=value, bound=bound)
