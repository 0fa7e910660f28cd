"""Gemma 4: an image keeps its proportions and becomes as many tokens as the limit allows."""

from __future__ import annotations

import math
from dataclasses import dataclass

from penstock_router.text.image_tokens.base import ImageTokens
from penstock_router.text.image_tokens.settings import ModelFiles

# The limits that the model was trained with.
_MOST = (70, 140, 280, 560, 1120)


@dataclass(frozen=True, slots=True)
class _Squares:
    """A token for each square of `side` pixels, at most `most` of them."""

    token_id: int
    side: int
    most: int

    def token_ids(self, width: int, height: int) -> list[int]:
        """Resize the image to fill at most `most` squares; return a token for each whole square."""
        scale = math.sqrt(self.most * self.side**2 / (height * width))
        rows = math.floor(scale * height / self.side)
        columns = math.floor(scale * width / self.side)
        if not rows:
            rows, columns = 1, min(width // height, self.most)
        elif not columns:
            rows, columns = min(height // width, self.most), 1
        return [self.token_id] * (rows * columns)


def read(files: ModelFiles) -> ImageTokens:
    token, token_id = files.image_token()
    begin, _ = files.token_of_id("boi_token_id")
    end, _ = files.token_of_id("eoi_token_id")
    images = files.image_processor
    images.refuse("max_soft_tokens", *_MOST)
    squares = _Squares(
        token_id,
        images.integer("patch_size", 16) * images.integer("pooling_kernel_size", 3),
        images.integer("max_soft_tokens", 280),
    )
    return ImageTokens(
        anchor=token,
        written=token,
        text=f"{begin}{token}{end}",
        token_id=token_id,
        reserved=files.tokens(token, begin, end, "<|video|>"),
        token_ids=squares.token_ids,
    )
