"""What Ollama's clients ask besides tokens: which models there are, what each is, vectors.

Models are named as in /v1/models. Sizes are not known here, and are 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any, TypedDict

from aiohttp import web

from penstock_client.types import ShardInfo
from penstock_router.apis.embeddings import EmbedRequest
from penstock_router.apis.ollama import requests as ollama
from penstock_router.apis.ollama.answers import (
    EmbedAnswer,
    EmbeddingsAnswer,
    embed_answer,
    load_answer,
)
from penstock_router.errors import BadRequest
from penstock_router.json_fields import BOOLEAN, STRING, Field, read_fields, table
from penstock_router.offload.dispatch import Body
from penstock_router.routes import generate
from penstock_router.routes.base import ROUTER, admit_request, json_response, read_object
from penstock_router.routes.generate import Call
from penstock_router.served_models import ServedModel

# Whose API this is: clients decide by it what they may ask for.
API_VERSION = "0.12.11"
# A shard keeps its model for as long as it runs.
_NEVER = "9999-12-31T23:59:59Z"


class OllamaDetails(TypedDict):
    """What kind of model it is."""

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
    """The same of a model in memory."""

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


SHOW_FIELDS = table(
    [
        Field("model", STRING, "One of /api/tags, with or without :latest."),
        Field("name", STRING, "The older name of model."),
        Field("verbose", BOOLEAN, "Accepted without effect."),
    ]
)


async def answer(call: Call[Any]) -> web.StreamResponse:
    """POST /api/chat and /api/generate: tokens, unless there is nothing to answer."""
    asked = call.asked
    if not isinstance(asked, ollama.OllamaChat) or not asked.only_loads:
        return await generate.answer(call)
    model = await _loaded(call.request, asked.model)
    is_chat = call.api is ollama.CHAT
    return json_response(load_answer(model.name, is_chat=is_chat, unloads=asked.unloads))


async def answer_body(request: web.Request, body: Body) -> web.StreamResponse:
    """The same of a body whose kind is known from its fields."""
    return await answer(Call.read(request, body))


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
            "size": 0,
            "digest": info.weights_hash,
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
            "size": 0,
            "size_vram": 0,
            "digest": info.weights_hash,
            "details": _details(info, ""),
            "expires_at": _NEVER,
            "context_length": info.max_model_len,
        }
        for info in request.app[ROUTER].models.infos()
    ]
    return json_response(Running(models=entries))


async def show(request: web.Request) -> web.Response:
    """POST /api/show {"model": "NAME"}"""
    asked = read_fields(SHOW_FIELDS, await read_object(request))
    name = asked.get("model") or asked.get("name")
    if not name:
        raise BadRequest("model: required", param="model")
    model = await _loaded(request, name.removesuffix(ollama.LATEST))
    template = model.text.chat_template
    shown: Shown = {
        "modelfile": f"FROM {model.info.model}",
        "parameters": "",
        "template": "" if template is None else template.source,
        "details": _details(model.info, model.adapter),
        "model_info": _model_info(model.info),
        "capabilities": _capabilities(model),
        "modified_at": _time(request.app[ROUTER].models.started_at),
    }
    return json_response(shown)


async def show_version(request: web.Request) -> web.Response:
    """GET /api/version"""
    return json_response(Version(version=API_VERSION))


async def _loaded(request: web.Request, name: str) -> ServedModel:
    """The model, also while it waits for a shard that serves it."""
    with admit_request(request, 1) as ticket:
        async with ticket.limit.scope():
            return await request.app[ROUTER].models.get(name)


def _details(info: ShardInfo, adapter: str) -> OllamaDetails:
    return {
        "parent_model": info.model if adapter else "",
        "format": "safetensors",
        "family": info.architecture,
        "families": [info.architecture],
        "parameter_size": "",
        "quantization_level": info.dtype,
    }


def _model_info(info: ShardInfo) -> dict[str, Any]:
    shown: dict[str, Any] = {
        "general.architecture": info.architecture,
        f"{info.architecture}.context_length": info.max_model_len,
        f"{info.architecture}.vocab_size": info.vocab_size,
    }
    if info.embedding is not None:
        shown[f"{info.architecture}.embedding_length"] = info.embedding.size
    return shown


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
