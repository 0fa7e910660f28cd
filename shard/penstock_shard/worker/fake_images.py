"""Images for a runner without a model."""

from __future__ import annotations

from penstock_proto.types import PromptImage
from penstock_shard.errors import ImageUnusable


class FakeImages:
    """An `ImageEncoder` that only records which images it has. Encoding takes no time."""

    # No id stands for an image, so a prompt may have any tokens.
    token_id = -1

    def __init__(self) -> None:
        self._digests: set[bytes] = set()
        self.num_encoded = 0

    def counts(self) -> dict[str, float]:
        return {"images_encoded_total": self.num_encoded, "image_encode_seconds_total": 0.0}

    def put(self, digest: bytes, pixels: bytes) -> None:
        self._digests.add(digest)

    def drop(self, digest: bytes) -> None:
        self._digests.discard(digest)

    def num_rows(self, digest: bytes) -> int | None:
        return None

    def has(self, salt: str | None, image: PromptImage) -> bool:
        return salt is None

    def encode(self, salt: str | None, image: PromptImage) -> bool:
        if image.digest not in self._digests:
            raise ImageUnusable("its pixels are not here any more")
        self.num_encoded += 1
        return True

    def cancel(self, salt: str | None, image: PromptImage) -> None:
        """Do nothing: no encoding ever waits."""
