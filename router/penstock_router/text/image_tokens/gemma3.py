"""Gemma 3: an image becomes a square, and always the same number of tokens."""

from __future__ import annotations

from penstock_router.text.image_tokens.base import ImageTokens
from penstock_router.text.image_tokens.settings import MAX_TOKENS, ModelFiles


def read(files: ModelFiles) -> ImageTokens:
    token, token_id = files.image_token()
    begin, _ = files.special_token("boi_token", "<start_of_image>")
    end, _ = files.special_token("eoi_token", "<end_of_image>")
    # Pan and scan would add crops, and text that describes the crops.
    files.image_processor.refuse("do_pan_and_scan", False)
    ids = (token_id,) * files.processor.integer("image_seq_length", 256, most=MAX_TOKENS)
    return ImageTokens(
        anchor=begin,
        written=begin,
        text=f"\n\n{begin}{token}{end}\n\n",
        token_id=token_id,
        reserved=files.tokens(token, begin, end),
        token_ids=lambda width, height: ids,
    )
