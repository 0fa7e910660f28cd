"""Tokens that a model's prompts have in the place of an image."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass


class ImagesUnusable(Exception):
    """A model's files do not say how many tokens an image takes; the text names file and value."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageTokens:
    """Made of a model's files, which never change. Holds nothing of a request."""

    # What the model's chat templates write where an image stands, and nowhere else.
    anchor: str
    # The anchor with what belongs around it: for texts that no template writes.
    written: str
    # What replaces it before tokenization: it has the token `token_id` once, among others or not.
    text: str
    # The token at whose positions the rows stand that the image's encoder makes.
    token_id: int
    # All texts that mean something about images or videos: in what users write they are plain text.
    reserved: frozenset[str]
    # What replaces that one token for an image of this width and height in pixels. Raises
    # `ImageUnusable` if the model takes none of these proportions.
    token_ids: Callable[[int, int], Sequence[int]]

    def is_spelled_in(self, text: str) -> bool:
        """Tell whether the text has anything reserved."""
        return any(reserved in text for reserved in self.reserved)


@dataclass(frozen=True, slots=True)
class ImagePlace:
    """The tokens of a prompt that an image's `ImageTokens.token_ids` are."""

    offset: int
    num_tokens: int
