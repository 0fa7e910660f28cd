"""An image of a request, and the limits for all images."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from penstock_proto.types import PixelSource
from penstock_router.request import ImageSizes

# Limits of any image: a side in pixels, and the longer side divided by the shorter one.
MAX_SIDE = 16_384
MAX_RATIO = 200

# Bytes in pieces short enough to be hashed, copied or sent quickly.
Pieces = Sequence[bytes]


@dataclass(frozen=True, slots=True, weakref_slot=True)
class Image:
    """A decoded image. Its memory counts in its client's share until its last reference is gone."""

    # The hash of size and pixels, by `penstock_common.image_digest`.
    digest: bytes
    # In pixels, after rotation by EXIF data.
    width: int
    height: int
    # The bytes that the client sent.
    encoded: Pieces = field(repr=False)

    @property
    def num_encoded_bytes(self) -> int:
        return sum(map(len, self.encoded))


class ImageRefused(Exception):
    """An image is unusable; the reason is one line without the field's name."""


@dataclass(frozen=True, slots=True)
class LoadedImages:
    """Images in the order of the request's sources; `pixels` is for shards that lack them."""

    images: Sequence[Image] = ()
    pixels: PixelSource | None = None

    @property
    def sizes(self) -> ImageSizes:
        return tuple((image.width, image.height) for image in self.images)


NO_IMAGES = LoadedImages()
