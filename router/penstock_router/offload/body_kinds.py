"""The kinds of bodies by name. Any process can parse a body or work on its text with these."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import msgspec

from penstock_router.apis import tokenize
from penstock_router.apis.base import AnyKind, BodyKind, SeveralKinds
from penstock_router.apis.embeddings import EMBEDDINGS
from penstock_router.apis.messages.requests import COUNT_TOKENS, MESSAGES_API
from penstock_router.apis.ollama import requests as ollama
from penstock_router.apis.openai.requests import CHATS, COMPLETIONS
from penstock_router.apis.responses.requests import RESPONSES
from penstock_router.apis.tgi.requests import COMPAT, GENERATE, GENERATE_STREAM
from penstock_router.errors import ApiError, BadRequest
from penstock_router.generation.event_ids import body_digest
from penstock_router.json_fields import JsonObject, decode_object
from penstock_router.request import ImageSizes
from penstock_router.text.prompts import PreparedPrompts, TextModel


def _meant(given: JsonObject) -> BodyKind:
    if given.get("inputs") is not None:
        return COMPAT
    if given.get("messages") is not None:
        return CHATS
    if given.get("prompt") is not None:
        return COMPLETIONS
    if given.get("input") is not None:
        return EMBEDDINGS
    raise BadRequest("the body must have messages, prompt, input or inputs")


INVOCATIONS = SeveralKinds("invocations", _meant)

KINDS: dict[str, AnyKind] = {
    kind.name: kind
    for kind in (
        *(COMPLETIONS, CHATS, MESSAGES_API, RESPONSES, GENERATE, GENERATE_STREAM, COMPAT),
        *(EMBEDDINGS, INVOCATIONS, COUNT_TOKENS),
        *(tokenize.TOKENIZE, tokenize.TOKENIZE_PROMPT, tokenize.TOKENIZE_INPUTS),
        *(tokenize.CHAT_TOKENIZE, tokenize.DETOKENIZE),
        *(ollama.CHAT, ollama.TEMPLATED, ollama.RAW, ollama.GENERATE),
        *(ollama.EMBED, ollama.EMBEDDINGS),
    )
}


@dataclass(frozen=True, slots=True)
class Reading:
    """A parsed body: its request, or the reason for a refusal."""

    kind: BodyKind
    asked: Any = None
    refusal: ApiError | None = None
    # The `body_digest`, if asked for.
    digest: bytes = b""


def read(kind: AnyKind, data: bytes, *, with_digest: bool) -> Reading:
    """Parse a body. Raises `BadRequest` if not even its kind is clear."""
    given = decode_object(data)
    if isinstance(kind, SeveralKinds):
        kind = kind.choose(given)
    try:
        asked = kind.parse(given)
        return Reading(kind, asked, digest=body_digest(given) if with_digest else b"")
    except ApiError as error:
        # A traceback would make a reference cycle, through the frame that holds the error.
        return Reading(kind, refusal=error.with_traceback(None))


def work(
    kind: BodyKind,
    asked: Any,
    model: TextModel,
    earlier: bytes,
    image_sizes: ImageSizes = (),
) -> PreparedPrompts | bytes:
    """Do the text work for a kind of body. `earlier` is JSON of messages that precede the request's
    own, or empty.

    Return prompts, or an answer as JSON. Raises `BadRequest`.
    """
    if image_sizes:
        asked = dataclasses.replace(asked, image_sizes=image_sizes)
    if earlier:
        asked = asked.after(msgspec.json.decode(earlier))
    made = kind.work(asked, model)
    return made if isinstance(made, PreparedPrompts) else msgspec.json.encode(made)
