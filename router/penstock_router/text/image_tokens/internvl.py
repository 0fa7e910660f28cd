"""InternVL: an image as square tiles, and as a whole if there are several."""

from __future__ import annotations

from dataclasses import dataclass

from penstock_router.text.image_tokens.base import ImageTokens
from penstock_router.text.image_tokens.settings import MAX_TOKENS, ModelFiles

# More than any checkpoint has. The bound exists because each image tries all grids.
_MAX_TILES = 256


@dataclass(frozen=True, slots=True)
class _Tiles:
    """Tiles of `tile_pixels`; `grids` are columns and rows of tiles, fewest tiles first."""

    token_id: int
    tokens_per_tile: int
    tile_pixels: int
    grids: tuple[tuple[int, int], ...]

    def token_ids(self, width: int, height: int) -> list[int]:
        columns, rows = self._grid(width, height)
        tiles = columns * rows
        return [self.token_id] * (self.tokens_per_tile * (tiles + 1 if tiles > 1 else 1))

    def _grid(self, width: int, height: int) -> tuple[int, int]:
        """Return the grid nearest to the image's proportions; of equally near grids, the largest
        that the image's own pixels fill by more than half.
        """
        ratio, best, best_difference = width / height, (1, 1), float("inf")
        for columns, rows in self.grids:
            difference = abs(ratio - columns / rows)
            filled = width * height > 0.5 * self.tile_pixels * columns * rows
            if difference < best_difference or (difference == best_difference and filled):
                best, best_difference = (columns, rows), difference
        return best


def read(files: ModelFiles) -> ImageTokens:
    token, token_id = files.image_token()
    begin, _ = files.special_token("start_image_token", "<img>")
    end, _ = files.special_token("end_image_token", "</img>")
    images = files.image_processor
    size = images.part("size")
    tiles = _Tiles(
        token_id,
        files.processor.integer("image_seq_length", 256, most=MAX_TOKENS),
        size.integer("height") * size.integer("width"),
        _grids(
            images.integer("min_patches", 1), images.integer("max_patches", 12, most=_MAX_TILES)
        ),
    )
    return ImageTokens(
        anchor=token,
        written=token,
        text=f"{begin}{token}{end}",
        token_id=token_id,
        reserved=files.tokens(token, begin, end, "<video>"),
        token_ids=tiles.token_ids,
    )


def _grids(min_tiles: int, max_tiles: int) -> tuple[tuple[int, int], ...]:
    grids = [
        (columns, rows)
        for columns in range(1, max_tiles + 1)
        for rows in range(1, max_tiles // columns + 1)
        if columns * rows >= min_tiles
    ]
    return tuple(sorted(grids, key=lambda grid: grid[0] * grid[1]))
