"""Qwen2-VL to Qwen3.5: images of any proportions, enlarged or shrunk to whole patches."""

from __future__ import annotations

import math
from dataclasses import dataclass

from penstock_router.errors import ImageUnusable
from penstock_router.text.image_tokens.base import ImageTokens
from penstock_router.text.image_tokens.settings import ModelFiles, Settings

# Maximum of the longer side divided by the shorter.
_MAX_RATIO = 200
# The processor's default if the checkpoint's file has no size.
_DEFAULT_SIZE = Settings("size", {"shortest_edge": 56 * 56, "longest_edge": 28 * 28 * 1280})


@dataclass(frozen=True, slots=True)
class Grid:
    """A token for each square of `side` pixels. The image has `min_pixels` to `max_pixels`; each
    pixel counts `frames` times.
    """

    token_id: int
    side: int
    min_pixels: int
    max_pixels: int
    frames: int = 1

    def token_ids(self, width: int, height: int) -> list[int]:
        """Return a token for each square, rounded as the model's image processor does."""
        if max(width, height) / min(width, height) > _MAX_RATIO:
            raise ImageUnusable(
                f"an image of {width} x {height} pixels: its longer side may have at most "
                f"{_MAX_RATIO} times the pixels of the shorter one"
            )
        rows, columns = round(height / self.side), round(width / self.side)
        given_pixels = self.frames * height * width
        num_pixels = self.frames * rows * columns * self.side**2
        if num_pixels > self.max_pixels:
            shrunk = math.sqrt(given_pixels / self.max_pixels)
            rows = max(1, math.floor(height / shrunk / self.side))
            columns = max(1, math.floor(width / shrunk / self.side))
        elif num_pixels < self.min_pixels:
            enlarged = math.sqrt(self.min_pixels / given_pixels)
            rows = math.ceil(height * enlarged / self.side)
            columns = math.ceil(width * enlarged / self.side)
        return [self.token_id] * (rows * columns)


def read(files: ModelFiles) -> ImageTokens:
    token, token_id = files.image_token()
    images = files.image_processor
    size = images.part("size") if images.get("size") is not None else _DEFAULT_SIZE
    # If a file has both, the processor prefers the older `min_pixels` to `size`.
    fewest = images if images.get("min_pixels") is not None else size
    most = images if images.get("max_pixels") is not None else size
    grid = Grid(
        token_id,
        images.integer("patch_size", 14) * images.integer("merge_size", 2),
        fewest.integer("min_pixels" if fewest is images else "shortest_edge"),
        most.integer("max_pixels" if most is images else "longest_edge"),
    )
    begin, _ = files.known("vision_start_token", "<|vision_start|>")
    end, _ = files.known("vision_end_token", "<|vision_end|>")
    return ImageTokens(
        anchor=token,
        written=f"{begin}{token}{end}",
        text=token,
        token_id=token_id,
        reserved=files.tokens(token, begin, end, "<|vision_pad|>", "<|video_pad|>"),
        token_ids=grid.token_ids,
    )
