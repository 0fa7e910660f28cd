"""Idefics 3 and SmolVLM: an image as rows of named square tiles, and then as a whole."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from penstock_router.text.image_tokens.base import ImageTokens
from penstock_router.text.image_tokens.settings import MAX_TOKENS, ModelFiles

# Images are never larger than this.
_MAX_SIDE = 4096
_MAX_TILES_A_SIDE = 16
_AROUND = "<fake_token_around_image>"
_WHOLE = "<global-img>"


@dataclass(frozen=True, slots=True)
class _Tiles:
    """Tiles of `tile` x `tile` pixels; `runs` are the ids of the texts between tiles."""

    token_id: int
    tokens_per_tile: int
    # 0: images are not cut into tiles.
    tile: int
    longest: int
    runs: Mapping[str, list[int]] = field(repr=False)

    def token_ids(self, width: int, height: int) -> list[int]:
        """Return all ids between the outer marks: names of tiles, tiles, ends of rows."""
        rows, columns = self._grid(width, height)
        of_tile, ids = [self.token_id] * self.tokens_per_tile, []
        around = self.runs[_AROUND]
        for row in range(rows):
            for column in range(columns):
                ids += around if row or column else []
                ids += self.runs[_name(row, column)] + of_tile
            ids += self.runs["\n" if row < rows - 1 else "\n\n"]
        return ids + (around if rows else []) + self.runs[_WHOLE] + of_tile

    def _grid(self, width: int, height: int) -> tuple[int, int]:
        """Return rows and columns of tiles; 0 and 0 if only the whole image is shown."""
        height, width = _longest_to(height, width, self.longest)
        if not self.tile:
            return 0, 0
        ratio, tile = width / height, self.tile
        if width >= height:
            columns = math.ceil(width / tile)
            rows = math.ceil(int(columns * tile / ratio) / tile)
        else:
            rows = math.ceil(height / tile)
            columns = math.ceil(int(rows * tile * ratio) / tile)
        return (rows, columns) if max(rows, columns) > 1 else (0, 0)


def _name(row: int, column: int) -> str:
    return f"<row_{row + 1}_col_{column + 1}>"


def _longest_to(height: int, width: int, longest: int) -> tuple[int, int]:
    """Resize an image so that its longer side is `longest` and its shorter side is even."""
    ratio = width / height
    if width >= height:
        short = int(longest / ratio)
        return max(short + short % 2, 1), longest
    short = int(longest * ratio)
    return longest, max(short + short % 2, 1)


def read(files: ModelFiles) -> ImageTokens:
    token, token_id = files.image_token()
    for text in (_AROUND, _WHOLE):
        files.known(text, text)
    images = files.image_processor
    tile = images.part("max_image_size").integer("longest_edge")
    longest = images.part("size").integer("longest_edge", most=_MAX_SIDE - 1)
    most = -(-(longest + 1) // tile)
    if most > _MAX_TILES_A_SIDE:
        raise images.unusable("max_image_size", f"makes {most} tiles of an image's longer side")
    images.refuse("do_image_splitting", True, False)
    cut = images.get("do_image_splitting") is not False
    names = [_name(row, column) for row in range(most) for column in range(most)]
    tiles = _Tiles(
        token_id,
        files.processor.integer("image_seq_len", 169, most=MAX_TOKENS),
        tile if cut else 0,
        longest,
        {text: files.ids_between(token, text) for text in (*names, "\n", "\n\n", _AROUND, _WHOLE)},
    )
    return ImageTokens(
        anchor=token,
        written=token,
        text=f"{_AROUND}{token}{_AROUND}",
        token_id=token_id,
        reserved=files.tokens(token, _AROUND, _WHOLE, *names, "<video>"),
        token_ids=tiles.token_ids,
    )
