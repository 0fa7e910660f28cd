"""Tokens of texts and texts of tokens, without a shard: /tokenize, /detokenize and their like."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable
from typing import Any

from aiohttp import web

from penstock_router.apis.messages import TokenCount, parse_count
from penstock_router.apis.tgi_answers import ERRORS as TGI_ERRORS
from penstock_router.apis.tokens import (
    CHAT_TOKENIZE_FIELDS,
    DETOKENIZE_FIELDS,
    MAX_CHARS,
    TOKENIZE_FIELDS,
    ChatTokens,
    DetokenizeAnswer,
    PromptTokens,
    chat_to_tokenize,
    text_tokens,
)
from penstock_router.errors import BadRequest
from penstock_router.fields import INT32_MAX, JsonObject, read_fields
from penstock_router.job import chat_prompt, rendered
from penstock_router.models import ServedModel
from penstock_router.routes.base import (
    ERROR_FORM,
    ROUTER,
    json_response,
    read_object,
    using_model,
)
from penstock_router.tokenizer import INLINE_CHARS

# Each takes some 500 bytes while it is shown.
_MAX_PLACES = 1_000_000


async def tokenize(request: web.Request) -> web.Response:
    """POST /tokenize"""
    given = await read_object(request)
    if given.get("inputs") is not None:
        request[ERROR_FORM] = TGI_ERRORS
    values = read_fields(TOKENIZE_FIELDS, given)
    async with using_model(request, values.get("model", "")) as model:
        if "inputs" in values:
            text = values["inputs"]
            find = _places(model, text, values.get("add_special_tokens", True))
            return await _made(request, len(text), lambda: text_tokens(text, find()))
        return await _prompt_tokens(request, model, values)


def _places(
    model: ServedModel, text: str, add_special_tokens: bool
) -> Callable[[], list[tuple[int, int, int]]]:
    if len(text) > MAX_CHARS:
        raise BadRequest(f"the text has {len(text)} characters; at most {MAX_CHARS} are tokenized")
    return functools.partial(
        model.tokenizer.places, text, add_special_tokens=add_special_tokens, at_most=_MAX_PLACES
    )


async def _made(request: web.Request, size: int, make: Callable[[], object]) -> web.Response:
    """An answer, made in a thread where it is of many characters or tokens."""
    if size <= INLINE_CHARS:
        return json_response(make())
    executor = request.app[ROUTER].models.executor
    loop = asyncio.get_running_loop()
    return await loop.run_in_executor(executor, lambda: json_response(make()))


async def _prompt_tokens(
    request: web.Request, model: ServedModel, values: JsonObject
) -> web.Response:
    if "messages" in values:
        chat = chat_to_tokenize(values)
        prompt = await chat_prompt(chat, model, request.app[ROUTER].models, INT32_MAX)
        tokens = prompt.token_ids
    elif "prompt" in values:
        [tokens] = await model.tokenizer.encode(
            [values["prompt"]],
            add_special_tokens=values.get("add_special_tokens", True),
            max_tokens=INT32_MAX,
        )
    else:
        raise BadRequest("prompt: needed, or messages or inputs", param="prompt")

    def make() -> PromptTokens:
        texts = None
        if values.get("return_token_strs"):
            texts = [model.tokenizer.token_text(token_id) for token_id in tokens]
        return {
            "tokens": tokens,
            "count": len(tokens),
            "max_model_len": model.info.max_model_len,
            "token_strs": texts,
        }

    return await _made(request, len(tokens), make)


async def chat_tokenize(request: web.Request) -> web.Response:
    """POST /chat_tokenize"""
    values = read_fields(CHAT_TOKENIZE_FIELDS, await read_object(request))
    async with using_model(request, values.get("model", "")) as model:
        chat = chat_to_tokenize(values)
        text = await rendered(chat, model, request.app[ROUTER].models)
        find = _places(model, text, chat.add_special_tokens)

        def make() -> ChatTokens:
            return {"tokenize_response": text_tokens(text, find()), "templated_text": text}

        return await _made(request, len(text), make)


async def detokenize(request: web.Request) -> web.Response:
    """POST /detokenize"""
    values = read_fields(DETOKENIZE_FIELDS, await read_object(request))
    async with using_model(request, values.get("model", "")) as model:
        tokens = values["tokens"]
        largest = max(tokens, default=0)
        if largest >= model.info.vocab_size:
            raise BadRequest(f"Token id {largest} is out of vocabulary", param="tokens")
        decode = functools.partial(model.tokenizer.decode, tokens, skip_special_tokens=False)
        executor = request.app[ROUTER].models.executor
        text = await asyncio.get_running_loop().run_in_executor(executor, decode)
        answer: DetokenizeAnswer = {"prompt": text}
        return json_response(answer)


async def count_message_tokens(request: web.Request) -> web.Response:
    """POST /v1/messages/count_tokens"""
    chat = parse_count(await read_object(request))
    async with using_model(request, chat.model) as model:
        prompt = await chat_prompt(chat, model, request.app[ROUTER].models, INT32_MAX)
        answer: TokenCount = {"input_tokens": len(prompt.token_ids)}
        return json_response(answer)


async def tokenizer_info(request: web.Request) -> web.Response:
    """GET /tokenizer_info"""
    router = request.app[ROUTER]
    model = await router.models.get(request.query.get("model", ""))
    template = model.chat_template
    answer: dict[str, Any] = {**model.tokenizer.config}
    answer["chat_template"] = None if template is None else template.source
    answer.setdefault("tokenizer_class", "PreTrainedTokenizerFast")
    answer["vocab_size"] = model.info.vocab_size
    answer["model_max_length"] = model.info.max_model_len
    return json_response(answer)
