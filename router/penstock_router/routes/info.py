"""Facts of the router and of its models: for clients, probes and Prometheus."""

from __future__ import annotations

from typing import Any, Literal, NotRequired, TypedDict

from aiohttp import web

from penstock_common.version import VERSION
from penstock_proto.facts import ShardInfo
from penstock_router.apis.messages.models import MessageModel, message_model, page_of
from penstock_router.apis.openai import fields as openai
from penstock_router.apis.responses.models import catalogue
from penstock_router.apis.tgi import requests as tgi
from penstock_router.errors import Unavailable, UnknownModel
from penstock_router.observe.exposition import CONTENT_TYPE
from penstock_router.served_models import Models
from penstock_router.server.parts import ROUTER
from penstock_router.server.request_headers import is_anthropics
from penstock_router.server.send import json_response


class ModelCard(TypedDict):
    """A name under which a model or an adapter is served."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    root: str
    # The base model of an adapter; None for a model.
    parent: str | None
    max_model_len: int
    input_modalities: list[Literal["text", "image"]]
    # As the router's flags name them; None where none is known, or the model's files are not loaded
    # yet.
    tool_call_parser: str | None
    reasoning_parser: str | None
    # What is lost of requests or answers by the model's chat template: a sentence each.
    chat_template_notes: list[str]
    permission: list[str]


class ModelList(TypedDict):
    """The models that ready shards serve, and their adapters, each under each of its names."""

    object: Literal["list"]
    data: list[ModelCard]
    # For Codex, which says its version in the query.
    models: NotRequired[list[Any]]


class VersionAnswer(TypedDict):
    """The version of penstock."""

    version: str


class LoadAnswer(TypedDict):
    """Count of the sequences that this worker has in flight, and what it has queued besides."""

    server_load: int
    queued: int
    queued_tokens: int


class InfoAnswer(TypedDict):
    """The model and the bounds of requests; with several workers, those of the one asked."""

    model_id: str
    model_sha: str | None
    model_pipeline_tag: Literal["text-generation"]
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


async def list_models(request: web.Request) -> web.Response:
    """GET /v1/models, as Anthropic has it where its version is asked for."""
    models = request.app[ROUTER].models
    served = models.names().items()
    if not served:
        raise Unavailable(f"{models.none_serves()}; try again shortly")
    if is_anthropics(request):
        of_messages = [_message_model(name, info, models) for name, (info, _) in served]
        return json_response(page_of(of_messages, request.query))
    cards = [_card(name, info, adapter, models) for name, (info, adapter) in served]
    answer: ModelList = {"object": "list", "data": cards}
    return json_response({**answer, **catalogue(request.query)})


async def get_model(request: web.Request) -> web.Response:
    """GET /v1/models/{id}"""
    models = request.app[ROUTER].models
    name = request.match_info["id"]
    # Raises, with the reason, if the name is known but not served now.
    models.info(name)
    served = models.names().get(name)
    if served is None:
        # The name stands for any model, and is no model's own.
        raise UnknownModel(name)
    if is_anthropics(request):
        return json_response(_message_model(name, served[0], models))
    return json_response(_card(name, *served, models))


def _message_model(name: str, info: ShardInfo, models: Models) -> MessageModel:
    return message_model(name, models.started_at, info.max_model_len)


def _card(name: str, info: ShardInfo, adapter: str, models: Models) -> ModelCard:
    conventions, notes = models.formats(info)
    tool_call_parser, reasoning_parser = conventions.names
    return {
        "id": name,
        "object": "model",
        "created": models.started_at,
        "owned_by": "penstock",
        "root": info.model,
        "parent": info.model if adapter else None,
        "max_model_len": info.max_model_len,
        "input_modalities": ["text", "image"] if models.takes_images(info) else ["text"],
        "tool_call_parser": tool_call_parser or None,
        "reasoning_parser": reasoning_parser or None,
        "chat_template_notes": list(notes),
        "permission": [],
    }


async def show_info(request: web.Request) -> web.Response:
    """GET /info, as text-generation-inference has it."""
    router = request.app[ROUTER]
    info, config = router.models.info(""), router.config
    answer: InfoAnswer = {
        "model_id": info.model,
        "model_sha": info.revision or None,
        "model_pipeline_tag": "text-generation",
        "max_concurrent_requests": config.max_concurrent_requests,
        "max_best_of": min(tgi.MAX_BEST_OF, config.max_concurrent_requests),
        "max_stop_sequences": tgi.MAX_STOPS,
        # At least one token must fit after the prompt.
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


async def live(request: web.Request) -> web.Response:
    """GET /live: this process answers."""
    return web.Response()


async def health(request: web.Request) -> web.Response:
    """GET /health, /ping, /ready: a request would be served, or held until it can be."""
    router = request.app[ROUTER]
    reason = router.models.not_ready_because
    if router.admission.stopping:
        reason = "the router is shutting down"
    if reason is not None:
        raise Unavailable(f"not ready: {reason}")
    return web.Response()


async def metrics(request: web.Request) -> web.Response:
    """GET /metrics"""
    text = await request.app[ROUTER].exposition.text()
    return web.Response(body=text, headers={"Content-Type": CONTENT_TYPE})


async def show_version(request: web.Request) -> web.Response:
    """GET /version"""
    answer: VersionAnswer = {"version": VERSION}
    return json_response(answer)


async def load(request: web.Request) -> web.Response:
    """GET /load"""
    admission = request.app[ROUTER].admission
    answer: LoadAnswer = {
        "server_load": admission.in_flight,
        "queued": admission.queued,
        "queued_tokens": admission.queued_tokens,
    }
    return json_response(answer)
