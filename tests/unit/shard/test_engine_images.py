"""Images that the server has the engine keep, and images that it has the engine drop."""

from __future__ import annotations

import pytest

from penstock_common.image_digest import image_digest
from penstock_shard.ipc.messages import ImageDrop, ImagePiece
from penstock_shard.server import images
from penstock_shard.server.images import EngineImages


def _put(kept: EngineImages, colour: int) -> bytes:
    """Put an image of one pixel. Returns its digest."""
    pixels = bytes([colour, 0, 0])
    digest = image_digest(1, 1, pixels)
    incoming = kept.begin(digest, 1, 1)
    incoming.add(pixels)
    incoming.check()
    kept.end(incoming, is_whole=True)
    return digest


def test_images_are_bounded_in_number_however_small_they_are(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(images, "_MOST_IMAGES", 3)
    told: list[ImagePiece | ImageDrop] = []
    kept = EngineImages(2**20, told.append)
    digests = [_put(kept, colour) for colour in range(5)]
    assert [digest in kept for digest in digests] == [False, False, True, True, True]
    drops = [message.digest for message in told if isinstance(message, ImageDrop)]
    assert drops == digests[:2]
    assert kept.num_bytes == 9
