"""Requests of Ollama's clients besides tokens: which models there are, what each is, vectors.

Models are named as in /v1/models, and found by what else Ollama takes for a model's name.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from typing import Any, NotRequired, TypedDict

from aiohttp import web

from penstock_proto.facts import ShardInfo
from penstock_router.apis.base import LINES
from penstock_router.apis.embeddings import EmbedRequest
from penstock_router.apis.ollama import model_facts
from penstock_router.apis.ollama import requests as ollama
from penstock_router.apis.ollama.answers import (
    EmbedAnswer,
    EmbeddingsAnswer,
    embed_answer,
    load_answer,
    pull_progress,
)
from penstock_router.apis.ollama.names import served_name
from penstock_router.apis.ollama.prompts import OllamaChat
from penstock_router.errors import Forbidden
from penstock_router.json_fields import (
    ANYTHING,
    BOOLEAN,
    WARNINGS,
    Field,
    JsonObject,
    Table,
    read_fields,
    table,
    taken,
)
from penstock_router.offload.dispatch import Body
from penstock_router.routes import generate
from penstock_router.routes.base import admit_request
from penstock_router.routes.embeddings import Render, embed
from penstock_router.routes.generate import Call
from penstock_router.routes.warnings import warn
from penstock_router.served_models import ServedModel
from penstock_router.server.parts import ROUTER
from penstock_router.server.read_body import read_object
from penstock_router.server.send import json_response

# Whose API this is: clients decide by it what they may ask for.
API_VERSION = "0.12.11"
# A shard keeps its model for as long as it runs.
_NEVER = "9999-12-31T23:59:59Z"


class OllamaDetails(TypedDict):
    """The kind of model it is."""

    parent_model: str
    format: str
    family: str
    families: list[str]
    parameter_size: str
    quantization_level: str


class ModelEntry(TypedDict):
    """A name under which a model or an adapter is served."""

    name: str
    model: str
    modified_at: str
    size: int
    digest: str
    details: OllamaDetails


class Tags(TypedDict):
    """The models that ready shards serve."""

    models: list[ModelEntry]


class RunningEntry(TypedDict):
    """An entry for a model in memory."""

    name: str
    model: str
    size: int
    size_vram: int
    digest: str
    details: OllamaDetails
    expires_at: str
    context_length: int


class Running(TypedDict):
    """The models in memory: all."""

    models: list[RunningEntry]


class Shown(TypedDict):
    """A model."""

    modelfile: str
    parameters: str
    template: str
    details: OllamaDetails
    model_info: dict[str, Any]
    capabilities: list[str]
    modified_at: str


class Version(TypedDict):
    """The version of the API."""

    version: str


class Progress(TypedDict):
    """The state of a pull, or why there is none."""

    status: NotRequired[str]
    error: NotRequired[str]


SHOW_FIELDS = table(
    [
        *ollama.NAMES,
        taken("verbose", False, help="Vocabularies are not shown."),
        *(taken(name, "", help="Of a Modelfile.") for name in ("system", "template")),
        taken("options", {}, help="Of a Modelfile."),
    ]
)
PULL_FIELDS = table(
    [
        *ollama.NAMES,
        Field("stream", BOOLEAN, "Answer with lines; default true."),
        *(Field(name, ANYTHING, "Nothing is fetched.") for name in ("insecure", "username")),
        Field("password", ANYTHING, "Nothing is fetched."),
    ]
)


async def answer(call: Call[Any]) -> web.StreamResponse:
    """POST /api/chat and /api/generate: tokens, unless there is nothing to answer."""
    asked = _with_served_name(call.request, call.asked)
    if not isinstance(asked, OllamaChat) or not asked.only_loads:
        return await generate.answer(dataclasses.replace(call, asked=asked))
    model = await _loaded(call.request, asked.model)
    is_chat = call.api is ollama.CHAT
    return json_response(load_answer(model.name, is_chat=is_chat, unloads=asked.unloads))


async def answer_body(request: web.Request, body: Body) -> web.StreamResponse:
    """Answer a body whose kind is known from its fields."""
    return await answer(Call.read(request, body))


async def embed_all(request: web.Request, body: Body) -> web.Response:
    """POST /api/embed"""
    return await _embed(
        request, body, render_embeddings, lambda model: {"model": model, "embeddings": []}
    )


async def embed_one(request: web.Request, body: Body) -> web.Response:
    """POST /api/embeddings"""
    return await _embed(request, body, render_embedding, lambda model: {"embedding": []})


async def _embed(
    request: web.Request, body: Body, render: Render, without_inputs: Callable[[str], JsonObject]
) -> web.Response:
    body.asked = _with_served_name(request, body.asked)
    if body.asked.prompts:
        return await embed(request, body, render)
    model = await _loaded(request, body.asked.model)
    return json_response(without_inputs(model.name))


def render_embeddings(
    asked: EmbedRequest,
    model: str,
    vectors: Sequence[Sequence[float]],
    num_tokens: int,
    seconds: float,
) -> EmbedAnswer:
    """An answer of /api/embed."""
    return embed_answer(model, vectors, num_tokens, seconds)


def render_embedding(
    asked: EmbedRequest,
    model: str,
    vectors: Sequence[Sequence[float]],
    num_tokens: int,
    seconds: float,
) -> EmbeddingsAnswer:
    """An answer of /api/embeddings."""
    return {"embedding": list(vectors[0])}


async def list_tags(request: web.Request) -> web.Response:
    """GET /api/tags"""
    models = request.app[ROUTER].models
    entries: list[ModelEntry] = [
        {
            "name": name,
            "model": name,
            "modified_at": _time(models.started_at),
            "size": info.shape.weight_bytes,
            "digest": model_facts.digest(info, adapter),
            "details": _details(info, adapter),
        }
        for name, (info, adapter) in models.names().items()
    ]
    return json_response(Tags(models=entries))


async def list_running(request: web.Request) -> web.Response:
    """GET /api/ps"""
    entries: list[RunningEntry] = [
        {
            "name": info.model,
            "model": info.model,
            "size": info.shape.weight_bytes,
            "size_vram": 0 if info.device in ("cpu", "none") else info.shape.weight_bytes,
            "digest": model_facts.digest(info, ""),
            "details": _details(info, ""),
            "expires_at": _NEVER,
            "context_length": info.max_model_len,
        }
        for info in request.app[ROUTER].models.infos()
    ]
    return json_response(Running(models=entries))


async def show(request: web.Request) -> web.Response:
    """POST /api/show {"model": "NAME"}"""
    asked = await _read(request, SHOW_FIELDS)
    model = await _loaded(request, _served_name(request, asked["model"]))
    template = model.text.chat_template
    shown: Shown = {
        "modelfile": f"FROM {model.info.model}",
        "parameters": "",
        "template": "" if template is None else template.source,
        "details": _details(model.info, model.adapter),
        "model_info": model_facts.model_info(model.info),
        "capabilities": _capabilities(model),
        "modified_at": _time(request.app[ROUTER].models.started_at),
    }
    return json_response(shown)


async def pull(request: web.Request) -> web.Response:
    """POST /api/pull: nothing is to be done for a model that is served, and nothing can be for any
    other.
    """
    asked = await _read(request, PULL_FIELDS)
    await _loaded(request, _served_name(request, asked["model"]))
    is_streamed = asked.get("stream", True)
    kind = LINES.media_type if is_streamed else "application/json"
    return web.Response(body=pull_progress(is_streamed=is_streamed), content_type=kind)


async def refuse_change(request: web.Request) -> web.Response:
    """Refuse to create, copy, upload or delete a model."""
    raise Forbidden(f"{request.path[:200]}: not served; a model is what a shard was started with")


async def show_version(request: web.Request) -> web.Response:
    """GET /api/version"""
    return json_response(Version(version=API_VERSION))


async def _read(request: web.Request, fields: Table) -> JsonObject:
    values = read_fields(fields, await read_object(request, any_type=True))
    warn(request, values.get(WARNINGS, ()))
    return values


def _served_name(request: web.Request, given: str) -> str:
    return served_name(given, request.app[ROUTER].models.names())


def _with_served_name(request: web.Request, asked: Any) -> Any:
    return dataclasses.replace(asked, model=_served_name(request, asked.model))


async def _loaded(request: web.Request, name: str) -> ServedModel:
    """The model, also while it waits for a shard that serves it."""
    with admit_request(request, 1) as ticket:
        async with ticket.limit.scope():
            return await request.app[ROUTER].models.get(name)


def _details(info: ShardInfo, adapter: str) -> OllamaDetails:
    return {
        "parent_model": info.model if adapter else "",
        "format": "safetensors",
        "family": model_facts.architecture(info),
        "families": [model_facts.architecture(info)],
        "parameter_size": model_facts.parameter_size(info),
        "quantization_level": model_facts.quantization(info),
    }


def _capabilities(model: ServedModel) -> list[str]:
    conventions, template = model.text.conventions, model.text.chat_template
    sees_images = "images" in model.info.capabilities and model.text.image_tokens is not None
    has = {
        "completion": True,
        "tools": template is not None and conventions.tool_format is not None,
        "thinking": template is not None and conventions.reasoning is not None,
        "embedding": model.info.embedding is not None,
        "vision": sees_images,
    }
    return [name for name, is_there in has.items() if is_there]


def _time(unix_s: float) -> str:
    return datetime.fromtimestamp(unix_s, UTC).isoformat().replace("+00:00", "Z")
