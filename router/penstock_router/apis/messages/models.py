"""Lists the served models as Anthropic's API does."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, Literal, TypedDict

from penstock_router.errors import BadRequest
from penstock_router.json_fields import STRING, Field, integer, table

_DEFAULT_LIMIT = 20
_LIMIT = integer(1, 1000)


class MessageModel(TypedDict):
    """A name under which a model or an adapter is served."""

    type: Literal["model"]
    id: str
    display_name: str
    created_at: str
    lifecycle: Literal["active"]
    max_input_tokens: int
    max_tokens: int


class MessageModelPage(TypedDict):
    """A page of the names, in order."""

    data: list[MessageModel]
    has_more: bool
    first_id: str | None
    last_id: str | None


QUERY = table(
    [
        Field("limit", _LIMIT, "At most so many; default: 20. Only with anthropic-version."),
        Field("after_id", STRING, "Those after this one. Only with anthropic-version."),
        Field("before_id", STRING, "Those before this one. Only with anthropic-version."),
    ]
)


def message_model(name: str, created: int, max_model_len: int) -> MessageModel:
    return {
        "type": "model",
        "id": name,
        "display_name": name,
        "created_at": datetime.fromtimestamp(created, UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "lifecycle": "active",
        "max_input_tokens": max_model_len,
        "max_tokens": max_model_len,
    }


def page_of(models: Sequence[MessageModel], query: Mapping[str, str]) -> MessageModelPage:
    """Return the page that a query asks for. Raises `BadRequest`."""
    limit = _read_limit(query.get("limit"))
    after, before = query.get("after_id"), query.get("before_id")
    if after and before:
        raise BadRequest("before_id: not together with after_id", param="before_id")
    names = [model["id"] for model in models]
    begin, end = 0, len(models)
    if after:
        begin = _place("after_id", after, names) + 1
    if before:
        end = _place("before_id", before, names)
        shown = models[max(0, end - limit) : end]
        has_more = end > limit
    else:
        shown = models[begin : begin + limit]
        has_more = begin + limit < end
    return {
        "data": list(shown),
        "has_more": has_more,
        "first_id": shown[0]["id"] if shown else None,
        "last_id": shown[-1]["id"] if shown else None,
    }


def _read_limit(given: str | None) -> int:
    if not given:
        return _DEFAULT_LIMIT
    value: Any = int(given) if given.isascii() and given.isdigit() and len(given) < 10 else given
    limit: int = _LIMIT.read("limit", value)
    return limit


def _place(param: str, name: str, names: Sequence[str]) -> int:
    if name not in names:
        raise BadRequest(f"{param}: no model is named {name[:200]!r}", param=param)
    return names.index(name)
