"""/invocations, the one route that SageMaker asks: which API is meant shows in the body."""

from __future__ import annotations

from aiohttp import web

from penstock_router.apis.openai import CHATS, COMPLETIONS
from penstock_router.apis.tgi import COMPAT
from penstock_router.errors import BadRequest
from penstock_router.routes.base import read_object
from penstock_router.routes.embeddings import embed_object
from penstock_router.routes.generate import dispatch
from penstock_router.routes.resume import resumable


async def invoke(request: web.Request) -> web.StreamResponse:
    """POST /invocations"""
    given = await read_object(request)
    if given.get("inputs") is not None:
        return await dispatch(request, COMPAT, given)
    if given.get("messages") is not None:
        return await dispatch(request, CHATS, given, resumable)
    if given.get("prompt") is not None:
        return await dispatch(request, COMPLETIONS, given, resumable)
    if given.get("input") is not None:
        return await embed_object(request, given)
    raise BadRequest("the body must have messages, prompt, input or inputs")
