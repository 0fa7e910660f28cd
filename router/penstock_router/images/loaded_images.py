"""The images of a request once they are loaded; what loads them is elsewhere."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from penstock_client.types import PixelSource
from penstock_router.images.image import Image
from penstock_router.request import ImageSizes


@dataclass(frozen=True, slots=True)
class LoadedImages:
    """In the order of the request's sources; `pixels` gives what shards lack."""

    images: Sequence[Image] = ()
    pixels: PixelSource | None = None

    @property
    def sizes(self) -> ImageSizes:
        return tuple((image.width, image.height) for image in self.images)


NO_IMAGES = LoadedImages()
