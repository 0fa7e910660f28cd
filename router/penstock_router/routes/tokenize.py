"""Tokens of texts and texts of tokens, without a shard: /tokenize, /detokenize and their like."""

from __future__ import annotations

from typing import Any

from aiohttp import web

from penstock_router.offload.dispatch import Body
from penstock_router.routes.base import admit_request
from penstock_router.server.parts import ROUTER
from penstock_router.server.send import encoded_response, json_response, send
from penstock_router.text.prompts import PreparedPrompts


async def answer(request: web.Request, body: Body) -> web.Response:
    """POST /tokenize, /chat_tokenize, /detokenize and /v1/messages/count_tokens"""
    # Its time is limited, but it takes no place: no shard works on it.
    with admit_request(request, 1) as ticket:
        async with ticket.limit.scope():
            data = await body.work(await request.app[ROUTER].models.get(body.asked.model))
        assert not isinstance(data, PreparedPrompts)
        response = encoded_response(data)
        del data
        await send(request, response)
    return response


async def tokenizer_info(request: web.Request) -> web.Response:
    """GET /tokenizer_info"""
    # Also while it waits for a shard that serves the model.
    with admit_request(request, 1) as ticket:
        async with ticket.limit.scope():
            model = await request.app[ROUTER].models.get(request.query.get("model", ""))
    template = model.text.chat_template
    answer: dict[str, Any] = {**model.tokenizer.config}
    answer["chat_template"] = None if template is None else template.source
    answer.setdefault("tokenizer_class", "PreTrainedTokenizerFast")
    answer["vocab_size"] = model.info.vocab_size
    answer["model_max_length"] = model.info.max_model_len
    return json_response(answer)
