"""Describes the tokens that stand for an image in a model's prompts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass


class ImagesUnusable(Exception):
    """Raised if a model's files do not determine an image's number of tokens; the text names file
    and value.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageTokens:
    """A model's tokens for images, read from its files."""

    # The text that chat templates write for an image, and for nothing else.
    anchor: str
    # The anchor with its marks, for text that no template writes.
    written: str
    # The text that replaces the anchor before tokenization; it has the token `token_id` once.
    text: str
    # The token that the image encoder's rows replace.
    token_id: int
    # Texts that mean images or videos; in users' messages they are plain text.
    reserved: frozenset[str]
    # Makes the ids that replace `token_id`, from width and height in pixels. Raises `ImageUnusable`
    # for unsuitable proportions.
    token_ids: Callable[[int, int], Sequence[int]]

    def is_spelled_in(self, text: str) -> bool:
        return any(reserved in text for reserved in self.reserved)


@dataclass(frozen=True, slots=True)
class ImagePlace:
    """The place of one image's ids in a prompt (`ImageTokens.token_ids`)."""

    offset: int
    num_tokens: int
