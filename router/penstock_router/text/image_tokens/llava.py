"""LLaVA: an image becomes a square, and always the same number of tokens."""

from __future__ import annotations

from penstock_router.text.image_tokens.base import ImageTokens
from penstock_router.text.image_tokens.settings import MAX_TOKENS, ModelFiles


def read(files: ModelFiles) -> ImageTokens:
    token, token_id = files.image_token()
    patches, extra_tokens = crop_side(files) // patch_side(files), extra_of(files)
    num_tokens = patches**2 + extra_tokens
    if not 1 <= num_tokens <= MAX_TOKENS:
        raise files.processor.unusable("patch_size", f"makes {num_tokens} tokens of an image")
    ids = (token_id,) * num_tokens
    return ImageTokens(
        anchor=token,
        written=token,
        text=token,
        token_id=token_id,
        reserved=files.tokens(token),
        token_ids=lambda width, height: ids,
    )


def crop_side(files: ModelFiles) -> int:
    """Return the side of the squares to which images are resized and cropped, in pixels."""
    images = files.image_processor
    size, crop = images.part("size"), images.part("crop_size")
    side = size.integer("shortest_edge" if size.get("shortest_edge") is not None else "height")
    size.refuse("width", side)
    images.refuse("do_center_crop", True)
    for name in ("height", "width"):
        if crop.integer(name) != side:
            raise crop.unusable(name, f"is not implemented beside a size of {side}")
    return side


def patch_side(files: ModelFiles) -> int:
    """Return the side of a patch (one token), in pixels."""
    return files.processor.integer("patch_size")


def extra_of(files: ModelFiles) -> int:
    """Count a square's tokens besides its patches; the count may be -1."""
    name = "vision_feature_select_strategy"
    files.processor.refuse(name, "default", "full")
    added = files.processor.integer("num_additional_image_tokens", 0, least=0)
    return added - 1 if files.processor.get(name) == "default" else added
