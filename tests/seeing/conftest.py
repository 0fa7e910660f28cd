"""Two shards with a tiny model that sees images. They take seconds to start: all files ask them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from support.budget import in_soak
from support.image_site import SeeingShards, seeing_shards

SIDE = 900
IMAGE_BYTES = 3 * SIDE**2
# Small steps, so that a prompt takes several; and room for one large image.
_FLAGS = (
    *("--max-num-batched-tokens", "32", "--max-num-seqs", "8"),
    *("--image-cache-bytes", str(IMAGE_BYTES)),
)


@pytest.fixture(
    scope="package",
    params=["qwen3_vl", *map(in_soak, ("internvl", "llava_next", "mistral3", "qwen2_5_vl"))],
)
def shards(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[SeeingShards]:
    """Each test leaves both serving, perhaps with other engines."""
    pytest.importorskip("torch")
    folder = tmp_path_factory.mktemp("seeing")
    with seeing_shards(folder, request.param, 2, *_FLAGS) as made:
        yield made
