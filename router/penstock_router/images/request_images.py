"""The images of one request: loaded together, and given to shards that lack their pixels."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from penstock_proto.types import PromptImage
from penstock_router.errors import ImageUnusable
from penstock_router.images.image import NO_IMAGES, LoadedImages
from penstock_router.images.images import Images
from penstock_router.request import ImageSource


async def load_images(
    images: Images, sources: Sequence[ImageSource], client: str, max_images: int
) -> LoadedImages:
    """Load all images. Raises the first error of `load`, and `ImageUnusable` if there are too many
    images.
    """
    if not sources:
        return NO_IMAGES
    if len(sources) > max_images:
        raise ImageUnusable(
            f"{sources[max_images].param}: a request may have {max_images} images (--max-images); "
            f"given: {len(sources)}",
            param=sources[max_images].param,
        )
    loading = [
        asyncio.ensure_future(images.load(source.url, param=source.param, client=client))
        for source in sources
    ]
    try:
        loaded = await asyncio.gather(*loading)
    finally:
        for task in loading:
            task.cancel()
    by_digest = {image.digest.hex(): image for image in loaded}

    async def pixels(image: PromptImage) -> memoryview:
        return await images.pixels(by_digest[image.sha256], client=client)

    return LoadedImages(loaded, pixels)
