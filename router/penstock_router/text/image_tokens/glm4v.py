"""GLM-4V: like Qwen-VL, but small images are enlarged first, and pixels count once per frame."""

from __future__ import annotations

from dataclasses import dataclass

from penstock_router.text.image_tokens.base import ImageTokens
from penstock_router.text.image_tokens.qwen_vl import Grid
from penstock_router.text.image_tokens.settings import ModelFiles

_VIDEOS = ("<|video|>", "<|begin_of_video|>", "<|end_of_video|>")


@dataclass(frozen=True, slots=True)
class _EnlargedFirst:
    grid: Grid

    def token_ids(self, width: int, height: int) -> list[int]:
        if min(width, height) < (side := self.grid.side):
            scale = max(side / height, side / width)
            width, height = int(width * scale), int(height * scale)
        return self.grid.token_ids(width, height)


def read(files: ModelFiles) -> ImageTokens:
    token, token_id = files.image_token()
    images, size = files.image_processor, files.image_processor.part("size")
    grid = Grid(
        token_id,
        images.integer("patch_size", 14) * images.integer("merge_size", 2),
        size.integer("shortest_edge"),
        size.integer("longest_edge"),
        frames=images.integer("temporal_patch_size", 2),
    )
    begin, _ = files.known("image_start_token", "<|begin_of_image|>")
    end, _ = files.known("image_end_token", "<|end_of_image|>")
    return ImageTokens(
        anchor=token,
        written=f"{begin}{token}{end}",
        text=token,
        token_id=token_id,
        reserved=files.tokens(token, begin, end, *_VIDEOS),
        token_ids=_EnlargedFirst(grid).token_ids,
    )
