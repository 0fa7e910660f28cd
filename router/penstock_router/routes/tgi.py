"""What text-generation-inference's API has besides generating: /info and /chat_tokenize."""

from __future__ import annotations

from typing import TypedDict

from aiohttp import web

from penstock_router.apis import openai, tgi
from penstock_router.fields import read_fields
from penstock_router.job import rendered
from penstock_router.routes.base import ROUTER, VERSION, json_response, read_object, using_model
from penstock_router.routes.text import (
    CHAT_TO_TOKENIZE_FIELDS,
    TextToken,
    chat_to_tokenize,
    text_tokens,
)


class InfoAnswer(TypedDict):
    """What is served, and the bounds of requests. With several workers they are one worker's."""

    model_id: str
    model_sha: str | None
    model_pipeline_tag: str
    max_concurrent_requests: int
    max_best_of: int
    max_stop_sequences: int
    max_input_tokens: int
    max_total_tokens: int
    validation_workers: int
    max_client_batch_size: int
    router: str
    version: str
    sha: None
    docker_label: None


class ChatTokens(TypedDict):
    """A chat as the model's template renders it, and its tokens."""

    tokenize_response: list[TextToken]
    templated_text: str


async def show_info(request: web.Request) -> web.Response:
    """GET /info"""
    router = request.app[ROUTER]
    info, config = router.models.info(""), router.config
    answer: InfoAnswer = {
        "model_id": info.model,
        "model_sha": info.revision or None,
        "model_pipeline_tag": "text-generation",
        "max_concurrent_requests": config.max_concurrent_requests,
        "max_best_of": min(tgi.MAX_BEST_OF, config.max_concurrent_requests),
        "max_stop_sequences": tgi.MAX_STOPS,
        # One token has to follow.
        "max_input_tokens": info.max_model_len - 1,
        "max_total_tokens": info.max_model_len,
        "validation_workers": config.tokenizer_threads,
        "max_client_batch_size": openai.MAX_PROMPTS,
        "router": "penstock",
        "version": VERSION,
        "sha": None,
        "docker_label": None,
    }
    return json_response(answer)


async def chat_tokenize(request: web.Request) -> web.Response:
    """POST /chat_tokenize"""
    values = read_fields(CHAT_TO_TOKENIZE_FIELDS, await read_object(request))
    async with using_model(request, values.get("model", "")) as model:
        chat = chat_to_tokenize(values)
        text = await rendered(chat, model, request.app[ROUTER].models)
        tokens = await text_tokens(model, text, chat.add_special_tokens)
        answer: ChatTokens = {"tokenize_response": tokens, "templated_text": text}
        return json_response(answer)
