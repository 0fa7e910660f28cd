"""Tokens of texts and texts of tokens, without a shard: /tokenize, /detokenize and their like."""

from __future__ import annotations

from typing import Any

from aiohttp import web

from penstock_router.bodies import Body
from penstock_router.routes.base import ROUTER, json_response, using_model


async def answer(request: web.Request, body: Body) -> web.Response:
    """POST /tokenize, /chat_tokenize, /detokenize and /v1/messages/count_tokens"""
    async with using_model(request, body.asked.model) as model:
        data = await body.work(model)
    assert isinstance(data, bytes)
    return web.Response(body=data, content_type="application/json")


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
