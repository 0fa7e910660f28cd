"""A request of OpenAI's Responses API: a chat whose turns are items, and what its answer
repeats.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, Literal, NotRequired, Self, TypedDict

from penstock_router.apis.responses.items import Item, check_items, check_outputs, messages_of
from penstock_router.json_fields import JsonObject
from penstock_router.request import ChatRequest


class TextFormat(TypedDict):
    """The format of the answer's text; all fields but `type` belong to json_schema."""

    type: Literal["text", "json_object", "json_schema"]
    name: NotRequired[str]
    description: NotRequired[str]
    schema: NotRequired[JsonObject]
    strict: NotRequired[bool]


class TextConfig(TypedDict):
    """What was asked of the answer's text."""

    format: TextFormat
    verbosity: Literal["medium"]


class Reasoning(TypedDict):
    """What was asked of reasoning models."""

    effort: str | None
    summary: str | None


class EchoedFields(TypedDict):
    """What an answer repeats from its request, defaults filled in."""

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

    # `Item`s, but msgspec reads no union of them. The conversation without instructions, which
    # apply to one answer only.
    items: list[Any]
    # `EchoedFields`; empty after `without_text`.
    repeated: JsonObject
    previous_response_id: str | None
    background: bool
    store: bool

    def without_text(self) -> Self:
        """A copy without the fields that may be long."""
        # Not `super()`: slots=True creates the class anew, and `super()` refers to the first one.
        return dataclasses.replace(ChatRequest.without_text(self), items=[], repeated={})

    def after(self, earlier: list[Item]) -> ResponsesRequest:
        """The request with the earlier conversation before it. Raises `BadRequest`."""
        items = [*earlier, *self.items]
        check_items("previous_response_id", items)
        check_outputs(items, len(earlier))
        messages = messages_of(self.repeated["instructions"], items)
        return dataclasses.replace(self, items=items, messages=messages)
