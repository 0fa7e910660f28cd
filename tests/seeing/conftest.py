"""Two shards with a tiny model that sees images. They take seconds to start: all files ask them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from support.budget import budget
from support.image_site import SITE_FAMILIES, SeeingShards, seeing_shards

SIDE = budget(450, 900)
IMAGE_BYTES = 3 * SIDE**2


@pytest.fixture(scope="package", params=SITE_FAMILIES)
def shards(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[SeeingShards]:
    """Two shards that see images. Each test leaves both serving, perhaps with other engines."""
    pytest.importorskip("torch")
    # Steps are small, so that a prompt takes several, but an image of Gemma takes one. The image
    # cache has room for one large image.
    flags = (
        *("--max-num-batched-tokens", "44" if request.param == "gemma3" else "32"),
        *("--max-num-seqs", "8", "--image-cache-bytes", str(IMAGE_BYTES)),
    )
    with seeing_shards(tmp_path_factory.mktemp("seeing"), request.param, 2, *flags) as made:
        yield made
