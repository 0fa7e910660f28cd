"""Kinds of bodies: how each is parsed, and which text work follows once its model is known.

Reading and making are plain functions, and the same ones wherever they run: `dispatch.py` says
where. Between the two the router finds the model, and what else a body refers to.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgspec

from penstock_router.apis import embeddings, tokenize
from penstock_router.apis.base import ERRORS, Api, ErrorForm
from penstock_router.apis.messages import requests as messages
from penstock_router.apis.openai import requests as openai
from penstock_router.apis.responses import requests as responses
from penstock_router.apis.responses.request_type import ResponsesRequest
from penstock_router.apis.tgi import answers as tgi_answers
from penstock_router.apis.tgi import requests as tgi
from penstock_router.apis.tokenize import TokensRequest
from penstock_router.errors import ApiError, BadRequest
from penstock_router.generation.event_ids import body_digest
from penstock_router.json_fields import INT32_MAX, JsonObject, decode_object
from penstock_router.request import ChatRequest
from penstock_router.text.prompts import (
    INLINE_IDS,
    PreparedPrompts,
    TextModel,
    chat_prompt,
    embedding_prompts,
    is_short,
    is_small,
    prepare_prompts,
    render,
)

# The most tokens shown with their places in a text: each takes some 500 bytes meanwhile.
MAX_PLACES = 1_000_000

_encode = msgspec.json.encode


@dataclass(frozen=True, slots=True, kw_only=True)
class BodyKind:
    """Bodies that are parsed and worked on in one way."""

    name: str
    # The type that `parse` returns: a dataclass with `model`, `brings_template`, `without_text`.
    request_type: type[Any]
    # Raises `BadRequest`.
    parse: Callable[[JsonObject], Any]
    # (request, model, JSON of earlier messages) -> prompts, or the JSON of the answer. Raises
    # `BadRequest`.
    work: Callable[[Any, TextModel, bytes], PreparedPrompts | bytes]
    # Whether `work` takes well under a millisecond.
    is_short: Callable[[Any], bool]
    errors: ErrorForm = ERRORS
    # The API, if the body asks for tokens.
    api: Api[Any] | None = None


@dataclass(frozen=True, slots=True)
class SeveralKinds:
    """Bodies whose fields tell their kind."""

    name: str
    # Raises `BadRequest`.
    choose: Callable[[JsonObject], BodyKind]


AnyKind = BodyKind | SeveralKinds


@dataclass(frozen=True, slots=True)
class Reading:
    """A parsed body: its request, or why it is refused."""

    kind: BodyKind
    asked: Any = None
    refusal: ApiError | None = None
    # `body_digest` of the body, if asked for.
    digest: bytes = b""


def read(kind: AnyKind, data: bytes | memoryview, *, with_digest: bool) -> Reading:
    """Read a body. Raises `BadRequest` where it does not even show of which kind it is."""
    given = decode_object(data)
    if isinstance(kind, SeveralKinds):
        kind = kind.choose(given)
    try:
        asked = kind.parse(given)
        return Reading(kind, asked, digest=body_digest(given) if with_digest else b"")
    except ApiError as error:
        # Without the traceback, which would be a reference cycle with what keeps the error.
        return Reading(kind, refusal=error.with_traceback(None))


# ---- What asks for tokens, or for vectors ------------------------------------------------------


def _generate(
    asked: tgi_answers.GenerateRequest, model: TextModel, earlier: bytes
) -> PreparedPrompts:
    prepared = prepare_prompts(asked, model)
    [inputs] = asked.prompts
    assert isinstance(inputs, str)
    return dataclasses.replace(prepared, full_text=inputs) if asked.full_text else prepared


def _respond(asked: ResponsesRequest, model: TextModel, earlier: bytes) -> PreparedPrompts:
    if earlier:
        asked = asked.after(msgspec.json.decode(earlier))
    return dataclasses.replace(
        prepare_prompts(asked, model),
        conversation=_encode(asked.items) if asked.store else b"",
        repeated={name: msgspec.Raw(_encode(value)) for name, value in asked.repeated.items()},
    )


def _of(
    api: Api[Any],
    work: Callable[..., PreparedPrompts] = lambda asked, model, earlier: prepare_prompts(
        asked, model
    ),
) -> BodyKind:
    return BodyKind(
        name=api.name,
        request_type=api.request_type,
        parse=api.parse,
        work=work,
        is_short=is_short,
        errors=api.errors,
        api=api,
    )


COMPLETIONS = _of(openai.COMPLETIONS)
CHATS = _of(openai.CHATS)
MESSAGES = _of(messages.MESSAGES_API)
RESPONSES = _of(responses.RESPONSES, _respond)
GENERATE = _of(tgi.GENERATE, _generate)
GENERATE_STREAM = _of(tgi.GENERATE_STREAM, _generate)
COMPAT = _of(tgi.COMPAT, _generate)
EMBEDDINGS = BodyKind(
    name="embeddings",
    request_type=embeddings.EmbedRequest,
    parse=embeddings.parse,
    work=lambda asked, model, earlier: embedding_prompts(asked, model),
    is_short=is_short,
)


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


# ---- What is answered with tokens or text ------------------------------------------------------


def _count(asked: ChatRequest, model: TextModel, earlier: bytes) -> bytes:
    prompt = chat_prompt(asked, model, INT32_MAX)
    answer: messages.TokenCount = {"input_tokens": len(prompt.token_ids)}
    return _encode(answer)


def _tokenize_prompt(asked: TokensRequest, model: TextModel, earlier: bytes) -> bytes:
    values = asked.values
    if "messages" in values:
        prompt = chat_prompt(tokenize.chat_to_tokenize(values), model, INT32_MAX)
        token_ids = list(prompt.token_ids)
    elif "prompt" in values:
        [token_ids] = model.tokenizer.encode(
            [values["prompt"]],
            add_special_tokens=values.get("add_special_tokens", True),
            max_tokens=INT32_MAX,
        )
    else:
        raise BadRequest("prompt: needed, or messages or inputs", param="prompt")
    texts = None
    if values.get("return_token_strs"):
        texts = [model.tokenizer.token_text(token_id) for token_id in token_ids]
    answer: tokenize.PromptTokens = {
        "tokens": token_ids,
        "count": len(token_ids),
        "max_model_len": model.max_model_len,
        "token_strs": texts,
    }
    return _encode(answer)


def _tokenize_inputs(asked: TokensRequest, model: TextModel, earlier: bytes) -> bytes:
    values = asked.values
    return _encode(_placed(values["inputs"], model, values.get("add_special_tokens", True)))


def _chat_tokenize(asked: TokensRequest, model: TextModel, earlier: bytes) -> bytes:
    chat = tokenize.chat_to_tokenize(asked.values)
    text = render(chat, model)
    answer: tokenize.ChatTokens = {
        "tokenize_response": _placed(text, model, chat.add_special_tokens),
        "templated_text": text,
    }
    return _encode(answer)


def _placed(text: str, model: TextModel, add_special_tokens: bool) -> list[tokenize.TextToken]:
    if len(text) > tokenize.MAX_CHARS:
        raise BadRequest(
            f"the text has {len(text)} characters; at most {tokenize.MAX_CHARS} are tokenized"
        )
    places = model.tokenizer.places(text, add_special_tokens=add_special_tokens, at_most=MAX_PLACES)
    return tokenize.text_tokens(text, places)


def _detokenize(asked: TokensRequest, model: TextModel, earlier: bytes) -> bytes:
    token_ids = asked.values["tokens"]
    largest = max(token_ids, default=0)
    if largest >= model.vocab_size:
        raise BadRequest(f"Token id {largest} is out of vocabulary", param="tokens")
    text = model.tokenizer.decode(token_ids, skip_special_tokens=False)
    answer: tokenize.DetokenizeAnswer = {"prompt": text}
    return _encode(answer)


def _has_little_text(asked: TokensRequest) -> bool:
    return is_small(asked.values)


def _has_few_ids(asked: TokensRequest) -> bool:
    return len(asked.values["tokens"]) <= INLINE_IDS


COUNT_TOKENS = BodyKind(
    name="count_tokens",
    request_type=ChatRequest,
    parse=messages.parse_count,
    work=_count,
    is_short=is_short,
    errors=messages.MESSAGES_API.errors,
)
_TOKENIZE_PROMPT = BodyKind(
    name="tokenize_prompt",
    request_type=TokensRequest,
    parse=tokenize.parse_with(tokenize.TOKENIZE_FIELDS),
    work=_tokenize_prompt,
    is_short=_has_little_text,
)
_TOKENIZE_INPUTS = dataclasses.replace(
    _TOKENIZE_PROMPT,
    name="tokenize_inputs",
    work=_tokenize_inputs,
    errors=tgi_answers.ERRORS,
)
TOKENIZE = SeveralKinds(
    "tokenize",
    lambda given: _TOKENIZE_PROMPT if given.get("inputs") is None else _TOKENIZE_INPUTS,
)
CHAT_TOKENIZE = BodyKind(
    name="chat_tokenize",
    request_type=TokensRequest,
    parse=tokenize.parse_with(tokenize.CHAT_TOKENIZE_FIELDS),
    work=_chat_tokenize,
    is_short=_has_little_text,
    errors=tgi_answers.ERRORS,
)
DETOKENIZE = BodyKind(
    name="detokenize",
    request_type=TokensRequest,
    parse=tokenize.parse_with(tokenize.DETOKENIZE_FIELDS),
    work=_detokenize,
    is_short=_has_few_ids,
)

KINDS: dict[str, AnyKind] = {
    kind.name: kind
    for kind in (
        *(COMPLETIONS, CHATS, MESSAGES, RESPONSES, GENERATE, GENERATE_STREAM, COMPAT),
        *(EMBEDDINGS, INVOCATIONS, COUNT_TOKENS, TOKENIZE, _TOKENIZE_PROMPT, _TOKENIZE_INPUTS),
        *(CHAT_TOKENIZE, DETOKENIZE),
    )
}
