"""/invocations, the one route that SageMaker calls: the body shows which API is meant."""

from __future__ import annotations

from aiohttp import web

from penstock_router.apis.base import Api
from penstock_router.offload.dispatch import Body
from penstock_router.routes.embeddings import embed
from penstock_router.routes.generate import Call
from penstock_router.routes.resume import answer_resumable


async def invoke(request: web.Request, body: Body) -> web.StreamResponse:
    """POST /invocations"""
    if isinstance(body.kind, Api):
        return await answer_resumable(Call.read(request, body))
    return await embed(request, body)
