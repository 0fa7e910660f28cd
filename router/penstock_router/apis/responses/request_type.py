"""A request of OpenAI's Responses API: a chat whose turns are items, and fields that its answer
repeats.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NotRequired, Self, TypedDict

from penstock_router.apis.responses.items.conversation import messages_of
from penstock_router.apis.responses.items.reading import check_items
from penstock_router.apis.responses.items.types import Item
from penstock_router.apis.responses.tools.functions import ServedTool
from penstock_router.errors import BadRequest
from penstock_router.json_fields import JsonObject, shorten
from penstock_router.request import ChatRequest


class TextFormat(TypedDict):
    """The format of the answer's text; all fields but `type` belong to json_schema."""

    type: Literal["text", "json_object", "json_schema"]
    name: NotRequired[str]
    description: NotRequired[str]
    schema: NotRequired[JsonObject]
    strict: NotRequired[bool]


class TextConfig(TypedDict):
    """The requested properties of the answer's text."""

    format: TextFormat
    verbosity: Literal["low", "medium", "high"]


class Reasoning(TypedDict):
    """The requested reasoning."""

    effort: str | None
    summary: str | None


class EchoedFields(TypedDict):
    """Fields that an answer repeats from its request, with defaults filled in."""

    background: bool
    instructions: str | None
    max_output_tokens: int | None
    max_tool_calls: int | None
    metadata: dict[str, str]
    parallel_tool_calls: bool
    previous_response_id: str | None
    prompt_cache_key: str | None
    reasoning: Reasoning
    safety_identifier: str | None
    service_tier: Literal["default"]
    store: bool
    text: TextConfig
    # A mode, or an object that names functions.
    tool_choice: str | JsonObject
    tools: list[JsonObject]
    top_logprobs: int
    truncation: Literal["auto", "disabled"]
    user: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ResponsesRequest(ChatRequest):
    """A chat in this API's form: `messages` are made from the instructions and `items`."""

    # The conversation without instructions, which apply only to one answer. The elements are
    # `Item`s, but msgspec reads no union of TypedDicts.
    items: list[Any]
    # `EchoedFields`; empty after `without_text`.
    repeated: JsonObject
    previous_response_id: str | None
    background: bool
    store: bool
    # Tools that are not plain functions, by function name.
    served: dict[str, ServedTool] = field(default_factory=dict)
    # Ids of stored items that `items` refer to.
    references: tuple[str, ...] = ()
    # True if reasoning is also shown as `encrypted_content`.
    seals_reasoning: bool = False

    def without_text(self) -> Self:
        # `super()` would fail: it refers to the first class, but slots=True creates the class anew.
        return dataclasses.replace(
            ChatRequest.without_text(self),
            items=[],
            repeated={},
            served={
                name: dataclasses.replace(tool, definition="") for name, tool in self.served.items()
            },
        )

    def after(self, earlier: Sequence[Any]) -> ResponsesRequest:
        """Add stored items. `earlier` has the conversation before the request, then each answer
        that the request's items refer to. Raises `BadRequest` for unknown items or too many.
        """
        before, answers = list(earlier[0]), earlier[1:]
        known = {item["id"]: item for items in (before, *answers) for item in items}
        own = [_resolved(item, known) for item in self.items]
        items = [*before, *own]
        check_items("previous_response_id" if before else "input", items)
        messages = messages_of(self.repeated["instructions"], items, self.served)
        return dataclasses.replace(self, items=items, messages=messages)


def _resolved(item: Item, known: dict[str, Item]) -> Item:
    if item["type"] != "item_reference":
        return item
    found = known.get(item["id"])
    if found is None:
        text = f"input: no stored item has the id {shorten(item['id'])}; send the item itself"
        raise BadRequest(text, param="input")
    return found
