"""Images of strangers, decoded by the real process: valid ones as Pillow decodes them here, hostile
ones refused within bounds of time and memory; and nothing is left behind.
"""

from __future__ import annotations

import asyncio
import base64
import re
import time
import warnings
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from io import BytesIO
from pathlib import Path

import psutil
import pytest
import pytest_asyncio
from PIL import Image as PillowImage
from PIL import ImageOps
from support.hostile_images import REFUSED
from support.image_processes import image_processes
from support.odd_images import VALID

from penstock_common.image_digest import image_digest
from penstock_router.config import RouterConfig
from penstock_router.errors import BadRequest
from penstock_router.images.image import Image
from penstock_router.images.images import Images
from penstock_router.observe.metrics import Metrics
from penstock_router.thread_pool import Threads

pytestmark = pytest.mark.asyncio(loop_scope="module")

# Refusing takes milliseconds; decoding the largest allowed image a second or two.
MAX_S = 8.0
MAX_MEMORY_BYTES = 1_300_000_000


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def images() -> AsyncIterator[Images]:
    executor = ThreadPoolExecutor(2)
    made = Images(RouterConfig(shards="a:1"), Threads(executor, 100), Metrics())
    yield made
    await made.close()
    executor.shutdown()
    assert image_processes() == []
    assert asyncio.all_tasks() == {asyncio.current_task()}


async def load(images: Images, data: bytes) -> Image:
    url = "data:image/png;base64," + base64.b64encode(data).decode()
    return await images.load(url, param="messages[0].content[1].image_url", client="a")


@pytest.mark.parametrize("name", REFUSED)
async def test_what_cannot_or_may_not_be_decoded_is_refused_in_bounds(
    images: Images, name: str
) -> None:
    make, words = REFUSED[name]
    data = make()
    began_s = time.perf_counter()
    with pytest.raises(BadRequest, match=re.escape(words)) as refused:
        await load(images, data)
    assert time.perf_counter() - began_s < MAX_S
    assert refused.value.message.startswith("messages[0].content[1].image_url: ")
    assert refused.value.param == "messages[0].content[1].image_url"
    assert "\n" not in refused.value.message
    assert memory_peak_bytes() < MAX_MEMORY_BYTES


@pytest.mark.parametrize("name", VALID)
async def test_what_is_odd_but_valid_has_the_pixels_that_pillow_finds(
    images: Images, name: str
) -> None:
    data = VALID[name]()
    image = await load(images, data)
    rows = await images.pixels(image, client="a")
    expected = as_pillow_has_it(data)
    assert (image.width, image.height) == expected.size
    assert bytes(rows) == expected.tobytes()
    assert image.digest == image_digest(image.width, image.height, rows)


def as_pillow_has_it(data: bytes) -> PillowImage.Image:
    with warnings.catch_warnings(action="ignore"), PillowImage.open(BytesIO(data)) as image:
        try:
            whole = ImageOps.exif_transpose(image)
        except Exception:  # noqa: BLE001 - broken EXIF data
            whole = image.copy()
        if not whole.has_transparency_data:
            return whole.convert("RGB")
        layer = whole.convert("RGBA")
        white = PillowImage.new("RGBA", layer.size, "white")
        return PillowImage.composite(layer, white, layer).convert("RGB")


def memory_peak_bytes() -> int:
    [process] = image_processes() or [psutil.Process()]
    status = Path(f"/proc/{process.pid}/status").read_text()
    return int(re.findall(r"VmHWM:\s+(\d+) kB", status)[0]) * 1024
