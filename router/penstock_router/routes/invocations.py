"""/invocations, the one route that SageMaker calls: the body shows which API is meant."""

from __future__ import annotations

from aiohttp import web

from penstock_router.bodies import Body
from penstock_router.routes.embeddings import embed
from penstock_router.routes.generate import dispatch
from penstock_router.routes.resume import answer_resumable


async def invoke(request: web.Request, body: Body) -> web.StreamResponse:
    """POST /invocations"""
    api = body.kind.api
    if api is None:
        return await embed(request, body)
    return await dispatch(request, body, answer_resumable if api.resumable else None)
