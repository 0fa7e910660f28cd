"""Finds each token's place in a prompt's text, to show tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from penstock_router.errors import BadRequest
from penstock_router.request import ChatRequest, CompletionRequest, Options
from penstock_router.text.image_tokens.expand import place_images
from penstock_router.text.prompts import TextModel, has_images, pieces_of, render
from penstock_router.text.tokenizer import TokenPlace


@dataclass(frozen=True, slots=True)
class Bounds:
    """Limits on the tokens shown for one prompt."""

    max_chars: int
    max_tokens: int


def chat_places(
    chat: ChatRequest, model: TextModel, bounds: Bounds
) -> tuple[str, list[TokenPlace]]:
    """Render a chat, and find the places of its tokens."""
    return _places(render(chat, model), chat, model, bounds)


def completion_places(
    request: CompletionRequest, model: TextModel, bounds: Bounds
) -> tuple[str, list[TokenPlace]]:
    """Return the text of the request's only prompt, including its images, and the places of its
    tokens.
    """
    [prompt] = request.prompts
    pieces = pieces_of(prompt, model) or (str(prompt),)
    return _places(pieces, request, model, bounds)


def _places(
    pieces: Sequence[str], request: Options, model: TextModel, bounds: Bounds
) -> tuple[str, list[TokenPlace]]:
    if (num_chars := sum(map(len, pieces))) > bounds.max_chars:
        text = f"the text has {num_chars} characters; at most {bounds.max_chars} are tokenized"
        raise BadRequest(text)
    if model.image_tokens is None or not has_images(pieces, request.image_sizes, model):
        [text] = pieces
        return text, model.tokenizer.places(
            text, add_special_tokens=request.add_special_tokens, at_most=bounds.max_tokens
        )
    return place_images(
        model.tokenizer,
        pieces,
        model.image_tokens,
        request.image_sizes,
        add_special_tokens=request.add_special_tokens,
        at_most=bounds.max_tokens,
    )
