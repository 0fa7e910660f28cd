"""Shows a stored response, or pages of its conversation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import msgspec

from penstock_router.apis.responses.answers import FAILED, ItemList, mark_lost
from penstock_router.errors import BadRequest
from penstock_router.json_fields import shorten

_decode, _encode = msgspec.json.decode, msgspec.json.encode


@dataclass(frozen=True, slots=True)
class Page:
    """List at most `limit` items in this order, after the item with the id `after`."""

    limit: int
    order: Literal["asc", "desc"]
    after: str | None


def read_stored(response: bytes, messages: bytes, page: Page | None) -> bytes:
    """Return a page of the conversation that the response answers. Without `page`, return the
    response, which the store lists as failed: if its JSON has another status, its process is gone.
    Raises `BadRequest`.
    """
    answer: dict[str, Any] = _decode(response)
    if page is not None:
        answered = {item["id"] for item in answer["output"]}
        items = [item for item in _decode(messages) if item["id"] not in answered]
        return _encode(_list_items(items, page))
    if answer["status"] != FAILED:
        mark_lost(answer)
    return _encode(answer)


def _list_items(items: list[Any], page: Page) -> ItemList:
    if page.order == "desc":
        items.reverse()
    if page.after is not None:
        ids = [item["id"] for item in items]
        if page.after not in ids:
            raise BadRequest(f"after: no item has the id {shorten(page.after)}", param="after")
        items = items[ids.index(page.after) + 1 :]
    listed = items[: page.limit]
    return {
        "object": "list",
        "data": listed,
        "first_id": listed[0]["id"] if listed else "",
        "last_id": listed[-1]["id"] if listed else "",
        "has_more": len(items) > page.limit,
    }
