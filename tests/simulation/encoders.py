"""Image encoders of simulated devices: how long one image takes, and what is left to steps."""

from __future__ import annotations

from dataclasses import dataclass

from penstock_common.clock import Clock
from penstock_proto.types import PromptImage
from penstock_shard.errors import ImageUnusable

# In a prompt, for each token that stands for a part of an image.
IMAGE_ID = 14
# The salt of a request, and the digest of an image.
_Key = tuple[str, bytes]


@dataclass(frozen=True)
class Encoding:
    """The speed at which a device encodes images. While a step runs too, the encoder has `share` of
    the device and the step has the rest; with None both run as fast as alone.
    """

    share: float | None = 0.5
    # Qwen2.5-VL-7B on an H100 takes 167 ms for an image of 2,691 tokens. There, attention within
    # the whole image is 15 % of the multiplications and grows with the square of the tokens.
    token_s: float = 0.85 * 0.167 / 2691
    pair_s: float = 0.15 * 0.167 / 2691**2

    def seconds(self, num_tokens: int) -> float:
        """Return the seconds that an image takes with the whole device."""
        return num_tokens * self.token_s + num_tokens**2 * self.pair_s


class SimulatedEncoder:
    """An `ImageEncoder` that takes its part of a device's time, one image after the other. What it
    makes are as many rows as the image has tokens.
    """

    token_id = IMAGE_ID

    def __init__(self, encoding: Encoding, clock: Clock) -> None:
        self.num_encoded = 0
        self.encode_s = 0.0
        self._encoding = encoding
        self._clock = clock
        self._digests: set[bytes] = set()
        self._num_rows: dict[bytes, int] = {}
        # Images in their order, and for how long each would still take all of the device.
        self._left_s: dict[_Key, float] = {}
        # Until when that is worked out, which is after steps that were launched; and when images
        # were, or will be, encoded.
        self._at_s = 0.0
        self._done_at_s: dict[_Key, float] = {}

    def counts(self) -> dict[str, float]:
        return {
            "images_encoded_total": self.num_encoded,
            "image_encode_seconds_total": self.encode_s,
        }

    def put(self, digest: bytes, pixels: bytes) -> None:
        self._digests.add(digest)

    def drop(self, digest: bytes) -> None:
        self._digests.discard(digest)

    def num_rows(self, digest: bytes) -> int | None:
        return self._num_rows.get(digest)

    def has(self, salt: str | None, image: PromptImage) -> bool:
        if salt is None:
            return True
        return self._done_at_s.get((salt, image.digest), float("inf")) <= self._clock()

    def encode(self, salt: str | None, image: PromptImage) -> bool:
        if salt is None:
            return True
        key = salt, image.digest
        self._work(self._clock(), 1.0)
        if key not in self._left_s and key not in self._done_at_s:
            if image.digest not in self._digests:
                raise ImageUnusable("its pixels are not here any more")
            self._left_s[key] = self._encoding.seconds(image.num_tokens)
        if self.has(salt, image):
            self._num_rows[image.digest] = image.num_tokens
            return True
        return False

    def cancel(self, salt: str | None, image: PromptImage) -> None:
        """Do nothing: the encoding goes on, as if it had begun."""

    def step_s(self, at_s: float, alone_s: float) -> float:
        """Return the seconds of a step that starts at `at_s`, not before the last one ended. Alone
        it would take `alone_s`.
        """
        self._work(at_s, 1.0)
        share = self._encoding.share
        if share is None:
            self._work(at_s + alone_s, 1.0)
            return alone_s
        beside_s = min(alone_s / (1 - share), sum(self._left_s.values()) / share)
        self._work(at_s + beside_s, share)
        step_s = alone_s + beside_s * share
        self._work(at_s + step_s, share)
        return step_s

    def _work(self, until_s: float, share: float) -> None:
        """Encode until a time with so much of the device."""
        while self._left_s and self._at_s < until_s:
            key, left_s = next(iter(self._left_s.items()))
            ends_s = self._at_s + left_s / share
            if ends_s > until_s:
                self._left_s[key] -= (until_s - self._at_s) * share
                break
            del self._left_s[key]
            self._at_s = self._done_at_s[key] = ends_s
            self.num_encoded += 1
            self.encode_s += left_s / share
        self._at_s = max(self._at_s, until_s)
