"""An image of a request, and what it may not be."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from penstock_client.types import PixelSource
from penstock_router.request import ImageSizes

# Of any image: a side in pixels, and how many times the longer one is as long as the shorter one.
MAX_SIDE = 16_384
MAX_RATIO = 200

# Bytes in pieces, none of which takes long to hash, copy or send.
Pieces = Sequence[bytes]


@dataclass(frozen=True, slots=True, weakref_slot=True)
class Image:
    """One that was decoded. Whoever holds it holds memory of its client's share."""

    # Of its size and pixels: `penstock_common.image_digest`.
    digest: bytes
    # In pixels, after it was turned as its EXIF data says.
    width: int
    height: int
    # As it came.
    encoded: Pieces = field(repr=False)

    @property
    def num_encoded_bytes(self) -> int:
        return sum(map(len, self.encoded))


class ImageRefused(Exception):
    """Says in one line what is wrong with an image: all but the name of its field."""


@dataclass(frozen=True, slots=True)
class LoadedImages:
    """In the order of the request's sources; `pixels` gives what shards lack."""

    images: Sequence[Image] = ()
    pixels: PixelSource | None = None

    @property
    def sizes(self) -> ImageSizes:
        return tuple((image.width, image.height) for image in self.images)


NO_IMAGES = LoadedImages()
