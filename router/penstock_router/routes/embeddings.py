"""/v1/embeddings: texts to vectors, which shards compute."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from aiohttp import web

from penstock_proto.types import EmbeddingRequest
from penstock_router.apis import embeddings, json_in_thread
from penstock_router.apis.embeddings import EmbedRequest
from penstock_router.errors import BadRequest
from penstock_router.observe.request_record import Usage
from penstock_router.offload.dispatch import Body
from penstock_router.routes.base import admit_request
from penstock_router.served_models import ServedModel
from penstock_router.server.caller import client_of
from penstock_router.server.parts import RECORD, REQUEST_ID, ROUTER, Router
from penstock_router.server.send import encoded_response, send
from penstock_router.text.prompts import PreparedPrompts

# Most bytes that one number of a vector takes in an answer.
_FLOAT_BYTES = 24


# (request, model, vectors, tokens of all inputs, seconds since it came) -> the JSON of the answer.
Render = Callable[[EmbedRequest, str, Sequence[Sequence[float]], int, float], Any]


def render_openai(
    asked: EmbedRequest,
    model: str,
    vectors: Sequence[Sequence[float]],
    num_tokens: int,
    seconds: float,
) -> embeddings.EmbeddingAnswer:
    """An answer of /v1/embeddings."""
    return embeddings.answer(asked, model, vectors, num_tokens)


async def embed(request: web.Request, body: Body, render: Render = render_openai) -> web.Response:
    """POST /v1/embeddings, and the like of other APIs."""
    asked: EmbedRequest = body.asked
    router, record = request.app[ROUTER], request[RECORD]
    with admit_request(request, len(asked.prompts), "input", asked.timeout_s) as ticket:
        async with ticket.limit.scope():
            model = await router.models.get(asked.model)
            if model.adapter:
                raise BadRequest(
                    f"model: {model.adapter} is an adapter, and those make no embeddings",
                    param="model",
                )
            _check_served(router, model, asked)
            prepared = await body.work(model)
            assert isinstance(prepared, PreparedPrompts)
        num_tokens = sum(len(prompt.token_ids) for prompt in prepared.prompts)
        record.usage, record.model = Usage(num_tokens), model.info.model
        record.prepared_s = time.perf_counter()
        await ticket.start(num_tokens)
        record.placed_s = time.perf_counter()
        async with ticket.limit.scope():
            response = await _compute(request, asked, model, prepared, render)
        # Only the answer's bytes are held while they are sent.
        del prepared
        ticket.charge.settle()
        await send(request, response)
    return response


async def _compute(
    request: web.Request,
    asked: EmbedRequest,
    model: ServedModel,
    prepared: PreparedPrompts,
    render: Render,
) -> web.Response:
    router, name = request.app[ROUTER], model.info.model
    inputs = [prompt.token_ids for prompt in prepared.prompts]
    num_tokens = sum(map(len, inputs))
    vectors = await router.fleet.embed(
        EmbeddingRequest(
            inputs=inputs,
            pooling=asked.pooling,
            dimensions=asked.dimensions,
            normalize=asked.normalize,
            model=name,
            tokenizer_hash=model.info.tokenizer_hash,
            label=request[REQUEST_ID],
        )
    )
    router.metrics.prompt_tokens.labels(name).inc(num_tokens)

    def encode() -> bytes:
        seconds = time.perf_counter() - request[RECORD].arrived_s
        return json_in_thread.encode(render(asked, name, vectors, num_tokens, seconds))

    return encoded_response(await router.threads.run(encode, client_of(request)))


def _check_served(router: Router, model: ServedModel, asked: EmbedRequest) -> None:
    # One shard that makes embeddings is enough: not every shard of the model must.
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
    size = defaults.size if asked.dimensions is None else asked.dimensions
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
