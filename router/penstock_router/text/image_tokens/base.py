"""The interface of a family: what its prompts have in the place of an image."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Placeholder:
    """What stands for one image in a prompt.

    `text` replaces the anchor before tokenization. It has the family's `token` once, which then is
    replaced by `token_ids`.
    """

    text: str
    token_ids: Sequence[int]


class ImageTokens(Protocol):
    """Made of a model's files, which never change. Holds nothing of a request."""

    # What the family's chat templates write where an image stands.
    anchor: str
    # The text of the token that stands for images once the anchor was replaced.
    token: str
    # Its id: positions that have it get the rows that the image's encoder makes.
    token_id: int
    # All texts that mean something about images: in what users write they are plain text.
    reserved: frozenset[str]

    def place(self, width: int, height: int) -> Placeholder:
        """What stands for an image of so many pixels. Raises `BadRequest` if the family takes none
        of these proportions.
        """
        ...
