"""/v1/embeddings: texts to vectors, which shards compute."""

from __future__ import annotations

import asyncio
import dataclasses

import msgspec
from aiohttp import web

from penstock_client.types import EmbeddingRequest
from penstock_router.apis import embeddings
from penstock_router.errors import BadRequest
from penstock_router.fields import JsonObject
from penstock_router.job import completion_prompts
from penstock_router.models import ServedModel
from penstock_router.request import CompletionRequest
from penstock_router.routes.base import REQUEST_ID, ROUTER, Router, read_object

# What a number of a vector takes in an answer, at most.
_FLOAT_BYTES = 24


async def embed(request: web.Request) -> web.Response:
    """POST /v1/embeddings"""
    return await embed_object(request, await read_object(request))


async def embed_object(request: web.Request, given: JsonObject) -> web.Response:
    """Answer a body of /v1/embeddings."""
    asked, values = embeddings.parse(given)
    router = request.app[ROUTER]
    with router.admission.places(len(asked.prompts), "input") as limit:
        async with limit.scope():
            model = await router.models.get(asked.model)
            _check_served(router, model, asked, values)
            if asked.truncate_prompt_tokens == -1:
                # Nothing follows: the whole context is the input's.
                limit_tokens = model.info.max_model_len
                asked = dataclasses.replace(asked, truncate_prompt_tokens=limit_tokens)
            prompts = await completion_prompts(asked, model, router.models, "input")
            if not all(prompt.token_ids for prompt in prompts):
                raise BadRequest("input: one of the inputs has no tokens", param="input")
            vectors = await router.fleet.embed(
                EmbeddingRequest(
                    inputs=[prompt.token_ids for prompt in prompts],
                    pooling=values.get("pooling"),
                    dimensions=values.get("dimensions"),
                    normalize=values.get("normalize"),
                    model=model.info.model,
                    tokenizer_hash=model.info.tokenizer_hash,
                    label=request[REQUEST_ID],
                )
            )
            num_tokens = sum(len(prompt.token_ids) for prompt in prompts)
            router.metrics.prompt_tokens.inc(num_tokens)
            as_base64 = values.get("encoding_format") == "base64"

            def encode() -> bytes:
                name = model.info.model
                whole = embeddings.answer(name, vectors, num_tokens, as_base64=as_base64)
                return msgspec.json.encode(whole)

            loop = asyncio.get_running_loop()
            body = await loop.run_in_executor(router.models.executor, encode)
    return web.Response(body=body, content_type="application/json")


def _check_served(
    router: Router, model: ServedModel, asked: CompletionRequest, values: JsonObject
) -> None:
    # Any of the model's shards will do: not each of them need make embeddings.
    infos = (shard.info for shard in router.fleet.shards if shard.ready and shard.info is not None)
    served = [info.embedding for info in infos if info.model == model.info.model]
    defaults = next((embedding for embedding in served if embedding is not None), None)
    max_answer_bytes = router.config.max_answer_bytes
    if defaults is None:
        raise BadRequest(
            f"the model {model.info.model} makes no embeddings; a shard started with --embeddings "
            "last or --embeddings mean makes some of any model",
            param="model",
        )
    size = values.get("dimensions", defaults.size)
    if size > defaults.size:
        raise BadRequest(
            f"dimensions: must be at most {defaults.size}; given: {size}", param="dimensions"
        )
    if len(asked.prompts) * size * _FLOAT_BYTES > max_answer_bytes:
        raise BadRequest(
            f"input: {len(asked.prompts)} vectors of {size} numbers are more than an answer may "
            f"have ({max_answer_bytes} bytes); send fewer inputs",
            param="input",
        )
