"""Every route: what serves it, and what is documented of it."""

from __future__ import annotations

from typing import Any

from penstock_router.apis import embeddings, messages
from penstock_router.apis.base import Api
from penstock_router.apis.openai import CHATS, COMPLETIONS
from penstock_router.routes import info, text
from penstock_router.routes.base import Route
from penstock_router.routes.embeddings import embed
from penstock_router.routes.generate import Detour, generates
from penstock_router.routes.resume import resumable


def _generation(path: str, api: Api[Any], summary: str, detour: Detour | None = None) -> Route:
    return Route(
        method="POST",
        path=path,
        handler=generates(api, detour),
        summary=summary,
        fields=api.fields,
        answer=api.answer,
        event=api.event,
        errors=api.errors,
    )


ROUTES: tuple[Route, ...] = (
    _generation("/v1/completions", COMPLETIONS, "Go on after a prompt.", resumable),
    _generation("/v1/chat/completions", CHATS, "Answer a chat.", resumable),
    _generation("/v1/messages", messages.MESSAGES_API, "Answer a chat, as Anthropic has it."),
    Route(
        method="POST",
        path="/v1/embeddings",
        handler=embed,
        summary="Vectors of texts.",
        fields=embeddings.FIELDS,
        answer=embeddings.EmbeddingAnswer,
    ),
    Route(
        method="POST",
        path="/v1/messages/count_tokens",
        handler=text.count_message_tokens,
        summary="How many tokens the prompt of such a chat has.",
        fields=messages.COUNT_FIELDS,
        answer=messages.TokenCount,
        errors=messages.ERRORS,
    ),
    Route(
        method="GET",
        path="/v1/models",
        handler=info.list_models,
        summary="The models that are served.",
        answer=info.ModelList,
    ),
    # With its own slashes, as names of models have them.
    Route(
        method="GET",
        path="/v1/models/{id:.+}",
        handler=info.get_model,
        summary="One model.",
        answer=info.ModelCard,
    ),
    Route(
        method="POST",
        path="/tokenize",
        handler=text.tokenize,
        summary="The token ids of a prompt or a chat.",
        fields=text.TOKENIZE_FIELDS,
        answer=text.TokenizeAnswer,
    ),
    Route(
        method="POST",
        path="/detokenize",
        handler=text.detokenize,
        summary="The text of token ids.",
        fields=text.DETOKENIZE_FIELDS,
        answer=text.DetokenizeAnswer,
    ),
    Route(
        method="GET",
        path="/tokenizer_info",
        handler=text.tokenizer_info,
        summary="The tokenizer's configuration and its chat template.",
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
        summary="The router answers.",
        is_open=True,
    ),
    Route(method="GET", path="/ping", handler=info.health, summary="As /health.", is_open=True),
    Route(
        method="GET",
        path="/ready",
        handler=info.ready,
        summary="Requests would be served.",
        answer=info.Status,
        is_open=True,
    ),
    Route(
        method="GET",
        path="/metrics",
        handler=info.metrics,
        summary="What is counted, for Prometheus.",
        is_open=True,
    ),
)
