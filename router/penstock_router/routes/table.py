"""Table of all routes: the handler of each, and what the documentation says of it."""

from __future__ import annotations

from typing import Any

from aiohttp import web

from penstock_router.apis import embeddings, tokenize
from penstock_router.apis.base import ERRORS, LINES, Api, ErrorForm
from penstock_router.apis.messages import models as message_models
from penstock_router.apis.messages import requests as messages
from penstock_router.apis.messages.errors import ERRORS as MESSAGE_ERRORS
from penstock_router.apis.ollama import answers as ollama_answers
from penstock_router.apis.ollama import requests as ollama
from penstock_router.apis.openai.requests import CHATS, COMPLETIONS
from penstock_router.apis.responses.answers import DeletedAnswer, ItemList, ResponseAnswer
from penstock_router.apis.responses.requests import RESPONSES
from penstock_router.apis.tgi import answers as tgi_answers
from penstock_router.apis.tgi import requests as tgi
from penstock_router.offload.body_kinds import INVOCATIONS
from penstock_router.routes import (
    adapters,
    console,
    docs,
    generate,
    info,
    invocations,
    responses,
    resume,
)
from penstock_router.routes import ollama as ollama_routes
from penstock_router.routes import tokenize as token_routes
from penstock_router.routes.base import Route, with_body
from penstock_router.routes.embeddings import embed
from penstock_router.routes.generate import Answerer, make_handler
from penstock_router.routes.resume import answer_resumable
from penstock_router.server.request_headers import HEADERS, is_anthropics


def _generation(
    path: str, api: Api[Any], summary: str, answer_call: Answerer = answer_resumable
) -> Route:
    return Route(
        method="POST",
        path=path,
        handler=make_handler(api, answer_call),
        summary=summary,
        fields=api.fields,
        headers={**generate.HEADERS, **(resume.HEADERS if api.resumable else {})},
        answer=api.answer,
        event=api.event,
        framing=api.framing,
        errors=api.errors,
    )


# The errors of paths that no route has, by how they begin.
_FORMS = (
    ("/api/", ollama_answers.ERRORS),
    ("/v1/messages", MESSAGE_ERRORS),
    ("/v1/responses", RESPONSES.errors),
    ("/generate", tgi_answers.ERRORS),
)


def errors_of(request: web.Request, route: Route | None) -> ErrorForm:
    """The form of a request's errors: its route's, or that of the API to which its path belongs."""
    form = route.errors if route is not None else _form_of_path(request.path)
    of_several = route is None or MESSAGE_ERRORS in route.other_errors
    return MESSAGE_ERRORS if form is ERRORS and of_several and is_anthropics(request) else form


def _form_of_path(path: str) -> ErrorForm:
    return next((form for begin, form in _FORMS if path.startswith(begin)), ERRORS)


def _refused_change(method: str, path: str) -> Route:
    return Route(
        method=method,
        path=path,
        handler=ollama_routes.refuse_change,
        summary="Refused: a model is what a shard was started with.",
        errors=ollama_answers.ERRORS,
        is_refused=True,
    )


ROUTES: tuple[Route, ...] = (
    _generation("/v1/completions", COMPLETIONS, "Complete a prompt."),
    _generation("/v1/chat/completions", CHATS, "Answer a chat."),
    _generation("/v1/messages", messages.MESSAGES_API, "Answer a chat, as Anthropic has it."),
    Route(
        method="POST",
        path="/v1/embeddings",
        handler=with_body(embeddings.EMBEDDINGS, embed),
        summary="Vectors of texts.",
        fields=embeddings.FIELDS,
        headers=HEADERS,
        answer=embeddings.EmbeddingAnswer,
    ),
    Route(
        method="POST",
        path="/v1/messages/count_tokens",
        handler=with_body(messages.COUNT_TOKENS, token_routes.answer),
        summary="How many tokens the prompt of such a chat has.",
        fields=messages.COUNT_FIELDS,
        headers=HEADERS,
        answer=messages.TokenCount,
        errors=MESSAGE_ERRORS,
    ),
    _generation("/v1/responses", RESPONSES, "Answer, and keep the answer.", responses.respond),
    Route(
        method="GET",
        path="/v1/responses/{id}",
        handler=responses.retrieve,
        errors=RESPONSES.errors,
        summary="A response that is kept.",
        query=responses.RETRIEVE_QUERY,
        answer=ResponseAnswer,
    ),
    Route(
        method="DELETE",
        path="/v1/responses/{id}",
        handler=responses.delete,
        errors=RESPONSES.errors,
        summary="Delete a response that is kept.",
        answer=DeletedAnswer,
    ),
    Route(
        method="POST",
        path="/v1/responses/{id}/cancel",
        handler=responses.cancel,
        errors=RESPONSES.errors,
        summary="Cancel a response that is made in the background.",
        answer=ResponseAnswer,
    ),
    Route(
        method="GET",
        path="/v1/responses/{id}/input_items",
        handler=responses.input_items,
        errors=RESPONSES.errors,
        summary="The conversation that a response answers.",
        query=responses.ITEMS_QUERY,
        answer=ItemList,
    ),
    _generation("/generate", tgi.GENERATE, "Go on after a text, as text-generation-inference."),
    _generation("/generate_stream", tgi.GENERATE_STREAM, "The same, with events as tokens come."),
    _generation("/", tgi.COMPAT, "The same in an array, or with events."),
    Route(
        method="GET",
        path="/",
        handler=console.page,
        summary="The console: the fleet, a chat, and this document's routes to try.",
        media_type="text/html",
        is_open=True,
    ),
    Route(
        method="GET",
        path="/info",
        handler=info.show_info,
        summary="The model and the bounds of requests, as text-generation-inference has them.",
        answer=info.InfoAnswer,
        errors=tgi_answers.ERRORS,
        is_open=True,
    ),
    Route(
        method="POST",
        path="/chat_tokenize",
        handler=with_body(tokenize.CHAT_TOKENIZE, token_routes.answer),
        summary="The prompt of a chat and its tokens.",
        fields=tokenize.CHAT_TOKENIZE_FIELDS,
        headers=HEADERS,
        answer=tokenize.ChatTokens,
        errors=tgi_answers.ERRORS,
    ),
    Route(
        method="POST",
        path="/invocations",
        handler=with_body(INVOCATIONS, invocations.invoke),
        summary="As another route, by the body: one with messages, prompt, input or inputs.",
        bodies=(CHATS.fields, COMPLETIONS.fields, embeddings.FIELDS, tgi.COMPAT.fields),
        headers={**generate.HEADERS, **resume.HEADERS},
        answer=CHATS.answer | COMPLETIONS.answer | embeddings.EmbeddingAnswer | tgi.COMPAT.answer,
        event=CHATS.event | COMPLETIONS.event | tgi.COMPAT.event,
        other_errors=(tgi_answers.ERRORS,),
    ),
    _generation("/api/chat", ollama.CHAT, "Answer a chat, as Ollama has it.", ollama_routes.answer),
    Route(
        method="POST",
        path="/api/generate",
        handler=with_body(ollama.GENERATE, ollama_routes.answer_body),
        summary="Answer a prompt, or complete it (raw), as Ollama has it.",
        fields=ollama.GENERATE_FIELDS,
        headers=generate.HEADERS,
        answer=ollama.TEMPLATED.answer,
        event=ollama.TEMPLATED.event,
        framing=ollama.TEMPLATED.framing,
        errors=ollama.TEMPLATED.errors,
    ),
    Route(
        method="POST",
        path="/api/embed",
        handler=with_body(ollama.EMBED, ollama_routes.embed_all),
        summary="Vectors of texts, as Ollama has them.",
        fields=ollama.EMBED_FIELDS,
        headers=HEADERS,
        answer=ollama_answers.EmbedAnswer,
        errors=ollama_answers.ERRORS,
    ),
    Route(
        method="POST",
        path="/api/embeddings",
        handler=with_body(ollama.EMBEDDINGS, ollama_routes.embed_one),
        summary="The vector of a text, as older clients of Ollama ask for it.",
        fields=ollama.EMBEDDINGS_FIELDS,
        headers=HEADERS,
        answer=ollama_answers.EmbeddingsAnswer,
        errors=ollama_answers.ERRORS,
    ),
    Route(
        method="GET",
        path="/api/tags",
        handler=ollama_routes.list_tags,
        summary="The models that are served, as Ollama lists them.",
        answer=ollama_routes.Tags,
        errors=ollama_answers.ERRORS,
    ),
    Route(
        method="GET",
        path="/api/ps",
        handler=ollama_routes.list_running,
        summary="The models in memory, as Ollama lists them.",
        answer=ollama_routes.Running,
        errors=ollama_answers.ERRORS,
    ),
    Route(
        method="POST",
        path="/api/show",
        handler=ollama_routes.show,
        summary="A model, as Ollama shows it.",
        fields=ollama_routes.SHOW_FIELDS,
        answer=ollama_routes.Shown,
        errors=ollama_answers.ERRORS,
    ),
    Route(
        method="POST",
        path="/api/pull",
        handler=ollama_routes.pull,
        summary="Success for a model that is served, as Ollama's clients ask before they use it.",
        fields=ollama_routes.PULL_FIELDS,
        answer=ollama_routes.Progress,
        event=ollama_routes.Progress,
        framing=LINES,
        errors=ollama_answers.ERRORS,
    ),
    _refused_change("POST", "/api/create"),
    _refused_change("POST", "/api/copy"),
    _refused_change("POST", "/api/push"),
    _refused_change("DELETE", "/api/delete"),
    _refused_change("POST", "/api/blobs/{digest}"),
    # And with HEAD, by which clients ask whether they have to send one.
    _refused_change("GET", "/api/blobs/{digest}"),
    Route(
        method="GET",
        path="/api/version",
        handler=ollama_routes.show_version,
        summary="The version of Ollama whose API this is.",
        answer=ollama_routes.Version,
        errors=ollama_answers.ERRORS,
        is_open=True,
    ),
    Route(
        method="GET",
        path="/v1/models",
        handler=info.list_models,
        summary="The models that are served; as Anthropic has them with anthropic-version.",
        query=message_models.QUERY,
        answer=info.ModelList | message_models.MessageModelPage,
        other_errors=(MESSAGE_ERRORS,),
    ),
    # The id may contain slashes, as names of models do.
    Route(
        method="GET",
        path="/v1/models/{id:.+}",
        handler=info.get_model,
        summary="One model.",
        answer=info.ModelCard | message_models.MessageModel,
        other_errors=(MESSAGE_ERRORS,),
    ),
    Route(
        method="POST",
        path="/v1/load_lora_adapter",
        handler=adapters.load_adapter,
        summary="Have the shards load a LoRA adapter: for keys of the scope admin.",
        fields=adapters.LOAD_FIELDS,
        media_type="text/plain",
        is_admins=True,
    ),
    Route(
        method="POST",
        path="/v1/unload_lora_adapter",
        handler=adapters.unload_adapter,
        summary="Let no further request have a LoRA adapter: for keys of the scope admin.",
        fields=adapters.UNLOAD_FIELDS,
        media_type="text/plain",
        is_admins=True,
    ),
    Route(
        method="POST",
        path="/tokenize",
        handler=with_body(tokenize.TOKENIZE, token_routes.answer),
        summary="The token ids of a prompt or a chat.",
        fields=tokenize.TOKENIZE_FIELDS,
        headers=HEADERS,
        needs_one_of=("prompt", "messages", "inputs"),
        answer=tokenize.TokenizeAnswer,
        other_errors=(tgi_answers.ERRORS,),
    ),
    Route(
        method="POST",
        path="/detokenize",
        handler=with_body(tokenize.DETOKENIZE, token_routes.answer),
        summary="The text of token ids.",
        fields=tokenize.DETOKENIZE_FIELDS,
        headers=HEADERS,
        answer=tokenize.DetokenizeAnswer,
    ),
    Route(
        method="GET",
        path="/tokenizer_info",
        handler=token_routes.tokenizer_info,
        summary="The tokenizer's configuration and its chat template.",
        query=tokenize.TOKENIZER_INFO_QUERY,
        headers=HEADERS,
        answer=dict[str, Any],
    ),
    Route(
        method="GET",
        path="/load",
        handler=info.load,
        summary="How much this worker has in flight.",
        answer=info.LoadAnswer,
        is_open=True,
    ),
    Route(
        method="GET",
        path="/version",
        handler=info.show_version,
        summary="The version of penstock.",
        answer=info.VersionAnswer,
        is_open=True,
    ),
    Route(
        method="GET",
        path="/health",
        handler=info.health,
        summary="200: a request would be served, or held until it can be; 503 says why not.",
        is_open=True,
    ),
    Route(method="GET", path="/ping", handler=info.health, summary="As /health.", is_open=True),
    Route(method="GET", path="/ready", handler=info.health, summary="As /health.", is_open=True),
    Route(
        method="GET",
        path="/live",
        handler=info.live,
        summary="200: the router answers.",
        is_open=True,
    ),
    Route(
        method="GET",
        path="/metrics",
        handler=info.metrics,
        summary="What is counted, for Prometheus.",
        media_type="text/plain",
        is_open=True,
    ),
    Route(
        method="GET",
        path="/openapi.json",
        handler=docs.document,
        summary="This document.",
        answer=dict[str, Any],
        is_open=True,
    ),
    Route(
        method="GET",
        path="/docs",
        handler=docs.page,
        summary="A page that shows this document and sends requests.",
        media_type="text/html",
        is_open=True,
    ),
)
