"""LLaVA-NeXT: an image as a whole, and again in tiles on the canvas that suits it best."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from penstock_router.text.image_tokens.base import ImageTokens
from penstock_router.text.image_tokens.llava import crop_side, extra_of, patch_side
from penstock_router.text.image_tokens.settings import ModelFiles, Settings


@dataclass(frozen=True, slots=True)
class _Canvases:
    """Tiles of `tile` pixels and `patches` patches a side; `canvases` are pairs of height and
    width.
    """

    token_id: int
    tile: int
    patches: int
    # Tokens of the whole image besides its patches; may be negative.
    extra_tokens: int
    canvases: tuple[tuple[int, int], ...]

    def token_ids(self, width: int, height: int) -> list[int]:
        """Return ids of the whole image, and of the canvas without margins, plus one per row of
        patches.
        """
        canvas_height, canvas_width = _best_canvas(self.canvases, width, height)
        rows = self.patches * (canvas_height // self.tile)
        columns = self.patches * (canvas_width // self.tile)
        # The order of the multiplications decides the rounding.
        if width / height > columns / rows:
            rows -= (rows - int(round(height * (columns / width), 7))) // 2 * 2
        else:
            columns -= (columns - int(round(width * (rows / height), 7))) // 2 * 2
        whole = self.patches**2 + self.extra_tokens
        return [self.token_id] * (whole + rows * columns + rows)


def _best_canvas(canvases: Sequence[tuple[int, int]], width: int, height: int) -> tuple[int, int]:
    """Return the canvas that keeps most of the image's pixels; of equals, the smallest."""
    best, most, least_waste = canvases[0], 0, float("inf")
    for canvas_height, canvas_width in canvases:
        scale = min(canvas_width / width, canvas_height / height)
        shown = min(int(width * scale) * int(height * scale), width * height)
        waste = canvas_height * canvas_width - shown
        if shown > most or (shown == most and waste < least_waste):
            best, most, least_waste = (canvas_height, canvas_width), shown, waste
    return best


def read(files: ModelFiles) -> ImageTokens:
    token, token_id = files.image_token()
    tile = crop_side(files)
    canvases = _Canvases(
        token_id,
        tile,
        tile // patch_side(files),
        extra_of(files),
        _pinpoints(files.image_processor, tile),
    )
    return ImageTokens(
        anchor=token,
        written=token,
        text=token,
        token_id=token_id,
        reserved=files.tokens(token, "<video>"),
        token_ids=canvases.token_ids,
    )


def _pinpoints(images: Settings, tile: int) -> tuple[tuple[int, int], ...]:
    name = "image_grid_pinpoints"
    given, pairs = images.get(name), []
    for pair in given if isinstance(given, list) else ():
        match pair:
            case [int(height), int(width)] if height >= tile and width >= tile:
                pairs.append((height, width))
            case _:
                raise images.unusable(name, f"must be pairs of numbers of at least {tile}")
    if not pairs:
        raise images.unusable(name, "must be a list of pairs of numbers")
    return tuple(pairs)
