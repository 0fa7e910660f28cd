"""Pixtral and Mistral 3: an image keeps its proportions; a token ends each row of patches."""

from __future__ import annotations

import math
from dataclasses import dataclass

from penstock_router.errors import ImageUnusable
from penstock_router.text.image_tokens.base import ImageTokens
from penstock_router.text.image_tokens.settings import ModelFiles


@dataclass(frozen=True, slots=True)
class _Rows:
    """A token for each square of `side` pixels, in an image with sides of at most `longest`."""

    token_id: int
    row_end_id: int
    image_end_id: int
    side: int
    longest: int

    def token_ids(self, width: int, height: int) -> list[int]:
        """Return rows of equal length, each with an end token."""
        shrunk = max(height / self.longest, width / self.longest)
        shown_height, shown_width = height, width
        if shrunk > 1:
            shown_height, shown_width = math.floor(height / shrunk), math.floor(width / shrunk)
        rows, columns = math.ceil(shown_height / self.side), math.ceil(shown_width / self.side)
        if not rows or not columns:
            raise ImageUnusable(
                f"an image of {width} x {height} pixels: shrunk to sides of at most "
                f"{self.longest} pixels, one of them would have none"
            )
        ids = ([self.token_id] * columns + [self.row_end_id]) * rows
        ids[-1] = self.image_end_id
        return ids


def read(files: ModelFiles) -> ImageTokens:
    token, token_id = files.image_token()
    names = files.processor
    row_end = names.text("image_break_token", "[IMG_BREAK]")
    image_end = names.text("image_end_token", "[IMG_END]")
    rows = _Rows(
        token_id,
        files.known("image_break_token", row_end)[1],
        files.known("image_end_token", image_end)[1],
        names.integer("patch_size", 16) * names.integer("spatial_merge_size", 1),
        files.image_processor.part("size").integer("longest_edge"),
    )
    return ImageTokens(
        anchor=token,
        written=token,
        text=token,
        token_id=token_id,
        reserved=files.tokens(token, row_end, image_end),
        token_ids=rows.token_ids,
    )
