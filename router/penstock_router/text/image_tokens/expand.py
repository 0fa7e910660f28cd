"""Turns a prompt's text into ids, with each image's ids in the image's place."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from itertools import chain

from penstock_router.errors import BadRequest, ImageUnusable
from penstock_router.request import ImageSizes
from penstock_router.text.image_tokens.base import ImagePlace, ImageTokens
from penstock_router.text.tokenizer import (
    Tokenizer,
    TokenPlace,
    Truncation,
    check_num_shown,
    prompt_too_long,
)


def encode_with_images(
    tokenizer: Tokenizer,
    pieces: Sequence[str],
    images: ImageTokens,
    sizes: ImageSizes,
    *,
    add_special_tokens: bool,
    max_tokens: int,
    truncation: Truncation | None = None,
) -> tuple[list[int], tuple[ImagePlace, ...]]:
    """Tokenize a prompt's `pieces` separately. Return its ids, and the places of its images.

    Raises `BadRequest` unless there is one anchor per image, or if a cut would go through an image;
    `ContextExceeded` for more than `max_tokens`.
    """
    if len(pieces) > max_tokens:
        # Refuse many pieces early: each has at least one token, and takes much memory.
        raise prompt_too_long(len(pieces), max_tokens)
    _check_anchors(sum(piece.count(images.anchor) for piece in pieces), len(sizes))
    of_images, num_tokens = [], 0
    for width, height in sizes:
        of_images.append(images.token_ids(width, height))
        num_tokens += len(of_images[-1])
        if num_tokens > max_tokens:
            # Check before many large images become lists of ids.
            raise prompt_too_long(num_tokens, max_tokens)
    encoded = tokenizer.encode(
        [piece.replace(images.anchor, images.text) for piece in pieces],
        add_special_tokens=False,
        max_tokens=max_tokens if truncation is None else sys.maxsize,
    )
    before, after = tokenizer.special_around if add_special_tokens else ([], [])
    ids, places = _put(list(chain.from_iterable(encoded)), images.token_id, of_images)
    if truncation is not None:
        room = max(0, truncation.max_tokens - len(before) - len(after))
        ids, places = _cut(ids, places, Truncation(room, truncation.side))
    ids = [*before, *ids, *after]
    if truncation is not None:
        # The limit may be lower than the number of added special tokens.
        ids = truncation.cut(ids)
    if len(ids) > max_tokens:
        raise prompt_too_long(len(ids), max_tokens)
    moved = (ImagePlace(place.offset + len(before), place.num_tokens) for place in places)
    return ids, tuple(moved)


def place_images(
    tokenizer: Tokenizer,
    pieces: Sequence[str],
    images: ImageTokens,
    sizes: ImageSizes,
    *,
    add_special_tokens: bool,
    at_most: int,
) -> tuple[str, list[TokenPlace]]:
    """Return the prompt's text, and each token's place in it; all tokens of an image share a place.
    Raises like `encode_with_images`, and `BadRequest` for more than `at_most` tokens.
    """
    _check_anchors(sum(piece.count(images.anchor) for piece in pieces), len(sizes))
    of_images, places, text = [images.token_ids(*size) for size in sizes], list[TokenPlace](), ""
    for piece in pieces:
        shown = piece.replace(images.anchor, images.text)
        places += [
            (token_id, len(text) + start, len(text) + stop)
            for token_id, start, stop in tokenizer.places(
                shown, add_special_tokens=False, at_most=at_most
            )
        ]
        text += shown
    _check_tokens([token_id for token_id, _, _ in places], images.token_id, len(of_images))
    check_num_shown(len(places) + sum(map(len, of_images)), at_most)
    before, after = tokenizer.special_around if add_special_tokens else ([], [])
    unplaced = iter(of_images)
    return text, [
        *((token_id, 0, 0) for token_id in before),
        *(
            (each, start, stop)
            for token_id, start, stop in places
            for each in (next(unplaced) if token_id == images.token_id else (token_id,))
        ),
        *((token_id, 0, 0) for token_id in after),
    ]


def _check_anchors(num_anchors: int, num_images: int) -> None:
    if num_anchors < num_images:
        raise ImageUnusable(
            f"the chat template shows {num_anchors} of the {num_images} images; it may not take "
            "any in such messages",
            param="messages",
        )
    if num_anchors > num_images:
        raise BadRequest(
            f"the prompt has {num_anchors} places for images, and {num_images} were given",
            param="messages",
        )


def _check_tokens(ids: Sequence[int], token_id: int, num_images: int) -> None:
    if ids.count(token_id) != num_images:
        text = "the prompt's text becomes more tokens of images than it has images"
        raise BadRequest(text, param="messages")


def _put(
    ids: list[int], token_id: int, of_images: Sequence[Sequence[int]]
) -> tuple[list[int], list[ImagePlace]]:
    _check_tokens(ids, token_id, len(of_images))
    put: list[int] = []
    places, begin = [], 0
    for its_ids in of_images:
        place = ids.index(token_id, begin)
        put += ids[begin:place]
        places.append(ImagePlace(len(put), len(its_ids)))
        put += its_ids
        begin = place + 1
    return put + ids[begin:], places


def _cut(
    ids: list[int], places: Sequence[ImagePlace], truncation: Truncation
) -> tuple[list[int], list[ImagePlace]]:
    kept = truncation.cut(ids)
    gone = len(ids) - len(kept) if truncation.side == "left" else 0
    moved = [ImagePlace(place.offset - gone, place.num_tokens) for place in places]
    if any(place.offset < 0 or place.offset + place.num_tokens > len(kept) for place in moved):
        raise BadRequest(
            f"truncate_prompt_tokens: keeping {truncation.max_tokens} of the prompt's {len(ids)} "
            "tokens would cut off an image, or a part of one",
            param="truncate_prompt_tokens",
        )
    return kept, moved
